"""The sweep: hands candidates to processes in order, writes one row for each as soon as its fate is known.

Nothing is kept only in memory: a sweep that was stopped, killed or ran out of budget goes on with the same command,
because what has a row is not done again. Several commands may work on one sweep at once: each takes a claim on a
candidate before it begins (``tuner.engines.share``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from dash_kernels.problem import Config, Problem
from tuner.compile import prediction_identity, schedule_identity
from tuner.engines.local import Pool, Slot
from tuner.engines.share import Share
from tuner.plan import Item, Reporter, Summary, SweepSettings
from tuner.preparation import Preparation
from tuner.results import ResultRow, Store, config_hash
from tuner.results.claims import Claim
from tuner.results.rows import short_hash
from tuner.resume import due_finals, earlier, rows_of_sweep, run_info
from tuner.space import Candidate, baseline_config
from tuner.worker import Reply, WorkerStartError

IDLE_WAIT_S = 0.5
FINALISTS = 9  # at most, of a cell: two baselines, the default, four to serve, two others
MOST_FOR_FINALS = 0.25  # of a budget
RESOURCES = ("registers", "spill_bytes", "shared_bytes")
MEASURED = (
    *("tflops", "ms", "ms_low", "ms_high", "samples", "speedup_vs_baseline"),
    *("max_abs_error", "rel_error", "budget", "bits_equal", "runs_compared"),
    *("numerics_key", "telemetry"),
)


def items_of(candidates: Sequence[Candidate], source: str) -> list[Item]:
    """The candidates with the names of what they need."""
    return [
        Item(
            candidate,
            config_hash(candidate.problem, candidate.config, source),
            schedule_identity(candidate.problem, candidate.config),
            prediction_identity(candidate.problem, candidate.config),
        )
        for candidate in candidates
    ]


class Sweep:
    """One command's work. ``run`` returns when all is done, the budget is spent, or :meth:`stop` was called."""

    def __init__(
        self,
        store: Store,
        settings: SweepSettings,
        items: Sequence[Item],
        compilers: Pool,
        gpus: Pool | None,
        environment: dict[str, Any] | None,
        reporter: Reporter,
    ) -> None:
        self.store, self.settings, self.reporter = store, settings, reporter
        self.gpus, self.compilers = gpus, compilers
        self.environment = environment
        self.summary = Summary()
        self.items = list(items)
        self.problems = {item.problem for item in items}
        self.prepared = Preparation(settings, compilers, items)
        self.warm: set[tuple[int, int, str]] = set()
        self.baselines: dict[Problem, Config] = {}
        self.baseline_items = {item.problem: item for item in items if self._is_baseline(item)}
        self.share: Share | None = None
        self.run_id: int | None = None
        self._modelled_run: int | None = None
        self._stop = ""
        self._first_start: float | None = None
        self._gpu_seconds = 0.0

    def stop(self, reason: str) -> None:
        """End the sweep after the current step; safe to call from a signal handler."""
        self._stop = self._stop or reason

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> Summary:
        """Raises WorkerStartError when none of the workers can start, or start again; rows written until then stay."""
        started = time.monotonic()
        deadline = started + self.settings.budget_s if self.settings.budget_s else float("inf")
        self._meet_gpu()
        self._resume()
        self.reporter.begin(len(self.items), self.summary.resumed, self.settings.budget_s or 0.0)
        try:
            while self._open_items() and not self._stop:
                if time.monotonic() >= deadline - self._needed_for_finals():
                    self._drain()
                    break
                self._step()
            if not self._stop and self.gpus is not None:
                self._final_round(deadline)
        except WorkerStartError as error:
            self._finish()
            kept = f"{self.summary.counts.total()} rows of this command are kept"
            raise WorkerStartError(f"{error}; {kept}, the same command goes on") from None
        except Exception:
            self._finish()
            raise
        self._finish()  # not after a second Ctrl-C, which may have cut a transaction of this process short
        self.summary.left = len(self._open_items())
        if self.summary.left:
            self.stop("budget")
        self.summary.stopped = self._stop
        self.summary.seconds = time.monotonic() - started
        if self.gpus is not None and self._first_start is not None:
            available = len(self.gpus.slots) * (time.monotonic() - self._first_start)
            self.summary.gpu_busy = min(1.0, self._gpu_seconds / available)
        return self.summary

    def _finish(self) -> None:
        """Give back what is in hand, and note when the runs ended."""
        self._share.end()
        for run in (self.run_id, self._modelled_run):
            if run is not None:
                self.store.finish_run(run)

    def _meet_gpu(self) -> None:
        """Learn the environment from the first GPU worker; what needs no GPU goes on while it starts."""
        settings = self.settings
        if self.gpus is not None:
            while not (idle := self.gpus.idle_slots()) and not self._stop:
                self.prepared.hand_out()
                self._collect(IDLE_WAIT_S)
            self.environment = idle[0].worker.info.get("environment", {}) if idle else {}
        about = self.environment or {}
        self.prepared.sms = int(about.get("sms") or settings.sms) or None
        self.run_info = run_info(settings, about)

    def _needed_for_finals(self) -> float:
        """Seconds of a budget to keep for the final rounds, at the pace of the candidates so far."""
        if not self.settings.budget_s or self.gpus is None or not self.summary.counts:
            return 0.0
        pace = self._gpu_seconds / self.summary.counts.total() / len(self.gpus.slots)
        return min(MOST_FOR_FINALS * self.settings.budget_s, pace * FINALISTS * len(self.problems))

    def _step(self) -> None:
        self._learn_of_others()
        self._hand_out()
        self._settle()
        self._collect(IDLE_WAIT_S)
        self.reporter.tick()

    def _collect(self, patience: float) -> None:
        pools = [pool for pool in (self.gpus, self.compilers) if pool is not None]
        patience = max(0.0, min([patience, *(pool.seconds_left() for pool in pools)]))
        wait([connection for pool in pools for connection in pool.connections], timeout=patience)
        self._take_replies()
        self.prepared.collect()

    def _take_replies(self) -> None:
        """Write a row for each candidate that has ended, before its GPU gets the next: a kill loses what is in hand only."""
        if self.share is not None:
            self.share.beat()
        for slot, item, reply in self.gpus.poll() if self.gpus is not None else ():
            self._note_end(item, reply)
            self._measured(slot, item, reply)

    def _drain(self) -> None:
        """Let the candidates on the GPUs finish: at most one each, bounded by their timeout."""
        self.prepared.clear()
        while self.gpus is not None and self.gpus.busy and self._stop != "interrupt":
            self._take_replies()
            if self.gpus.busy:
                wait(self.gpus.connections, timeout=IDLE_WAIT_S)

    # -- before the GPU ---------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Take out what has a row, and offer the rest; remember which problems have a baseline to measure against."""
        found = earlier(self.store, self.settings, self.run_info, self.items)
        for item in self.items:
            if item.hash in found.known:
                item.state = "done"
        self.items = [item for item in self.items if item.hash not in found.known]
        self.prepared.keep(self.items)
        for row in found.rows:
            if row.config_hash in found.usable and self._is_baseline(row):
                self.baselines[row.to_problem()] = row.to_config()
        found.count(self.summary)
        self.share = Share(
            self.store, self.settings, self.run_info, lambda: self._stop == "interrupt"
        )
        self.share.offer(self.items)

    @property
    def _share(self) -> Share:
        assert self.share is not None
        return self.share

    def _learn_of_others(self) -> None:
        """Take note of what other processes have finished, and of what they have given back."""
        idle = not any(item.state == "running" for item in self.items)
        news = self._share.refresh(idle=idle)
        for item, status in news.done:
            self.summary.elsewhere += 1
            self.summary.usable += status == "ok"
            self.summary.failed_before += status != "ok"
            if status == "ok" and self._is_baseline(item):
                self.baselines[item.problem] = item.config
        if news.done:
            self.reporter.elsewhere(len(news.done))
        if news.back:
            self.prepared.again(news.back)

    def _hand_out(self) -> None:
        self.prepared.hand_out()
        if self.gpus is None or self._stop:
            return
        for slot in self.gpus.idle_slots():
            chosen = None
            while chosen is None and (wanted := self._wanted_by(slot)):
                chosen = self._share.take(wanted)
            if chosen is None:
                break
            self._start(slot, chosen)

    def _wanted_by(self, slot: Slot) -> list[Item]:
        """Of the candidates that are ready and of the tier that is due: those of the slot's own problem if it has any,
        else of a problem that no other slot holds, in the order in which the model puts them."""
        assert self.gpus is not None
        elsewhere = {other.held for other in self.gpus.slots if other is not slot}
        ready = [item for item in self.items if item.state == "waiting" and self._is_ready(item)]
        if not ready:
            return []
        due = [item for item in ready if item.candidate.tier == ready[0].candidate.tier]
        mine = [item for item in due if item.problem == slot.held]
        free = [item for item in due if item.problem not in elsewhere]
        first = (mine or free or due)[0]
        return sorted(
            (item for item in due if item.problem == first.problem), key=self.prepared.predicted_ms
        )

    def _is_ready(self, item: Item) -> bool:
        """Prepared, and the baseline to sample beside it has had its turn."""
        baseline = self.baseline_items.get(item.problem)
        if baseline is not None and baseline is not item and baseline.state != "done":
            return False
        return self.prepared.ready(item)

    def _settle(self) -> None:
        """Give a row to every waiting candidate whose fate needs no GPU."""
        for item in self.items:
            if item.state == "waiting":
                self._settle_item(item)

    def _settle_item(self, item: Item) -> None:
        prepared = self.prepared
        support, proof, kernel = item.candidate.support, prepared.proof(item), prepared.kernel(item)
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
        elif (misfit := prepared.misfit(item)) is not None:
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

    def _settle_compiled(self, item: Item) -> None:
        if not self.settings.simulate:
            self._write(item, "ok")
            return
        predicted = self.prepared.prediction(item)
        if predicted is not None:
            self._write(item, "ok", [self._modelled(item, predicted)])

    # -- on the GPU -------------------------------------------------------------------------------------------------

    def _start(self, slot: Slot, item: Item) -> None:
        item.state = "running"
        slot.held = item.problem
        baseline = self._baseline(item)
        task = {
            "kind": "measure",
            "problem": item.problem.to_dict(),
            "entries": [
                {"config": item.config.to_dict(), "min_resident": self.prepared.residents(item)}
            ],
            "baseline": baseline.to_dict() if baseline else None,
        }
        timeout = self.settings.timeout_s
        place = (id(slot), slot.starts, item.kernel_key)
        if place not in self.warm:  # the worker loads the kernel, and may have to compile it
            self.warm.add(place)
            timeout += self.settings.compile_timeout_s
        assert self.gpus is not None
        self._first_start = self._first_start or time.monotonic()
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
        self._gpu_seconds += reply.seconds
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

    def _write(
        self,
        item: Item,
        status: str,
        also: Sequence[tuple[int, ResultRow]] = (),
        /,
        **columns: Any,
    ) -> None:
        item.state = "done"
        kernel, proof = self.prepared.kernel(item), self.prepared.proof(item)
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
            min_resident=self.prepared.residents(item) if proof and proof.ok else None,
            **resources,
            **columns,
        )
        if self.run_id is None:
            self.run_id = self._share.patiently(lambda: self.store.start_run(self.run_info))
        if self._share.write(item, self.run_id, row, also):
            self._count(row)

    def _count(self, row: ResultRow) -> None:
        self.summary.counts[row.status] += 1
        self.summary.usable += row.status == "ok"
        self.summary.unsettled += (row.telemetry or {}).get("settled") is False
        if row.status != "ok":
            self.summary.failures.append(row)
        self.reporter.row(row)

    def _modelled(self, item: Item, reply: Reply) -> tuple[int, ResultRow]:
        """The row of the model's time, and the run that it goes into."""
        if self._modelled_run is None:
            info = replace(self.run_info, source="modelled", uuid="")
            self._modelled_run = self.store.start_run(info)
        row = ResultRow.of(
            item.problem,
            item.config,
            gpu=self.settings.gpu,
            status="ok" if reply.ok else reply.failure,
            source="modelled",
            min_resident=self.prepared.residents(item),
            predicted=reply.result.get("predicted"),
            error=reply.error or None,
        )
        return self._modelled_run, row

    # -- near ties --------------------------------------------------------------------------------------------------

    def _final_round(self, deadline: float) -> None:
        """Sample the leaders of each problem in turn with its baselines; their rows stand for the cell's winners."""
        assert self.gpus is not None
        rows = rows_of_sweep(self.store, self.settings, self.run_info)
        due = due_finals(self.problems, rows)
        if not due:
            return
        newest = {row.to_problem(): row.id for row in rows}
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
                claim = None
                while due and claim is None:
                    problem, chosen = due.pop()
                    work = ["final", problem.to_dict(), newest[problem]]
                    claim = self._share.take_work(short_hash(work))
                if claim is not None:
                    self._start_final(slot, run_id, claim, problem, chosen)
            self._collect(IDLE_WAIT_S)
            self.reporter.tick()
        self.store.finish_run(run_id)

    def _start_final(
        self, slot: Slot, run_id: int, claim: Claim, problem: Problem, chosen: list[ResultRow]
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
            results = zip(chosen, reply.result["results"], strict=True)
            rows = [self._final_row(row, result) for row, result in results]
            if self._share.write_rows(claim, run_id, rows):
                for row in rows:
                    if row.status != "ok":
                        self.summary.failures.append(row)
                        self.reporter.row(row)

        self.gpus.submit(
            slot, finished, task, self.settings.timeout_s + self.settings.compile_timeout_s
        )

    def _final_row(self, first: ResultRow, result: dict[str, Any]) -> ResultRow:
        return ResultRow.of(
            first.to_problem(),
            first.to_config(),
            gpu=first.gpu,
            status=result.get("status", "ok"),
            error=result.get("error"),
            min_resident=first.min_resident,
            **{name: getattr(first, name) for name in RESOURCES},
            **{name: result[name] for name in MEASURED if name in result},
        )

    def _open_items(self) -> list[Item]:
        return [item for item in self.items if item.state != "done"]
