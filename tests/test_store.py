"""The results database on SQLite and on a real PostgreSQL: what goes in comes out, whoever dies meanwhile."""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import multiprocessing
import os
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from postgres_server import NOBODY, PostgresServer
from sqlalchemy import make_url, text

from dash_kernels.problem import Config, Problem
from tuner.results import (
    Release,
    ResultFilter,
    ResultRow,
    RunInfo,
    Store,
    StoreError,
    StoreUnavailable,
    config_hash,
    database,
    migrate,
)
from tuner.results.__main__ import main as results_command

HEAD = migrate.HEAD
PROBLEM = Problem("causal", 128, 4096, batch=4, heads=16)
RUN = RunInfo("h200", {"gpu": "h200", "driver": "580"}, {"zeroing": True}, "dash-tune --gpu h200")


def row(number: int = 0, **values: object) -> ResultRow:
    return ResultRow.of(replace(PROBLEM, batch=number + 1), Config(), gpu="h200", **values)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


# -- values ---------------------------------------------------------------------------------------------------------


def test_a_row_comes_back_as_it_went_in(store: Store) -> None:
    run_id = store.start_run(RUN)
    full = row(
        tflops=512.5, ms=1.25, ms_low=1.2, ms_high=1.3, samples=[1.2, 1.25, 1.3], speedup_vs_baseline=1.9,
        registers=168, spill_bytes=0, shared_bytes=229_000, required_bytes=2**40, limit_bytes=232_448,
        max_abs_error=1e-3, rel_error=2e-3, budget=4e-3, bits_equal=True, runs_compared=100, min_resident=1,
        numerics_key="0123456789abcdef", telemetry={"clocks": [1980, 1965]}, predicted=1.1, above_peak=True,
        created_at=datetime(2026, 1, 2, 3, 4, 5, 678901, timezone.utc),
    )  # fmt: skip
    identifier = store.add(run_id, full)
    (found,) = store.results()
    assert found == replace(full, id=identifier, run_id=run_id, run_uuid=store.runs()[0].uuid)
    assert found.to_problem() == replace(PROBLEM, batch=1)
    assert found.to_config() == Config()
    (run,) = store.runs()
    assert (run.gpu, run.environment, run.measurement_policy) == (
        "h200",
        RUN.environment,
        {"zeroing": True},
    )
    assert run.sweep == RUN.sweep
    assert run.finished is None
    store.finish_run(run_id)
    assert store.runs()[0].finished is not None


def test_nan_and_infinity_are_null_at_any_depth(store: Store) -> None:
    odd = row(
        tflops=math.nan, ms=math.inf, samples=[1.0, math.nan], telemetry={"power": {"w": -math.inf}}
    )
    store.add(store.start_run(replace(RUN, environment={"rate": math.nan})), odd)
    (found,) = store.results()
    assert (found.tflops, found.ms, found.samples) == (None, None, [1.0, None])
    assert found.telemetry == {"power": {"w": None}}
    assert store.runs()[0].environment == {"rate": None}


def test_error_texts_of_any_kind_are_stored(store: Store) -> None:
    store.add(
        store.start_run(replace(RUN, command="lone \ud800")),
        row(status="runtime", error="bad \0 byte, lone \ud800 surrogate" + "x" * 99_999),
    )
    error = store.results()[0].error
    assert error is not None
    assert error.startswith("bad  byte, lone ? surrogate")
    assert len(error) == 16_000


@pytest.mark.parametrize("field", ["status", "source", "direction"])
def test_a_value_outside_its_set_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 'odd'"):
        row(**{field: "odd"})


def test_config_hash_tells_apart_all_that_differs() -> None:
    hashes = {
        config_hash(PROBLEM, Config()),
        config_hash(replace(PROBLEM, batch=2), Config()),
        config_hash(PROBLEM, Config(num_stages=3)),
        config_hash(PROBLEM, Config(), "compiled"),
        config_hash(PROBLEM, Config(), direction="forward"),
    }
    assert len(hashes) == 5
    assert row().config_hash == config_hash(replace(PROBLEM, batch=1), Config())


# -- append-only ----------------------------------------------------------------------------------------------------


def test_a_config_has_one_row_a_run_and_the_first_stays(store: Store) -> None:
    run_id = store.start_run(RUN)
    first = store.add(run_id, row(tflops=500.0))
    assert store.add(run_id, row(tflops=600.0)) == first
    second_run = store.start_run(RUN)
    assert store.add(second_run, row(tflops=600.0)) > first
    assert [found.tflops for found in store.results()] == [500.0, 600.0]


def test_a_run_known_by_its_uuid_keeps_its_id(store: Store) -> None:
    run_id = store.start_run(replace(RUN, uuid="a-uuid"))
    assert store.start_run(replace(RUN, uuid="a-uuid")) == run_id


def test_rows_of_no_run_or_of_another_gpu_are_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="no run 77"):
        store.add(77, row())
    with pytest.raises(StoreError, match="a row of h800 belongs to a run of its own"):
        store.add(store.start_run(RUN), replace(row(), gpu="h800"))
    assert store.count() == 0
    assert store.gpus() == []


def test_resume_skips_what_has_a_row_in_the_same_environment(store: Store) -> None:
    run_id = store.start_run(RUN)
    done, late = row(0, tflops=1.0), row(1, status="timeout", error="120 s")
    store.add_many(run_id, [done, late])
    other = store.start_run(replace(RUN, environment={"gpu": "h200", "driver": "581"}))
    store.add(other, row(2))
    key = RUN.environment_key
    assert store.done_hashes("h200", key) == {done.config_hash, late.config_hash}
    assert store.done_hashes("h200", key, retry=("timeout", "runtime")) == {done.config_hash}
    assert store.done_hashes("h200", key, "compiled") == set()
    assert store.done_hashes("h800", key) == set()
    assert store.done_hashes("h200", key, policy_key=RUN.policy_key) == {
        done.config_hash,
        late.config_hash,
    }
    assert store.done_hashes("h200", key, policy_key="another") == set()


# -- filters, times, pages ------------------------------------------------------------------------------------------


def test_times_are_compared_and_answered_in_utc(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        pacific = timezone(timedelta(hours=-8))
        store.add(
            store.start_run(RUN), row(created_at=datetime(2026, 1, 1, 13, 30, tzinfo=pacific))
        )
        bound = datetime(2026, 1, 1, 21, 0, tzinfo=timezone.utc)
        (found,) = store.results(ResultFilter(since=bound))
        assert found.created_at == datetime(2026, 1, 1, 21, 30, tzinfo=timezone.utc)
        assert found.created_at.utcoffset() == timedelta(0)
        assert store.results(ResultFilter(until=bound)) == []
        assert len(store.results(ResultFilter(until=bound + timedelta(minutes=30)))) == 1
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_time_without_zone_is_refused() -> None:
    naive = datetime(2026, 1, 1)
    with pytest.raises(ValueError, match="since 2026-01-01T00:00:00 has no time zone"):
        ResultFilter(since=naive)
    with pytest.raises(ValueError, match="created_at"):
        row(created_at=naive)


def test_pages_hold_every_row_once_though_all_are_equal(store: Store) -> None:
    run_id = store.start_run(RUN)
    ids = store.add_many(run_id, [row(number, tflops=500.0) for number in range(1000)])
    seen: list[int] = []
    while page := store.results(limit=50, after_id=seen[-1] if seen else 0):
        assert len(page) == 50
        seen += [found.id or 0 for found in page]
    assert seen == sorted(ids)
    assert len(set(seen)) == 1000


def test_filters_select_by_column(store: Store) -> None:
    run_id = store.start_run(RUN)
    store.add(run_id, row(0, status="timeout"))
    store.add(run_id, ResultRow.of(PROBLEM, Config(schedule="shift"), gpu="h200"))
    assert [found.schedule for found in store.results(ResultFilter(schedule="shift"))] == ["shift"]
    assert store.count(ResultFilter(status="timeout", head_dim=128)) == 1
    assert store.count(ResultFilter(head_dim=64)) == 0
    assert store.gpus() == ["h200"]


# -- several processes ----------------------------------------------------------------------------------------------


def _tune(url: str, worker: int, barrier: object, pause: float) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    with Store.open(url) as store:
        run_id = store.start_run(replace(RUN, command=f"worker {worker}"))
        done = store.done_hashes(RUN.gpu, RUN.environment_key)
        for number in range(50):
            todo = row(worker * 50 + number, tflops=500.0)
            if todo.config_hash not in done:
                store.add(run_id, todo)
                time.sleep(pause)


def _start(url: str, workers: list[int], pause: float) -> list[multiprocessing.process.BaseProcess]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(workers) + 1)
    processes = [
        context.Process(target=_tune, args=(url, worker, barrier, pause)) for worker in workers
    ]
    for process in processes:
        process.start()
    barrier.wait(60)
    return processes


def test_four_processes_fill_a_fresh_database_though_one_is_killed(url: str) -> None:
    processes = _start(url, [0, 1, 2, 3], pause=0.01)
    deadline = time.monotonic() + 60
    with Store.open(url) as store:

        def written(worker: int) -> int:
            runs = [run.id for run in store.runs() if run.command == f"worker {worker}"]
            return store.count(ResultFilter(run_id=runs[0])) if runs else 0

        while written(2) < 10 and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(processes[2].pid or 0, signal.SIGKILL)
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0, -signal.SIGKILL, 0]
        assert 10 <= written(2) < 50

        (resumed,) = _start(url, [2], pause=0)
        resumed.join(60)
        assert resumed.exitcode == 0
        found = store.results()
        assert len(found) == 200
        assert len({one.config_hash for one in found}) == 200
    if "://" not in url:
        with closing(sqlite3.connect(url)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert _journal(Path(url)) == "wal"


def _journal(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("PRAGMA journal_mode").fetchone()[0])


def test_a_reader_that_pages_by_id_misses_no_row_of_writers_beside_it(store: Store) -> None:
    started, each = store.start_run(RUN), 40

    def write(first: int) -> None:
        for number in range(first, first + each):
            store.add(started, row(number))

    seen: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, each * place) for place in range(4)]
        done = False
        while not done:
            done = all(writer.done() for writer in writers)
            page = store.results(after_id=seen[-1] if seen else 0)
            seen += [found.id for found in page if found.id is not None]
    for writer in writers:
        writer.result()
    assert len(seen) == store.count() == 4 * each


def test_threads_may_share_a_database_in_memory() -> None:
    with Store.open("sqlite://") as store, ThreadPoolExecutor(8) as pool:
        started = store.start_run(RUN)
        ids = list(pool.map(lambda number: store.add(started, row(number)), range(64)))
        pages = list(pool.map(lambda _: len(store.results()), range(64)))
    assert len(set(ids)) == 64
    assert set(pages) == {64}


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
    assert _journal(home / "deep" / "rows.db") == "delete"
    assert "is on a network file system (nfs4): use it from one host only" in caplog.text
    caplog.clear()
    _fill(str(tmp_path / "local.db"))
    assert _journal(tmp_path / "local.db") == "wal"
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
    assert _journal(path) == "delete"
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
    before = text_file.read_bytes()
    with pytest.raises(StoreError, match=r"notes.txt is not a usable SQLite file .*--db"):
        Store.open(text_file)
    with pytest.raises(StoreError, match=r"holds another program's tables \(studies"):
        Store.open(foreign)
    with pytest.raises(StoreError, match="is a folder"):
        Store.open(tmp_path)
    with pytest.raises(StoreError, match="folder .* cannot be made"):
        Store.open(text_file / "results.db")
    assert text_file.read_bytes() == before
    with closing(sqlite3.connect(foreign)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("studies",)]


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


def test_ping(store: Store) -> None:
    store.ping()


# -- releases -------------------------------------------------------------------------------------------------------


def test_releases_are_numbered_and_immutable(store: Store) -> None:
    assert store.get_release() is None
    first = store.add_release(
        Release("h200", "h200-a", "d1", '{"cells": []}', "first", [{"x": math.nan}], 7)
    )
    second = store.add_release(Release("h800", "h800-a", "d2", "{}"))
    assert (first.id or 0) < (second.id or 0)
    found = store.get_release(first.id)
    assert found == replace(first, overall=[{"x": None}])
    assert store.get_release() == second
    assert store.get_release(gpu="h200") == found
    assert store.get_release(second.id, gpu="h200") is None
    assert store.releases() == [second, found]
    with pytest.raises(StoreError, match="'h200-a' of h200 exists; releases are immutable"):
        store.add_release(Release("h200", "h200-a", "d3", "{}"))
    with store._engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM dash_releases")).scalar() == 2


def test_a_home_folder_that_is_not_there_is_named_with_the_remedy() -> None:
    with pytest.raises(StoreError, match="no home folder.*--db PATH"):
        database.resolve_url("~no-such-user/results.db")


def test_a_host_that_is_lost_inside_a_transaction_does_not_keep_the_others_waiting(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "SILENT_SECONDS", 1.0)
    url = postgres.database()
    with Store.open(url) as lost, Store.open(url) as other:
        run_id = lost.start_run(RUN)
        with pytest.raises(StoreError), lost._write() as connection:  # noqa: PT012
            connection.execute(text("UPDATE dash_runs SET command = 'lost'"))
            other.add(run_id, row(2))  # waits until the server has ended the silent one
            connection.execute(text("SELECT 1"))
        assert [found.config_hash for found in other.results()] == [row(2).config_hash]
