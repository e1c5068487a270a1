"""choose(): which config runs a problem on a GPU, and which rung of the ladder said so.

exact -> nearest measured shape -> same family of GPUs (opt-in) -> default rule. A process reads one lookup table, the
shipped one of its GPU unless use_table() or DASH_TABLE names another, and keeps it: it is frozen once used, and no
step of training measures anything or calls a server.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from dash_kernels.default_rule import DEFAULT_RULE, default_config
from dash_kernels.device import (
    GPUS,
    Gpu,
    GpuSpec,
    NoGpuError,
    current_gpu,
    resolve_gpu,
    version_of,
)
from dash_kernels.fetch import cached_tables, fetch_table, is_url
from dash_kernels.lookup import (
    TABLES,
    Cell,
    Difference,
    LookupTable,
    Rung,
    TableError,
    TableMissing,
    shipped_gpus,
)
from dash_kernels.problem import Config, Problem, supports

logger = logging.getLogger("dash_kernels")

DEFAULT_GPU = "h200"  # answers choose() on a machine that has no GPU
REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Choice:
    """The resolved answer. ``matched`` is "exact", "nearest", "family" or "default"; ``release`` names the table.

    ``ladder`` has every rung from the top to the one that answered, each with why it did or did not, field by field.
    """

    config: Config
    matched: str
    release: str
    numerics_key: str
    reason: str
    ladder: tuple[Rung, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """The lookup table in force for one GPU: ``table`` is None when only the default rule answers, and ``why`` says so."""

    table: LookupTable | None
    family: bool = False
    why: str = ""
    differs: tuple[Difference, ...] = ()

    @property
    def release(self) -> str:
        return self.table.release if self.table else DEFAULT_RULE

    @property
    def digest(self) -> str:
        return self.table.digest if self.table else ""


@dataclass
class _State:
    """What this process was told to use. Guarded by its lock; ``sources`` filled means frozen.

    ``choices`` holds answers by (problem, device, deterministic, match_batch); it is filled only once frozen.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    named: str = ""
    table: LookupTable | None = None
    refused: str = ""
    allow_family: bool = False
    allow_compiler: bool = False
    sources: dict[str, Source] = field(default_factory=dict)
    software: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    choices: dict[Any, Choice] = field(default_factory=dict)


_state = _State()


def use_table(
    source: str | os.PathLike[str], *, allow_family: bool = False, allow_compiler: bool = False
) -> None:
    """Use this lookup table for the rest of the process: a file, or the http(s) address of a release's table.json.

    A fetched table is kept on disk, so that the next start needs no network. A table that is broken (edited, cut off,
    not a lookup table) is refused by name with one warning, and the shipped table answers; so does it for a GPU that
    the table is not of. ``allow_family`` lets the table of another GPU of the same family (h800, h100, h200) answer,
    ``allow_compiler`` one that was tuned with another major version of Triton.

    Raises TableMissing for a file or an address that cannot be read, RuntimeError once another table has answered: a
    process never changes tables between two steps.
    """
    name = os.fspath(source)
    table, refused = _load(name)
    with _state.lock:
        if _state.sources:
            used = next(iter(_state.sources.values()))
            same = table.digest == used.digest if table else _state.table is None
            if same:
                return
            raise RuntimeError(
                f"table {used.release} has already answered in this process: call use_table() before the first "
                "attention or choose(), or start a new process"
            )
        _state.named, _state.table, _state.refused = name, table, refused
        _state.allow_family, _state.allow_compiler = allow_family, allow_compiler


def choose(
    problem: Problem,
    device: Any = None,
    *,
    deterministic: bool = True,
    match_batch: bool = False,
) -> Choice:
    """Config for ``problem`` on ``device``: a CUDA index, a torch.device, a GPU name, or None for the current GPU.

    Without a GPU the answer is that of an h200, and ``reason`` says so. Only monotone configs are served. With
    ``deterministic=False`` the answer is the same config with policy "unordered", and says it. Batch and heads are
    looked at only with ``match_batch``. Raises NoGpuError (remedy named) where PyTorch lacks CUDA on a GPU machine,
    ValueError where no config runs the problem. Safe in any thread; an answer given once is a dictionary's lookup.
    """
    state = _state
    key = (problem, _device_key(device), deterministic, match_batch)
    held = state.choices.get(key)
    if held is not None:
        return held
    gpu, note = _resolve(device)
    choice = _choose(problem if match_batch else _shape_only(problem), gpu, match_batch)
    if not deterministic:
        choice = replace(
            choice,
            config=choice.config.with_(policy="unordered"),
            numerics_key="",
            reason=f"{choice.reason}; unordered: bits may differ from run to run, as deterministic=False asks",
        )
    if note:
        choice = replace(choice, reason=f"{choice.reason}; {note}")
    if len(state.choices) >= REMEMBERED:
        state.choices = {}  # another thread may go on reading the old one
    state.choices[problem, _device_key(device), deterministic, match_batch] = choice
    return choice


def frozen_source(device: Any = None) -> Source:
    """The lookup table in force for ``device``, frozen from now on. Logs its digest the first time."""
    gpu, _ = _resolve(device)
    return _source(gpu.name, gpu.family)


def is_frozen() -> bool:
    """Whether a table has answered in this process, so that no other may."""
    return bool(_state.sources)


def source_in_force(device: Any = None) -> Source:
    """What :func:`frozen_source` would freeze, without freezing it."""
    gpu, _ = _resolve(device)
    with _state.lock:
        return _state.sources.get(gpu.name) or _find_source(gpu.name, gpu.family)


def other_sources(device: Any = None) -> Iterator[Source]:
    """The other tables at hand that may answer for ``device``: the shipped one and those fetched on this machine."""
    gpu, _ = _resolve(device)
    if gpu.name in shipped_gpus():
        yield Source(LookupTable.load(TABLES / f"{gpu.name}.json"))
    yield Source(None, why="the default rule alone")
    for table in cached_tables():
        source = _fitting(table, gpu.name, gpu.family)
        if source.table is not None:
            yield source


def freeze(device: Any, source: Source) -> None:
    """Make ``source`` answer for ``device`` from now on. Raises RuntimeError where another has answered already."""
    gpu, _ = _resolve(device)
    if _keep(gpu.name, source).digest != source.digest:
        raise RuntimeError(f"table {_state.sources[gpu.name].release} has already answered")


def _keep(gpu: str, source: Source) -> Source:
    """The source of ``gpu`` from now on: ``source`` unless there is one, logged once."""
    with _state.lock:
        if gpu in _state.sources:
            return _state.sources[gpu]
        _state.sources[gpu] = source
    if source.table is not None:
        table = source.table
        tuned, here = table.environment.get("triton"), version_of("triton")
        other = f"; tuned with Triton {tuned}, run with {here}: speeds may differ"
        logger.info(
            "%s uses lookup table %s of %s, digest %s%s",
            gpu,
            table.release,
            table.gpu,
            source.digest,
            other if tuned and here and tuned != here else "",
        )
    else:
        logger.info("%s uses the default rule: %s", gpu, source.why)
    return source


def _load(name: str) -> tuple[LookupTable | None, str]:
    """The table of this name, or None and what is wrong with it, said in one warning."""
    try:
        return (fetch_table(name) if is_url(name) else LookupTable.load(name)), ""
    except TableMissing:
        raise
    except TableError as error:
        logger.warning(
            "lookup table refused: %s. The table shipped for this GPU is used instead", error
        )
        return None, f"table refused: {error}"


def _choose(problem: Problem, gpu: Gpu, match_batch: bool) -> Choice:
    from dash_kernels.numerics import config_key

    source = _source(gpu.name, gpu.family)
    software = _software(gpu)
    config, rungs = _climb(problem, gpu, source, match_batch, software)
    answered = rungs[-1]
    key = config_key(config, dtype=problem.dtype, head_dim=problem.head_dim, environment=software)
    release = source.release if answered.name != "default" else DEFAULT_RULE
    return Choice(config, answered.name, release, key, answered.why, rungs)


def _climb(
    problem: Problem, gpu: Gpu, source: Source, match_batch: bool, software: dict[str, Any]
) -> tuple[Config, tuple[Rung, ...]]:
    """The config, and the rungs down to the one that answered."""
    table, why, differs = source.table, source.why, source.differs
    if table is not None and (differs := _other_compiler(table, software)):
        why = (
            f"table {table.release} was tuned with another major version of Triton ({differs[0]}); "
            "use_table(..., allow_compiler=True) or DASH_ALLOW_COMPILER=1 lets it answer"
        )
        table = None
    if table is not None:
        found = table.find(problem, match_batch)
        if found is None:
            differs = table.why_missed(problem)
            why = f"table {table.release} has no cell for {_kind(problem)} ({'; '.join(map(str, differs))})"
        else:
            cell, matched = found
            assert cell.served is not None
            support = supports(cell.served.config, problem, gpu.capability)
            if support:
                off = _off(cell, problem, match_batch)
                rungs = _answered(table, cell, matched, off, source.family, gpu)
                return cell.served.config, rungs
            why = f"table {table.release} serves a config that cannot run here: {support.reason}"
    config, rule = _rule(problem, gpu, table)
    missed = [Rung(name, False, why, differs) for name in ("exact", "nearest", "family")]
    return config, (*missed, Rung("default", True, f"{rule}: {why}"))


def _rule(problem: Problem, gpu: Gpu, table: LookupTable | None) -> tuple[Config, str]:
    """What stands in where no cell answers: for a window the config measured without it, if it runs; else the rule."""
    if problem.windowed and table is not None:
        whole = replace(problem, window_left=-1, window_right=-1)
        found = table.find(whole)
        served = found[0].served if found else None
        if found and served and supports(served.config, problem, gpu.capability):
            at = found[0].problem.seq_len
            return (
                served.config,
                f"default: the config measured for {problem.mask} without the window at seq_len {at}",
            )
    return default_config(problem, gpu.capability), "default rule"


def _answered(
    table: LookupTable,
    cell: Cell,
    matched: str,
    off: tuple[Difference, ...],
    family: bool,
    gpu: Gpu,
) -> tuple[Rung, ...]:
    where = f"measured on {table.gpu} at seq_len {cell.problem.seq_len}"
    if cell.problem.seq_len_kv != cell.problem.seq_len:
        where += f", seq_len_kv {cell.problem.seq_len_kv}"
    if family:
        other = (Difference("gpu", gpu.name, (table.gpu,)), *off)
        why = "; ".join(map(str, other))
        missed = [Rung(name, False, why, other) for name in ("exact", "nearest")]
        return (*missed, Rung("family", True, where, other))
    if matched == "exact":
        return (Rung("exact", True, where),)
    return (
        Rung("exact", False, "; ".join(map(str, off)), off),
        Rung("nearest", True, where, off),
    )


def _off(cell: Cell, problem: Problem, match_batch: bool) -> tuple[Difference, ...]:
    """The lengths, and with ``match_batch`` the sizes, in which the nearest cell differs."""
    names = ("seq_len", "seq_len_kv", *(("batch", "heads") if match_batch else ()))
    pairs = [(name, getattr(problem, name), getattr(cell.problem, name)) for name in names]
    return tuple(Difference(name, asked, (has,)) for name, asked, has in pairs if asked != has)


def _other_compiler(table: LookupTable, software: dict[str, Any]) -> tuple[Difference, ...]:
    """The major versions of Triton, where table and process are known to have different ones and that was not allowed."""
    if _state.allow_compiler or os.environ.get("DASH_ALLOW_COMPILER") == "1":
        return ()
    return compiler_difference(software.get("triton"), table.environment)


def compiler_difference(triton: str | None, environment: dict[str, Any]) -> tuple[Difference, ...]:
    """Where ``environment`` was tuned with another major version of Triton than ``triton``; unknown ones agree."""
    tuned = environment.get("triton")
    if not triton or not tuned or str(tuned).split(".")[0] == triton.split(".")[0]:
        return ()
    return (Difference("triton", triton, (str(tuned),)),)


def _kind(problem: Problem) -> str:
    text = f"{problem.mask} head_dim {problem.head_dim} {problem.dtype} head group {problem.head_group}"
    return text + "".join(f" {name} {value}" for name, value in problem.options().items())


def _software(gpu: Gpu) -> dict[str, Any]:
    """The environment that keys of this GPU are made of, found once."""
    from dash_kernels.device import environment

    held = _state.software.get((gpu.name, gpu.index))
    if held is None:
        held = environment(gpu.index if gpu.index >= 0 else None)
        held["capability"] = "{}.{}".format(*gpu.capability)
        _state.software[gpu.name, gpu.index] = held
    return held


def _shape_only(problem: Problem) -> Problem:
    return replace(problem, batch=1, heads=problem.head_group, heads_kv=1)


def _device_key(device: Any) -> Any:
    """What an answer for ``device`` is remembered under: the index of a CUDA device, also for the current one."""
    if device is None or device == "cuda":
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return device
        return torch.cuda.current_device()
    if isinstance(device, (int, str)):
        return device
    index = getattr(device, "index", None)
    return str(device) if index is None else index


def _resolve(device: Any) -> tuple[Gpu, str]:
    """The GPU that is meant, and what the caller should know about that reading."""
    if isinstance(device, str) and not device.startswith("cuda"):
        return _nominal(resolve_gpu(device)), ""
    index = _cuda_index(device)
    try:
        return current_gpu(index), ""
    except NoGpuError as error:
        if device is not None or "this machine has an NVIDIA GPU" in str(error):
            raise
        with _state.lock:
            named = _state.table.gpu if _state.table is not None else ""
        name = named if named in GPUS else DEFAULT_GPU
        return _nominal(GPUS[name]), f"answered for {name}: {error}"


def _cuda_index(device: Any) -> int | None:
    if device is None or isinstance(device, int):
        return device
    text = str(device)
    kind, _, number = text.partition(":")
    if kind != "cuda" or (number and not number.isdigit()):
        raise ValueError(f"device is {text!r}; give a CUDA device, its index or a GPU name")
    return int(number) if number else None


def _nominal(spec: GpuSpec) -> Gpu:
    return Gpu(spec.name, spec.aliases[0], spec.sms, spec.capability, spec.l2_bytes, -1, spec)


def _source(gpu: str, family: str) -> Source:
    with _state.lock:
        held = _state.sources.get(gpu)
        return held or _keep(gpu, _find_source(gpu, family))


def _find_source(gpu: str, family: str) -> Source:
    """The named table where it may answer for this GPU, else the shipped one."""
    named = os.environ.get("DASH_TABLE", "")
    if not _state.named and named:
        _state.table, _state.refused = _load(named)
        _state.named = named
    why = _state.refused
    differs: tuple[Difference, ...] = ()
    if _state.table is not None:
        source = _fitting(_state.table, gpu, family)
        if source.table is not None:
            return source
        why, differs = source.why, source.differs
        if gpu in shipped_gpus():
            logger.warning("%s; the table shipped for %s is used instead", why, gpu)
    if gpu in shipped_gpus():
        return Source(LookupTable.load(TABLES / f"{gpu}.json"))
    if _allow_family():
        kin = [name for name in shipped_gpus() if name in GPUS and GPUS[name].family == family]
        if kin:
            return Source(LookupTable.load(TABLES / f"{kin[0]}.json"), family=True)
    if not why:
        differs = (Difference("gpu", gpu, shipped_gpus()),)
    return Source(None, why=why or f"no table is shipped for {gpu}", differs=differs)


def _fitting(table: LookupTable, gpu: str, family: str) -> Source:
    """``table`` as the source of ``gpu``; without a table, and saying why, where it may not answer for it."""
    if table.gpu == gpu:
        return Source(table)
    differs = (Difference("gpu", gpu, (table.gpu,)),)
    kin_of = GPUS[table.gpu].family if table.gpu in GPUS else table.gpu
    if kin_of != family:
        why = f"table {table.release} is of {table.gpu}, no kin of {gpu}"
        return Source(None, why=why, differs=differs)
    if not _allow_family():
        why = (
            f"table {table.release} is of {table.gpu}; DASH_ALLOW_FAMILY=1 or use_table(..., allow_family=True) "
            f"lets it answer for {gpu}"
        )
        return Source(None, why=why, differs=differs)
    return Source(table, family=True)


def _allow_family() -> bool:
    return _state.allow_family or os.environ.get("DASH_ALLOW_FAMILY") == "1"
