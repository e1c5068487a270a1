"""Store: every read and write of the results database, each in one short transaction."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar, cast
from uuid import uuid4

from sqlalchemy import Connection, Engine, Select, func, insert, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from tuner.results import database, migrate
from tuner.results.claims import Claim, settle
from tuner.results.models import ReleaseTable, Result, Run
from tuner.results.rows import (
    Release,
    ResultFilter,
    ResultRow,
    RunInfo,
    StoreError,
    StoreUnavailable,
    finite,
    utc_now,
)
from tuner.winners import FAILED_CHECKS, Cell

RUN_FIELDS = tuple(f.name for f in fields(RunInfo))
ROW_FIELDS = tuple(f.name for f in fields(ResultRow) if f.name != "run_uuid")
SWEEP = Run.environment_key + ":" + Run.policy_key
DECIDING = ("ok", *FAILED_CHECKS)  # what rows say that decide who wins
RELEASE_FIELDS = tuple(f.name for f in fields(Release))
NEWEST_RELEASE = (ReleaseTable.created_at.desc(), ReleaseTable.id.desc())
ANY = ResultFilter()
IDS_A_QUERY = 500  # SQLite bounds the parameters of a statement
REMEMBERED = 256  # answers kept in memory
T = TypeVar("T")


class Store:
    """A results database. Safe to share between threads; a process that forks opens its own.

    Every method raises StoreError with one line, or StoreUnavailable where a later try may succeed.
    """

    def __init__(self, engine: Engine, url: Any, read_only: bool = False) -> None:
        self.url = url
        self.read_only = read_only
        self._engine = engine
        self._writer = engine.execution_options(write=True)
        self._remembered: dict[Any, Any] = {}
        self._computing = threading.RLock()
        self._file = database.file_identity(url)

    @classmethod
    def open(cls, url: str | os.PathLike[str] | None = None, read_only: bool = False) -> Store:
        """Open a path or URL (None: ``DASH_DB``, else SQLite in the user's data folder), creating what is missing.

        ``read_only`` neither creates, migrates nor writes.
        """
        resolved = database.resolve_url(url)
        return cls(database.open_engine(resolved, read_only), resolved, read_only)

    def close(self) -> None:
        """Close the connections; the next call opens the file that stands at the database's path by now."""
        self._engine.dispose()
        self._file = database.file_identity(self.url) or self._file

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def where(self) -> str:
        """The database's name for messages, without its password."""
        return database.show(self.url)

    # -- runs and rows ----------------------------------------------------------------------------------------------

    def start_run(self, run: RunInfo) -> int:
        """Store the run and answer its id; a run whose uuid is known already keeps its id."""
        run = replace(run, uuid=run.uuid or str(uuid4()), started=run.started or utc_now())
        with self._write() as connection:
            known = connection.scalar(select(Run.id).where(Run.uuid == run.uuid))
            if known is not None:
                return int(known)
            values = {name: getattr(run, name) for name in RUN_FIELDS if name != "id"}
            values |= {
                "command": finite(run.command),
                "environment": finite(run.environment),
                "measurement_policy": finite(run.measurement_policy),
                "environment_key": run.environment_key,
                "policy_key": run.policy_key,
            }
            return _inserted(connection.execute(insert(Run).values(**values)))

    def finish_run(self, run_id: int) -> None:
        with self.transaction() as connection:
            connection.execute(update(Run).where(Run.id == run_id).values(finished=utc_now()))

    def add(self, run_id: int, row: ResultRow, claim: Claim | None = None) -> int:
        """Append one row and answer its id. A config that has a row in this run keeps it: the first one stays.

        With ``claim``, the row is stored and the claim finished together, or neither: raises ClaimLost where another
        process has taken the config since.
        """
        return self.add_many(run_id, [row], claim)[0]

    def add_many(
        self,
        run_id: int,
        rows: Sequence[ResultRow],
        claim: Claim | None = None,
        also: Sequence[tuple[int, ResultRow]] = (),
    ) -> list[int]:
        """Append rows in one transaction, with those of other runs in ``also``; ids of ``rows`` as :meth:`add` answers."""
        entries = [(run_id, rows), *((other, [row]) for other, row in also)]
        values = [value for run, its in entries for value in _row_values(run, its)]
        insert_ = sqlite.insert if self.is_sqlite else postgresql.insert
        once = insert_(Result).on_conflict_do_nothing(index_elements=["run_id", "config_hash"])
        with self.transaction() as connection:
            if claim is not None:
                settle(connection, claim)
            for run, its in entries:
                self._check_gpu(connection, run, its)
            self._take_turn(connection)  # last, because all others wait from here to the commit
            if values:
                connection.execute(once, values)
        return self._ids(run_id, [row.config_hash for row in rows])

    def _check_gpu(self, connection: Connection, run_id: int, rows: Sequence[ResultRow]) -> None:
        gpu = connection.scalar(select(Run.gpu).where(Run.id == run_id))
        if gpu is None:
            raise StoreError(f"database {self.where} has no run {run_id}; start one first")
        other = next((row.gpu for row in rows if row.gpu != gpu), None)
        if other is not None:
            raise StoreError(
                f"run {run_id} is of {gpu}; a row of {other} belongs to a run of its own"
            )

    def _ids(self, run_id: int, hashes: Sequence[str]) -> list[int]:
        ids: dict[str, int] = {}
        with self.reading() as connection:
            for start in range(0, len(hashes), IDS_A_QUERY):
                found = select(Result.config_hash, Result.id).where(
                    Result.run_id == run_id,
                    Result.config_hash.in_(hashes[start : start + IDS_A_QUERY]),
                )
                ids |= {row.config_hash: row.id for row in connection.execute(found)}
        return [ids[name] for name in hashes]

    def runs(self, gpu: str | None = None) -> list[RunInfo]:
        """Runs in the order of their ids."""
        query = select(*(getattr(Run, name) for name in RUN_FIELDS)).order_by(Run.id)
        if gpu is not None:
            query = query.where(Run.gpu == gpu)
        with self.reading() as connection:
            return [RunInfo(**row._mapping) for row in connection.execute(query)]

    def done_hashes(
        self,
        gpu: str,
        environment_key: str,
        source: str = "measured",
        *,
        policy_key: str | None = None,
        retry: Collection[str] = (),
    ) -> set[str]:
        """Config hashes that have a row in any run of this environment: what a resumed sweep skips.

        ``retry`` names statuses to try again, for instance ``("timeout", "runtime")``.
        """
        query = (
            select(Result.config_hash)
            .join(Run, Run.id == Result.run_id)
            .where(Run.gpu == gpu, Run.environment_key == environment_key, Result.source == source)
        )
        if policy_key is not None:
            query = query.where(Run.policy_key == policy_key)
        if retry:
            query = query.where(Result.status.not_in(tuple(retry)))
        with self.reading() as connection:
            return set(connection.scalars(query))

    def statuses(self, run: RunInfo, hashes: Collection[str]) -> dict[str, str]:
        """Statuses of these configs by hash, each from its newest row in the sweep (environment and policy) of ``run``."""
        names = sorted(hashes)
        found: dict[str, str] = {}
        if not names:
            return found
        with self.reading() as connection:
            for start in range(0, len(names), IDS_A_QUERY):
                query = (
                    select(Result.config_hash, Result.status)
                    .join(Run, Run.id == Result.run_id)
                    .where(Result.config_hash.in_(names[start : start + IDS_A_QUERY]))
                    .where(Run.gpu == run.gpu, Run.environment_key == run.environment_key)
                    .where(Run.policy_key == run.policy_key, Result.source == run.source)
                    .order_by(Result.id)
                )
                found |= {row.config_hash: row.status for row in connection.execute(query)}
        return found

    def results(
        self, filters: ResultFilter = ANY, limit: int | None = 1000, after_id: int = 0
    ) -> list[ResultRow]:
        """Rows with id > ``after_id`` in the order of ids: pass the last id of a page to get the next one."""
        query = matching(_rows(), filters).where(Result.id > after_id).order_by(Result.id)
        if limit is not None:
            query = query.limit(limit)
        with self.reading() as connection:
            return [ResultRow.stored(dict(row._mapping)) for row in connection.execute(query)]

    def rows_by_run(self) -> dict[str, int]:
        """Number of rows by the run's uuid, for runs that have any."""
        query = select(Run.uuid, func.count(Result.id)).join(Result).group_by(Run.uuid)
        with self.reading() as connection:
            return {uuid: int(rows) for uuid, rows in connection.execute(query)}

    def count(self, filters: ResultFilter = ANY) -> int:
        with self.reading() as connection:
            return int(connection.scalar(matching(select(func.count(Result.id)), filters)) or 0)

    # -- winners ----------------------------------------------------------------------------------------------------

    def winners(
        self,
        gpu: str,
        filters: ResultFilter = ANY,
        *,
        source: str = "measured",
        until_id: int | None = None,
    ) -> list[Cell]:
        """The winners of each cell (see ``tuner.winners``), remembered until the database has a newer row.

        ``until_id`` looks at rows up to this id only: what was known at the time of a release.
        """
        from tuner.results.newest import standing

        last = self.last_result_id()
        last = last if until_id is None else min(until_id, last)
        return self.remember(
            ("winners", gpu, filters, source, last),
            lambda: standing(self, gpu, filters, source=source, until_id=last),
        )

    def remember(self, key: Hashable, compute: Callable[[], T]) -> T:
        """``compute()``, kept for the next call with this key. A key names the state of the database it is true for."""
        held = self._remembered  # another thread may put an empty one in its place
        if key in held:
            return cast(T, held[key])
        with self._computing:  # others wait instead of computing the same
            if key not in self._remembered:
                value = compute()
                if len(self._remembered) >= REMEMBERED:
                    self._remembered = {}
                self._remembered[key] = value
            return cast(T, self._remembered[key])

    def forget(self) -> None:
        """Drop what was remembered: another database stands where this one was."""
        self._remembered = {}

    def candidates(
        self,
        gpu: str,
        filters: ResultFilter = ANY,
        *,
        source: str = "measured",
        sweep: str | None = None,
    ) -> list[tuple[ResultRow, str]]:
        """Rows that decide who wins, oldest first, each with the name of its sweep (environment and policy).

        ``sweep``: of this one only.
        """
        query = _rows().add_columns(SWEEP.label("sweep"))
        query = matching(query, replace(filters, gpu=gpu, source=source, status=None))
        query = query.where(Result.status.in_(DECIDING))
        if sweep is not None:
            query = of_sweep(query, sweep)
        with self.reading() as connection:
            query = query.order_by(Result.created_at, Result.id)
            found = [dict(row._mapping) for row in connection.execute(query)]
        return [
            (ResultRow.stored(values), name) for values in found for name in [values.pop("sweep")]
        ]

    def last_result_id(self) -> int:
        """The newest row's id, 0 when there is none. Rows are never changed, so it names the database's state."""
        with self.reading() as connection:
            return int(connection.scalar(select(func.max(Result.id))) or 0)

    def state(self) -> tuple[int, int]:
        """Ids of the newest row and the newest release, 0 for none: equal states give equal answers."""
        row, release = (
            select(func.max(table.id)).scalar_subquery() for table in (Result, ReleaseTable)
        )
        with self.reading() as connection:
            found = connection.execute(select(row, release)).one()
        return int(found[0] or 0), int(found[1] or 0)

    def gpus(self) -> list[str]:
        """GPUs that have rows."""
        with self.reading() as connection:
            has_rows = select(Result.id).where(Result.run_id == Run.id).exists()
            return list(
                connection.scalars(select(Run.gpu).where(has_rows).distinct().order_by(Run.gpu))
            )

    # -- releases ---------------------------------------------------------------------------------------------------

    def add_release(self, release: Release) -> Release:
        """Store an immutable lookup table and answer it with its number. A name may be used once a GPU."""
        values = {name: getattr(release, name) for name in RELEASE_FIELDS if name != "id"}
        values |= {
            "overall": finite(release.overall),
            "created_at": release.created_at or utc_now(),
        }
        try:
            with self._write() as connection:
                number = _inserted(connection.execute(insert(ReleaseTable).values(**values)))
        except IntegrityError:
            raise StoreError(
                f"release {release.name!r} of {release.gpu} exists; releases are immutable"
            ) from None
        return replace(release, id=number, created_at=values["created_at"])

    def releases(self, gpu: str | None = None) -> list[Release]:
        """Releases, newest first."""
        query = select(*(getattr(ReleaseTable, name) for name in RELEASE_FIELDS))
        query = query.order_by(*NEWEST_RELEASE)
        if gpu is not None:
            query = query.where(ReleaseTable.gpu == gpu)
        with self.reading() as connection:
            return [Release(**row._mapping) for row in connection.execute(query)]

    def get_release(self, number: int | None = None, gpu: str | None = None) -> Release | None:
        """The release of this number, or the newest (of ``gpu``); None where there is none."""
        query = select(*(getattr(ReleaseTable, name) for name in RELEASE_FIELDS))
        if number is not None:
            query = query.where(ReleaseTable.id == number)
        if gpu is not None:
            query = query.where(ReleaseTable.gpu == gpu)
        with self.reading() as connection:
            row = connection.execute(query.order_by(*NEWEST_RELEASE).limit(1)).first()
        return None if row is None else Release(**row._mapping)

    # -- the rest ---------------------------------------------------------------------------------------------------

    def load_shipped(self) -> int:
        """Add the measured rows that came with the package, and the releases frozen from them, where they are missing.

        Answers how many rows were new. Safe to call at each start.
        """
        from tuner.importing import load_shipped

        return load_shipped(self)

    def schema_version(self) -> str:
        with self.reading() as connection:
            return str(migrate.current_version(connection))

    def ping(self) -> None:
        """Raises StoreUnavailable when the database does not answer."""
        with self.reading() as connection:
            connection.execute(text("SELECT 1"))

    @property
    def is_sqlite(self) -> bool:
        return bool(self.url.drivername == "sqlite")

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with database.errors(self.url), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One short transaction that may write."""
        if self.read_only:
            raise StoreError(f"database {self.where} was opened for reading only")
        self._require_same_file()
        with database.errors(self.url), self._writer.begin() as connection:
            yield connection

    def _require_same_file(self) -> None:
        """SQLite would write on into a file that has no name any more, and lose it."""
        found = database.file_identity(self.url)
        if found != self._file:
            how = "was replaced by another file; put the first one" if found else "is gone; put it"
            raise StoreUnavailable(f"database {self.where} {how} back and try again")

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with self.transaction() as connection:
            self._take_turn(connection)
            yield connection

    def _take_turn(self, connection: Connection) -> None:
        """One writer at a time, so that rows become visible in the order of their ids: pages and answers rely on it."""
        if not self.is_sqlite:  # which has one writer at a time anyway
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('dash_write'))"))


def _row_values(run_id: int, rows: Sequence[ResultRow]) -> list[dict[str, Any]]:
    now = utc_now()
    return [
        {name: getattr(row, name) for name in ROW_FIELDS if name != "id"}
        | {"run_id": run_id, "created_at": row.created_at or now}
        for row in rows
    ]


def _rows() -> Select[Any]:
    columns = [getattr(Result, name) for name in ROW_FIELDS]
    return select(*columns, Run.uuid.label("run_uuid")).join(Run, Run.id == Result.run_id)


def of_sweep(query: Select[Any], sweep: str) -> Select[Any]:
    """Narrowed to the runs of one sweep, named as :data:`SWEEP` names it."""
    environment, _, policy = sweep.partition(":")
    return query.where(Run.environment_key == environment, Run.policy_key == policy)


def matching(query: Select[Any], filters: ResultFilter) -> Select[Any]:
    for name, value in filters.equalities().items():
        query = query.where(getattr(Result, name) == value)
    if filters.since is not None:
        query = query.where(Result.created_at >= filters.since)
    if filters.until is not None:
        query = query.where(Result.created_at <= filters.until)
    return query


def _inserted(result: Any) -> int:
    return int(result.inserted_primary_key[0])
