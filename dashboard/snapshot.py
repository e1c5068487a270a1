"""What the rows of one GPU amount to, computed once and kept until the database has a newer row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dashboard.filters import Filters, of_slice
from dashboard.points import Point, fastest_by_kind, point_of
from tuner.results import newest
from tuner.results.rows import ResultRow
from tuner.results.store import Store
from tuner.winners import CELL_FIELDS, Cell, age, most_work, winners


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


class Standing:
    """The rows of one GPU and source, taken cell by cell: a new row costs the cells that it belongs to, and no other.

    Per cell the rows of its newest sweep are read, and of older ones until one has a config to serve: what
    ``winners`` would look at, of all the rows that there are.
    """

    def __init__(self, store: Store, gpu: str, source: str) -> None:
        self._store, self._gpu, self._source = store, gpu, source
        self._last_id = 0
        self._sweeps: dict[tuple[Any, ...], dict[str, newest.Age]] = {}
        self._cells: dict[tuple[Any, ...], Snapshot] = {}

    def advance(self, last_id: int) -> Snapshot:
        """The snapshot as of row ``last_id``."""
        fresh = newest.groups(self._store, self._gpu, self._source, self._last_id, last_id)
        for group in fresh:
            ages = self._sweeps.setdefault(group.cell, {})
            ages[group.sweep] = max(ages.get(group.sweep, group.age), group.age)
        for cell in {group.cell for group in fresh}:
            self._cells[cell] = self._take(cell, last_id)
        self._last_id = last_id
        parts = self._cells.values()
        ceilings = [part.ceiling for part in parts if part.ceiling]
        return Snapshot(
            self._gpu,
            self._source,
            last_id,
            sorted((c for p in parts for c in p.cells), key=_place),
            sorted((p for part in parts for p in part.points), key=lambda p: (p.shape, p.kind)),
            [point for part in parts for point in part.compiled],
            max(ceilings, default=None),
        )

    def _take(self, cell: tuple[Any, ...], last_id: int) -> Snapshot:
        ages = self._sweeps[cell]
        rows: list[tuple[ResultRow, str]] = []
        taken = take(self._gpu, self._source, last_id, rows)
        for sweep in sorted(ages, key=lambda sweep: ages[sweep], reverse=True):
            older = newest.rows_of(self._store, cell, self._source, sweep, last_id)
            rows = sorted(older + rows, key=lambda pair: age(pair[0]))
            taken = take(self._gpu, self._source, last_id, rows)
            if taken.cells and taken.cells[0].served:
                break
        return taken


def _place(cell: Cell) -> tuple[Any, ...]:
    return tuple(getattr(cell, name) for name in CELL_FIELDS)


class Snapshots:
    """Snapshots of a store. Safe between threads; each is computed by one of them while the others wait.

    ``last_id`` answers the id of the newest row: the store's own, unless a server sets one that it asks less often.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.last_id: Callable[[], int] = store.last_result_id
        self._held: dict[tuple[str, str], Snapshot] = {}
        self._standings: dict[tuple[str, str], Standing] = {}
        self._locks: dict[tuple[str, str], threading.Lock] = {}
        self._guard = threading.Lock()
        self._counted: tuple[int, dict[tuple[str, str, str], int]] = (0, {})

    def forget(self) -> None:
        """Start over: another database stands where this one was."""
        with self._guard:
            self._held, self._standings, self._counted = {}, {}, (0, {})

    def default_gpu(self) -> str | None:
        """The GPU of the newest release; else one with measured winners; else one with rows, if there is any."""
        release = self._store.get_release()
        if release is not None:
            return release.gpu
        found = self.gpus()
        measured = [gpu for gpu in found if len(found) == 1 or self.of(gpu).cells]
        return next(iter(measured or found), None)

    def gpus(self) -> list[str]:
        """GPUs that have rows."""
        return sorted({gpu for gpu, *_ in self.counts()})

    def counts(self) -> dict[tuple[str, str, str], int]:
        """Number of rows by (gpu, source, status); only new ones are counted again."""
        last = self.last_id()
        with self._guard:
            counted_to, held = self._counted
            if last < counted_to:
                counted_to, held = 0, {}
            if last > counted_to:
                held = dict(held)
                for key, number in newest.counts(self._store, counted_to, last).items():
                    held[key] = held.get(key, 0) + number
                self._counted = (last, held)
            return held

    def of(self, gpu: str, source: str = "measured") -> Snapshot:
        """The snapshot as of now. Raises StoreUnavailable when the database does not answer."""
        last = self.last_id()
        held = self._held.get((gpu, source))
        if held is not None and held.last_id == last:
            return held
        with self._guard:
            lock = self._locks.setdefault((gpu, source), threading.Lock())
        with lock:
            held = self._held.get((gpu, source))
            if held is not None and held.last_id == last:
                return held
            with self._guard:
                standing = self._standings.pop((gpu, source), None)
            if standing is None or (held is not None and held.last_id > last):
                standing = Standing(self._store, gpu, source)
            fresh = standing.advance(last)  # one that fails halfway is not kept
            with self._guard:
                self._standings[gpu, source] = standing
                self._held[gpu, source] = fresh
            return fresh
