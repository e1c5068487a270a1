"""The values that the results database speaks in: RunInfo, ResultRow, ResultFilter, Release.

Standard library only. A row is flat (one attribute a column), so that the API, CSV and the dashboard read it as it is.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from typing import Any

from dash_kernels import device
from dash_kernels.device import GPUS
from dash_kernels.problem import OPTION_FIELDS, SHAPE_FIELDS, Config, Problem
from tuner.failures import CLASSES

STATUSES = ("ok", *CLASSES)
SOURCES = ("measured", "compiled", "modelled")
DIRECTIONS = ("backward", "forward")
ERROR_CHARACTERS = 16_000
LEASE_S = 60.0  # a claim whose holder has been silent for this long returns to the others


class StoreError(Exception):
    """The database, or a value for it, is not usable: one line that names it and the remedy."""


class NotOurDatabase(StoreError):
    """A database that is none of dash's: no SQLite file, empty, or of another program. ``lacks`` says which."""

    def __init__(self, where: str, lacks: str, remedy: str) -> None:
        super().__init__(f"{where} {lacks}; {remedy}")
        self.lacks = lacks


class StoreUnavailable(StoreError):
    """The database does not answer now; the same call may succeed later."""


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


def finite(value: Any) -> Any:
    """``value`` with every NaN and infinity, at any depth, replaced by None, and text that any database takes."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.replace("\0", "").encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def canonical(value: Any) -> str:
    """Strict JSON that is equal for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def short_hash(value: Any) -> str:
    """Sixteen hex digits of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical(finite(value)).encode()).hexdigest()[:16]


def environment_key(environment: dict[str, Any]) -> str:
    """Names an environment, as the dispatcher does, or a measurement policy."""
    return device.environment_key(finite(environment))


def config_hash(
    problem: Problem, config: Config, source: str = "measured", direction: str = "backward"
) -> str:
    """Names one thing to try. A run holds at most one row of each."""
    return short_hash([problem.to_dict(), config.to_dict(), source, direction])


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One command that wrote rows. Runs of a GPU with equal ``sweep`` were measured alike and may be compared.

    ``uuid`` and ``started`` are filled by the store when empty.
    """

    gpu: str
    environment: dict[str, Any]
    measurement_policy: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    source: str = "measured"
    uuid: str = ""
    started: datetime | None = None
    finished: datetime | None = None
    id: int | None = None

    def __post_init__(self) -> None:
        _one_of("source", self.source, SOURCES)
        _aware(self, "started", "finished")

    @property
    def environment_key(self) -> str:
        return environment_key(self.environment)

    @property
    def policy_key(self) -> str:
        return environment_key(self.measurement_policy)

    @property
    def sweep(self) -> str:
        """Names the sweep among those of its GPU, as ``Store.candidates`` does."""
        return f"{self.environment_key}:{self.policy_key}"


@dataclass(frozen=True, slots=True)
class ResultRow:
    """What became of one config: times in ms, sizes in bytes, ``predicted`` in ms of the model. None is unknown.

    Problem and config are columns of their own; ``head_dim_v`` 0 is ``head_dim``.

    Build one with :meth:`of`. ``config_hash`` is computed when empty; ``id``, ``run_id``, ``run_uuid`` and
    ``created_at`` come from the store.
    """

    gpu: str
    mask: str
    head_dim: int
    dtype: str
    seq_len: int
    seq_len_kv: int
    batch: int
    heads: int
    heads_kv: int
    head_group: int
    backend: str
    schedule: str
    group_size: int
    policy: str
    block_m: int
    block_n: int
    config: dict[str, Any]
    status: str
    source: str = "measured"
    direction: str = "backward"
    window_left: int = -1
    window_right: int = -1
    head_dim_v: int = 0
    softcap: bool = False
    varlen: bool = False
    config_hash: str = ""
    error: str | None = None
    tflops: float | None = None
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    samples: list[float] | None = None
    speedup_vs_baseline: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    required_bytes: int | None = None
    limit_bytes: int | None = None
    max_abs_error: float | None = None
    rel_error: float | None = None
    budget: float | None = None
    bits_equal: bool | None = None
    runs_compared: int | None = None
    min_resident: int | None = None
    numerics_key: str | None = None
    telemetry: dict[str, Any] | None = None
    predicted: float | None = None
    above_peak: bool = False
    created_at: datetime | None = None
    run_uuid: str | None = None
    run_id: int | None = None
    id: int | None = None

    def __post_init__(self) -> None:
        _one_of("status", self.status, STATUSES)
        _one_of("source", self.source, SOURCES)
        _one_of("direction", self.direction, DIRECTIONS)
        _aware(self, "created_at")
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)
        for name in _CLEANED:
            object.__setattr__(self, name, finite(getattr(self, name)))
        if self.error is not None:
            object.__setattr__(self, "error", self.error[:ERROR_CHARACTERS])
        if not self.config_hash:
            value = config_hash(self.to_problem(), self.to_config(), self.source, self.direction)
            object.__setattr__(self, "config_hash", value)

    @classmethod
    def of(
        cls, problem: Problem, config: Config, *, gpu: str, status: str = "ok", **values: Any
    ) -> ResultRow:
        """The row of ``config`` on ``problem``; ``values`` are any of the other columns.

        One faster than the data sheet's peak of a known GPU is marked ``above_peak``, whoever measured it.
        """
        tflops = values.get("tflops")
        if gpu in GPUS and tflops is not None and tflops > GPUS[gpu].peak_tflops:
            values["above_peak"] = True
        return cls(
            gpu=gpu,
            status=status,
            head_group=problem.head_group,
            **problem.to_dict(),
            **config_columns(config),
            config=config.to_dict(),
            **values,
        )

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> ResultRow:
        """The row of these columns, all of them, which were checked and cleaned when they went in."""
        row = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(row, name, value)
        return row

    def to_problem(self) -> Problem:
        return Problem(**{name: getattr(self, name) for name in (*SHAPE_FIELDS, *OPTION_FIELDS)})

    def to_config(self) -> Config:
        return Config.from_dict(self.config)

    def to_dict(self) -> dict[str, Any]:
        """Every column, times as datetime."""
        return asdict(self)


_CLEANED = [
    "config",
    "error",
    "tflops",
    "ms",
    "ms_low",
    "ms_high",
    "samples",
    "speedup_vs_baseline",
    "max_abs_error",
    "rel_error",
    "budget",
    "telemetry",
    "predicted",
]
CONFIG_COLUMNS = ("backend", "schedule", "policy", "block_m", "block_n")
DERIVED_COLUMNS = ("head_group", "group_size", *CONFIG_COLUMNS)
"""What :meth:`ResultRow.of` works out from the problem and the config."""


def option_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a cell as a lookup table writes it, where those at their defaults go unsaid."""
    plain = {
        "window_left": -1,
        "window_right": -1,
        "head_dim_v": values["head_dim"],
        "softcap": False,
        "varlen": False,
    }
    return {name: values.get(name, plain[name]) for name in OPTION_FIELDS}


def config_columns(config: Config) -> dict[str, Any]:
    """The fields of a config that are columns of their own."""
    return {name: getattr(config, name) for name in CONFIG_COLUMNS} | {"group_size": config.group}


@dataclass(frozen=True, slots=True)
class ResultFilter:
    """Which rows: every field that is not None must match. ``since`` and ``until`` are inclusive and need a zone."""

    gpu: str | None = None
    mask: str | None = None
    head_dim: int | None = None
    dtype: str | None = None
    seq_len: int | None = None
    seq_len_kv: int | None = None
    batch: int | None = None
    heads: int | None = None
    heads_kv: int | None = None
    head_group: int | None = None
    window_left: int | None = None
    window_right: int | None = None
    head_dim_v: int | None = None
    softcap: bool | None = None
    varlen: bool | None = None
    direction: str | None = None
    backend: str | None = None
    schedule: str | None = None
    policy: str | None = None
    status: str | None = None
    source: str | None = None
    run_id: int | None = None
    config_hash: str | None = None
    numerics_key: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        _aware(self, "since", "until")

    def equalities(self) -> dict[str, Any]:
        """The set fields that are columns to compare with."""
        names = (f.name for f in fields(self) if f.name not in ("since", "until"))
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, slots=True)
class Release:
    """A numbered, immutable lookup table. ``table`` is the JSON text, byte for byte what is served.

    ``overall`` holds the winners over all seq lens at the time of the release (see ``tuner.winners.overall``).
    """

    gpu: str
    name: str
    digest: str
    table: str
    notes: str = ""
    overall: list[dict[str, Any]] = field(default_factory=list)
    last_result_id: int = 0
    created_at: datetime | None = None
    id: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The parsed lookup table."""
        table: dict[str, Any] = json.loads(self.table)
        return table


def _one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    if value not in tuple(allowed):
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")


def _aware(instance: Any, *names: str) -> None:
    for name in names:
        value = getattr(instance, name)
        if value is None:
            continue
        if value.tzinfo is None:
            raise ValueError(
                f"{name} {value.isoformat()} has no time zone; write it with Z or an offset"
            )
        object.__setattr__(instance, name, value.astimezone(timezone.utc))
