"""The lookup table: what a tuned GPU answers for each cell, its JSON form, and how a cell is found for a problem.

A cell is one (mask, head_dim, dtype, head group, options, seq_len, seq_len_kv) with the shape that was measured; its
``served`` entry is the best monotone deterministic config (safe beside any other kernel), ``best`` the best
deterministic one of all. The digest is the SHA-256 of the canonical JSON without the digest itself. Format 2 is format 1
with cells that have options (a window, softcap, ...), so that a reader that knows none does not take them for plain ones.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dash_kernels.problem import OPTION_FIELDS, Config, Problem

FORMAT = 1
FORMAT_WITH_OPTIONS = 2
KIND_FIELDS = ("mask", "head_dim", "dtype", "head_group", *OPTION_FIELDS)
"""What a cell and a problem must agree in: an answer never crosses these."""
TABLES = Path(__file__).parent / "tables"


class TableError(ValueError):
    """A lookup table that cannot be read or used; the message names the source, the place and the remedy."""


class TableMissing(TableError):
    """There is no lookup table there, or it cannot be reached: unlike a broken one, nothing stands in for it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which what was asked for differs from what there is."""

    field: str
    asked: Any
    has: tuple[Any, ...]

    def __str__(self) -> str:
        return (
            f"{self.field}: asked {self.asked}, there is {', '.join(map(str, self.has)) or 'none'}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {"field": self.field, "asked": self.asked, "has": list(self.has)}


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder: "exact", "nearest", "family" or "default", whether it answered, and why it did or did not."""

    name: str
    answered: bool
    why: str
    differs: tuple[Difference, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "rung": self.name,
            "answered": self.answered,
            "why": self.why,
            "differs": [difference.to_dict() for difference in self.differs],
        }


def differences(
    asked: Mapping[str, Any], held: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> tuple[Difference, ...]:
    """The fewest of ``names`` in which everything ``held`` differs from ``asked``, each with the values that there are.

    Empty where something held agrees in all of them, or where nothing is held.
    """
    apart = [tuple(name for name in names if has[name] != asked[name]) for has in held]
    if not apart:
        return ()
    fewest = min(apart, key=lambda fields: (len(fields), [names.index(name) for name in fields]))
    nearest = [has for has, fields in zip(held, apart, strict=True) if fields == fewest]
    return tuple(
        Difference(name, asked[name], tuple(sorted({has[name] for has in nearest})))
        for name in fewest
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """One measured config. ``ms`` is the median of the whole backward; ``tflops`` follows Problem.flops("square")."""

    config: Config
    tflops: float | None = None
    ms: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    min_resident: int | None = None
    numerics_key: str | None = None
    confidence: dict[str, float] | None = None
    speedup_vs_baseline: float | None = None

    @property
    def servable(self) -> bool:
        """Whether a training job may get it unasked: ordered or two-pass, and safe with any number of free SMs."""
        return self.config.deterministic and self.min_resident == 1

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {"config": self.config.to_dict()}


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured for one shape, and the entries that answer for it."""

    problem: Problem
    direction: str
    served: Entry | None
    best: Entry | None
    baselines: dict[str, Entry] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        p = self.problem
        return {
            "mask": p.mask,
            "head_dim": p.head_dim,
            "dtype": p.dtype,
            "head_group": p.head_group,
            **p.options(),
            "seq_len": p.seq_len,
            "seq_len_kv": p.seq_len_kv,
            "batch": p.batch,
            "heads": p.heads,
            "direction": self.direction,
            "served": self.served.to_dict() if self.served else None,
            "best": self.best.to_dict() if self.best else None,
            "baselines": {name: entry.to_dict() for name, entry in sorted(self.baselines.items())},
        }


@dataclass(frozen=True, slots=True)
class LookupTable:
    """A release: immutable, named, and identified by its digest."""

    gpu: str
    release: str
    created: str
    cells: tuple[Cell, ...]
    environment: dict[str, Any] = field(default_factory=dict)
    measurement_policy: dict[str, Any] = field(default_factory=dict)
    baseline: str = "ascending"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dict with its digest. Raises TableError for a NaN or infinity."""
        options = any(cell.problem.options() for cell in self.cells)
        body = {
            "format": FORMAT_WITH_OPTIONS if options else FORMAT,
            "gpu": self.gpu,
            "release": self.release,
            "created": self.created,
            "environment": self.environment,
            "measurement_policy": self.measurement_policy,
            "baseline": self.baseline,
            "cells": [cell.to_dict() for cell in self.cells],
        }
        return body | {"digest": digest_of(body)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, sort_keys=True, allow_nan=False) + "\n"

    @property
    def digest(self) -> str:
        return str(self.to_dict()["digest"])

    @classmethod
    def from_dict(cls, data: Any, source: str = "lookup table") -> LookupTable:
        """Validated table. Raises TableError naming ``source`` and the first thing wrong with it."""
        if not isinstance(data, dict):
            raise TableError(
                f"{source}: a lookup table is a JSON object, not {type(data).__name__}"
            )
        if data.get("format") not in (FORMAT, FORMAT_WITH_OPTIONS):
            raise TableError(
                f"{source}: format is {data.get('format')!r}; this version reads formats {FORMAT} and "
                f"{FORMAT_WITH_OPTIONS}: export the table again, or use the dash_kernels that wrote it"
            )
        cells = _take(data, "cells", list, source)
        table = cls(
            gpu=_take(data, "gpu", str, source),
            release=_take(data, "release", str, source),
            created=_take(data, "created", str, source),
            cells=tuple(_cell(cell, f"{source}: cells[{i}]") for i, cell in enumerate(cells)),
            environment=_take(data, "environment", dict, source),
            measurement_policy=_take(data, "measurement_policy", dict, source),
            baseline=_take(data, "baseline", str, source),
        )
        stated = _take(data, "digest", str, source)
        actual = digest_of(data)
        if stated != actual:
            raise TableError(
                f"{source}: digest says {stated[:12]} but the content is {actual[:12]}: the file was edited or "
                "damaged; export it again"
            )
        return table

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "lookup table") -> LookupTable:
        try:
            data = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise TableError(f"{source}: not JSON ({error})") from error
        return cls.from_dict(data, source)

    @classmethod
    def load(cls, path: str | Path) -> LookupTable:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise TableMissing(f"{path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise TableError(f"{path}: not UTF-8 text ({error.reason})") from error
        return cls.from_json(text, str(path))

    def find(self, problem: Problem, match_batch: bool = False) -> tuple[Cell, str] | None:
        """The cell that answers for ``problem`` and how: "exact" or "nearest"; None when no cell may.

        All of KIND_FIELDS must agree. Nearest means nearest in log(seq_len) and log(seq_len_kv), ties to the shorter.
        Batch and heads are looked at only with ``match_batch``, so that by default a sample gets the same config, and the
        same bits, alone and in a batch.
        """
        able = [cell for cell in self.cells if _same_kind(cell, problem)]
        if not able:
            return None

        def distance(cell: Cell) -> tuple[float, float, int, int, int, int]:
            p = cell.problem
            lengths = abs(math.log(p.seq_len / problem.seq_len)) + abs(
                math.log(p.seq_len_kv / problem.seq_len_kv)
            )
            work = (
                abs(math.log(p.batch * p.heads / (problem.batch * problem.heads)))
                if match_batch
                else 0.0
            )
            return lengths, work, p.seq_len, p.seq_len_kv, -p.batch, -p.heads

        cell = min(able, key=distance)
        same = (cell.problem.seq_len, cell.problem.seq_len_kv) == (
            problem.seq_len,
            problem.seq_len_kv,
        )
        if match_batch:
            same = same and (cell.problem.batch, cell.problem.heads) == (
                problem.batch,
                problem.heads,
            )
        return cell, "exact" if same else "nearest"

    def why_missed(self, problem: Problem) -> tuple[Difference, ...]:
        """In which fields the cells differ from ``problem``, where :meth:`find` has none for it."""
        able = [cell for cell in self.cells if cell.direction == "backward"]
        same = [cell for cell in able if kind_of(cell.problem) == kind_of(problem)]
        if same:  # measured, but with nothing that a training job may get unasked
            needs = {(cell.best and cell.best.min_resident) or 0 for cell in same}
            return (Difference("min_resident", 1, tuple(sorted(needs))),)
        kinds = [kind_of(cell.problem) for cell in able if _serves(cell)]
        return differences(kind_of(problem), kinds, KIND_FIELDS)


def kind_of(problem: Problem) -> dict[str, Any]:
    """The values of KIND_FIELDS."""
    return {name: getattr(problem, name) for name in KIND_FIELDS}


def digest_of(body: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON of a table's dict, its "digest" left out."""
    stripped = {name: value for name, value in body.items() if name != "digest"}
    try:
        text = json.dumps(stripped, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise TableError("a lookup table holds no NaN or infinity; use null") from error
    return hashlib.sha256(text.encode()).hexdigest()


def shipped_gpus() -> tuple[str, ...]:
    """GPUs that this package ships a table for."""
    return tuple(sorted(path.stem for path in TABLES.glob("*.json")))


def _same_kind(cell: Cell, problem: Problem) -> bool:
    return (
        cell.direction == "backward"
        and _serves(cell)
        and all(getattr(cell.problem, name) == getattr(problem, name) for name in KIND_FIELDS)
    )


def _serves(cell: Cell) -> bool:
    return cell.served is not None and cell.served.servable


_ENTRY_KINDS: dict[str, tuple[type, ...]] = {
    "numerics_key": (str,),
    "confidence": (dict,),
    "min_resident": (int,),
    "registers": (int,),
    "spill_bytes": (int,),
    "shared_bytes": (int,),
}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; a missing number is null")


def _take(data: dict[str, Any], name: str, kind: type, source: str) -> Any:
    if name not in data:
        raise TableError(f"{source}: {name} is missing")
    if not isinstance(data[name], kind):
        raise TableError(f"{source}: {name} is {data[name]!r}; expected {kind.__name__}")
    return data[name]


def _cell(data: Any, source: str) -> Cell:
    if not isinstance(data, dict):
        raise TableError(f"{source} is not an object")
    heads, group = _take(data, "heads", int, source), _take(data, "head_group", int, source)
    if group < 1 or heads % group:
        raise TableError(f"{source}: head_group {group} does not divide heads {heads}")
    try:
        problem = Problem(
            mask=_take(data, "mask", str, source),
            head_dim=_take(data, "head_dim", int, source),
            seq_len=_take(data, "seq_len", int, source),
            dtype=_take(data, "dtype", str, source),
            batch=_take(data, "batch", int, source),
            heads=heads,
            heads_kv=heads // group,
            seq_len_kv=_take(data, "seq_len_kv", int, source),
            **{name: data[name] for name in OPTION_FIELDS if name in data},
        )
    except TableError:
        raise
    except ValueError as error:
        raise TableError(f"{source}: {error}") from error
    return Cell(
        problem=problem,
        direction=_take(data, "direction", str, source),
        served=_entry(data.get("served"), f"{source}.served"),
        best=_entry(data.get("best"), f"{source}.best"),
        baselines={
            name: entry
            for name, raw in _take(data, "baselines", dict, source).items()
            if (entry := _entry(raw, f"{source}.baselines.{name}")) is not None
        },
    )


def _entry(data: Any, source: str) -> Entry | None:
    if data is None:
        return None
    if not isinstance(data, dict):
        raise TableError(f"{source} is not an object")
    unknown = sorted(set(data) - set(Entry.__dataclass_fields__))
    if unknown:
        raise TableError(f"{source}: unknown field {unknown[0]!r}")
    try:
        config = Config.from_dict(_take(data, "config", dict, source))
    except TableError:
        raise
    except (ValueError, TypeError) as error:
        raise TableError(f"{source}.config: {error}") from error
    for name in sorted(data.keys() - {"config"}):
        value, kinds = data[name], _ENTRY_KINDS.get(name, (int, float))
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise TableError(
                f"{source}: {name} is {value!r}; expected {kinds[-1].__name__} or null"
            )
    return Entry(**(data | {"config": config}))
