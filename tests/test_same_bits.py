"""``--numerics-key``: only configs that keep the bits are tried, and only they can win."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dash_kernels import dispatch, numerics
from dash_kernels.device import software
from dash_kernels.numerics import config_key
from dash_kernels.problem import Config, Problem
from tuner.cli import main
from tuner.results import ResultFilter, ResultRow, RunInfo, Store
from tuner.same_bits import NoSuchBits, keeping
from tuner.space import SpaceFilter, baseline_config

HOPPER = (9, 0)
HERE = {**software(), "capability": "9.0"}
FILTERS = SpaceFilter(("causal",), (128,), (1024, 4096))
OTHER = Config(schedule="descending", launch_order="ascending")


def key_of(config: Config) -> str:
    return config_key(config, dtype="bfloat16", head_dim=128, environment=HERE)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "rows.sqlite") as opened:
        yield opened


def test_only_configs_of_the_key_stand_beside_the_baseline(store: Store) -> None:
    key = key_of(Config())
    found = keeping(key, FILTERS, HOPPER, "h200", store)
    assert {candidate.problem.seq_len for candidate in found} == {1024, 4096}
    assert all(candidate.runnable for candidate in found)
    others = [c for c in found if key_of(c.config) != key]
    assert {c.config for c in others} == {baseline_config(found[0].problem, HOPPER)}
    same = [c.config for c in found if key_of(c.config) == key]
    for name in ("heads_interleaved", "num_stages"):
        assert len({getattr(config, name) for config in same}) > 1
    assert {config.launch_order for config in same} == {"descending"}, "its own: monotone"


def test_the_key_of_the_process_keeps_what_it_would_choose(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_state", dispatch._State())
    key = numerics.numerics_key("h200")
    found = keeping(key, FILTERS, HOPPER, "h200", store)
    for problem in {candidate.problem for candidate in found}:
        chosen = dispatch.choose(problem, "h200")
        configs = {c.config for c in found if c.problem == problem}
        assert chosen.config in configs
        assert {key_of(c) for c in configs} - {key_of(baseline_config(problem, HOPPER))} == {
            chosen.numerics_key
        }


def test_a_key_that_nothing_here_has_says_what_differs(store: Store) -> None:
    with pytest.raises(NoSuchBits, match="no stored row has it"):
        keeping("0" * 16, FILTERS, HOPPER, "h200", store)
    run = store.start_run(RunInfo("h200", {**HERE, "triton": "9.9.9"}))
    problem = Problem("causal", 128, 4096)
    store.add(run, ResultRow.of(problem, Config(), gpu="h200", numerics_key="1" * 16))
    with pytest.raises(NoSuchBits, match=r"it is of shortest_first .* on h200; triton 9\.9\.9"):
        keeping("1" * 16, FILTERS, HOPPER, "h200", store)


def test_winners_of_a_key_are_of_that_key_and_a_failed_gate_still_counts(store: Store) -> None:
    run = store.start_run(RunInfo("h200", HERE))
    again = store.start_run(RunInfo("h200", HERE))
    problem, key = Problem("causal", 128, 4096, batch=4, heads=16), key_of(Config())

    def add(run: int, config: Config, tflops: float, **values: object) -> None:
        made = {"tflops": tflops, "ms": 1.0, "min_resident": 1, "numerics_key": key_of(config)}
        store.add(run, ResultRow.of(problem, config, gpu="h200", **{**made, **values}))

    add(run, Config(), 500.0)
    add(run, OTHER, 600.0)
    add(run, Config(heads_interleaved=4), 550.0)
    flawed = {"status": "nondeterministic", "numerics_key": None}
    add(again, Config(heads_interleaved=4), 0.0, **flawed)
    (cell,) = store.winners("h200", ResultFilter(numerics_key=key))
    assert cell.served is not None
    assert cell.served.row.to_config() == Config()
    (free,) = store.winners("h200")
    assert free.best.row.to_config() == OTHER


def test_the_command_lists_and_refuses(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--gpu", "h200", "--dry-run", "--mask", "causal", "--head-dim", "128"]

    def dash_tune(key: str) -> object:
        argv = ["dash-tune", *arguments, "--db", store.where, "--numerics-key", key]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code

    assert dash_tune(key_of(OTHER)) == 0
    out = capsys.readouterr().out
    assert "descending 64x128" in out
    assert "shortest_first" not in out
    assert dash_tune("nonsense") == 2
    assert "numerics key nonsense" in capsys.readouterr().err
