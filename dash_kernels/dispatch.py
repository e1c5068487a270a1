"""choose(): which config runs a problem on a GPU, and which rung of the ladder said so.

exact -> nearest measured shape -> same family of GPUs (opt-in) -> default rule. A process reads one lookup table, the
shipped one of its GPU unless use_table() or DASH_TABLE names another, and keeps it: it is frozen once used, and no
step of training measures anything or calls a server.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dash_kernels.device import GPUS, Gpu, GpuSpec, NoGpuError, current_gpu, resolve_gpu
from dash_kernels.lookup import TABLES, LookupTable, TableError, shipped_gpus
from dash_kernels.problem import Config, Problem, padded_head_dim, supports

logger = logging.getLogger("dash_kernels")

DEFAULT_GPU = "h200"  # answers choose() on a machine that has no GPU
DEFAULT_RULE = "default-1"  # name of default_config(); a change of the rule is a new name, and a new numerics key
FETCH_SECONDS = 30
MAX_TABLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Choice:
    """The resolved answer. ``matched`` is "exact", "nearest", "family" or "default"; ``release`` names the table."""

    config: Config
    matched: str
    release: str
    numerics_key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Source:
    """The lookup table in force for one GPU: ``table`` is None when only the default rule answers."""

    table: LookupTable | None
    family: bool = False
    why: str = ""

    @property
    def release(self) -> str:
        return self.table.release if self.table else DEFAULT_RULE

    @property
    def digest(self) -> str:
        return self.table.digest if self.table else ""


@dataclass
class _State:
    """What this process was told to use. Guarded by its lock; ``sources`` filled means frozen."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    named: str = ""
    table: LookupTable | None = None
    allow_family: bool = False
    sources: dict[str, Source] = field(default_factory=dict)


_state = _State()


def use_table(source: str | os.PathLike[str], *, allow_family: bool = False) -> None:
    """Use this lookup table for the rest of the process: a file, or the http(s) address of a release's table.json.

    A release is fetched once and cached on disk. ``allow_family`` lets the table of another GPU of the same family
    (h800, h100, h200) answer. Raises TableError for a table that cannot be read, RuntimeError once another table has
    answered: a process never changes tables between two steps.
    """
    name = os.fspath(source)
    table = fetch_table(name) if _is_url(name) else LookupTable.load(name)
    with _state.lock:
        if _state.sources:
            used = next(iter(_state.sources.values()))
            if table.digest == used.digest:
                return
            raise RuntimeError(
                f"table {used.release} has already answered in this process: call use_table() before the first "
                "attention or choose(), or start a new process"
            )
        _state.named, _state.table, _state.allow_family = name, table, allow_family


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
    looked at only with ``match_batch``. Raises NoGpuError (remedy named) where PyTorch lacks CUDA on a GPU machine.
    """
    gpu, note = _resolve(device)
    choice = _choose(problem if match_batch else _shape_only(problem), gpu, match_batch)
    if not deterministic:
        config = choice.config.with_(policy="unordered")
        choice = replace(
            choice,
            config=config,
            numerics_key="",
            reason=f"{choice.reason}; unordered: bits may differ from run to run, as deterministic=False asks",
        )
    return replace(choice, reason=f"{choice.reason}; {note}") if note else choice


def frozen_source(device: Any = None) -> Source:
    """The lookup table in force for ``device``, frozen from now on. Logs its digest the first time."""
    gpu, _ = _resolve(device)
    return _source(gpu.name, gpu.family)


def default_config(problem: Problem, capability: tuple[int, int]) -> Config:
    """The rule where nothing has been measured.

    Causal shortest_first, full mask ascending with four heads interleaved. Hopper: its largest tile, the signal
    deferred at head_dim 128 and plain at 64. Elsewhere the portable kernel: a 128-row tile up to 2048 keys at head_dim
    64 and a 64-row one beyond it, half of that at head_dim 128; three stages where they fit, because with two no copy
    of a Q tile runs beside a step.
    """
    dim = padded_head_dim(problem.head_dim)
    order: dict[str, Any] = (
        {"schedule": "shortest_first", "launch_order": "descending"}
        if problem.causal
        else {"schedule": "ascending", "launch_order": "ascending", "heads_interleaved": 4}
    )
    if capability[0] == 9:
        block_m = 128 if dim == 64 else 64
        signal = "deferred" if dim == 128 else "plain"
        return Config(backend="hopper", block_m=block_m, block_n=128, signal=signal, **order)
    short = problem.seq_len_kv <= 2048
    block_n = 128 if dim == 64 and short else 64
    block_m = 64 if dim == 64 or short else 32
    portable = Config(
        backend="portable", block_m=block_m, block_n=block_n, num_stages=3, signal="plain", **order
    )
    return portable if supports(portable, problem, capability) else replace(portable, num_stages=2)


@functools.lru_cache(maxsize=4096)
def _choose(problem: Problem, gpu: Gpu, match_batch: bool) -> Choice:
    source = _source(gpu.name, gpu.family)
    reason = source.why
    if source.table is not None:
        found = source.table.find(problem, match_batch)
        if found is None:
            reason = (
                f"table {source.release} has no cell for {problem.mask} head_dim {problem.head_dim} "
                f"{problem.dtype} head group {problem.head_group}"
            )
        else:
            cell, matched = found
            assert cell.served is not None
            support = supports(cell.served.config, problem, gpu.capability)
            if support:
                where = f"measured on {source.table.gpu} at seq_len {cell.problem.seq_len}"
                if cell.problem.seq_len_kv != cell.problem.seq_len:
                    where += f", seq_len_kv {cell.problem.seq_len_kv}"
                return _answer(
                    cell.served.config,
                    "family" if source.family else matched,
                    source,
                    problem,
                    gpu,
                    where,
                )
            reason = (
                f"table {source.release} serves a config that cannot run here: {support.reason}"
            )
    config = default_config(problem, gpu.capability)
    support = supports(config, problem, gpu.capability)
    if not support:
        raise ValueError(f"no config runs this problem on {gpu.name}: {support.reason}")
    return _answer(config, "default", source, problem, gpu, f"default rule: {reason}")


def _answer(
    config: Config, matched: str, source: Source, problem: Problem, gpu: Gpu, reason: str
) -> Choice:
    from dash_kernels.device import environment
    from dash_kernels.numerics import config_key

    software = environment(gpu.index if gpu.index >= 0 else None)
    software["capability"] = "{}.{}".format(*gpu.capability)
    key = config_key(config, dtype=problem.dtype, head_dim=problem.head_dim, environment=software)
    release = source.release if matched != "default" else DEFAULT_RULE
    return Choice(config, matched, release, key, reason)


def _shape_only(problem: Problem) -> Problem:
    return replace(problem, batch=1, heads=problem.head_group, heads_kv=1)


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
        if gpu not in _state.sources:
            source = _find_source(gpu, family)
            _state.sources[gpu] = source
            if source.table is not None:
                logger.info(
                    "%s uses lookup table %s of %s, digest %s",
                    gpu,
                    source.release,
                    source.table.gpu,
                    source.digest,
                )
            else:
                logger.info("%s uses the default rule: %s", gpu, source.why)
        return _state.sources[gpu]


def _find_source(gpu: str, family: str) -> Source:
    table, allow_family = (
        _state.table,
        _state.allow_family or os.environ.get("DASH_ALLOW_FAMILY") == "1",
    )
    named = _state.named or os.environ.get("DASH_TABLE", "")
    if table is None and named:
        table = fetch_table(named) if _is_url(named) else LookupTable.load(named)
    if table is None and gpu in shipped_gpus():
        table = LookupTable.load(TABLES / f"{gpu}.json")
    if table is None and allow_family:
        kin = [name for name in shipped_gpus() if name in GPUS and GPUS[name].family == family]
        table = LookupTable.load(TABLES / f"{kin[0]}.json") if kin else None
    if table is None:
        return Source(None, why=f"no table is shipped for {gpu}")
    if table.gpu == gpu:
        return Source(table)
    kin_of = GPUS[table.gpu].family if table.gpu in GPUS else table.gpu
    if kin_of != family:
        return Source(None, why=f"table {table.release} is of {table.gpu}, no kin of {gpu}")
    if not allow_family:
        return Source(
            None,
            why=f"table {table.release} is of {table.gpu}; DASH_ALLOW_FAMILY=1 or use_table(..., allow_family=True) "
            f"lets it answer for {gpu}",
        )
    return Source(table, family=True)


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def fetch_table(url: str) -> LookupTable:
    """Table at an http(s) address. One whose path names a release is immutable, so its cached copy answers first."""
    folder = cache_folder() if "/releases/" in urllib.parse.urlsplit(url).path else None
    cached = folder and folder / f"table-{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
    if cached and cached.is_file():
        try:
            return LookupTable.load(cached)
        except TableError as error:
            logger.warning("cached lookup table is damaged and is fetched again: %s", error)
    try:
        with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as answer:
            text = answer.read(MAX_TABLE_BYTES + 1)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise TableError(f"{url}: {getattr(error, 'reason', error)}") from error
    if len(text) > MAX_TABLE_BYTES:
        raise TableError(f"{url}: larger than {MAX_TABLE_BYTES >> 20} MiB; not a lookup table")
    table = LookupTable.from_json(text, url)
    if cached:
        _write_cache(cached, text)
    return table


def cache_folder() -> Path | None:
    """Folder of fetched tables: DASH_CACHE, else the user's cache folder; None for a user who has no home."""
    chosen = os.environ.get("DASH_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dash"
    except RuntimeError:
        return None


def _write_cache(path: Path, text: bytes) -> None:
    """Keep ``text`` at ``path`` whole or not at all; a folder that cannot be written only costs the next fetch."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        os.replace(name, path)
    except OSError as error:
        logger.warning(
            "cannot cache the lookup table under %s (%s); it is fetched anew by each process",
            path.parent,
            error,
        )
