"""A database of the first release becomes one of this release: rows stay valid, under the same names."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dash_kernels.problem import OPTION_FIELDS, Config, Problem
from tuner.results import ResultRow, RunInfo, Store, config_hash
from tuner.results import migrate as migrations

RUN = RunInfo("h200", {"driver": "580"}, {"version": 1}, uuid="first")
PROBLEM = Problem("causal", 128, 4096, batch=4, heads=16)


@pytest.fixture
def first_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two rows as release 0.1 wrote them: the second failed the determinism gate."""
    path = tmp_path / "old.sqlite"
    with monkeypatch.context() as old:
        old.setattr(migrations, "HEAD", "0001")
        with Store.open(path) as store:
            run = store.start_run(RUN)
    values = {
        **{name: getattr(PROBLEM, name) for name in ("mask", "head_dim", "dtype", "seq_len")},
        **{name: getattr(PROBLEM, name) for name in ("seq_len_kv", "batch", "heads", "heads_kv")},
        "run_id": run,
        "created_at": "2026-01-01 00:00:00",
        "gpu": "h200",
        "head_group": 1,
        "source": "measured",
        "direction": "backward",
        "backend": "hopper",
        "above_peak": 0,
        "schedule": "x",
        "group_size": 1,
        "policy": "ordered",
        "block_m": 64,
        "block_n": 128,
        "config": "{}",
        "tflops": 500.0,
        "ms": 1.0,
        "min_resident": 1,
    }
    with closing(sqlite3.connect(path)) as connection, connection:
        for name, status in (("one", "ok"), ("two", "nondeterminism")):
            row = {**values, "config_hash": name, "status": status}
            columns, marks = ", ".join(row), ", ".join("?" * len(row))
            sql = f"INSERT INTO dash_results ({columns}) VALUES ({marks})"
            connection.execute(sql, list(row.values()))
    return path


def test_rows_of_the_first_release_stay_valid_and_get_their_options(first_release: Path) -> None:
    with Store.open(first_release) as store:
        assert store.schema_version() == migrations.HEAD
        one, two = store.results()
        assert one.to_problem() == PROBLEM
        assert (one.head_dim_v, one.window_left, one.softcap, one.varlen) == (128, -1, False, False)
        assert (one.status, two.status) == ("ok", "nondeterministic")
        windowed = replace(PROBLEM, window_left=1023)
        store.add(1, ResultRow.of(windowed, Config(), gpu="h200", tflops=400.0, min_resident=1))
        cells = store.winners("h200")
        assert [(cell.window_left, cell.best.row.tflops) for cell in cells] == [
            (-1, 500.0),
            (1023, 400.0),
        ]
    assert first_release.with_name("old.sqlite.schema-0001.bak").exists()


def test_a_problem_without_options_keeps_the_hash_that_the_first_release_gave_it() -> None:
    assert config_hash(PROBLEM, Config()) == config_hash(replace(PROBLEM, head_dim_v=128), Config())
    assert not set(OPTION_FIELDS) & set(PROBLEM.to_dict())
    hashes = {
        config_hash(replace(PROBLEM, **{name: value}), Config())
        for name, value in (
            ("window_left", 7),
            ("head_dim_v", 64),
            ("softcap", True),
            ("varlen", True),
        )
    }
    assert len(hashes | {config_hash(PROBLEM, Config())}) == 5
