"""Snapshots taken row by row have the winners and points of all rows at once. Every number here is FAKE."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import cast

import pytest
from fake_rows import fake_problem, fake_row, fill

from dash_kernels.problem import Config
from dashboard.snapshot import Snapshots, take
from server.fresh import Fresh, State
from tuner.results import newest
from tuner.results.rows import ResultRow, RunInfo
from tuner.results.store import Store

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
CONFIGS = (
    Config(schedule="ascending", launch_order="ascending"),
    Config(schedule="shortest_first"),
    Config(schedule="descending"),
    Config(schedule="symmetric_shift"),
    Config(schedule="descending", policy="unordered"),
)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.open("sqlite://") as opened:
        yield opened


def whole(store: Store, source: str = "measured") -> object:
    """What reading every row gives, in the order in which snapshots list it."""
    last = store.last_result_id()
    return listed(take("h200", source, last, store.candidates("h200", source=source)))


def listed(snapshot: object) -> object:
    cells = [(cell, cell.servable) for cell in snapshot.cells]  # type: ignore[attr-defined]
    return cells, snapshot.points  # type: ignore[attr-defined]


def random_row(draw: random.Random, number: int) -> ResultRow:
    """Any config, any age, sometimes failed, sometimes of a final round, sometimes too fast to be true."""
    problem = fake_problem(draw.choice(("causal", "full")), 128, draw.choice((1024, 4096)))
    config = draw.choice(CONFIGS).with_(num_stages=draw.choice((1, 2)))
    status = draw.choice(("ok", "ok", "ok", "correctness", "nondeterministic", "timeout"))
    speed = draw.choice((400.0, 450.0, 451.0, 2000.0))
    values: dict[str, object] = {"status": status, "bits_equal": status != "nondeterministic"}
    if status != "ok":
        values |= dict.fromkeys(("tflops", "ms", "ms_low", "ms_high", "samples"))
    if draw.random() < 0.2:
        values["telemetry"] = {"round": "final"}
    row = fake_row(problem, config, speed, **values)
    return replace(row, created_at=START + timedelta(seconds=draw.randrange(50)), id=None)


@pytest.mark.parametrize("seed", range(2))
def test_row_by_row_is_all_at_once(store: Store, seed: int) -> None:
    draw = random.Random(seed)
    sweeps = [
        RunInfo("h200", {"gpu": "h200", "driver": str(number), "note": "FAKE"}, {"version": 0})
        for number in range(3)
    ]
    snapshots = Snapshots(store)
    for number in range(50):
        run = store.start_run(draw.choice(sweeps))
        store.add(run, random_row(draw, number))
        if draw.random() < 0.2:
            assert listed(snapshots.of("h200")) == whole(store)
    assert listed(snapshots.of("h200")) == whole(store)
    assert listed(Snapshots(store).of("h200")) == whole(store)
    total = snapshots.counts()
    assert sum(total.values()) == store.count() == 50
    assert total == newest.counts(store, 0, store.last_result_id())


def test_each_source_has_its_own(store: Store) -> None:
    fill(store)
    snapshots = Snapshots(store)
    for source in ("measured", "modelled", "compiled"):
        assert listed(snapshots.of("h200", source)) == whole(store, source)
    assert snapshots.of("h800").cells == []


def test_a_new_row_reads_its_own_cell_only(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store)
    snapshots = Snapshots(store)
    snapshots.of("h200")
    read: list[tuple[object, ...]] = []
    real = newest.rows_of

    def counted(store: Store, cell: tuple[object, ...], *rest: object) -> object:
        read.append(cell)
        return real(store, cell, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(newest, "rows_of", counted)
    run = store.start_run(RunInfo("h200", {"note": "FAKE"}, {"version": 9}))
    store.add(run, fake_row(fake_problem("causal", 128, 1024), Config(), 500.0))
    snapshots.of("h200")
    assert len(set(read)) == 1


def test_a_database_that_shrank_is_read_anew(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.db") as long, Store.open(tmp_path / "b.db") as short:
        fill(long)
        fill(short)
        run = long.start_run(RunInfo("h200", {"note": "FAKE"}, {"version": 9}))
        long.add(run, fake_row(fake_problem("causal", 128, 1024), Config(), 600.0))
        snapshots = Snapshots(long)
        counted = snapshots.counts()
        assert listed(snapshots.of("h200")) == whole(long)
        snapshots._store, snapshots.last_id = short, short.last_result_id
        assert listed(snapshots.of("h200")) == whole(short)
        assert sum(snapshots.counts().values()) == sum(counted.values()) - 1


# -- the database's state -------------------------------------------------------------------------------------------


class Asked:
    """A database whose state is set, answered when ``open`` is set, and counted."""

    is_sqlite = False

    def __init__(self) -> None:
        self.row, self.times, self.open = 1, 0, threading.Event()
        self.open.set()
        self.begun = threading.Event()
        self.writes: Callable[[], None] = lambda: None

    def state(self) -> tuple[int, int]:
        self.times += 1
        row = self.row
        self.writes()
        self.begun.set()
        assert self.open.wait(10)
        return row, 0

    def fresh(self, seconds: float) -> Fresh:
        return Fresh(cast(Store, self), replaced=lambda: None, seconds=seconds)


def test_requests_ask_for_the_state_together() -> None:
    asked = Asked()
    fresh = asked.fresh(60.0)

    async def many() -> list[State]:
        return await asyncio.gather(*(fresh.current() for _ in range(50)))

    assert {state.row for state in asyncio.run(many())} == {1}
    assert asked.times == 1


def test_the_next_state_is_asked_for_while_this_one_answers() -> None:
    asked = Asked()
    fresh = asked.fresh(1.0)

    async def ahead() -> None:
        await fresh.current()
        await asyncio.sleep(0.55)
        asked.row = 2
        asked.open.clear()
        asked.begun.clear()
        assert (await fresh.current()).row == 1  # at once, though the database does not answer now
        assert asked.begun.wait(10)
        asked.open.set()
        while (await fresh.current()).row == 1:
            await asyncio.sleep(0.005)
        assert asked.times == 2

    asyncio.run(ahead())


def test_a_write_is_seen_at_once_though_the_database_was_being_asked() -> None:
    asked = Asked()
    fresh = asked.fresh(60.0)

    async def written() -> list[State]:
        asked.open.clear()
        before = asyncio.create_task(fresh.current())
        while not asked.begun.is_set():
            await asyncio.sleep(0.005)
        asked.row = 2
        fresh.expire()
        after = asyncio.create_task(fresh.current())
        await asyncio.sleep(0.01)
        asked.open.set()
        return [*await asyncio.gather(before, after), await fresh.current()]

    assert [state.row for state in asyncio.run(written())] == [1, 2, 2]
    assert fresh.now().row == 2
    assert asked.times == 2


def test_requests_are_answered_though_this_process_writes_whenever_the_database_is_asked() -> None:
    asked = Asked()
    fresh = asked.fresh(60.0)
    asked.writes = fresh.expire
    for row in (1, 2):
        asked.row = row
        assert asyncio.run(asyncio.wait_for(fresh.current(), 10)).row == row
    assert fresh.now().row == 2
