"""From stored rows to what a figure draws: for each shape and kind of schedule, its fastest configuration."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dash_kernels.problem import OPTION_FIELDS
from tuner.results.rows import ResultRow
from tuner.winners import CELL_FIELDS, Cell, cost, is_final, is_plain, pick, resident


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
    window_left: int
    window_right: int
    head_dim_v: int
    softcap: bool
    varlen: bool
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


INTERLEAVED = "ascending_interleaved"
"""Ascending order launched otherwise than FlashAttention-3 does: a rival of the baseline, so a line of its own."""


def kind_of(row: ResultRow) -> str:
    """The name a reader knows a row by: its kind of schedule, or its policy where that decides the order."""
    if row.policy != "ordered":
        return row.policy
    if row.schedule == "ascending" and not is_plain(row):
        return INTERLEAVED
    grouped = row.schedule == "grouped_shift" and row.group_size > 1
    return f"{row.schedule}({row.group_size})" if grouped else row.schedule


def schedule_of(kind: str) -> str:
    """The schedule behind a kind's name, its group left in: ``ascending_interleaved`` -> ``ascending``."""
    return "ascending" if kind == INTERLEAVED else kind


def tflops_of(row: ResultRow) -> float | None:
    """Measured TFLOPS; for a modelled row those that its predicted time amounts to."""
    if row.source == "modelled":
        return row.to_problem().tflops(row.predicted) if row.predicted else None
    return row.tflops


def point_of(row: ResultRow, speedup: float | None = None) -> Point:
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
        speedup=speedup,
        registers=row.registers,
        spill_bytes=row.spill_bytes,
        min_resident=resident(row),
        deterministic=row.policy != "unordered",
        source=row.source,
        tile=f"{row.block_m}x{row.block_n}",
        config=row.config,
        **{name: getattr(row, name) for name in OPTION_FIELDS},
    )


def fastest_by_kind(
    candidates: Iterable[tuple[ResultRow, str]], cells: Iterable[Cell]
) -> list[Point]:
    """The fastest row of each kind at each cell, within the sweep that the cell was decided in.

    ``candidates`` are (row, name of its sweep), oldest first. A kind that took part in a final round is
    drawn as it did there; ``ascending`` is the cell's baseline, so that its line is 1.0.
    """
    decided = {_shape(cell): cell for cell in cells}
    groups: dict[tuple[Any, ...], dict[str, ResultRow]] = defaultdict(dict)
    for row, sweep in candidates:
        cell = decided.get(_shape(row))
        if (
            cell is not None
            and sweep == cell.sweep
            and not row.above_peak
            and cost(row) is not None
        ):
            key = (*_shape(row), kind_of(row))
            groups[key][row.config_hash] = row
    points = []
    for (*shape, kind), rows in groups.items():
        cell = decided[tuple(shape)]
        newest = list(rows.values())
        row = pick([row for row in newest if is_final(row)] or newest)
        if kind in cell.baselines:
            row = cell.baselines[kind].row
        points.append(point_of(row, _speedup(row, cell)))
    return sorted(points, key=lambda p: (p.shape, p.kind))


def _speedup(row: ResultRow, cell: Cell) -> float | None:
    """As the cell has it where the row stands in it; else as it was measured, sample by sample beside ascending."""
    for winner in (cell.served, cell.best, *cell.baselines.values()):
        if winner is not None and winner.row is row:
            return winner.speedup_vs_baseline
    if row.speedup_vs_baseline is not None or "ascending" not in cell.baselines:
        return row.speedup_vs_baseline
    own, base = cost(row), cost(cell.baselines["ascending"].row)
    return base / own if own and base and row.source != "compiled" else None


def _shape(item: ResultRow | Cell) -> tuple[Any, ...]:
    return tuple(getattr(item, name) for name in CELL_FIELDS)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Geometric mean of the known positive values; None when there are none."""
    logs = [math.log(v) for v in values if v is not None and v > 0 and math.isfinite(v)]
    return math.exp(sum(logs) / len(logs)) if logs else None
