"""From stored rows to what a figure draws: for each shape and kind of schedule, its fastest configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.results.rows import ResultRow
from tuner.winners import CELL_FIELDS, Cell, cost, resident


@dataclass(frozen=True)
class Point:
    """One configuration at one shape. None is unknown.

    ``speedup`` is against ascending order in the same sweep. Where ``source`` is modelled, ``tflops`` and ``speedup``
    are predictions.
    """

    kind: str
    mask: str
    head_dim: int
    dtype: str
    head_group: int
    direction: str
    seq_len: int
    seq_len_kv: int
    batch: int
    heads: int
    tflops: float | None
    speedup: float | None
    registers: int | None
    spill_bytes: int | None
    min_resident: int | None
    deterministic: bool
    source: str
    tile: str
    config: Mapping[str, Any] = field(hash=False)

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in CELL_FIELDS if name != "gpu")


def kind_of(row: ResultRow) -> str:
    """The name a reader knows a row by: its kind of schedule, or its policy where that decides the order."""
    if row.policy != "ordered":
        return row.policy
    grouped = row.schedule == "grouped_shift" and row.group_size > 1
    return f"{row.schedule}({row.group_size})" if grouped else row.schedule


def tflops_of(row: ResultRow) -> float | None:
    """Measured TFLOPS; for a modelled row those that its predicted time amounts to."""
    if row.source == "modelled":
        return row.to_problem().tflops(row.predicted) if row.predicted else None
    return row.tflops


def point_of(row: ResultRow, baseline: ResultRow | None = None) -> Point:
    """``baseline`` is the ascending row of the same sweep."""
    own, base = cost(row), cost(baseline) if baseline is not None else None
    return Point(
        kind=kind_of(row),
        mask=row.mask,
        head_dim=row.head_dim,
        dtype=row.dtype,
        head_group=row.head_group,
        direction=row.direction,
        seq_len=row.seq_len,
        seq_len_kv=row.seq_len_kv,
        batch=row.batch,
        heads=row.heads,
        tflops=tflops_of(row),
        speedup=base / own if own and base and row.source != "compiled" else None,
        registers=row.registers,
        spill_bytes=row.spill_bytes,
        min_resident=resident(row),
        deterministic=row.policy != "unordered",
        source=row.source,
        tile=f"{row.block_m}x{row.block_n}",
        config=row.config,
    )


def fastest_by_kind(
    candidates: Iterable[tuple[ResultRow, str]], cells: Iterable[Cell]
) -> list[Point]:
    """The fastest row of each kind at each cell, within the sweep that the cell was decided in.

    ``candidates`` are (row, name of its sweep). ``ascending`` is the baseline itself where the cell has one, so that
    its line is 1.0 by definition.
    """
    decided = {_shape(cell): cell for cell in cells}
    best: dict[tuple[Any, ...], ResultRow] = {}
    for row, sweep in candidates:
        cell = decided.get(_shape(row))
        if cell is None or sweep != cell.sweep or row.above_peak or cost(row) is None:
            continue
        key = (*_shape(row), kind_of(row))
        held = best.get(key)
        if held is None or (cost(row) or math.inf) < (cost(held) or math.inf):
            best[key] = row
    points = []
    for row in best.values():
        baselines = decided[_shape(row)].baselines
        baseline = baselines["ascending"].row if "ascending" in baselines else None
        if baseline is not None and kind_of(row) == "ascending":
            row = baseline
        points.append(point_of(row, baseline))
    return sorted(points, key=lambda p: (p.shape, p.kind))


def _shape(item: ResultRow | Cell) -> tuple[Any, ...]:
    return tuple(getattr(item, name) for name in CELL_FIELDS)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Geometric mean of the known positive values; None when there are none."""
    logs = [math.log(v) for v in values if v is not None and v > 0 and math.isfinite(v)]
    return math.exp(sum(logs) / len(logs)) if logs else None
