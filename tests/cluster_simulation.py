"""Many commands on one database, killed and put to sleep at random: ends with exactly one committed row a config.

    python tests/cluster_simulation.py --workers 64 --kills 64

Measurement is fake (``quick_handlers``); commands, claims, heartbeats, worker processes and the database are real: a
PostgreSQL of its own where one can be started, else SQLite (``--db URL`` for another one). Every command takes the
others for processes of other hosts, so what a killed one held returns when its lease is over and not before.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sweep_forks import SweepForks

from tuner.results import Store
from tuner.results.models import ClaimTable, Result
from tuner.space import SpaceFilter, space

LEASE_S = 2.0  # and more where so many commands share these cores that a heartbeat comes late
COMMANDS_A_CORE = 4
SHAPES: dict[str, list[Any]] = {
    "masks": ["causal", "full"],
    "head_dims": [128],
    "seq_lens": [1024, 2048, 4096, 8192],
}
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Report:
    """What was to be done, what is in the database, and what happened on the way."""

    configs: int
    rows: int
    rows_a_config: dict[int, int]
    workers: int
    killed: int
    slept: int
    taken_twice: int
    seconds: float
    exit_codes: dict[int, int]

    @property
    def good(self) -> bool:
        return self.rows == self.configs and self.rows_a_config == {1: self.configs}


class Simulation:
    """``workers`` commands at any time until ``kills`` of them were killed; every second kill is a long sleep instead."""

    def __init__(self, forks: SweepForks, db: str, workers: int, kills: int, **shapes: Any) -> None:
        self.forks, self.db, self.workers, self.kills = forks, db, workers, kills
        self.shapes = {**SHAPES, **shapes}
        self.lease_s = LEASE_S * max(1.0, workers / COMMANDS_A_CORE / (os.cpu_count() or 1))
        self.random = random.Random()
        self.running: set[int] = set()
        self.asleep: dict[int, float] = {}
        self.killed = self.slept = 0
        self.codes: Counter[int] = Counter()
        self._begun = False

    def run(self) -> Report:
        started = time.monotonic()
        for _ in range(self.workers):
            self._start()
        while self.running:
            if time.monotonic() - started > PATIENCE_S:
                raise TimeoutError(f"{len(self.running)} commands still run after {PATIENCE_S} s")
            time.sleep(self.random.uniform(0, 0.1))
            self._wake()
            self._reap()
            awake = sorted(self.running - set(self.asleep))
            if awake and self.killed + self.slept < self.kills and self._has_begun():
                self._strike(self.random.choice(awake))
        return self._report(time.monotonic() - started)

    def _start(self) -> None:
        self.running.add(
            self.forks.start(self.db, filters=self.shapes, lease_s=self.lease_s, own_machine=True)
        )

    def _has_begun(self) -> bool:
        if not self._begun:
            with Store.open(self.db) as store:
                self._begun = store.count() > 0
        return self._begun

    def _strike(self, pid: int) -> None:
        if self.random.random() < 0.5:
            os.kill(pid, signal.SIGSTOP)
            self.asleep[pid] = time.monotonic() + self.lease_s * self.random.uniform(0.5, 2)
            self.slept += 1
            return
        os.kill(pid, signal.SIGKILL)
        self.killed += 1
        self.running.remove(pid)
        self.codes[self.forks.wait(pid)] += 1
        self._start()  # as a scheduler would

    def _wake(self) -> None:
        for pid, when in list(self.asleep.items()):
            if time.monotonic() >= when:
                del self.asleep[pid]
                os.kill(pid, signal.SIGCONT)

    def _reap(self) -> None:
        for pid in [pid for pid in self.running if self.forks.ended(pid)]:
            self.running.remove(pid)
            self.codes[self.forks.wait(pid)] += 1

    def _report(self, seconds: float) -> Report:
        filters = SpaceFilter(**{name: tuple(values) for name, values in self.shapes.items()})
        with Store.open(self.db) as store, store.reading() as connection:
            rows = Counter(
                row.config_hash
                for row in store.results(limit=None)
                if (row.telemetry or {}).get("round") != "final"
            )
            twice = select(func.count()).where(
                ClaimTable.token > 1, ClaimTable.config_hash.in_(select(Result.config_hash))
            )
            return Report(
                configs=len(space((9, 0), filters)),
                rows=sum(rows.values()),
                rows_a_config=dict(Counter(rows.values())),
                workers=self.workers,
                killed=self.killed,
                slept=self.slept,
                taken_twice=int(connection.scalar(twice) or 0),
                seconds=round(seconds, 1),
                exit_codes=dict(self.codes),
            )


def main() -> int:
    from postgres_server import NoPostgres, PostgresServer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--kills", type=int, default=64)
    parser.add_argument("--seconds-a-config", default="0.3")
    parser.add_argument("--db", help="default: a PostgreSQL of its own, else SQLite")
    asked = parser.parse_args()
    server, db = None, asked.db
    with tempfile.TemporaryDirectory() as folder:
        if db is None:
            try:
                server = PostgresServer()
                db = server.database()
            except NoPostgres as reason:
                print(f"no PostgreSQL ({reason}): SQLite")
                db = str(Path(folder) / "rows.db")
        forks = SweepForks(DASH_QUICK_S=asked.seconds_a_config)
        try:
            report = Simulation(forks, db, asked.workers, asked.kills).run()
        finally:
            try:
                forks.close()
            finally:
                if server is not None:
                    server.stop()
    print(report)
    print("exactly one row a config" if report.good else "WRONG: not exactly one row a config")
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
