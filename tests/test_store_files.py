"""Which database opens: new, older, newer, another program's, read-only, locked or away; and what is said of it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from postgres_server import NOBODY, PostgresServer
from sqlalchemy import make_url
from store_rows import RUN, journal, row

from tuner.results import (
    Store,
    StoreError,
    StoreUnavailable,
    database,
    migrate,
)
from tuner.results.__main__ import main as results_command

HEAD = migrate.HEAD


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


# -- schema ---------------------------------------------------------------------------------------------------------


def test_migrations_make_exactly_the_models(store: Store) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    from tuner.results.models import Base

    scripts = ScriptDirectory(str(migrate.SCRIPTS))
    assert [script.revision for script in scripts.walk_revisions()] == list(
        reversed(migrate.REVISIONS)
    )
    assert store.schema_version() == migrate.HEAD
    with store._engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": migrate.VERSION_TABLE}
        )
        assert compare_metadata(context, Base.metadata) == []


@pytest.fixture
def next_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process becomes the next release, whose schema has one column more."""
    scripts = tmp_path / "migrations"
    shutil.copytree(migrate.SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    (scripts / "versions" / "next.py").write_text(
        f"import sqlalchemy as sa\nfrom alembic import op\n\nrevision = 'next'\ndown_revision = {HEAD!r}\n\n\n"
        "def upgrade():\n    op.add_column('dash_runs', sa.Column('label', sa.Text()))\n"
    )
    monkeypatch.setattr(migrate, "SCRIPTS", scripts)
    monkeypatch.setattr(migrate, "REVISIONS", (*migrate.REVISIONS, "next"))
    monkeypatch.setattr(migrate, "HEAD", "next")
    return monkeypatch


def _fill(url: str) -> None:
    with Store.open(url) as store:
        store.add(store.start_run(RUN), row(tflops=500.0))


def test_an_older_sqlite_is_migrated_after_a_backup_and_then_refused_by_the_old_release(
    tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "old.db"
    _fill(str(path))
    patch: pytest.MonkeyPatch = request.getfixturevalue("next_release")
    with Store.open(path) as store:
        assert store.schema_version() == "next"
        assert store.count() == 1
    backup = tmp_path / f"old.db.schema-{HEAD}.bak"
    assert str(backup) in caplog.text
    with closing(sqlite3.connect(backup)) as connection:
        assert connection.execute("SELECT version_num FROM dash_schema_version").fetchone() == (
            HEAD,
        )
        assert connection.execute("SELECT count(*) FROM dash_results").fetchone() == (1,)
    patch.undo()
    for read_only in (False, True):
        with pytest.raises(StoreError, match="schema next, made by a newer release of dash"):
            Store.open(path, read_only=read_only)


def test_an_older_postgresql_is_refused_until_the_named_command_ran(
    postgres: PostgresServer, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    url = postgres.database()
    _fill(url)
    request.getfixturevalue("next_release")
    with pytest.raises(StoreError, match="python -m tuner.results upgrade --db URL"):
        Store.open(url)
    assert results_command(["upgrade", "--db", url]) == 0
    assert "has schema next" in capsys.readouterr().out
    with Store.open(url) as store:
        assert store.count() == 1


def test_a_half_made_schema_is_rolled_back(url: str, next_release: pytest.MonkeyPatch) -> None:
    broken = migrate.SCRIPTS / "versions" / "next.py"
    whole = broken.read_text()
    broken.write_text(whole + "    op.execute('SELECT * FROM missing_table')\n")
    with pytest.raises(StoreError):
        Store.open(url)
    broken.write_text(whole)
    with Store.open(url) as store:
        assert store.schema_version() == "next"


# -- files that will not do -----------------------------------------------------------------------------------------


def test_the_journal_falls_back_with_one_clear_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def locked(path: Path, mode: str) -> str:
        raise sqlite3.OperationalError("locking protocol")

    for name, ask in (("delete", lambda path, mode: "delete"), ("locking protocol", locked)):
        monkeypatch.setattr(database, "ask_journal", ask)
        path = tmp_path / f"{name}.db"
        caplog.clear()
        with Store.open(path) as store:
            store.add(store.start_run(RUN), row())
            assert store.count() == 1
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert f"refused journal mode wal ({name})" in record.message
        assert "local disk" in record.message


def test_on_a_network_file_system_there_is_no_wal_and_a_warning_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home of users"
    home.mkdir()
    mounts = tmp_path / "mounts"
    escaped = str(home).replace(" ", "\\040")
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/home {escaped} nfs4 rw 0 0\n")
    monkeypatch.setattr(database, "MOUNTS", mounts)
    _fill(str(home / "deep" / "rows.db"))
    assert journal(home / "deep" / "rows.db") == "delete"
    assert "is on a network file system (nfs4): use it from one host only" in caplog.text
    caplog.clear()
    _fill(str(tmp_path / "local.db"))
    assert journal(tmp_path / "local.db") == "wal"
    assert not caplog.text


def test_a_file_system_that_cannot_lock_is_named_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        StoreError, match=r"rows.db.lock cannot be locked .*as on NFS; keep it on a local disk"
    ):
        Store.open(tmp_path / "rows.db")
    assert not (tmp_path / "rows.db").exists()


def test_the_rollback_journal_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "results.db"
    monkeypatch.setenv("DASH_SQLITE_JOURNAL", "delete")
    _fill(str(path))
    assert journal(path) == "delete"
    assert caplog.records == []
    monkeypatch.setenv("DASH_SQLITE_JOURNAL", "memory")
    with pytest.raises(StoreError, match="DASH_SQLITE_JOURNAL is 'memory'; choose wal or delete"):
        Store.open(tmp_path / "other.db")


def test_files_that_are_no_database_of_ours_are_refused_untouched(tmp_path: Path) -> None:
    text_file = tmp_path / "notes.txt"
    text_file.write_text("these are my notes, and they are long enough to be read as a header" * 20)
    foreign = tmp_path / "foreign.db"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE studies (id INTEGER)")
        connection.commit()
    before, theirs = text_file.read_bytes(), foreign.read_bytes()
    with pytest.raises(StoreError, match=r"notes.txt is not a usable SQLite file .*--db"):
        Store.open(text_file)
    with pytest.raises(StoreError, match=r"holds another program's tables \(studies"):
        Store.open(foreign)
    with pytest.raises(StoreError, match="is a folder"):
        Store.open(tmp_path)
    with pytest.raises(StoreError, match="folder .* cannot be made"):
        Store.open(text_file / "results.db")
    with pytest.raises(StoreError, match="cannot be reached .File name too long"):
        Store.open(tmp_path / f"{'x' * 300}.db")
    assert text_file.read_bytes() == before
    assert foreign.read_bytes() == theirs, "not even its journal"
    assert {path.name for path in tmp_path.glob("foreign*")} == {"foreign.db"}


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    path.touch()
    _fill(str(path))


def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database.os, "access", lambda path, mode: False)
    with pytest.raises(StoreError, match=r"cannot be written \(permission denied for .*DASH_DB"):
        Store.open(tmp_path / "results.db")
    assert list(tmp_path.iterdir()) == []


def test_reading_only_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with pytest.raises(StoreError, match="does not exist; run dash-tune first"):
        Store.open(path, read_only=True)
    assert list(tmp_path.iterdir()) == []
    _fill(str(path))
    with Store.open(path, read_only=True) as store:
        assert store.count() == 1
        with pytest.raises(StoreError, match="opened for reading only"):
            store.add(1, row(1))


def test_a_file_that_is_gone_takes_no_row_until_it_is_back(tmp_path: Path) -> None:
    path, aside = tmp_path / "results.db", tmp_path / "aside.db"
    with Store.open(path) as store:
        run = store.start_run(RUN)
        path.rename(aside)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="results.db is gone; put it back"):
                store.add(run, row(1))
            assert not path.exists()
            store.close()
        aside.rename(path)
        store.add(run, row(1))
        assert store.count() == 1


def test_a_file_in_the_place_of_the_one_that_was_opened_takes_no_row(tmp_path: Path) -> None:
    path, aside, other = (tmp_path / name for name in ("results.db", "aside.db", "other.db"))
    _fill(str(other))
    with Store.open(path) as store:
        run = store.start_run(RUN)
        path.rename(aside)
        other.rename(path)
        with pytest.raises(StoreUnavailable, match="results.db was replaced by another file; put"):
            store.add(run, row(1))
        path.rename(other)
        aside.rename(path)
        store.add(run, row(1))
        assert store.count() == 1
        for name in tmp_path.glob("results.db*"):
            name.unlink()
        other.rename(path)
        store.close()
        store.start_run(replace(RUN, uuid="another"))
        assert len(store.runs()) == 2, "opened anew, the file that is there is the database"


def test_a_database_in_a_folder_without_write_permission_can_be_read() -> None:
    folder = Path(tempfile.mkdtemp(prefix="dash-read-only-"))
    path, root = folder / "results.db", os.geteuid() == 0
    try:
        _fill(str(path))
        path.chmod(0o444)
        folder.chmod(0o555)
        if root:
            os.seteuid(NOBODY)
        with Store.open(path, read_only=True) as store:
            assert store.count() == 1
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_writer_that_holds_the_file_too_long_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.db"
    _fill(str(path))
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.1)
    with Store.open(path) as store, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert store.count() == 1
        with pytest.raises(StoreUnavailable, match="held by another writer"):
            store.start_run(RUN)
        other.execute("ROLLBACK")
        store.start_run(RUN)


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("postgresql://u:secret@db/dash", "postgres://u:secret@db/dash"):
        url = database.resolve_url(given)
        assert url.drivername == "postgresql+psycopg"
        assert "secret" not in database.show(url)
    assert database.resolve_url(f"sqlite:///{tmp_path}/a.db").database == f"{tmp_path}/a.db"
    assert database.resolve_url(None).database == f"{tmp_path}/user-data/dash/dash.db"
    monkeypatch.setenv("DASH_DB", f"{tmp_path}/b.db")
    assert database.resolve_url(None).database == f"{tmp_path}/b.db"
    for bad in ("mysql://u:secret@h/d", "://"):
        with pytest.raises(StoreError, match="sqlite") as caught:
            database.resolve_url(bad)
        assert "secret" not in str(caught.value)


def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="does not answer") as caught:
        Store.open(f"postgresql://user:secret@/dash?host={tmp_path}")
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_database_that_does_not_exist_on_its_server_is_named(postgres: PostgresServer) -> None:
    missing = make_url(postgres.database()).set(database="nothing_here")
    with pytest.raises(StoreError, match=r'"nothing_here" does not exist\); create it') as caught:
        Store.open(missing.render_as_string(hide_password=False))
    assert not isinstance(caught.value, StoreUnavailable)


def test_a_home_folder_that_is_not_there_is_named_with_the_remedy() -> None:
    with pytest.raises(StoreError, match="no home folder.*--db PATH"):
        database.resolve_url("~no-such-user/results.db")
