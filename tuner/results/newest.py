"""Reads what decides and what is shown without reading the rest: most of a large database is history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Select, func, or_, select

from tuner.results.models import Result, Run
from tuner.results.rows import ResultFilter, ResultRow, RunInfo
from tuner.results.store import (
    ANY,
    DECIDING,
    IDS_A_QUERY,
    ROW_FIELDS,
    RUN_FIELDS,
    SWEEP,
    Store,
    matching,
    of_sweep,
)
from tuner.winners import CELL_FIELDS, Cell, winners

Age = tuple[datetime, int]


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one cell in one sweep: how old the newest of them is."""

    cell: tuple[Any, ...]
    sweep: str
    age: Age


def standing(
    store: Store,
    gpu: str,
    filters: ResultFilter = ANY,
    *,
    source: str = "measured",
    until_id: int,
) -> list[Cell]:
    """The winners of each cell, as ``winners`` finds them among all of ``Store.candidates``.

    Per cell the rows of its newest sweep are read, and of older ones until one has a config to serve. Of a filter's
    ``numerics_key`` are the rows that may win; one that failed a gate counts whatever its key.
    """
    sweeps: dict[tuple[Any, ...], list[Group]] = defaultdict(list)
    for group in groups(store, gpu, source, 0, until_id, filters):
        sweeps[group.cell].append(group)
    cells: list[Cell] = []
    for cell, found in sorted(sweeps.items()):
        rows: list[tuple[ResultRow, str]] = []
        taken: list[Cell] = []
        for group in sorted(found, key=lambda group: group.age, reverse=True):
            rows = rows_of(store, cell, source, group.sweep, until_id, filters) + rows
            taken = winners(rows)
            if taken and taken[0].served:
                break
        cells += taken
    return cells


def groups(
    store: Store, gpu: str, source: str, after_id: int, until_id: int, filters: ResultFilter = ANY
) -> list[Group]:
    """Cells and sweeps that have rows with ``after_id`` < id <= ``until_id``, of those that decide who wins."""
    cell = [getattr(Result, name) for name in CELL_FIELDS]
    query = (
        select(*cell, SWEEP, func.max(Result.created_at), func.max(Result.id))
        .join(Run, Run.id == Result.run_id)
        .where(Result.gpu == gpu, Result.id > after_id, Result.id <= until_id)
        .group_by(*cell, SWEEP)
    )
    with store.reading() as connection:
        found = connection.execute(_deciding(query, source, filters))
        return [Group(tuple(row[:-3]), row[-3], (row[-2], row[-1])) for row in found]


def rows_of(
    store: Store,
    cell: tuple[Any, ...],
    source: str,
    sweep: str,
    until_id: int,
    filters: ResultFilter = ANY,
) -> list[tuple[ResultRow, str]]:
    """The deciding rows of one cell in one sweep, oldest first, as ``Store.candidates`` answers them."""
    query = _deciding(_rows(), source, filters)
    for name, value in zip(CELL_FIELDS, cell, strict=True):
        query = query.where(getattr(Result, name) == value)
    query = of_sweep(query, sweep)
    query = query.where(Result.id <= until_id).order_by(Result.created_at, Result.id)
    with store.reading() as connection:
        found = [ResultRow.stored(dict(row._mapping)) for row in connection.execute(query)]
    return [(row, sweep) for row in found]


def _deciding(query: Select[Any], source: str, filters: ResultFilter) -> Select[Any]:
    key = filters.numerics_key
    query = matching(query, replace(filters, source=source, status=None, numerics_key=None))
    query = query.where(Result.status.in_(DECIDING))
    return (
        query
        if key is None
        else query.where(or_(Result.numerics_key == key, Result.status != "ok"))
    )


def counts(store: Store, after_id: int, until_id: int) -> dict[tuple[str, str, str], int]:
    """Number of rows by (gpu, source, status), of those with ``after_id`` < id <= ``until_id``."""
    by = (Result.gpu, Result.source, Result.status)
    query = select(*by, func.count(Result.id)).group_by(*by)
    if after_id > 0:
        query = query.where(Result.id > after_id)
    query = query.where(Result.id <= until_id)
    with store.reading() as connection:
        return {(gpu, source, status): n for gpu, source, status, n in connection.execute(query)}


def statuses_of_run(store: Store, run_id: int) -> dict[str, int]:
    """Number of rows of one run by status."""
    query = select(Result.status, func.count(Result.id)).where(Result.run_id == run_id)
    with store.reading() as connection:
        return {
            str(status): int(n) for status, n in connection.execute(query.group_by(Result.status))
        }


def recent_runs(store: Store, gpu: str, source: str, limit: int) -> list[RunInfo]:
    """Runs of a GPU, those of ``source`` and newest first."""
    query = _runs().where(Run.gpu == gpu).order_by(Run.source != source, Run.id.desc())
    with store.reading() as connection:
        return [RunInfo(**row._mapping) for row in connection.execute(query.limit(limit))]


def gpu_of_run(store: Store, uuid: str) -> str | None:
    """The GPU of the run of this uuid, None where there is no such run."""
    with store.reading() as connection:
        found: str | None = connection.scalar(select(Run.gpu).where(Run.uuid == uuid))
    return found


def runs_by_id(store: Store, ids: Collection[int | None]) -> list[RunInfo]:
    """The runs of these ids."""
    wanted = sorted({number for number in ids if number is not None})
    found: list[RunInfo] = []
    with store.reading() as connection:
        for start in range(0, len(wanted), IDS_A_QUERY):
            query = _runs().where(Run.id.in_(wanted[start : start + IDS_A_QUERY]))
            found += [RunInfo(**row._mapping) for row in connection.execute(query)]
    return found


def _rows() -> Select[Any]:
    columns = [getattr(Result, name) for name in ROW_FIELDS]
    return select(*columns, Run.uuid.label("run_uuid")).join(Run, Run.id == Result.run_id)


def _runs() -> Select[Any]:
    return select(*(getattr(Run, name) for name in RUN_FIELDS))
