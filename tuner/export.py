"""What leaves the database: lookup tables and releases, CSV, Parquet, and the dump that ships with the package.

``tuner.importing`` reads CSV, Parquet and dumps back.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dash_kernels.lookup import FORMAT, LookupTable, digest_of
from dash_kernels.problem import OPTION_FIELDS, SHAPE_FIELDS
from tuner.results.rows import (
    DERIVED_COLUMNS,
    Release,
    ResultFilter,
    ResultRow,
    RunInfo,
    StoreError,
    canonical,
    utc_now,
)
from tuner.winners import Cell, age, overall

if TYPE_CHECKING:
    from tuner.results.store import Store

log = logging.getLogger("dash.results")

DUMP_FORMAT = 1
RELEASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
DAY = re.compile(r"\d{4}-\d\d-\d\d")
ROW_COLUMNS = tuple(f.name for f in fields(ResultRow) if f.name not in ("run_id", "id"))
RUN_COLUMNS = (
    "run_source",
    "run_command",
    "run_started",
    "run_finished",
    "environment",
    "measurement_policy",
)
PROBLEM_COLUMNS = SHAPE_FIELDS
JSON_COLUMNS = ("config", "samples", "telemetry", "environment", "measurement_policy")
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


# -- lookup tables and releases -------------------------------------------------------------------------------------


def lookup_table(
    store: Store,
    gpu: str,
    release: str = "draft",
    *,
    until_id: int | None = None,
    cells: Sequence[Cell] | None = None,
) -> dict[str, Any]:
    """The winners of ``gpu`` as the dispatcher's lookup table, named ``release``, with its digest.

    ``cells`` are its winners where the caller has them already. Environment and policy are those of the newest winner.
    Raises StoreError where nothing was measured.
    """
    if cells is None:
        cells = store.winners(gpu, until_id=until_id)
    if not cells:
        raise StoreError(
            f"no measured winner for {gpu} in {store.where}; run dash-tune --gpu {gpu} first"
        )
    from tuner.results.newest import runs_by_id

    newest = max((winner.row for cell in cells for winner in _standings(cell)), key=age)
    (run,) = runs_by_id(store, [newest.run_id])
    older = sum(cell.sweep != run.sweep for cell in cells)
    if older:
        log.warning(
            "%d of %d cells of %s come from an older environment or policy", older, len(cells), gpu
        )
    body = {
        "format": FORMAT,
        "gpu": gpu,
        "release": release,
        "created": rfc3339(newest.created_at or utc_now()),
        "environment": run.environment,
        "measurement_policy": run.measurement_policy,
        "baseline": "ascending",
        "cells": [cell.to_dict() for cell in cells],
    }
    table: dict[str, Any] = LookupTable.from_dict(
        body | {"digest": digest_of(body)}, f"winners of {gpu}"
    ).to_dict()
    return table


def table_json(table: Mapping[str, Any]) -> str:
    """The text of a table's file."""
    return LookupTable.from_dict(dict(table)).to_json()


def freeze(
    store: Store,
    gpu: str,
    notes: str = "",
    name: str | None = None,
    *,
    cells: Sequence[Cell] | None = None,
    until_id: int | None = None,
) -> Release:
    """Make the winners of now a release: numbered, immutable, where no name is given named ``<gpu>-<date>[.<number>]``.

    ``cells`` are the winners as of row ``until_id``, where the caller has them already. The release is newer than every
    one there is, also where the clock went backwards since. Raises StoreError for a name that is taken or means
    something else.
    """
    if name is not None:
        check_release_name(name)
    last = store.last_result_id() if until_id is None else until_id
    if cells is None:
        cells = store.winners(gpu, until_id=last)
    there = store.releases(gpu)
    times = [release.created_at for release in there if release.created_at]
    now = max(utc_now(), max(times) + timedelta(microseconds=1)) if times else utc_now()
    if name is None:
        name = _next_name(gpu, [release.name for release in there])
    table = lookup_table(store, gpu, name, cells=cells)
    best = [winner.to_dict() for winner in overall(cells)]
    return store.add_release(
        Release(
            gpu,
            name,
            table["digest"],
            table_json(table),
            notes,
            overall=best,
            last_result_id=last,
            created_at=now,
        )
    )


def check_release_name(name: str) -> None:
    """Raises StoreError for a name that no release may be given. One that was imported keeps the name it has."""
    if not RELEASE_NAME.fullmatch(name):
        raise StoreError(
            f"release name {name!r}: use up to 100 letters, digits, '.', '_' and '-', a letter or digit first"
        )
    if name.isdecimal() or name == "draft":
        raise StoreError(
            f"release name {name!r} would read as a number or as the draft; choose another"
        )
    tomorrow = f"{utc_now() + timedelta(days=1):%Y-%m-%d}"
    day = max(DAY.findall(name), default="")
    if day > tomorrow:
        raise StoreError(
            f"release name {name!r}: {day} is after tomorrow (UTC), and default names go on from the latest day in use; "
            f"use a day up to {tomorrow}, or none"
        )


def _next_name(gpu: str, there: Iterable[str]) -> str:
    """``<gpu>-<date>``, of today and without a number if all those ``there`` are of earlier days, else after them."""
    dated = re.compile(rf"{re.escape(gpu)}-({DAY.pattern})(?:[.-](\d+))?")
    found = [(match[1], int(match[2] or 1)) for name in there if (match := dated.match(name))]
    newest, number = max(found, default=("", 0))
    today = f"{utc_now():%Y-%m-%d}"
    return f"{gpu}-{today}" if newest < today else f"{gpu}-{newest}.{number + 1}"


def _standings(cell: Cell) -> Iterable[Any]:
    return (winner for winner in (cell.best, cell.served) if winner is not None)


def rfc3339(time: datetime) -> str:
    """UTC with a Z, as every exported time is written."""
    return time.isoformat().replace("+00:00", "Z")


# -- rows -----------------------------------------------------------------------------------------------------------


def rows_csv(rows: Iterable[ResultRow], runs: Iterable[RunInfo] = ()) -> str:
    """CSV with a header. With ``runs`` (``store.runs()``) each row carries its run, and the file can be imported.

    A text cell that a spreadsheet would run as a formula gets an apostrophe before it.
    """
    out = io.StringIO()
    by_id = {run.id: run for run in runs}
    writer = csv.DictWriter(out, ROW_COLUMNS + (RUN_COLUMNS if by_id else ()))
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _csv_cell(value) for name, value in _flat(row, by_id).items()})
    return out.getvalue()


def rows_parquet(rows: Iterable[ResultRow], runs: Iterable[RunInfo] = ()) -> bytes:
    """Parquet with the columns of :func:`rows_csv`; config, samples, telemetry and environment are JSON text."""
    import pyarrow
    import pyarrow.parquet

    by_id = {run.id: run for run in runs}
    names = ROW_COLUMNS + (RUN_COLUMNS if by_id else ())
    schema = pyarrow.schema([(name, _arrow_type(name)) for name in names])
    table = pyarrow.Table.from_pylist([_flat(row, by_id) for row in rows], schema=schema)
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _flat(row: ResultRow, runs: Mapping[int | None, RunInfo]) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in ROW_COLUMNS}
    if runs:
        run = runs[row.run_id]
        values |= {
            "run_source": run.source,
            "run_command": run.command,
            "run_started": run.started,
            "run_finished": run.finished,
            "environment": run.environment,
            "measurement_policy": run.measurement_policy,
        }
    return {
        k: canonical(v) if k in JSON_COLUMNS and v is not None else v for k, v in values.items()
    }


def _csv_cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        return "'" + value
    if isinstance(value, datetime):
        return rfc3339(value)
    return value


def column_kind(name: str) -> str:
    """How a flat column is written: int, float, bool, time, json or str."""
    if name in JSON_COLUMNS:
        return "json"
    if name in ("run_started", "run_finished"):
        return "time"
    annotation = next((str(f.type) for f in fields(ResultRow) if f.name == name), "str")
    kind = annotation.split(" | ")[0]
    return "time" if kind == "datetime" else kind


def _arrow_type(name: str) -> Any:
    import pyarrow

    return {
        "int": pyarrow.int64(),
        "float": pyarrow.float64(),
        "bool": pyarrow.bool_(),
        "time": pyarrow.timestamp("us", tz="UTC"),
        "json": pyarrow.string(),
        "str": pyarrow.string(),
    }[column_kind(name)]


# -- dumps ----------------------------------------------------------------------------------------------------------

DUMP_COLUMNS = tuple(n for n in ROW_COLUMNS if n not in ("gpu", "run_uuid", *DERIVED_COLUMNS))


def dump(store: Store, gpu: str | None = None) -> dict[str, Any]:
    """Every run with its environment and rows, compact: a config is an index into its run's ``configs``."""
    rows: dict[int | None, list[ResultRow]] = {}
    for row in store.results(ResultFilter(gpu=gpu), limit=None):
        rows.setdefault(row.run_id, []).append(row)
    runs = [_dump_run(run, rows[run.id]) for run in store.runs(gpu) if run.id in rows]
    return {"format": DUMP_FORMAT, "kind": "dash-results", "runs": runs}


def _dump_run(run: RunInfo, rows: Sequence[ResultRow]) -> dict[str, Any]:
    texts = {canonical(row.config): row.config for row in rows}
    places = {text: index for index, text in enumerate(texts)}
    options = {name for row in rows for name in row.to_problem().options()}
    off = set(OPTION_FIELDS) - options
    columns = [
        name
        for name in DUMP_COLUMNS
        if name not in off and any(getattr(row, name) is not None for row in rows)
    ]
    return {
        "uuid": run.uuid,
        "gpu": run.gpu,
        "source": run.source,
        "command": run.command,
        "started": run.started and rfc3339(run.started),
        "finished": run.finished and rfc3339(run.finished),
        "environment": run.environment,
        "measurement_policy": run.measurement_policy,
        "configs": list(texts.values()),
        "columns": columns,
        "rows": [[_dump_cell(row, name, places) for name in columns] for row in rows],
    }


def _dump_cell(row: ResultRow, name: str, places: Mapping[str, int]) -> Any:
    value = getattr(row, name)
    if name == "config":
        return places[canonical(value)]
    return rfc3339(value) if isinstance(value, datetime) else value


def dump_shipped(store: Store, gpu: str, path: str | Path) -> int:
    """Write the rows of ``gpu`` as the package ships them (``tuner/data/<gpu>.json.gz``); answers how many.

    The same rows give the same bytes. Folders of the tuning machine are cut from commands and error texts.
    """
    data = dump(store, gpu)
    for run in data["runs"]:
        run["command"] = without_folders(run["command"])
        if "error" in run["columns"]:
            place = run["columns"].index("error")
            for row in run["rows"]:
                row[place] = row[place] and without_folders(row[place])
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        file.write(text.encode())
    return sum(len(run["rows"]) for run in data["runs"])


def without_folders(text: str) -> str:
    """``text`` with absolute paths cut to their last part."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.+@~-]+/)+", "", text)
