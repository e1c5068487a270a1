"""Whole sweeps (fake measurement, everything else real) that are killed, interrupted, and run side by side."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cluster_simulation import Simulation
from postgres_server import PostgresServer
from sweep_forks import SweepForks

from tuner.results import ResultRow, Store
from tuner.space import SpaceFilter, space

KILLS = 50
SHAPES = {"masks": ["causal", "full"], "head_dims": [128], "seq_lens": [1024, 2048]}
CONFIGS = len(space((9, 0), SpaceFilter(**{name: tuple(v) for name, v in SHAPES.items()})))  # type: ignore[arg-type]


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[SweepForks]:
    made = SweepForks(DASH_QUICK_LOG=str(tmp_path / "measured"))
    yield made
    made.close()


def measured(tmp_path: Path) -> list[tuple[str, str]]:
    """(pid of the worker, problem and config) of each candidate measured so far, in order."""
    log = tmp_path / "measured"
    lines = [line.split("\t") for line in log.read_text().splitlines()] if log.exists() else []
    return [(pid, name) for pid, kind, name in lines if kind == "measure"]


def first_pass(db: str) -> list[ResultRow]:
    with Store.open(db) as store:
        found = store.results(limit=None)
    return [row for row in found if (row.telemetry or {}).get("round") != "final"]


def assert_complete(db: str, configs: int = CONFIGS) -> None:
    """Every config has exactly one row, over all runs together."""
    rows = Counter(row.config_hash for row in first_pass(db))
    assert len(rows) == configs
    assert set(rows.values()) == {1}
    if "://" not in db:
        with closing(sqlite3.connect(db)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def eventually(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_work(forks: SweepForks, pid: int, tmp_path: Path, before: int) -> None:
    eventually(lambda: len(measured(tmp_path)) > before or forks.ended(pid))


def test_a_sweep_killed_at_50_random_moments_loses_at_most_the_config_in_hand_each_time(
    forks: SweepForks, tmp_path: Path
) -> None:
    """Half of the kills fall anywhere, start included; half while candidates are measured and rows written."""
    db, moments = str(tmp_path / "rows.db"), random.Random()
    for kill in range(KILLS):
        before = len(measured(tmp_path))
        pid = forks.start(db, filters=SHAPES, env={"DASH_QUICK_S": "0.01"})
        if kill % 2:
            wait_for_work(forks, pid, tmp_path, before)
            time.sleep(moments.uniform(0, 0.05))
        else:
            time.sleep(moments.uniform(0, 0.4))
        os.kill(pid, signal.SIGKILL)
        assert forks.wait(pid) in (-signal.SIGKILL, 0)
    assert forks.wait(forks.start(db, filters=SHAPES)) == 0
    assert_complete(db)
    work: dict[str, set[str]] = defaultdict(set)  # what each worker measured, in order of work
    for worker, name in measured(tmp_path):
        work[worker].add(name)
    lost, later = [], set[str]()
    for names in reversed(work.values()):
        lost.append(len(names & later))  # measured again, because its row was not written
        later |= names
    assert sum(lost) > 0, "the kills hit nothing"
    assert max(lost) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_twice_is_safe_at_any_moment(forks: SweepForks, tmp_path: Path, number: int) -> None:
    db, log, moments = str(tmp_path / "rows.db"), tmp_path / "log", random.Random()
    for _ in range(4):
        before = len(measured(tmp_path))
        pid = forks.start(db, filters=SHAPES, env={"DASH_QUICK_S": "0.05"}, log=log)
        wait_for_work(forks, pid, tmp_path, before)
        os.kill(pid, number)
        time.sleep(moments.uniform(0, 0.05))
        if not forks.ended(pid):
            os.kill(pid, number)
        assert forks.wait(pid) in (130, -number), log.read_text()
    assert forks.wait(forks.start(db, filters=SHAPES)) == 0
    assert_complete(db)


def test_four_commands_share_one_file_though_one_is_killed(
    forks: SweepForks, tmp_path: Path
) -> None:
    db = str(tmp_path / "rows.db")
    env = {"DASH_QUICK_S": "0.1"}
    logs = [tmp_path / f"log-{place}" for place in range(4)]
    pids = [forks.start(db, filters=SHAPES, env=env, log=log) for log in logs]
    eventually(lambda: Path(db).exists() and len({row.run_id for row in first_pass(db)}) == 4)
    os.kill(pids[1], signal.SIGKILL)
    codes = [forks.wait(pid) for pid in pids]
    assert codes == [0, -signal.SIGKILL, 0, 0], [log.read_text() for log in logs]
    assert_complete(db)
    assert len({row.run_id for row in first_pass(db)}) == 4, "all of them did a part"
    assert "by other processes" in logs[0].read_text()
    again = tmp_path / "again"
    assert forks.wait(forks.start(db, filters=SHAPES, log=again)) == 0
    assert f"0 ok, 0 failed, {CONFIGS} from before" in again.read_text()


def test_a_worker_thought_dead_wakes_up_and_writes_nothing(
    forks: SweepForks, tmp_path: Path
) -> None:
    """One command sleeps through its lease with a config in hand; another one finishes the sweep meanwhile."""
    db = str(tmp_path / "rows.db")
    settings: dict[str, Any] = {"filters": SHAPES, "lease_s": 1.0}
    sleeper = forks.start(db, env={"DASH_QUICK_S": "0.3"}, log=tmp_path / "log", **settings)
    eventually(lambda: Path(db).exists() and first_pass(db))
    time.sleep(0.1)  # past the end of that row's transaction, which would hold the file
    os.kill(sleeper, signal.SIGSTOP)
    assert forks.wait(forks.start(db, **settings)) == 0
    assert_complete(db)
    os.kill(sleeper, signal.SIGCONT)
    assert forks.wait(sleeper) == 0
    assert_complete(db)
    assert "by other processes" in (tmp_path / "log").read_text()


def test_a_cluster_whose_workers_die_and_oversleep_ends_with_one_row_a_config(
    postgres: PostgresServer,
) -> None:
    """Eight of the 64 that ``make simulate-cluster`` has."""
    forks = SweepForks(DASH_QUICK_S="0.3")
    try:
        report = Simulation(forks, postgres.database(), workers=8, kills=12, **SHAPES).run()
    finally:
        forks.close()
    assert report.good, report
    assert report.killed + report.slept == 12
    assert report.taken_twice > 0, "no claim had to return"
    assert set(report.exit_codes) == {0, -signal.SIGKILL}


def test_two_gpus_do_a_sweep_in_half_the_time(forks: SweepForks, tmp_path: Path) -> None:
    """What the sweep itself costs must not keep a second GPU waiting; a config takes 0.25 s here, less than on a GPU."""
    filters = {**SHAPES, "masks": ["causal"], "schedules": ["shortest_first"]}
    pace, winners = [], []
    for gpus in (1, 2):
        db = str(tmp_path / f"{gpus}.db")
        pid = forks.start(db, gpus=gpus, filters=filters, env={"DASH_QUICK_S": "0.25"})
        assert forks.wait(pid) == 0
        times = [row.created_at for row in first_pass(db) if row.created_at is not None]
        pace.append(len(times) / (max(times) - min(times)).total_seconds())
        with Store.open(db) as store:
            winners.append([cell.best.row.config_hash for cell in store.winners("h200")])
    assert winners[0] == winners[1]
    assert pace[1] / pace[0] > 1.7
