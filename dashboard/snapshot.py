"""What the rows of one GPU amount to, computed once and kept until the database has a newer row."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from dashboard.filters import Filters, of_slice
from dashboard.points import Point, fastest_by_kind, point_of
from tuner.results.rows import ResultRow
from tuner.results.store import Store
from tuner.winners import Cell, most_work, winners


@dataclass(frozen=True)
class Snapshot:
    """One GPU, one source, as of row ``last_id``: winners by cell, the fastest of each kind, what was compiled.

    ``ceiling`` is the chip's measured matmul TFLOPS, None where no row stores it (``telemetry["matmul_tflops"]``).
    """

    gpu: str
    source: str
    last_id: int
    cells: Sequence[Cell]
    points: Sequence[Point]
    compiled: Sequence[Point]
    ceiling: float | None = None

    def cells_of(self, filters: Filters) -> list[Cell]:
        """The cells of the slice that the filters name, one a seq_len."""
        return one_a_length(of_slice(self.cells, filters))

    def points_of(self, filters: Filters) -> list[Point]:
        """What the curves of that slice draw: the points of its cells."""
        shapes = {shape_of(cell) for cell in self.cells_of(filters)}
        return [point for point in of_slice(self.points, filters) if shape_of(point) in shapes]


def shape_of(item: Cell | Point) -> tuple[int, ...]:
    return item.seq_len, item.seq_len_kv, item.batch, item.heads


def one_a_length(cells: Sequence[Cell]) -> list[Cell]:
    """Of the cells of one slice, the one with the most work at each seq_len, by seq_len."""
    chosen: dict[int, Cell] = {}
    for cell in sorted(cells, key=lambda c: (c.seq_len != c.seq_len_kv, most_work(c))):
        chosen.setdefault(cell.seq_len, cell)
    return [chosen[s] for s in sorted(chosen)]


def take(
    gpu: str, source: str, last_id: int, candidates: Sequence[tuple[ResultRow, str]]
) -> Snapshot:
    """Pure: rows (each with its sweep) in, snapshot out."""
    cells = winners(candidates)
    compiled = [point_of(row) for row, _ in candidates if row.registers is not None]
    ceilings = [
        value for row, _ in candidates if (value := (row.telemetry or {}).get("matmul_tflops"))
    ]
    points = fastest_by_kind(candidates, cells)
    return Snapshot(gpu, source, last_id, cells, points, compiled, max(ceilings, default=None))


class Snapshots:
    """Snapshots of a store. Safe between threads; each is computed by one of them while the others wait."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[tuple[str, str], Snapshot] = {}
        self._locks: dict[tuple[str, str], threading.Lock] = {}
        self._guard = threading.Lock()

    def default_gpu(self) -> str | None:
        """The GPU of the newest release; else one with measured winners; else one with rows, if there is any."""
        release = self._store.get_release()
        if release is not None:
            return release.gpu
        found = self._store.gpus()
        measured = [gpu for gpu in found if len(found) == 1 or self.of(gpu).cells]
        return next(iter(measured or found), None)

    def of(self, gpu: str, source: str = "measured") -> Snapshot:
        """The snapshot as of now. Raises StoreUnavailable when the database does not answer."""
        last = self._store.last_result_id()
        held = self._held.get((gpu, source))
        if held is not None and held.last_id == last:
            return held
        with self._guard:
            lock = self._locks.setdefault((gpu, source), threading.Lock())
        with lock:
            held = self._held.get((gpu, source))
            if held is not None and held.last_id >= last:
                return held
            rows = self._store.candidates(gpu, source=source, until_id=last)
            fresh = take(gpu, source, last, rows)
            self._held[gpu, source] = fresh
            return fresh
