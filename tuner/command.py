"""The sweep command: what was asked, on which GPU, checked before anything is started or written."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from dash_kernels.device import GpuSpec, gpu_name, resolve_gpu, slug, software
from tuner import doctor
from tuner.engines.local import Pool, compile_pool, gpu_pool
from tuner.nvml import Monitor, VisibleGpu, visible_gpus
from tuner.plan import Item, Reporter, Summary, SweepSettings
from tuner.policy import MeasurementPolicy
from tuner.report import duration, failure_line, make_reporter
from tuner.results import Store
from tuner.results.rows import LEASE_S
from tuner.resume import nothing_to_do, remembered_environment
from tuner.same_bits import keeping
from tuner.space import Candidate, SpaceFilter, require_backend, space, validate
from tuner.sweep import Sweep, items_of
from tuner.worker import WorkerStartError

MEASURER = "tuner.measure:Measurer"
COMPILER = "tuner.compile:Compiler"
LISTED_FAILURES = 20
ENGINES = ("local", "ray")


class Stoppable(Protocol):
    """A sweep that can be ended in order."""

    def stop(self, reason: str) -> None: ...


Guard = Callable[[Any], AbstractContextManager[None]]


class UsageError(Exception):
    """Bad usage: one line that names what is wrong and the remedy. Exit code 2, nothing written."""


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """What ``dash-tune`` was asked to do. ``measurer`` and ``compiler`` are worker handlers (tests bring their own).

    ``share`` and ``lease_s`` are those of :class:`SweepSettings`.
    """

    gpu: str
    filters: SpaceFilter = field(default_factory=SpaceFilter)
    db: str | None = None
    budget_s: float = 0.0
    timeout_s: float = 60.0
    compile_timeout_s: float = 240.0
    jobs: int = 0
    engine: str = "local"
    share: str = ""
    lease_s: float = LEASE_S
    fresh: bool = False
    retry: bool = False
    numerics_key: str = ""
    compile_only: bool = False
    simulate: bool = False
    dry_run: bool = False
    as_json: bool = False
    serve: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    command: str = "dash-tune"
    policy: MeasurementPolicy = field(default_factory=MeasurementPolicy)
    measurer: str = MEASURER
    compiler: str = COMPILER


@dataclass(frozen=True, slots=True)
class Target:
    """The chip that rows are for; ``gpus`` is empty when nothing is to be measured."""

    name: str
    capability: tuple[int, int]
    spec: GpuSpec | None
    gpus: tuple[VisibleGpu, ...] = ()


def run_sweep(request: SweepRequest) -> int:
    """Do what was asked and answer the exit code. Raises UsageError or StoreError before anything is written."""
    if request.engine not in ENGINES:
        raise UsageError(f"unknown engine {request.engine!r}; choose from {', '.join(ENGINES)}")
    if request.engine == "ray" and not request.dry_run:
        return _run_on_cluster(request)
    target = resolve_target(request)
    candidates = _candidates(request, target)
    if request.dry_run:
        _list(request, target, candidates)
        return 0
    _preflight(request, target)
    program = _server_program() if request.serve else ""
    with Store.open(request.db) as store:
        server = _start_server(program, request) if program else None
        reporter = make_reporter(request.as_json)
        summary = _sweep(request, target, candidates, store, reporter, interrupts)
        _conclude(request, target.name, summary, store, server)
    return summary.exit_code


def sweep_here(request: SweepRequest, reporter: Reporter, guard: Guard) -> Summary:
    """This machine's part of a sweep that a driver has started elsewhere. ``guard`` holds the sweep while it runs."""
    target = resolve_target(request)
    candidates = _candidates(request, target)
    _preflight(request, target)
    with Store.open(request.db) as store:
        return _sweep(request, target, candidates, store, reporter, guard)


def _run_on_cluster(request: SweepRequest) -> int:
    if request.compile_only or request.simulate:
        raise UsageError(
            "--engine ray is for measuring; --compile-only and --simulate work on this machine alone"
        )
    try:
        validate(request.filters)
        if request.gpu != "auto":
            target = resolve_target(replace(request, compile_only=True))
            require_backend(request.filters, target.capability)
    except ValueError as error:
        raise UsageError(str(error)) from None
    from tuner.engines.ray import RaySweep, connect

    ray = connect(request)
    program = _server_program() if request.serve else ""
    with Store.open(request.db) as store:
        server = _start_server(program, request) if program else None
        reporter = make_reporter(request.as_json)
        sweep = RaySweep(ray, request, reporter)
        try:
            with interrupts(sweep):
                summary = sweep.run()
        finally:
            reporter.close()
        _conclude(request, ", ".join(sweep.totals), summary, store, server)
    for name, reason in sweep.errors.items():
        print(f"dash-tune: {name} was not swept: {reason}", file=sys.stderr)
    return 2 if sweep.errors else summary.exit_code


def _preflight(request: SweepRequest, target: Target) -> None:
    if not _real(request):
        return
    missing = doctor.preflight(target.capability, with_gpu=not request.compile_only)
    if missing:
        raise UsageError("; ".join(check.line for check in missing))


def resolve_target(request: SweepRequest) -> Target:
    """Which chip, and which of this machine's GPUs. Raises UsageError naming what is there instead."""
    spec = None
    gpus = visible_gpus()
    names = [gpu_name(gpu.driver_name) or slug(gpu.driver_name) for gpu in gpus]
    if request.gpu != "auto":
        try:
            spec = resolve_gpu(request.gpu)
        except ValueError as error:
            if slug(request.gpu) not in names:  # a slice, or a chip without a data sheet here
                raise UsageError(str(error)) from None
    if request.compile_only and spec is not None:
        return Target(spec.name, spec.capability, spec)
    if request.compile_only and not gpus:
        raise UsageError(
            "--gpu auto finds no GPU here; name the chip to compile for, for instance --gpu h800"
        )
    if request.dry_run and spec is not None and not gpus:
        return Target(spec.name, spec.capability, spec)
    if not gpus:
        raise UsageError(doctor.gpu().line)
    unnamed = names[0] if request.gpu == "auto" else slug(request.gpu)
    wanted = spec.name if spec else unnamed
    chosen = tuple(gpu for gpu, name in zip(gpus, names, strict=True) if name == wanted)
    if not chosen:
        found = ", ".join(
            dict.fromkeys(
                f"{gpu.driver_name} ({name})" for gpu, name in zip(gpus, names, strict=True)
            )
        )
        raise UsageError(
            f"--gpu {request.gpu}: this machine has {found}; use --gpu auto, or --compile-only to compile for {wanted}"
        )
    capability = chosen[0].capability
    with contextlib.suppress(ValueError):
        spec = resolve_gpu(wanted)
    return Target(wanted, capability, spec, () if request.compile_only else chosen)


def _candidates(request: SweepRequest, target: Target) -> list[Candidate]:
    if request.simulate and target.spec is None:
        raise UsageError(
            f"--simulate needs a chip with a known data sheet; {target.name} is not one"
        )
    if request.simulate and not request.compile_only:
        raise UsageError("--simulate goes with --compile-only: a sweep on a GPU measures")
    try:
        validate(request.filters)
        require_backend(request.filters, target.capability)
        if request.numerics_key:
            with Store.open(request.db) as store:
                store.load_shipped()
                return keeping(
                    request.numerics_key, request.filters, target.capability, target.name, store
                )
        candidates = space(target.capability, request.filters)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not candidates:
        raise UsageError(
            "the filters leave no config: this schedule has none for this mask; see dash-tune --dry-run"
        )
    return candidates


def _real(request: SweepRequest) -> bool:
    return request.compiler == COMPILER


def _list(request: SweepRequest, target: Target, candidates: Sequence[Candidate]) -> None:
    import json

    for candidate in candidates:
        problem, config = candidate.problem, candidate.config
        if request.as_json:
            entry = {
                "tier": candidate.tier,
                "problem": problem.to_dict(),
                "config": config.to_dict(),
                "refused": candidate.support.reason or None,
            }
            print(json.dumps(entry))
            continue
        refused = f"  ({candidate.support.reason})" if not candidate.runnable else ""
        print(
            f"{problem.label():46} batch={problem.batch:<3} heads={problem.heads}/{problem.heads_kv:<3} "
            f"{config.label()}{refused}"
        )
    if not request.as_json:
        print(f"{len(candidates)} configs for {target.name}; nothing was run")


# -- the sweep itself ---------------------------------------------------------------------------------------------


def _sweep(
    request: SweepRequest,
    target: Target,
    candidates: Sequence[Candidate],
    store: Store,
    reporter: Reporter,
    guard: Guard,
) -> Summary:
    settings = _settings(request, target)
    items = items_of(candidates, settings.source)
    nothing = _nothing_to_do(target, settings, items, store)
    if nothing is not None:
        reporter.begin(0, nothing.resumed, request.budget_s)
        reporter.close()
        return nothing
    for check in doctor.disturbances(target.gpus):
        reporter.note(f"warning: {check.line}")
    compilers: Pool | None = None
    gpus: Pool | None = None
    try:
        if target.gpus:
            held = {gpu.uuid: Monitor(gpu.uuid).memory_used() for gpu in target.gpus}
            about_gpus = {"policy": request.policy.to_dict(), "held_bytes": held}
            gpus = gpu_pool(request.measurer, target.gpus, about_gpus, reporter.note)
        jobs = request.jobs or max(1, cpu_cores() - len(target.gpus))
        options = {
            "capability": target.capability,
            "gpu": target.spec.name if target.spec else None,
        }
        compilers = compile_pool(request.compiler, jobs, options, reporter.note)
        about = None if gpus else _environment(target)
        sweep = Sweep(store, settings, items, compilers, gpus, about, reporter)
        with guard(sweep):
            return sweep.run()
    except WorkerStartError as error:
        raise UsageError(f"{error}; dash-tune doctor says what this machine lacks") from None
    finally:
        for pool in (gpus, compilers):
            if pool is not None:
                pool.close()
        reporter.close()


def _nothing_to_do(
    target: Target, settings: SweepSettings, items: Sequence[Item], store: Store
) -> Summary | None:
    """The end of a sweep that has all its rows already, found without starting a process; None where work is left."""
    if target.gpus:
        about = remembered_environment(store, settings, target.gpus[0].driver_name)
    else:
        about = _environment(target)
    started = time.monotonic()
    if about is None or settings.fresh or settings.simulate:
        return None
    summary = nothing_to_do(store, settings, items, about)
    if summary is not None:
        summary.seconds = time.monotonic() - started
    return summary


def cpu_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The cores that this process may use: its affinity, and the quota of its container."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux
    cores = len(allowed(0)) if allowed else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no such file, or no quota: "max 100000"
        limit, period = map(int, quota.read_text().split())
        cores = min(cores, max(1, limit // period))
    return cores


def _environment(target: Target) -> dict[str, Any]:
    """This machine's software and the identity of a chip that is not here."""
    chip = {
        "gpu": target.name,
        "gpu_name": None,
        "sms": target.spec.sms if target.spec else None,
        "capability": "{}.{}".format(*target.capability),
        "driver": None,
    }
    return {**software(), **chip}


def _settings(request: SweepRequest, target: Target) -> SweepSettings:
    filters = request.filters
    return SweepSettings(
        gpu=target.name,
        capability=target.capability,
        sms=target.spec.sms if target.spec else 0,
        source="compiled" if request.compile_only else "measured",
        command=request.command,
        timeout_s=request.timeout_s,
        compile_timeout_s=request.compile_timeout_s,
        budget_s=request.budget_s,
        fresh=request.fresh,
        retry=request.retry,
        share=request.share,
        lease_s=request.lease_s,
        simulate=request.simulate,
        model=request.simulate or (target.spec is not None and not request.compile_only),
        asked=bool(filters.schedules or filters.tiles or filters.stages),
        backend=filters.backends[0] if filters.backends else "",
        policy=request.policy,
    )


@contextlib.contextmanager
def interrupts(sweep: Stoppable) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) ends the sweep in order; a second one ends it at once."""
    previous: dict[int, Any] = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}

    def handler(number: int, _: Any) -> None:
        signal.signal(number, previous[number])
        sweep.stop("interrupt")

    for number in previous:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _server_program() -> str:
    beside = Path(sys.executable).with_name("dash-serve")
    program = str(beside) if beside.exists() else shutil.which("dash-serve")
    if program is None:
        raise UsageError(
            "--serve: the program dash-serve is not installed; pip install dash-kernels"
        )
    return program


def _start_server(program: str, request: SweepRequest) -> subprocess.Popen[bytes]:
    """``dash-serve`` as a process of its own; it goes on when the sweep has ended."""
    arguments = [program, "--host", request.host, "--port", str(request.port)]
    if request.db:
        arguments += ["--db", request.db]
    return subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
    )


def _conclude(
    request: SweepRequest,
    gpu: str,
    summary: Summary,
    store: Store,
    server: subprocess.Popen[bytes] | None,
) -> None:
    """Say what was done, each failure by class, and how to go on."""
    import json

    classes = {name: summary.counts[name] for name in sorted(summary.counts) if name != "ok"}
    if request.as_json:
        values = {
            "ok": summary.counts["ok"],
            "resumed": summary.resumed,
            "elsewhere": summary.elsewhere,
            "failed_before": summary.failed_before,
            "pruned": summary.pruned,
            "left": summary.left,
            "failed": classes,
            "stopped": summary.stopped,
            "unsettled": summary.unsettled,
            "seconds": round(summary.seconds, 3),
            "gpu_busy": None if summary.gpu_busy is None else round(summary.gpu_busy, 3),
            "database": store.where,
            "exit_code": summary.exit_code,
        }
        print(json.dumps({"event": "end", **values}))
        return
    print(
        f"{summary.counts['ok']} ok, {sum(classes.values())} failed, {summary.resumed} from before",
        end="",
    )
    if summary.elsewhere:
        print(f", {summary.elsewhere} by other processes", end="")
    print(f", in {duration(summary.seconds)}; rows in {store.where}")
    if summary.gpu_busy is not None:
        print(f"GPUs checked or timed for {summary.gpu_busy:.0%} of the time from the first config")
    if summary.unsettled:
        limit = f"{request.policy.target_interval:.1%}"
        print(
            f"{summary.unsettled} medians are known less exactly than {limit}: see their interval"
        )
    if summary.pruned:
        need = "more CTAs at once or more shared memory"
        print(f"{summary.pruned} configs left out: they need {need} than {gpu} has")
    if summary.failed_before:
        print(f"{summary.failed_before} failed before; --retry does timeouts and deaths again")
    for name, count in classes.items():
        print(f"  {name}: {count}")
    for row in summary.failures[:LISTED_FAILURES]:
        print(f"    {failure_line(row)}")
    if len(summary.failures) > LISTED_FAILURES:
        print(f"    and {len(summary.failures) - LISTED_FAILURES} more")
    if summary.stopped:
        why = "the budget is spent" if summary.stopped == "budget" else "interrupted"
        left = f"{summary.left} configs are left" if summary.left else "the final round is left"
        print(f"{why}; {left}: the same command goes on from here")
    if summary.usable == 0:
        print(f"nothing usable was {'compiled' if request.compile_only else 'measured'}")
    if server is not None:
        ended = server.poll()
        where = f"http://{request.host}:{request.port}"
        print(
            f"serving {where} as process {server.pid}"
            if ended is None
            else f"dash-serve ended with status {ended}"
        )


def parse_duration(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``15m`` or ``1h``. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", text.strip())
    if match is None or float(match.group(1)) <= 0:
        raise UsageError(f"budget {text!r} is not a time; write 90s, 15m or 1h")
    return float(match.group(1)) * {"s": 1, "m": 60, "h": 3600, None: 1}[match.group(2)]
