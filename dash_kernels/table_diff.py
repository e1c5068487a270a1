"""What changes from one lookup table to another: which cells run another config, how much faster, and whose bits change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dash_kernels.lookup import Cell, Entry, LookupTable
from dash_kernels.numerics import same_bits

CHANGES = ("added", "removed", "config", "bits")


@dataclass(frozen=True, slots=True)
class CellChange:
    """One cell that is not served as before.

    ``change`` is "added", "removed", "config" (another config) or "bits" (the same config, whose bits another kernel,
    compiler or PyTorch changes). ``gain`` is the new speed over the old one, minus one, where both are known.
    ``bits`` says whether a run that switches tables gets other bits: a cell that was not there had the nearest cell's
    config or the default rule's, so that is taken as a change.
    """

    cell: dict[str, Any]
    change: str
    bits: bool
    before: Entry | None
    after: Entry | None

    @property
    def gain(self) -> float | None:
        old, new = self.before and self.before.tflops, self.after and self.after.tflops
        return new / old - 1 if old and new else None

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.cell,
            "change": self.change,
            "bits_change": self.bits,
            "gain": self.gain,
            "before": _standing(self.before),
            "after": _standing(self.after),
        }

    def line(self) -> str:
        """For a terminal: ``causal d=128 seq_len=4096 bfloat16: +2.1 %, bits change: OLD -> NEW``."""
        cell = self.cell
        name = "{mask} d={head_dim} seq_len={seq_len} {dtype}".format(**cell)
        gain = "" if self.gain is None else f"{100 * self.gain:+.1f} %, "
        bits = "bits change" if self.bits else "same bits"
        old, new = (e.config.label() if e else "nothing" for e in (self.before, self.after))
        return f"{name}: {gain}{bits}: {old} -> {new}"


@dataclass(frozen=True, slots=True)
class TableDiff:
    """Every cell that changes, and how many do not."""

    changes: tuple[CellChange, ...]
    same: int

    def counts(self) -> dict[str, int]:
        found = {name: sum(c.change == name for c in self.changes) for name in CHANGES}
        return {"same": self.same, **found, "bits_change": sum(c.bits for c in self.changes)}

    def summary(self) -> str:
        """One line: ``22 cells as before, 2 with another config; 1 changes bits``."""
        n = self.counts()
        words = [
            f"{n[name]} {text}"
            for name, text in (
                ("config", "with another config"),
                ("bits", "with other bits by the same config"),
                ("added", "added"),
                ("removed", "removed"),
            )
            if n[name]
        ]
        said = ", ".join([f"{n['same']} cells as before", *words])
        bits = n["bits_change"]
        return f"{said}; {bits or 'none'} {'changes' if bits == 1 else 'change'} bits"

    def to_dict(self) -> dict[str, Any]:
        return {"cells": self.counts(), "changes": [change.to_dict() for change in self.changes]}


def diff(old: LookupTable, new: LookupTable) -> TableDiff:
    """What a job that goes from ``old`` to ``new`` is served otherwise."""
    before, after = ({_name(cell): cell for cell in table.cells} for table in (old, new))
    changes: list[CellChange] = []
    same = 0
    for name in [*after, *(name for name in before if name not in after)]:
        a, b = before.get(name), after.get(name)
        was, now = a.served if a else None, b.served if b else None
        shown = _shown(b or a)
        if was is None and now is None:
            continue
        if was is None or now is None:
            kind = "added" if was is None else "removed"
            changes.append(CellChange(shown, kind, True, was, now))
            continue
        cell = b or a
        assert cell is not None
        kept = same_bits(was, old.environment, now, new.environment, cell.problem)
        if was.config == now.config and kept:
            same += 1
            continue
        kind = "bits" if was.config == now.config else "config"
        changes.append(CellChange(shown, kind, not kept, was, now))
    return TableDiff(tuple(changes), same)


def _name(cell: Cell) -> tuple[Any, ...]:
    return cell.direction, cell.problem


def _shown(cell: Cell | None) -> dict[str, Any]:
    assert cell is not None
    drop = ("served", "best", "baselines")
    return {name: value for name, value in cell.to_dict().items() if name not in drop}


def _standing(entry: Entry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {
        "config": entry.config.to_dict(),
        "tflops": entry.tflops,
        "numerics_key": entry.numerics_key,
    }
