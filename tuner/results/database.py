"""Opens the database: which one, its engine, its journal mode, its schema. One line of error for each way to fail."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, TimeoutError
from sqlalchemy.pool import QueuePool

from tuner.results import migrate
from tuner.results.rows import NotOurDatabase, StoreError, StoreUnavailable

log = logging.getLogger("dash.results")

BUSY_SECONDS = 30.0
SILENT_SECONDS = 30.0  # inside a PostgreSQL transaction, before the server ends it
BUSY_VARIABLE = "DASH_SQLITE_BUSY_S"
JOURNAL_VARIABLE = "DASH_SQLITE_JOURNAL"
CHOOSE = "pass --db PATH or set DASH_DB"
MOUNTS = Path("/proc/self/mounts")
# Hosts that share a file on one of these share neither its locks nor the memory that WAL keeps beside it.
NETWORK_FILE_SYSTEMS = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "panfs"),
    *("wekafs", "glusterfs", "fuse.glusterfs", "fuse.sshfs", "fuse.ceph", "fuse.beegfs"),
}


def resolve_url(database: str | os.PathLike[str] | None) -> URL:
    """A path, a URL, or None for ``DASH_DB`` and then the user's data folder, as an SQLAlchemy URL."""
    try:
        return _resolve(os.fspath(database) if database is not None else os.environ.get("DASH_DB"))
    except RuntimeError:
        raise StoreError(
            f"this user has no home folder to find the database in; {CHOOSE}"
        ) from None


def _resolve(text_: str | None) -> URL:
    if not text_:
        from platformdirs import user_data_dir

        text_ = str(Path(user_data_dir("dash", appauthor=False)) / "dash.db")
    if "://" not in text_:
        return URL.create("sqlite", database=str(Path(text_).expanduser().absolute()))
    try:
        url = make_url(text_)
    except (ArgumentError, ValueError):
        raise StoreError(
            "the database URL cannot be read; write sqlite:///PATH or postgresql://HOST/NAME"
        ) from None
    kind = url.get_backend_name()
    if kind in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    if kind != "sqlite":
        raise StoreError(
            f"database URL {show(url)}: {kind} is not supported; use sqlite or postgresql"
        )
    if url.database in (None, "", ":memory:"):
        return URL.create("sqlite")
    return URL.create("sqlite", database=str(Path(str(url.database)).expanduser().absolute()))


def show(url: URL) -> str:
    """The database's name for messages, without its password."""
    return (
        url.database or "memory"
        if url.drivername == "sqlite"
        else url.render_as_string(hide_password=True)
    )


def file_identity(url: URL) -> tuple[int, int] | None:
    """Device and inode of a SQLite database's file as it stands now; None where there is no file."""
    if url.drivername != "sqlite" or url.database is None:
        return None
    try:
        found = os.stat(url.database)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def open_engine(url: URL, read_only: bool) -> Engine:
    """An engine whose schema is this release's. Raises StoreError."""
    if url.drivername != "sqlite":
        engine = _postgres_engine(url)
        try:
            with errors(url):
                _prepare_postgres(engine, url, read_only)
        except BaseException:
            engine.dispose()
            raise
        return engine
    if url.database is None:
        engine = _sqlite_engine(":memory:", pool_size=1, max_overflow=0)  # threads take turns
        with engine.execution_options(write=True).begin() as connection:
            migrate.upgrade(connection)
        return engine
    path = Path(url.database)
    if read_only:
        return _open_sqlite_read_only(path, url)
    return _open_sqlite(path, url)


@contextmanager
def errors(url: URL) -> Iterator[None]:
    """Turns a driver's error into StoreError (this database will not do) or StoreUnavailable (not now).

    A broken constraint is the caller's to judge and passes as it is.
    """
    try:
        yield
    except IntegrityError:
        raise
    except TimeoutError:
        raise StoreUnavailable(
            f"database {show(url)}: all connections are busy; try again"
        ) from None
    except DBAPIError as error:
        reason = (
            str(error.orig).strip().splitlines()[0]
            if str(error.orig).strip()
            else type(error.orig).__name__
        )
        raise _explain(reason, url, error.connection_invalidated) from error


def _explain(reason: str, url: URL, disconnected: bool) -> StoreError:
    where = f"database {show(url)}"
    low = reason.lower()
    if "not a database" in low or "malformed" in low:
        lacks = f"is not a usable SQLite file ({reason})"
        return NotOurDatabase(where, lacks, f"move it away, or {CHOOSE}")
    if "readonly" in low or "read-only" in low or "permission denied" in low:
        return StoreError(f"{where} cannot be written ({reason}); {CHOOSE}")
    if "locking protocol" in low or "disk i/o error" in low:
        return StoreUnavailable(
            f"{where} cannot be locked ({reason}), as on NFS; keep it on a local disk ({CHOOSE}), "
            f"or set {JOURNAL_VARIABLE}=delete"
        )
    if "full" in low and url.drivername == "sqlite":
        return StoreUnavailable(f"{where}: the disk is full; free space and try again")
    if "locked" in low or "busy" in low:
        return StoreUnavailable(
            f"{where} is held by another writer for over {busy_seconds():g} s; try again"
        )
    if "does not exist" in low or "authentication failed" in low:
        return StoreError(f"{where} cannot be opened ({reason}); create it, or {CHOOSE}")
    if url.drivername != "sqlite" and (
        disconnected or "connect" in low or "shut" in low or "timeout" in low
    ):
        return StoreUnavailable(f"{where} does not answer ({reason}); start it, or {CHOOSE}")
    return StoreError(f"{where}: {reason}")


# -- SQLite ---------------------------------------------------------------------------------------------------------


def _sqlite_engine(target: str, **options: Any) -> Engine:
    """``target`` is a file: URI or :memory:."""

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            target, timeout=busy_seconds(), check_same_thread=False, uri=True
        )
        connection.isolation_level = None  # transactions are begun below, not by the driver
        connection.execute("PRAGMA foreign_keys = ON")
        if connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
            connection.execute("PRAGMA synchronous = NORMAL")  # with WAL: safe, and no wait a row
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, **options)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def busy_seconds() -> float:
    """How long to wait for another writer of a SQLite file: DASH_SQLITE_BUSY_S, else half a minute."""
    text_ = os.environ.get(BUSY_VARIABLE) or str(BUSY_SECONDS)
    try:
        return max(0.0, float(text_))
    except ValueError:
        raise StoreError(f"{BUSY_VARIABLE} is {text_!r}; give seconds, such as 5") from None


def _file_engine(path: Path, query: str = "") -> Engine:
    return _sqlite_engine(path.as_uri() + query, pool_size=8, max_overflow=56)


def _open_sqlite(path: Path, url: URL) -> Engine:
    _require_writable(path)
    engine = _file_engine(path)
    try:
        with errors(url):
            if path.exists():
                if _ready(engine, url):
                    return engine
                with engine.connect() as connection:  # before a lock, a journal or a table is made
                    _refuse_foreign(connection, path)
            with _file_lock(path):
                _set_journal(path)
                _migrate_sqlite(engine, path, url)
        return engine
    except BaseException:
        engine.dispose()
        raise


def _require_reachable(path: Path) -> None:
    """A folder that may not be entered, or a name that is too long, is no missing file."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise StoreError(
            f"database {path} cannot be reached ({error.strerror}); {CHOOSE}"
        ) from None


def _require_writable(path: Path) -> None:
    _require_reachable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"database folder {path.parent} cannot be made ({error.strerror}); {CHOOSE}"
        ) from None
    if path.is_dir():
        raise StoreError(f"database {path} is a folder; name a file in it")
    for target in (path.parent, path):
        if target.exists() and not os.access(target, os.W_OK):
            raise StoreError(
                f"database {path} cannot be written (permission denied for {target}); {CHOOSE}"
            )


def _ready(engine: Engine, url: URL) -> bool:
    with engine.connect() as connection:
        version = migrate.current_version(connection)
    migrate.check_known(version, f"database {show(url)}")
    return version == migrate.HEAD


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """One process at a time creates or migrates the file; the lock dies with its holder."""
    from filelock import FileLock, Timeout

    lock = FileLock(f"{path}.lock", timeout=BUSY_SECONDS * 2)
    try:
        lock.acquire()
    except Timeout:
        raise StoreUnavailable(
            f"database {path} is being migrated by another process; try again"
        ) from None
    except (OSError, NotImplementedError) as error:
        raise StoreError(
            f"{path}.lock cannot be locked ({error}), as on NFS; keep it on a local disk: {CHOOSE}"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _set_journal(path: Path) -> None:
    """Switch the file to WAL, which lasts; keep the rollback journal, and say so, where WAL is refused."""
    network = network_file_system(path)
    wanted = os.environ.get(JOURNAL_VARIABLE, "delete" if network else "wal").lower()
    if wanted not in ("wal", "delete"):
        raise StoreError(f"{JOURNAL_VARIABLE} is {wanted!r}; choose wal or delete")
    if network:
        log.warning(
            "database %s is on a network file system (%s): use it from one host only, keep it on a local disk (%s), or "
            "share a PostgreSQL",
            path,
            network,
            CHOOSE,
        )
    try:
        answer = ask_journal(path, wanted)
    except sqlite3.OperationalError as error:
        answer = str(error)
    except sqlite3.DatabaseError as error:
        raise _explain(str(error), URL.create("sqlite", database=str(path)), False) from error
    if answer != wanted:
        log.warning(
            "database %s: SQLite refused journal mode %s (%s); going on with its rollback journal, with which readers "
            "wait for writers. Keep the file on a local disk, or set %s=delete to accept this.",
            path,
            wanted,
            answer,
            JOURNAL_VARIABLE,
        )


def network_file_system(path: Path) -> str | None:
    """The type of the network file system that holds ``path``; None on a local one, and where the system does not say."""
    try:
        mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return None
    folder, held, kind = path.parent.resolve(), -1, ""
    for _, point, type_, *_ in mounts:
        mounted = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point))  # spaces
        if folder.is_relative_to(mounted) and len(mounted.parts) >= held:
            held, kind = len(mounted.parts), type_
    return kind if kind in NETWORK_FILE_SYSTEMS else None


def ask_journal(path: Path, mode: str) -> str:
    """Ask SQLite for a journal mode; it answers with the one that is in force."""
    with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
        return str(connection.execute(f"PRAGMA journal_mode = {mode}").fetchone()[0])


def _refuse_foreign(connection: Connection, path: Path) -> None:
    tables = inspect(connection).get_table_names()
    if tables and migrate.current_version(connection) is None:
        raise StoreError(
            f"database {path} holds another program's tables ({tables[0]}, ...); {CHOOSE}"
        )


def _migrate_sqlite(engine: Engine, path: Path, url: URL) -> None:
    with engine.execution_options(write=True).begin() as connection:
        version = migrate.current_version(connection)
        migrate.check_known(version, f"database {path}")
        if version == migrate.HEAD:
            return
        _refuse_foreign(connection, path)
        if version is not None:
            log.warning(
                "database %s: schema %s becomes %s; backup in %s",
                path,
                version,
                migrate.HEAD,
                _backup(path, version),
            )
        migrate.upgrade(connection)


def _backup(path: Path, version: str) -> Path:
    """A whole copy of the database beside it, under a name that is still free."""
    backup, count = path.with_name(f"{path.name}.schema-{version}.bak"), 1
    while backup.exists():
        count += 1
        backup = path.with_name(f"{path.name}.schema-{version}.{count}.bak")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(backup)) as copy:
        source.backup(copy)
    return backup


def _open_sqlite_read_only(path: Path, url: URL) -> Engine:
    """Opens without writing a byte; ``immutable`` where not even WAL's side files can be made."""
    _require_reachable(path)
    if not path.is_file():
        raise StoreError(f"database {path} does not exist; run dash-tune first, or {CHOOSE}")
    failure: StoreError | None = None
    for query in ("?mode=ro", "?immutable=1"):
        engine = _file_engine(path, query)
        try:
            with errors(url):
                ready = _ready(engine, url)
        except StoreError as error:
            engine.dispose()
            failure = failure or error
            if "schema" in str(error):
                raise
            continue
        if not ready:
            with errors(url), engine.connect() as connection:
                version = migrate.current_version(connection)
            engine.dispose()
            where, remedy = f"database {path}", "a command that writes to it mends that"
            if version is None:
                raise NotOurDatabase(where, "holds no table of dash", remedy)
            raise StoreError(f"{where} has the older schema {version}; {remedy}")
        return engine
    assert failure is not None
    raise failure


# -- PostgreSQL -----------------------------------------------------------------------------------------------------


def _postgres_engine(url: URL) -> Engine:
    try:
        import psycopg  # noqa: F401  (named here so that its absence has its own message)
    except ImportError:
        raise StoreError('PostgreSQL needs psycopg: pip install "psycopg[binary]"') from None
    query = {"connect_timeout": "5", **url.query}
    engine = create_engine(url.set(query=query), pool_pre_ping=True, pool_size=8, max_overflow=24)

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: Any) -> None:
        """A host that is lost inside a transaction must not hold the others' locks for as long as TCP believes in it."""
        connection.execute(f"SET idle_in_transaction_session_timeout = {SILENT_SECONDS * 1000:.0f}")
        connection.commit()

    return engine


def _prepare_postgres(engine: Engine, url: URL, read_only: bool) -> None:
    with engine.connect() as connection:
        version = migrate.current_version(connection)
    migrate.check_known(version, f"database {show(url)}")
    if version == migrate.HEAD:
        return
    if version is None and read_only:
        remedy = "a command that writes to it mends that"
        raise NotOurDatabase(f"database {show(url)}", "holds no table of dash", remedy)
    if version is not None:
        raise StoreError(
            f"database {show(url)} has schema {version}, this release needs {migrate.HEAD}; "
            "stop its users and run: python -m tuner.results upgrade --db URL"
        )
    _upgrade_postgres(engine)


def upgrade(database: str | os.PathLike[str] | None) -> str:
    """Bring a database's schema to this release's on request; answers its name. The only way for PostgreSQL."""
    url = resolve_url(database)
    if url.drivername == "sqlite":
        open_engine(url, read_only=False).dispose()
        return show(url)
    engine = _postgres_engine(url)
    try:
        with errors(url):
            _upgrade_postgres(engine)
    finally:
        engine.dispose()
    return show(url)


def _upgrade_postgres(engine: Engine) -> None:
    """Migrate under an advisory lock, so that several servers may start on one empty database."""
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('dash_schema'))"))
        migrate.check_known(migrate.current_version(connection), "the database")
        migrate.upgrade(connection)
