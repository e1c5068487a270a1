"""Reads rows back: dumps, CSV, Parquet and T4 as they are written here, other databases, and the rows of the package.

Runs are known by their uuid and a run's rows by their config, so that importing twice, or merging two databases that
share runs, adds nothing twice.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from dash_kernels.lookup import TABLES, LookupTable, TableError
from dash_kernels.problem import OPTION_FIELDS, Config, Problem
from tuner.export import (
    DUMP_COLUMNS,
    DUMP_FORMAT,
    FORMULA_STARTS,
    PROBLEM_COLUMNS,
    ROW_COLUMNS,
    RUN_COLUMNS,
    column_kind,
)
from tuner.results.rows import (
    DERIVED_COLUMNS,
    NotOurDatabase,
    Release,
    ResultFilter,
    ResultRow,
    RunInfo,
    StoreError,
)
from tuner.t4 import is_t4, parse_t4
from tuner.winners import age, overall, winners

if TYPE_CHECKING:
    from tuner.results.store import Store

log = logging.getLogger("dash.results")

DATABASE_ENDINGS = (".sqlite", ".db")
REQUIRED = (*PROBLEM_COLUMNS, "gpu", "config", "status", "run_uuid", "environment")


class NotAnExport(StoreError):
    """A file that can be read and is not what export writes: the message names it and what it lacks."""


@dataclass(frozen=True, slots=True)
class Imported:
    """How many rows and releases were new, how many the database had already, and where the two do not agree.

    A conflict is a line; what the database has stays as it is.
    """

    added: int = 0
    known: int = 0
    conflicts: tuple[str, ...] = ()
    releases: int = 0

    def __add__(self, other: Imported) -> Imported:
        return Imported(
            self.added + other.added,
            self.known + other.known,
            self.conflicts + other.conflicts,
            self.releases + other.releases,
        )


def import_file(store: Store, path: str | Path) -> Imported:
    """Merge a .csv, .parquet, .json or .json.gz file, or another database.

    A .json may be rows (a dump or T4) or a lookup table, which becomes a release. Raises StoreError, NotAnExport for what
    is in the file, before anything is written.
    """
    if "://" in str(path) or Path(path).suffix in DATABASE_ENDINGS:
        return import_database(store, str(path))
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None
    try:
        if path.suffix == ".csv":
            reader = csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""))
            runs = _from_flat(reader.fieldnames or (), reader, _parse_csv)
        elif path.suffix == ".parquet":
            runs = _from_flat(*_read_parquet(content), _parse_parquet)
        elif path.suffix in (".json", ".gz"):
            data = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
            if isinstance(data, dict) and "cells" in data:
                return import_table(store, LookupTable.from_dict(data, str(path)), str(path))
            runs = parse_t4(data) if is_t4(data) else parse_dump(data)
        else:
            raise StoreError(
                f"{path}: the ending tells the format; use .csv, .parquet, .json, .json.gz, "
                f"{', '.join(DATABASE_ENDINGS)} or a database URL"
            )
        for run, rows in runs:
            _check_run(run, rows)
    except TableError as error:
        raise NotAnExport(str(error)) from None
    except KeyError as error:
        raise NotAnExport(f"{path} is not an export of dash: it lacks {error}") from error
    except (
        ValueError,
        TypeError,
        AttributeError,
        IndexError,
        OSError,
        EOFError,
        RecursionError,
        csv.Error,
    ) as error:
        raise NotAnExport(f"{path} is not an export of dash: {error}") from error
    return merge(store, runs)


def import_database(store: Store, other: str) -> Imported:
    """Merge every run, row and release of another database, which is only read.

    Raises NotAnExport, before anything is written, for a database that is none of dash's, and for a value that SQLite
    kept and no reader could use.
    """
    from tuner.results import database
    from tuner.results.store import Store as Database

    try:
        source = Database.open(other, read_only=True)
    except NotOurDatabase as error:
        where = database.show(database.resolve_url(other))
        raise NotAnExport(
            f"{where} is not a database of dash: it {error.lacks}; name one that dash-tune has written, or a file "
            "that dash-tune export wrote"
        ) from error
    with source:
        done = Imported()
        for run in source.runs():
            try:
                _check_run(run, source.results(ResultFilter(run_id=run.id), limit=None))
            except ValueError as error:
                raise NotAnExport(f"{source.where}: run {run.uuid}: {error}") from None
        for run in source.runs():
            rows = source.results(ResultFilter(run_id=run.id), limit=None)
            fresh = [replace(row, id=None, run_id=None, run_uuid=None) for row in rows]
            done += merge(store, [(replace(run, id=None), fresh)])
        for release in source.releases():
            last = store.last_result_id()
            done += _merge_release(store, replace(release, id=None, last_result_id=last))
        return done


def import_table(store: Store, table: LookupTable, where: str) -> Imported:
    """Make a lookup table a release of its own name."""
    release = Release(
        table.gpu,
        table.release,
        table.digest,
        table.to_json(),
        f"imported from {Path(where).name}",
        last_result_id=store.last_result_id(),
        created_at=time_of(table.created),
    )
    return _merge_release(store, release)


def _merge_release(store: Store, release: Release) -> Imported:
    named = {there.name: there.digest for there in store.releases(release.gpu)}
    if release.digest in named.values():
        return Imported(known=1)
    if release.name in named:
        said = f"release {release.name} of {release.gpu} has digest {named[release.name][:12]} here"
        return Imported(conflicts=(f"{said}, {release.digest[:12]} there",))
    store.add_release(release)
    return Imported(releases=1)


def merge(store: Store, runs: Iterable[tuple[RunInfo, list[ResultRow]]]) -> Imported:
    """Add runs with their rows, one transaction a run, skipping what is there and comparing it."""
    done = Imported()
    for run, rows in runs:
        run_id = store.start_run(run)
        there = {
            row.config_hash: row for row in store.results(ResultFilter(run_id=run_id), limit=None)
        }
        new = [row for row in rows if row.config_hash not in there]
        conflicts = [
            f"{row.to_problem().label()}: {row.to_config().label()}: {said}"
            for row in rows
            if row.config_hash in there and (said := _difference(there[row.config_hash], row))
        ]
        store.add_many(run_id, new)
        done += Imported(len(new), len(rows) - len(new), tuple(conflicts))
    return done


def _difference(here: ResultRow, there: ResultRow) -> str:
    """The first column in which two rows of one run and config differ, empty where they agree."""
    for name in ROW_COLUMNS:
        one, other = getattr(here, name), getattr(there, name)
        if name not in ("run_uuid", "created_at") and one != other:
            return f"{name} is {_short(one)} here, {_short(other)} there"
    return ""


def _short(value: Any) -> str:
    return text if len(text := str(value)) <= 40 else f"{text[:37]}..."


def shipped_files() -> list[Path]:
    return sorted((Path(__file__).parent / "data").glob("*.json.gz"))


def load_shipped(store: Store) -> int:
    """Merge every ``tuner/data/*.json.gz``, each with its lookup table as a release; answers how many rows were new."""
    counts = store.rows_by_run()
    added = 0
    for file in shipped_files():
        data = json.loads(gzip.decompress(file.read_bytes()))
        uuids = {run["uuid"] for run in data["runs"]}
        data["runs"] = [
            run for run in data["runs"] if counts.get(run["uuid"], 0) < len(run["rows"])
        ]
        added += merge(store, parse_dump(data)).added
        _load_release(store, file.name.removesuffix(".json.gz"), uuids)
    return added


def _load_release(store: Store, gpu: str, uuids: set[str]) -> None:
    """Make the shipped lookup table of ``gpu`` a release, as it was frozen from the rows of these runs."""
    path = TABLES / f"{gpu}.json"
    if not path.exists():
        return
    table = LookupTable.load(path)
    there = store.releases(gpu)
    if table.digest in {release.digest for release in there}:
        return
    taken = table.release in {release.name for release in there}
    ids = [run.id for run in store.runs(gpu) if run.uuid in uuids]
    found = [pair for run_id in ids for pair in store.candidates(gpu, ResultFilter(run_id=run_id))]
    rows = sorted(found, key=lambda pair: age(pair[0]))
    release = Release(
        gpu,
        f"{table.release}.{table.digest[:8]}" if taken else table.release,
        table.digest,
        path.read_text(encoding="utf-8"),
        "shipped with the package",
        overall=[winner.to_dict() for winner in overall(winners(rows))],
        last_result_id=store.last_result_id(),
        created_at=time_of(table.created),
    )
    try:
        store.add_release(release)
    except StoreError:  # another process may have been first
        if table.digest not in {release.digest for release in store.releases(gpu)}:
            raise


def parse_dump(data: Any) -> list[tuple[RunInfo, list[ResultRow]]]:
    """Runs and rows of a dump. Raises ValueError naming what is wrong with it."""
    if not isinstance(data, dict) or data.get("kind") != "dash-results":
        raise ValueError('no "kind": "dash-results" at its top')
    if data.get("format") != DUMP_FORMAT:
        raise ValueError(f"format {data.get('format')!r}; this release reads {DUMP_FORMAT}")
    return [(run_of(run), [_row_of(run, values) for values in run["rows"]]) for run in data["runs"]]


def _check_run(run: RunInfo, rows: Iterable[ResultRow]) -> None:
    """Raises ValueError for a field of another type: SQLite would take it, and no reader could use it."""
    _check_types(run)
    for row in rows:
        _check_types(row)


def _check_types(value: RunInfo | ResultRow) -> None:
    for name, types in TYPES[type(value)].items():
        found = getattr(value, name)
        if type(found) not in types or (type(found) is int and abs(found) >= 2**63):
            what = " or ".join(kind.__name__ for kind in types if kind is not type(None))
            raise ValueError(f"{name} is {_short(repr(found))}, which is no {what}")


def _types(cls: type[Any]) -> dict[str, tuple[type, ...]]:
    """The types that each field of a dataclass takes; a float may be whole."""
    hints = get_type_hints(cls)
    found = {}
    for name in (field.name for field in fields(cls)):
        hint = hints[name]
        parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        types = tuple(get_origin(part) or part for part in parts)
        found[name] = (*types, int) if float in types else types
    return found


TYPES: dict[type, dict[str, tuple[type, ...]]] = {cls: _types(cls) for cls in (RunInfo, ResultRow)}


def run_of(run: Mapping[str, Any]) -> RunInfo:
    if not run.get("uuid"):
        raise ValueError("a run has no uuid")
    return RunInfo(
        gpu=run["gpu"],
        environment=run["environment"],
        measurement_policy=run["measurement_policy"],
        command=run["command"],
        source=run["source"],
        uuid=run["uuid"],
        started=time_of(run["started"]),
        finished=time_of(run["finished"]),
    )


def _row_of(run: Mapping[str, Any], values: list[Any]) -> ResultRow:
    row = dict(zip(run["columns"], values, strict=True))
    unknown = sorted(set(row) - set(DUMP_COLUMNS))
    if unknown:
        raise ValueError(f"unknown column {unknown[0]!r}")
    problem = _problem_of(row)
    config = Config.from_dict(run["configs"][row.pop("config")])
    row["created_at"] = time_of(row.get("created_at"))
    return ResultRow.of(problem, config, gpu=run["gpu"], **row)


def _problem_of(values: dict[str, Any]) -> Problem:
    """Takes the problem's fields out of a row; options that are not there are off."""
    shape = {name: values.pop(name) for name in PROBLEM_COLUMNS}
    return Problem(**shape, **{name: values.pop(name) for name in OPTION_FIELDS if name in values})


def _from_flat(
    columns: Iterable[str], records: Iterable[Mapping[str, Any]], parse: Any
) -> list[tuple[RunInfo, list[ResultRow]]]:
    lacking = [name for name in REQUIRED if name not in set(columns)]
    if lacking:
        raise ValueError(f"it lacks the columns {', '.join(lacking)}")
    runs: dict[str, tuple[RunInfo, list[ResultRow]]] = {}
    for record in records:
        empty = [name for name in REQUIRED if record.get(name) in (None, "")]
        if empty:
            raise ValueError(f"column {empty[0]!r} of a row is empty")
        unknown = sorted(str(name) for name in set(record) - set(ROW_COLUMNS + RUN_COLUMNS))
        if unknown:
            raise ValueError(f"unknown column {unknown[0]!r}")
        values = {
            name: parse(name, value) for name, value in record.items() if value not in (None, "")
        }
        uuid = values.pop("run_uuid")
        about = {name: values.pop(name, None) for name in RUN_COLUMNS}
        problem = _problem_of(values)
        config = Config.from_dict(values.pop("config"))
        own = {name: value for name, value in values.items() if name not in DERIVED_COLUMNS}
        row = ResultRow.of(problem, config, **own)
        if uuid not in runs:
            info = RunInfo(
                gpu=row.gpu,
                environment=about["environment"],
                measurement_policy=about["measurement_policy"] or {},
                command=about["run_command"] or "",
                source=about["run_source"] or row.source,
                uuid=uuid,
                started=about["run_started"],
                finished=about["run_finished"],
            )
            runs[uuid] = (info, [])
        runs[uuid][1].append(row)
    return list(runs.values())


def _read_parquet(content: bytes) -> tuple[list[str], list[dict[str, Any]]]:
    """Names of the columns, and the rows."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(io.BytesIO(content))
    return table.column_names, table.to_pylist()


def _parse_parquet(name: str, value: Any) -> Any:
    return json.loads(value) if column_kind(name) == "json" else value


def _parse_csv(name: str, text: str) -> Any:
    kind = column_kind(name)
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text)
    if kind == "bool":
        if text not in ("True", "False"):
            raise ValueError(f"column {name!r} is {text!r}, neither True nor False")
        return text == "True"
    if kind == "time":
        return time_of(text)
    if kind == "json":
        return json.loads(text)
    return text[1:] if text[0] == "'" and text[1:].startswith(FORMULA_STARTS) else text


def time_of(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None
