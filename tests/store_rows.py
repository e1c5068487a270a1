"""Rows for tests of the results database, and how its file keeps its journal."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from dash_kernels.problem import Config, Problem
from tuner.results import ResultRow, RunInfo

PROBLEM = Problem("causal", 128, 4096, batch=4, heads=16)
RUN = RunInfo("h200", {"gpu": "h200", "driver": "580"}, {"zeroing": True}, "dash-tune --gpu h200")


def row(number: int = 0, **values: object) -> ResultRow:
    return ResultRow.of(replace(PROBLEM, batch=number + 1), Config(), gpu="h200", **values)


def journal(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("PRAGMA journal_mode").fetchone()[0])
