"""One sweep over every GPU of a Ray cluster: an agent a node runs the local engine there, and claims share the work.

The driver only starts agents, collects what they report, and says what became of them: which config runs where is
settled in the results database (``tuner.results.claims``). So a node that is lost costs what it had in hand and no more,
and a node that comes later joins in. Every agent sweeps the configs of its own GPU's name.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from dash_kernels import __version__
from dash_kernels.device import gpu_name, kernel_hash, resolve_gpu, slug
from tuner.command import SweepRequest, UsageError, sweep_here
from tuner.nvml import visible_gpus
from tuner.plan import Reporter, Summary
from tuner.results import ResultRow, StoreError
from tuner.results.database import resolve_url, show

PACKAGE = "dash-kernels[ray]"
LOOK_S = 5.0  # how often the driver looks for nodes that have joined
REPORT_S = 1.0  # how long an agent waits for news before it answers
WAIT_S = 0.25
TELL_S = 10.0
PENDING_S = 30.0  # how long a node whose GPUs are taken is waited for when all others have ended
STARTS_A_NODE = 3
STOP_S = 120.0  # how long agents may take to stop in order


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one GPU name's part of an agent's work ended: its summary, or why there is none."""

    gpu: str
    summary: Summary | None
    error: str = ""


class Agent:
    """Runs on a node, as an actor that holds the node's GPUs: one local sweep for each name among them."""

    def __init__(self, request: SweepRequest) -> None:
        self._request = request
        self._events: deque[tuple[Any, ...]] = deque()
        self._news = threading.Event()
        self._sweeps: list[Any] = []
        self._stop = ""

    def about(self) -> dict[str, Any]:
        """What the driver wants to know before work begins."""
        names = [gpu_name(gpu.driver_name) or slug(gpu.driver_name) for gpu in visible_gpus()]
        return {"version": __version__, "kernels": kernel_hash(), "gpus": names, "pid": os.getpid()}

    def run(self, names: list[str]) -> list[Outcome]:
        with ThreadPoolExecutor(len(names)) as pool:
            return list(pool.map(self._sweep, names))

    def _sweep(self, name: str) -> Outcome:
        request = replace(self._request, gpu=name)
        try:
            return Outcome(name, sweep_here(request, _Outbox(name, self._put), self._watched))
        except (UsageError, StoreError) as error:
            return Outcome(name, None, str(error))

    @contextmanager
    def _watched(self, sweep: Any) -> Iterator[None]:
        self._sweeps.append(sweep)
        if self._stop:
            sweep.stop(self._stop)
        yield

    def stop(self, reason: str) -> None:
        """End the sweeps after the current step."""
        self._stop = reason
        for sweep in self._sweeps:
            sweep.stop(reason)

    def _put(self, event: tuple[Any, ...]) -> None:
        self._events.append(event)
        self._news.set()

    def events(self) -> list[tuple[Any, ...]]:
        """What happened since the last call; waits a moment for something to happen."""
        self._news.wait(REPORT_S)
        self._news.clear()
        return [self._events.popleft() for _ in range(len(self._events))]


class _Outbox:
    """A reporter whose readers are elsewhere."""

    def __init__(self, gpu: str, put: Any) -> None:
        self._gpu, self._put = gpu, put

    def begin(self, total: int, resumed: int, budget_s: float = 0.0) -> None:
        self._put(("begin", self._gpu, total, resumed))

    def row(self, row: ResultRow) -> None:
        self._put(("row", row))

    def elsewhere(self, count: int) -> None:
        pass  # the agent that did it reports it

    def note(self, text: str) -> None:
        self._put(("note", text))

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class _Member:
    """The driver's view of one agent. ``about``, ``running`` and ``reports`` are answers that are due, None when not."""

    name: str
    actor: Any
    about: Any
    started: float
    running: Any = None
    reports: Any = None
    told_busy: bool = False

    @property
    def pending(self) -> bool:
        """Whether it still waits for its node's GPUs."""
        return self.about is not None

    @property
    def due(self) -> list[Any]:
        return [ref for ref in (self.about, self.running, self.reports) if ref is not None]


class RaySweep:
    """The driver. ``run`` returns when every agent has ended; :meth:`stop` ends them in order.

    ``errors`` says of GPU names that no node could sweep why not.
    """

    def __init__(self, ray: Any, request: SweepRequest, reporter: Reporter) -> None:
        self.ray, self.reporter = ray, reporter
        self.request = replace(
            request,
            engine="local",
            share=request.share or uuid4().hex,
            db=resolve_url(request.db).render_as_string(hide_password=False),
        )
        self.deadline = time.monotonic() + request.budget_s if request.budget_s else float("inf")
        self.members: dict[str, _Member] = {}
        self.starts: Counter[str] = Counter()
        self.finished: set[str] = set()
        self.refused: list[str] = []
        self.outcomes: list[Outcome] = []
        self.begun: set[str] = set()
        self.totals: dict[str, tuple[int, int]] = {}
        self.errors: dict[str, str] = {}
        self._looked = self._ended = 0.0
        self._stopped = ""

    def stop(self, reason: str) -> None:
        """Safe to call from a signal handler: the loop passes it on."""
        self._stopped = self._stopped or reason

    def run(self) -> Summary:
        """Raises UsageError when no node of the cluster could take part."""
        started = time.monotonic()
        stopped_at: float | None = None
        try:
            self._look()
            while self.members:
                if self._stopped and stopped_at is None:
                    stopped_at = time.monotonic()
                    self._tell_to_stop()
                if stopped_at is not None and time.monotonic() > stopped_at + STOP_S:
                    break
                self._advance()
                self._wait_for_busy_nodes()
                self._look()
                self.reporter.tick()
        finally:
            for member in self.members.values():
                self.ray.kill(member.actor)
        if not self.begun and not self._stopped:
            reasons = "; ".join(self.refused) or "it has no node with a GPU"
            raise UsageError(f"the Ray cluster cannot take this sweep: {reasons}")
        swept = {outcome.gpu for outcome in self.outcomes if outcome.summary is not None}
        self.errors = {
            gpu: "the nodes that have it were lost; the same command goes on from here"
            for gpu in self.begun - swept
            if not self._stopped
        }
        self.errors |= {one.gpu: one.error for one in self.outcomes if one.gpu not in swept}
        summary = merge(self.outcomes)
        summary.stopped = self._stopped or summary.stopped
        summary.seconds = time.monotonic() - started
        return summary

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Start an agent on every node with GPUs that has none: nodes that joined, and those whose agent died."""
        now = time.monotonic()
        if self._stopped or now >= self.deadline or now - self._looked < LOOK_S:
            return
        self._looked = now
        for node in self.ray.nodes():
            key, gpus = node["NodeID"], int(node["Resources"].get("GPU", 0))
            known = key in self.members or key in self.finished
            if node["Alive"] and gpus > 0 and not known and self.starts[key] < STARTS_A_NODE:
                self.starts[key] += 1
                self._start(node, gpus)

    def _start(self, node: dict[str, Any], gpus: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        cores = int(node["Resources"].get("CPU", 0))
        jobs = self.request.jobs or max(1, cores - gpus)
        left = max(1.0, self.deadline - time.monotonic()) if self.request.budget_s else 0.0
        options: dict[str, Any] = {
            "num_gpus": gpus,
            "num_cpus": min(1, cores),
            "max_concurrency": 4,  # about, events and stop answer while run is busy
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        }
        request = replace(self.request, jobs=jobs, budget_s=left)
        actor = self.ray.remote(Agent).options(**options).remote(request)
        name = str(node.get("NodeManagerHostname") or node["NodeID"][:8])
        about = actor.about.remote()
        self.members[node["NodeID"]] = _Member(name, actor, about, time.monotonic())

    def _tell_to_stop(self) -> None:
        for key, member in list(self.members.items()):
            if member.pending:
                self._end(key)
            else:
                member.actor.stop.remote(self._stopped)

    def _wait_for_busy_nodes(self) -> None:
        """Say which nodes have no GPUs free; do without them once all others have ended."""
        now = time.monotonic()
        waiting = {key: member for key, member in self.members.items() if member.pending}
        for member in waiting.values():
            if not member.told_busy and now - member.started > TELL_S:
                member.told_busy = True
                self.reporter.note(f"node {member.name}: waiting for its GPUs, other work has them")
        if self.outcomes and len(waiting) == len(self.members) and now - self._ended > PENDING_S:
            for key, member in waiting.items():
                self.reporter.note(f"node {member.name}: its GPUs were never free; left out")
                self._end(key)

    def _end(self, key: str) -> None:
        self.finished.add(key)
        self._ended = time.monotonic()
        self.ray.kill(self.members.pop(key).actor)

    # -- what agents say --------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Take the answers that are there; a moment's wait where there are none."""
        due = [ref for member in self.members.values() for ref in member.due]
        ready = set(self.ray.wait(due, num_returns=len(due), timeout=WAIT_S)[0])
        errors = self.ray.exceptions
        for key, member in list(self.members.items()):
            try:
                self._take(key, member, ready)
            except (errors.RayActorError, errors.ActorUnschedulableError) as error:
                self._lost(key, member, error)
            except errors.RayTaskError as error:
                self._refuse(key, f"node {member.name}: {str(error).strip().splitlines()[-1]}")

    def _take(self, key: str, member: _Member, ready: set[Any]) -> None:
        get = self.ray.get
        if member.about in ready:
            about, member.about = get(member.about), None
            names = self._names_on(member, about)
            if isinstance(names, str):
                self._refuse(key, names)
                return
            self.begun |= set(names)
            member.running = member.actor.run.remote(names)
            member.reports = member.actor.events.remote()
        if member.reports in ready:
            events = get(member.reports)
            for event in events:
                self._report(member, event)
            if member.running is None and not events:
                self._end(key)
                return
            member.reports = member.actor.events.remote()
        if member.running in ready:
            outcomes, member.running = get(member.running), None
            for outcome in outcomes:
                self.outcomes.append(outcome)
                if outcome.error:
                    self.reporter.note(f"node {member.name}, {outcome.gpu}: {outcome.error}")

    def _names_on(self, member: _Member, about: dict[str, Any]) -> list[str] | str:
        """The GPU names to sweep on a node, or why there is none."""
        if (about["version"], about["kernels"]) != (__version__, kernel_hash()):
            return (
                f"node {member.name} has dash {about['version']} with kernels {about['kernels'][:8]}, this command "
                f"{__version__} with {kernel_hash()[:8]}; install the same on every node"
            )
        found = list(dict.fromkeys(about["gpus"]))
        if not found:
            return f"node {member.name} has GPUs for Ray and none that the NVIDIA driver shows; dash-tune doctor there"
        wanted = found if self.request.gpu == "auto" else [resolve_gpu(self.request.gpu).name]
        chosen = [name for name in found if name in wanted]
        return chosen or f"node {member.name} has {', '.join(found)}, not {wanted[0]}"

    def _report(self, member: _Member, event: tuple[Any, ...]) -> None:
        kind, *values = event
        if kind == "row":
            self.reporter.row(values[0])
        elif kind == "note":
            self.reporter.note(f"{member.name}: {values[0]}")
        elif values[0] not in self.totals:
            gpu, total, resumed = values
            self.totals[gpu] = (total, resumed)
            totals, before = zip(*self.totals.values(), strict=True)
            self.reporter.begin(sum(totals), sum(before), self.request.budget_s)

    def _refuse(self, key: str, reason: str) -> None:
        self.refused.append(reason)
        self.reporter.note(f"{reason}; it is left out")
        self._end(key)

    def _lost(self, key: str, member: _Member, error: Exception) -> None:
        """An agent died, alone or with its node; another is started if the node is there."""
        del self.members[key]
        lease = self.request.lease_s
        said = str(error).strip().splitlines()
        self.refused.append(f"node {member.name}: its agent died: {said[0] if said else 'unknown'}")
        self.reporter.note(
            f"node {member.name}: its agent died; what it had in hand returns to the others within {lease:.0f} s"
        )
        self._looked = 0.0


def merge(outcomes: Iterable[Outcome]) -> Summary:
    """One summary of all agents. Agents of one GPU name shared one sweep, so what they all saw counts once."""
    merged = Summary()
    by_name: dict[str, list[Summary]] = {}
    for outcome in outcomes:
        if outcome.summary is not None:
            by_name.setdefault(outcome.gpu, []).append(outcome.summary)
    for summaries in by_name.values():
        for summary in summaries:
            merged.counts.update(summary.counts)
            merged.failures += summary.failures
            merged.unsettled += summary.unsettled
            merged.stopped = merged.stopped or summary.stopped
        for name in ("resumed", "failed_before", "usable", "pruned", "left"):
            seen = max(getattr(summary, name) for summary in summaries)
            setattr(merged, name, getattr(merged, name) + seen)
    busy = [one.gpu_busy for found in by_name.values() for one in found if one.gpu_busy is not None]
    merged.gpu_busy = sum(busy) / len(busy) if busy else None
    return merged


def connect(request: SweepRequest) -> Any:
    """The ray module, connected to the cluster. Raises UsageError with the remedy."""
    try:
        import ray
    except ImportError:
        raise UsageError(f'--engine ray needs Ray: pip install "{PACKAGE}"') from None
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"no Ray cluster answers ({str(error).splitlines()[0]}); start one (ray start --head) or set RAY_ADDRESS"
            ) from None
    hosts = {
        node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("GPU", 0) >= 1
    }
    url = resolve_url(request.db)
    if url.drivername == "sqlite" and hosts - {ray.util.get_node_ip_address()}:
        raise UsageError(
            f"--engine ray over several hosts needs one PostgreSQL, not {show(url)}: pass --db postgresql://HOST/NAME"
        )
    return ray
