"""The sweep: hands candidates to processes in order, writes one row for each as soon as its fate is known.

Nothing is kept only in memory: a sweep that was stopped, killed or ran out of budget goes on with the same command,
because what has a row is not done again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from dash_kernels.problem import SHARED_MEMORY_LIMIT, Config, Problem
from tuner.compile import kernel_identity, schedule_identity
from tuner.engines.local import Pool, Slot
from tuner.failures import TRANSIENT
from tuner.finals import finalists
from tuner.plan import Item, Reporter, Summary, SweepSettings
from tuner.results import ResultRow, RunInfo, Store, config_hash
from tuner.space import Candidate, baseline_config
from tuner.worker import Reply

IDLE_WAIT_S = 0.5
RESOURCES = ("registers", "spill_bytes", "shared_bytes")
MEASURED = (
    *("tflops", "ms", "ms_low", "ms_high", "samples", "speedup_vs_baseline", "above_peak"),
    *("max_abs_error", "rel_error", "budget", "bits_equal", "runs_compared"),
    *("numerics_key", "telemetry"),
)


class Sweep:
    """One command's work. ``run`` returns when all is done, the budget is spent, or :meth:`stop` was called."""

    def __init__(
        self,
        store: Store,
        settings: SweepSettings,
        candidates: Sequence[Candidate],
        compilers: Pool,
        gpus: Pool | None,
        environment: dict[str, Any] | None,
        reporter: Reporter,
    ) -> None:
        self.store, self.settings, self.reporter = store, settings, reporter
        self.compilers, self.gpus = compilers, gpus
        self.environment = environment
        self.summary = Summary()
        self.items = [self._item(candidate) for candidate in candidates]
        self.prepared: dict[tuple[str, str], Reply] = {}
        self.preparing: deque[tuple[str, str, Item]] = deque()
        self.compiles: deque[tuple[str, str, Item]] = deque()
        self.begun: set[tuple[str, str]] = set()
        self.warm: set[tuple[int, int, str]] = set()
        self.baselines: dict[Problem, Config] = {}
        self.baseline_items = {item.problem: item for item in self.items if self._is_baseline(item)}
        self.run_id: int | None = None
        self._modelled_run: int | None = None
        self._stop = ""

    def stop(self, reason: str) -> None:
        """End the sweep after the current step; safe to call from a signal handler."""
        self._stop = self._stop or reason

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> Summary:
        """Raises WorkerStartError when a worker cannot start; rows written until then stay."""
        started = time.monotonic()
        deadline = started + self.settings.budget_s if self.settings.budget_s else float("inf")
        self.preparing = self._preparations()
        self._meet_gpu()
        self._resume()
        self.preparing = self._preparations()
        self.reporter.begin(len(self.items), self.summary.resumed, self.settings.budget_s or 0.0)
        try:
            while self._open_items() and not self._stop:
                self._step(deadline)
            if not self._stop and self.gpus is not None:
                self._final_round(deadline)
        finally:
            for run in (self.run_id, self._modelled_run):
                if run is not None:
                    self.store.finish_run(run)
        self.summary.left = len(self._open_items())
        self.summary.stopped = self._stop
        self.summary.seconds = time.monotonic() - started
        return self.summary

    def _meet_gpu(self) -> None:
        """Learn the environment from the first GPU worker; what needs no GPU goes on while it starts."""
        settings = self.settings
        if self.gpus is not None:
            worker = self.gpus.slots[0].worker
            while not worker.ready and not self._stop:
                self._hand_out_preparations()
                self._collect(IDLE_WAIT_S)
            self.environment = worker.info.get("environment", {})
        about = self.environment or {}
        self.sms = int(about.get("sms") or settings.sms)
        self.run_info = RunInfo(
            gpu=settings.gpu,
            environment=about,
            measurement_policy=settings.policy.to_dict() if settings.source == "measured" else {},
            command=settings.command,
            source=settings.source,
        )

    def _step(self, deadline: float) -> None:
        if time.monotonic() >= deadline:
            self._drain()
            self.stop("budget")
            return
        self._hand_out()
        self._settle()
        self._collect(IDLE_WAIT_S)
        self.reporter.tick()

    def _collect(self, patience: float) -> None:
        pools = [pool for pool in (self.gpus, self.compilers) if pool is not None]
        patience = max(0.0, min([patience, *(pool.seconds_left() for pool in pools)]))
        wait([connection for pool in pools for connection in pool.connections], timeout=patience)
        if self.gpus is not None:
            finished = self.gpus.poll()
            for _, item, reply in finished:
                self._note_end(item, reply)
            if finished:
                self._hand_out()  # the GPU goes on while rows are written
            for slot, item, reply in finished:
                self._measured(slot, item, reply)
        for _, key, reply in self.compilers.poll():
            self._prepared(key, reply)

    def _drain(self) -> None:
        """Let the candidates on the GPUs finish: at most one each, bounded by their timeout."""
        self.preparing.clear()
        self.compiles.clear()
        while self.gpus is not None and self.gpus.busy and self._stop != "interrupt":
            for slot, item, reply in self.gpus.poll():
                self._measured(slot, item, reply)
            if self.gpus.busy:
                wait(self.gpus.connections, timeout=IDLE_WAIT_S)

    # -- before the GPU ---------------------------------------------------------------------------------------------

    def _item(self, candidate: Candidate) -> Item:
        problem, config = candidate.problem, candidate.config
        return Item(
            candidate,
            config_hash(problem, config, self.settings.source),
            schedule_identity(problem, config),
        )

    def _resume(self) -> None:
        """Take out what has a row; remember which problems have a baseline to measure against."""
        done: set[str] = set()
        if not self.settings.fresh:
            done = self.store.done_hashes(
                self.settings.gpu,
                self.run_info.environment_key,
                self.settings.source,
                policy_key=self.run_info.policy_key,
                retry=TRANSIENT if self.settings.retry else (),
            )
        known = {item.hash for item in self.items} & done
        for item in self.items:
            if item.hash in known:
                item.state = "done"
        self.items = [item for item in self.items if item.hash not in known]
        wanted = {item.kernel_key for item in self.items}
        self.begun -= {task[:2] for task in self.compiles if task[1] not in wanted}
        self.compiles = deque(task for task in self.compiles if task[1] in wanted)
        mine = [row for row in self._rows_of_sweep() if row.config_hash in known]
        usable = {row.config_hash for row in mine} - {
            row.config_hash for row in mine if row.status != "ok"
        }
        for row in mine:
            if row.config_hash in usable and self._is_baseline(row):
                self.baselines[row.to_problem()] = row.to_config()
        self.summary.resumed = len(known)
        self.summary.usable = len(usable)
        self.summary.failed_before = len(known) - len(usable)

    def _rows_of_sweep(self) -> list[ResultRow]:
        """Rows of this environment and policy that decide who wins, oldest first; also those that failed a gate."""
        found = self.store.candidates(self.settings.gpu, source=self.settings.source)
        return [row for row, sweep in found if sweep == self.run_info.sweep]

    def _preparations(self) -> deque[tuple[str, str, Item]]:
        """Proofs (and predictions) in the order in which candidates need them, each once."""
        needed: dict[tuple[str, str], Item] = {}
        for item in self.items:
            if item.candidate.runnable and item.state == "waiting":
                needed.setdefault(("prove", item.prove_key), item)
                if self.settings.simulate:
                    needed.setdefault(("predict", item.hash), item)
        return deque((*key, item) for key, item in needed.items() if key not in self.begun)

    def _hand_out_preparations(self) -> None:
        for slot in self.compilers.idle_slots():
            queue = self.compiles or self.preparing
            if not queue:
                break
            kind, key, item = queue.popleft()
            self.begun.add((kind, key))
            task = {
                "kind": kind,
                "problem": item.problem.to_dict(),
                "config": item.config.to_dict(),
                "cooperative": self._residents(item) > 1,
            }
            self.compilers.submit(slot, (kind, key), task, self.settings.compile_timeout_s)

    def _prepared(self, key: tuple[str, str], reply: Reply) -> None:
        """Keep what a compile process found; a proof names the kernels that its candidates need next."""
        self.prepared[key] = reply
        if key[0] != "prove" or not reply.ok:
            return
        for item in self.items:
            if item.prove_key != key[1] or item.state != "waiting":
                continue
            cooperative = self._residents(item) > 1
            item.kernel_key = kernel_identity(item.problem, item.config, cooperative)
            if ("compile", item.kernel_key) not in self.begun:
                self.begun.add(("compile", item.kernel_key))
                self.compiles.append(("compile", item.kernel_key, item))

    def _hand_out(self) -> None:
        self._hand_out_preparations()
        if self.gpus is None or self._stop:
            return
        for slot in self.gpus.idle_slots():
            chosen = self._next_for(slot)
            if chosen is None:
                break
            self._start(slot, chosen)

    def _next_for(self, slot: Slot) -> Item | None:
        """The first candidate that is ready, of the tier that is due, of the slot's own problem if there is one."""
        assert self.gpus is not None
        elsewhere = {other.held for other in self.gpus.slots if other is not slot}
        ready = [item for item in self.items if item.state == "waiting" and self._is_ready(item)]
        if not ready:
            return None
        due = [item for item in ready if item.candidate.tier == ready[0].candidate.tier]
        mine = [item for item in due if item.problem == slot.held]
        free = [item for item in due if item.problem not in elsewhere]
        return (mine or free or due)[0]

    def _is_ready(self, item: Item) -> bool:
        """Proven, compiled, and the baseline to sample beside it has had its turn."""
        proof, kernel = self._proof(item), self._kernel(item)
        baseline = self.baseline_items.get(item.problem)
        if baseline is not None and baseline is not item and baseline.state != "done":
            return False
        return bool(proof and kernel and proof.ok and kernel.ok and not self._misfit(item))

    def _proof(self, item: Item) -> Reply | None:
        return self.prepared.get(("prove", item.prove_key))

    def _kernel(self, item: Item) -> Reply | None:
        return self.prepared.get(("compile", item.kernel_key))

    def _residents(self, item: Item) -> int:
        proof = self._proof(item)
        if proof is None or not proof.ok:
            return 1
        return 1 if item.config.policy != "ordered" else int(proof.result["min_resident"])

    def _settle(self) -> None:
        """Give a row to every waiting candidate whose fate needs no GPU."""
        for item in self.items:
            if item.state == "waiting":
                self._settle_item(item)

    def _settle_item(self, item: Item) -> None:
        support, proof, kernel = item.candidate.support, self._proof(item), self._kernel(item)
        if not support.ok:
            self._write(
                item,
                "constraints",
                error=support.reason,
                required_bytes=support.required_bytes,
                limit_bytes=support.limit_bytes,
            )
        elif proof is not None and not proof.ok:
            self._write(item, proof.failure, error=proof.error)
        elif (misfit := self._misfit(item)) is not None:
            if self.settings.asked:
                self._write(item, "constraints", error=misfit[0], **misfit[1])
            else:
                item.state = "done"
                self.summary.pruned += 1
        elif kernel is not None and not kernel.ok:
            failure = (
                kernel.failure
                if kernel.failure in ("timeout", "compile", "constraints")
                else "compile"
            )
            self._write(item, failure, error=kernel.error)
        elif self.settings.source == "compiled" and proof is not None and kernel is not None:
            self._settle_compiled(item)

    def _misfit(self, item: Item) -> tuple[str, dict[str, int]] | None:
        """Why a proven or compiled candidate does not fit this chip, and the bytes where memory is it."""
        residents, kernel = self._residents(item), self._kernel(item)
        if residents > self.sms:
            chip = f"{self.settings.gpu} has {self.sms} SMs"
            return f"needs {residents} CTAs resident at once; {chip}", {}
        limit = SHARED_MEMORY_LIMIT.get(self.settings.capability)
        shared = kernel.result.get("shared_bytes") if kernel is not None and kernel.ok else None
        if limit is None or shared is None or shared <= limit:
            return None
        needed = {"required_bytes": int(shared), "limit_bytes": limit}
        return f"the kernel takes {shared} bytes of shared memory; the limit is {limit}", needed

    def _settle_compiled(self, item: Item) -> None:
        if not self.settings.simulate:
            self._write(item, "ok")
            return
        predicted = self.prepared.get(("predict", item.hash))
        if predicted is not None:
            self._write(item, "ok")
            self._write_modelled(item, predicted)

    # -- on the GPU -------------------------------------------------------------------------------------------------

    def _start(self, slot: Slot, item: Item) -> None:
        item.state = "running"
        slot.held = item.problem
        baseline = self._baseline(item)
        task = {
            "kind": "measure",
            "problem": item.problem.to_dict(),
            "entries": [{"config": item.config.to_dict(), "min_resident": self._residents(item)}],
            "baseline": baseline.to_dict() if baseline else None,
        }
        timeout = self.settings.timeout_s
        place = (id(slot), slot.starts, item.kernel_key)
        if place not in self.warm:  # the worker loads the kernel, and may have to compile it
            self.warm.add(place)
            timeout += self.settings.compile_timeout_s
        assert self.gpus is not None
        self.gpus.submit(slot, item, task, timeout)

    def _baseline(self, item: Item) -> Config | None:
        """The ascending config to sample beside this one; only one that has passed its own gates."""
        return item.config if self._is_baseline(item) else self.baselines.get(item.problem)

    def _is_baseline(self, item: Item | ResultRow) -> bool:
        problem, config = (
            (item.problem, item.config)
            if isinstance(item, Item)
            else (item.to_problem(), item.to_config())
        )
        settings = self.settings
        return config == baseline_config(problem, settings.capability, settings.backend)

    def _note_end(self, item: Any, reply: Reply) -> None:
        if isinstance(item, Item):
            item.state = "done"
            if reply.ok and self._is_baseline(item):
                self.baselines[item.problem] = item.config

    def _measured(self, slot: Slot, item: Any, reply: Reply) -> None:
        if not isinstance(item, Item):
            item(reply)
            return
        if reply.ok:
            self._write(
                item,
                "ok",
                **{name: reply.result.get(name) for name in MEASURED if name in reply.result},
            )
        else:
            details = {
                k: v for k, v in reply.result.items() if k in MEASURED or k.endswith("_bytes")
            }
            self._write(item, reply.failure, error=reply.error, **details)

    # -- rows -------------------------------------------------------------------------------------------------------

    def _write(self, item: Item, status: str, **columns: Any) -> None:
        item.state = "done"
        kernel, proof = self._kernel(item), self._proof(item)
        resources = (
            {name: kernel.result.get(name) for name in RESOURCES} if kernel and kernel.ok else {}
        )
        row = ResultRow.of(
            item.problem,
            item.config,
            gpu=self.settings.gpu,
            status=status,
            source=self.settings.source,
            config_hash=item.hash,
            min_resident=self._residents(item) if proof and proof.ok else None,
            **resources,
            **columns,
        )
        if self.run_id is None:
            self.run_id = self.store.start_run(self.run_info)
        self.store.add(self.run_id, row)
        self._count(row)

    def _count(self, row: ResultRow) -> None:
        self.summary.counts[row.status] += 1
        self.summary.usable += row.status == "ok"
        if row.status != "ok":
            self.summary.failures.append(row)
        self.reporter.row(row)

    def _write_modelled(self, item: Item, reply: Reply) -> None:
        if self._modelled_run is None:
            info = replace(self.run_info, source="modelled", uuid="")
            self._modelled_run = self.store.start_run(info)
        row = ResultRow.of(
            item.problem,
            item.config,
            gpu=self.settings.gpu,
            status="ok" if reply.ok else reply.failure,
            source="modelled",
            min_resident=self._residents(item),
            predicted=reply.result.get("predicted"),
            error=reply.error or None,
        )
        self.store.add(self._modelled_run, row)

    # -- near ties --------------------------------------------------------------------------------------------------

    def _final_round(self, deadline: float) -> None:
        """Sample the leaders of each problem in turn with its baselines; their rows stand for the cell's winners."""
        assert self.gpus is not None
        rows = self._rows_of_sweep()
        problems = {item.problem for item in self.items} | {row.to_problem() for row in rows}
        wanted = sorted(problems, key=lambda problem: tuple(problem.to_dict().values()))
        due = [(problem, chosen) for problem in wanted if (chosen := finalists(problem, rows))]
        if not due:
            return
        self.reporter.note(f"final round: {len(due)} cells, leaders sampled in turn")
        run_id = self.store.start_run(
            replace(self.run_info, command=f"{self.settings.command} (final round)")
        )
        while (due or self.gpus.busy) and not self._stop:
            if time.monotonic() >= deadline:
                self._drain()
                self.stop("budget")
                break
            for slot in self.gpus.idle_slots():
                if due:
                    self._start_final(slot, run_id, *due.pop())
            self._collect(IDLE_WAIT_S)
            self.reporter.tick()
        self.store.finish_run(run_id)

    def _start_final(
        self, slot: Slot, run_id: int, problem: Problem, chosen: list[ResultRow]
    ) -> None:
        assert self.gpus is not None
        slot.held = problem
        task = {
            "kind": "final",
            "problem": problem.to_dict(),
            "entries": [
                {"config": row.config, "min_resident": row.min_resident or 1} for row in chosen
            ],
        }

        def finished(reply: Reply) -> None:
            if not reply.ok:
                self.reporter.note(f"final round of {problem.label()}: {reply.error}")
                return
            for row, result in zip(chosen, reply.result["results"], strict=True):
                self._write_final(run_id, row, result)

        self.gpus.submit(
            slot, finished, task, self.settings.timeout_s + self.settings.compile_timeout_s
        )

    def _write_final(self, run_id: int, first: ResultRow, result: dict[str, Any]) -> None:
        columns = {name: result[name] for name in MEASURED if name in result}
        status = result.get("status", "ok")
        row = replace(
            first,
            id=None,
            run_id=None,
            run_uuid=None,
            created_at=None,
            status=status,
            error=result.get("error"),
            **columns,
        )
        self.store.add(run_id, row)
        if status != "ok":
            self.summary.failures.append(row)
            self.reporter.row(row)

    def _open_items(self) -> list[Item]:
        return [item for item in self.items if item.state != "done"]
