"""The question behind ``/best``: which config for this mask and head_dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dash_kernels.problem import Problem
from tuner.results.rows import Release, option_values
from tuner.winners import Cell, overall

DRAFT = "draft"


class NotMeasured(LookupError):
    """Nothing answers this question; the message says what is measured, ``kinds`` has it field by field."""

    def __init__(self, line: str, kinds: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(line)
        self.kinds = kinds


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. ``release`` is a number, a name, ``draft`` for the rows as they are now, or None for
    the newest release of the GPU.

    Without ``heads`` and ``heads_kv`` the head group is 1. Mask, head_dim, dtype, head group and the options (window,
    ``head_dim_v``, 0 being head_dim, softcap, varlen) must agree exactly; ``seq_len``, ``batch`` and ``heads`` are
    matched to the nearest.
    """

    gpu: str
    mask: str
    head_dim: int
    dtype: str = "bfloat16"
    seq_len: int | None = None
    batch: int | None = None
    heads: int | None = None
    heads_kv: int | None = None
    direction: str = "backward"
    window_left: int = -1
    window_right: int = -1
    head_dim_v: int = 0
    softcap: bool = False
    varlen: bool = False
    source: str = "measured"
    release: int | str | None = None

    @property
    def head_group(self) -> int:
        return self.heads // self.heads_kv if self.heads and self.heads_kv else 1

    @property
    def kind(self) -> dict[str, Any]:
        """The fields in which a cell must agree, every option said."""
        plain = {name: getattr(self, name) for name in ("mask", "head_dim", "dtype", "direction")}
        options = ("window_left", "window_right", "softcap", "varlen")
        return {
            **plain,
            "head_group": self.head_group,
            **{name: getattr(self, name) for name in options},
            "head_dim_v": self.head_dim_v or self.head_dim,
        }


def answer(q: Question, release: Release | None, live: Sequence[Cell] = ()) -> dict[str, Any]:
    """``{gpu, mask, ..., release, matched, best, by_seq_len}``, JSON-ready, out of ``release``, or without one out of the
    ``live`` cells of the GPU and source.

    ``by_seq_len`` maps each measured seq len to the config to serve there, with its shape, and under ``fastest`` the
    best config of all where that one needs ``allow_resident``. ``best`` is the one config with the highest geometric
    mean over the seq lens; with ``seq_len`` it is the entry of that seq len or of the nearest. Raises NotMeasured.
    """
    kind = q.kind
    cells: list[dict[str, Any]] = (
        release.to_dict()["cells"] if release else [cell.to_dict() for cell in live]
    )
    chosen = _chosen([cell for cell in cells if _agrees(cell, kind)], q)
    if release is None:
        shapes = {_shape(cell) for cell in chosen.values()}
        same = [c for c in live if all(getattr(c, name) == v for name, v in kind.items())]
        whole = [o.to_dict() for o in overall([c for c in same if _shape_of(c) in shapes])]
    else:
        whole = [o for o in release.overall if _agrees(o, kind)]
    if not chosen:
        raise _not_measured(q, cells)
    named = {"gpu": q.gpu, "release": release.name if release else None}
    by_seq_len = {str(s): _entry(chosen[s], q, named) for s in sorted(chosen)}
    if q.seq_len is None:
        top = {**named, "matched": "exact", **whole[0]} if whole else None
    else:
        nearest = min(chosen, key=lambda s: (abs(math.log(s / q.seq_len)), s))  # type: ignore[operator]
        by_seq_len = {str(nearest): by_seq_len[str(nearest)]}
        top = by_seq_len[str(nearest)]
    options = _options(kind)
    return {
        **named,
        **{name: value for name, value in kind.items() if name not in option_values(kind)},
        **options,
        "source": q.source,
        "release_id": release.id if release else None,
        "matched": top["matched"] if top else None,
        "best": top,
        "by_seq_len": by_seq_len,
    }


def _agrees(cell: dict[str, Any], kind: dict[str, Any]) -> bool:
    said = {**cell, **option_values(cell)}
    return all(said[name] == value for name, value in kind.items())


def _chosen(cells: list[dict[str, Any]], q: Question) -> dict[int, dict[str, Any]]:
    """One cell a seq len: nearest in heads and batch where they are asked for, square, with the most work."""

    def preference(cell: dict[str, Any]) -> tuple[float, ...]:
        heads = abs(math.log(cell["heads"] / q.heads)) if q.heads else 0.0
        batch = abs(math.log(cell["batch"] / q.batch)) if q.batch else 0.0
        work = cell["batch"] * cell["heads"]
        return (
            heads + batch,
            cell["seq_len_kv"] != cell["seq_len"],
            -work,
            -cell["heads"],
            cell["seq_len_kv"],
        )

    chosen: dict[int, dict[str, Any]] = {}
    for cell in sorted((c for c in cells if c["served"]), key=preference):
        chosen.setdefault(cell["seq_len"], cell)
    return chosen


def _shape(cell: dict[str, Any]) -> tuple[int, ...]:
    return cell["seq_len"], cell["seq_len_kv"], cell["batch"], cell["heads"]


def _entry(cell: dict[str, Any], q: Question, named: dict[str, Any]) -> dict[str, Any]:
    asked = {"seq_len": q.seq_len, "batch": q.batch, "heads": q.heads}
    exact = all(value in (None, cell[name]) for name, value in asked.items())
    served, fastest = cell["served"], cell["best"]
    return {
        **named,
        **{name: cell[name] for name in ("seq_len", "seq_len_kv", "batch", "heads")},
        "matched": "exact" if exact else "nearest",
        **served,
        "fastest": fastest if fastest and fastest["config"] != served["config"] else None,
    }


def _shape_of(cell: Cell) -> tuple[int, ...]:
    return cell.seq_len, cell.seq_len_kv, cell.batch, cell.heads


def _not_measured(q: Question, cells: Sequence[dict[str, Any]]) -> NotMeasured:
    """One line: what was asked for, and which kinds of cell there are."""
    served = [cell for cell in cells if cell["served"]]
    known = "; ".join(sorted({_named(cell) for cell in served})) or "nothing yet"
    names = tuple(q.kind)
    kinds = [{name: {**c, **option_values(c)}[name] for name in names} for c in served]
    return NotMeasured(
        f"{q.gpu} has no {q.source} winner for {_named(q.kind)}; it has: {known}", kinds
    )


def _options(values: dict[str, Any]) -> dict[str, Any]:
    """The options that are on."""
    named = {name: values[name] for name in ("mask", "head_dim")} | option_values(values)
    return Problem(seq_len=1, **named).options()


def _named(values: dict[str, Any]) -> str:
    """A kind of cell in words."""
    words = "{mask} d={head_dim} {dtype} head group {head_group}".format(**values)
    said = [f"{name} {value}" for name, value in _options(values).items()]
    return " ".join([words, *said, values["direction"]])
