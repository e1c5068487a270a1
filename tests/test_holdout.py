"""What snapping costs, from rows: half of the shapes answer for the other half."""

from __future__ import annotations

from pathlib import Path

import pytest

from dash_kernels.lookup import LookupTable
from dash_kernels.problem import Config, Problem
from tuner import holdout
from tuner.export import lookup_table
from tuner.results import ResultRow, RunInfo, Store

FAST_SHORT, FAST_LONG = Config(schedule="shortest_first"), Config(schedule="descending")
SPEEDS = {512: (300.0, 200.0), 1024: (400.0, 390.0), 2048: (450.0, 500.0), 4096: (400.0, 550.0)}


def test_the_nearest_shape_answers_and_its_cost_is_measured(tmp_path: Path) -> None:
    """FAKE speeds: (of FAST_SHORT, of FAST_LONG) by length."""
    with Store.open(tmp_path / "fake.db") as store:
        run = store.start_run(RunInfo("h200", {"note": "FAKE"}))
        for length, speeds in SPEEDS.items():
            problem = Problem("causal", 128, length, heads=16)
            for config, speed in zip((FAST_SHORT, FAST_LONG), speeds, strict=True):
                row = ResultRow.of(problem, config, gpu="h200", tflops=speed, min_resident=1)
                store.add(run, row)
        answers = {a.asked: a for a in holdout.holdout(*_of(store))}
    assert {a.asked: a.nearest for a in answers.values()} == {
        512: 1024, 1024: 512, 2048: 1024, 4096: 2048,
    }  # fmt: skip
    assert [answers[s].same_config for s in (512, 1024, 2048, 4096)] == [True, True, False, True]
    assert answers[2048].cost == pytest.approx(0.1)
    assert answers[4096].cost == 0.0
    said = holdout.summary(list(answers.values()))
    assert (said["shapes"], said["same_config"], said["largest_cost"]) == (4, 3, 0.1)
    assert said["mean_cost"] == pytest.approx(1 - 0.9**0.25, abs=1e-4)


def _of(store: Store) -> tuple[LookupTable, list[tuple[ResultRow, str]]]:
    return LookupTable.from_dict(lookup_table(store, "h200")), store.candidates("h200")


def test_snapping_on_the_shipped_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every served shape is asked for once; on average the nearest shape's config loses little."""
    with Store.open("sqlite://") as store:
        store.load_shipped()
        found = holdout.report(store, "h200")
        served = [cell for cell in _of(store)[0].cells if cell.served and cell.served.servable]
    assert found["summary"]["shapes"] == len(served) == len({s["shape"] for s in found["shapes"]})
    # A sweep under a budget tries not every config at every length.
    assert found["summary"]["without_a_row"] <= len(served) // 4
    assert found["summary"]["mean_cost"] < 0.05
    assert found["summary"]["same_config"] >= len(served) // 4
    assert holdout.main(["--gpu", "b200", "--db", str(tmp_path / "empty.db")]) == 2
    assert "no measured winner for b200" in capsys.readouterr().err
