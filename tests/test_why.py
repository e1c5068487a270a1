"""``doctor --why``: a lookup that misses and a row that does not decide say which field differs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dash_kernels import dispatch
from dash_kernels.default_rule import default_config
from dash_kernels.device import environment, environment_difference, environment_key, software
from dash_kernels.problem import Config, Problem
from tuner.cli import main
from tuner.export import lookup_table, table_json
from tuner.policy import MeasurementPolicy
from tuner.results import ResultRow, RunInfo, Store
from tuner.results.rows import environment_key as key_of_rows
from tuner.why import NotUnderstood, explain, parse_problem

PROBLEM = Problem("causal", 128, 4096, batch=4, heads=16)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty database, and a table of three cells in force that was made with Triton 3.6.0."""
    with Store.open("sqlite://") as tuned:
        run = tuned.start_run(RunInfo("h200", {"gpu": "h200", "triton": "3.6.0"}))
        for problem in (PROBLEM, Problem("causal", 64, 512), Problem("full", 64, 4096)):
            row = ResultRow.of(problem, default_config(problem, (9, 0)), gpu="h200", tflops=500.0)
            tuned.add(run, replace(row, ms=1.0, min_resident=1))
        (tmp_path / "table.json").write_text(table_json(lookup_table(tuned, "h200", "tuned")))
    monkeypatch.setattr(dispatch, "_state", dispatch._State())
    monkeypatch.setenv("DASH_TABLE", str(tmp_path / "table.json"))
    with Store.open(tmp_path / "rows.sqlite") as opened:
        yield opened


def add(store: Store, run: int, config: Config, tflops: float | None, **values: object) -> int:
    made: dict[str, Any] = {"tflops": tflops, "ms": 1.0, "min_resident": 1, **values}
    return store.add(run, ResultRow.of(PROBLEM, config, gpu="h200", **made))


def run_of(store: Store, **changes: object) -> int:
    about = {"gpu": "h200", **software(), **changes}
    return store.start_run(RunInfo("h200", about, MeasurementPolicy().to_dict()))


def test_tuner_and_dispatcher_name_an_environment_by_one_function() -> None:
    here = environment()
    assert key_of_rows(here) == environment_key(here)
    assert set(software()) < set(here)
    other = here | {"triton": "9.9", "driver": "1"}
    assert environment_difference(here, other) == {
        "driver": (here["driver"], "1"),
        "triton": (here["triton"], "9.9"),
    }
    assert environment_key(other) != environment_key(here)


def test_a_lookup_that_hits_says_where(store: Store) -> None:
    found = explain("causal d=128 seq_len=4096", store, "h200")
    assert "matched exact" in found.answer
    assert found.reasons[0].startswith("exact: answers: measured on h200 at seq_len 4096")


@pytest.mark.parametrize(
    ("asked", "gpu", "said"),
    [
        ("causal d=96 seq_len=512", "h200", "head_dim: asked 96, there is 64, 128"),
        ("causal d=128 seq_len=4096 softcap", "h200", "softcap: asked True, there is False"),
        ("full d=64 seq_len=4096 float16", "h200", "dtype: asked float16, there is bfloat16"),
        ("causal d=64 seq_len=777", "h200", "seq_len: asked 777, there is"),
        ("causal d=128 seq_len=4096", "h100", "h100"),
    ],
)
def test_a_lookup_that_misses_says_which_field_differs(
    store: Store, asked: str, gpu: str, said: str
) -> None:
    assert any(said in reason for reason in explain(asked, store, gpu).reasons)


def test_software_that_differs_from_the_tables_is_named(store: Store) -> None:
    reasons = explain("causal", store, "h200").reasons
    assert any("was made with triton 3.6.0; here it is" in reason for reason in reasons)


def test_a_row_says_what_keeps_it_from_deciding(store: Store) -> None:
    run = run_of(store)
    served = add(store, run, Config(), 500.0)
    slower = add(store, run, Config(num_stages=3), 450.0)
    atomics = add(store, run, Config(policy="unordered"), 600.0)
    wide = add(
        store, run, Config(schedule="shift", launch_order="ascending"), 400.0, min_resident=32
    )
    broken = add(store, run, Config(dq_stages=3), 0.0, status="runtime", error="CUDA error\nmore")
    assert explain(str(served), store, "").answer == "decides its cell"
    for number, said in (
        (slower, f"served is row {served}, "),
        (atomics, "never a winner"),
        (wide, "needs 32 CTAs resident at once"),
        (broken, "status is runtime: CUDA error"),
        (broken, "earlier kernels ran it, these refuse it: backend hopper has two dQ stages"),
    ):
        found = explain(str(number), store, "")
        assert found.answer == "does not decide its cell"
        assert any(said in reason for reason in found.reasons), found.reasons
    assert not any("made with" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("source", "better", "worse", "said"),
    [
        ("modelled", {"predicted": 1.0}, {"predicted": 1.2}, ": +20.0 % as the model has it"),
        (
            "compiled",
            {"registers": 168, "spill_bytes": 0},
            {"registers": 168, "spill_bytes": 40},
            ": 0 spill bytes and 168 registers against 40 and 168",
        ),
    ],
)
def test_rows_that_were_not_timed_are_compared_by_what_they_know(
    store: Store, source: str, better: dict[str, object], worse: dict[str, object], said: str
) -> None:
    run = store.start_run(RunInfo("h200", {"gpu": "h200", **software()}, source=source))
    none: dict[str, Any] = {"ms": None, "source": source}
    add(store, run, Config(), None, **{**none, **better})
    number = add(store, run, Config(num_stages=3), None, **{**none, **worse})
    reasons = explain(str(number), store, "").reasons
    assert any(reason.endswith(said) for reason in reasons), reasons


def test_a_row_of_another_environment_or_policy_names_the_fields(store: Store) -> None:
    old = replace(MeasurementPolicy(), max_samples=7).to_dict()
    run = store.start_run(RunInfo("h200", {**software(), "triton": "3.5.0"}, old))
    number = add(store, run, Config(), 500.0)
    newer = add(store, run_of(store), Config(), 510.0)
    reasons = explain(str(number), store, "").reasons
    assert any("another sweep decides its cell" in reason for reason in reasons)
    assert any("made with triton 3.5.0; here it is" in reason for reason in reasons)
    assert any("max_samples 7; a sweep now has 60" in reason for reason in reasons)
    assert explain(str(newer), store, "").answer == "decides its cell"


def test_a_failed_gate_a_newer_row_and_a_final_round_are_told(store: Store) -> None:
    first, second = run_of(store), run_of(store)
    number = add(store, first, Config(), 500.0)
    final = {"telemetry": {"round": "final"}}
    add(store, second, Config(), 480.0, **final)
    other = add(store, first, Config(num_stages=3), 470.0)
    add(store, second, Config(num_stages=3), 0.0, status="nondeterministic")
    reasons = explain(str(number), store, "").reasons
    assert any("is a newer one of the same config" in reason for reason in reasons)
    assert any("a final round has decided since" in reason for reason in reasons)
    assert any(
        "failed a gate in this sweep" in reason for reason in explain(str(other), store, "").reasons
    )


def test_problems_are_read_as_their_labels_are_written() -> None:
    problem = Problem(
        "causal", 192, 1024, "float16", window_left=255, head_dim_v=128, softcap=True, varlen=True
    )
    assert parse_problem(problem.label()) == problem
    assert parse_problem("full window=7:9 s=64 d=64").window == (7, 9)
    twice = "causal full", "d=128 head_dim=64", "s=64 s=64", "window=1,0 window=1,0"
    for text in ("zigzag", "d=x", "window=5", "seq_len", "d=0", "heads=3 heads_kv=2", *twice):
        with pytest.raises(NotUnderstood, match="--why"):
            parse_problem(text)


def test_the_command(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dash_tune(*arguments: str) -> object:
        argv = ["dash-tune", "doctor", "--db", store.where, "--gpu", "h200", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code

    assert dash_tune("--why", "causal d=128 seq_len=4096", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["about"] == "causal d=128 seq_len=4096 bfloat16"
    assert dash_tune("--why", "zigzag") == 2
    assert "is not understood" in capsys.readouterr().err
