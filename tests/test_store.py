"""The results database on SQLite and on a real PostgreSQL: what goes in comes out, whoever dies meanwhile."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from postgres_server import PostgresServer
from sqlalchemy import text
from store_rows import PROBLEM, RUN, journal, row

from dash_kernels.problem import Config
from tuner.results import (
    Release,
    ResultFilter,
    ResultRow,
    Store,
    StoreError,
    config_hash,
    database,
)


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
        assert journal(Path(url)) == "wal"


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
