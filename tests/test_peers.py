"""Side by side: which configs of ours stand for us, how the columns are summed up, and what a cut run leaves."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dash_kernels.device
import tuner.peers
import tuner.worker
from dash_kernels.problem import Config, Problem
from tuner.command import UsageError
from tuner.peers import our_configs, run_peers, summary, takes_peers, write
from tuner.results import ResultRow, RunInfo, Store
from tuner.space import SpaceFilter

PROBLEM = Problem("causal", 128, 4096, batch=4, heads=16)
H200 = SimpleNamespace(name="h200", capability=(9, 0))


def test_compile_processes_that_cannot_start_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(dash_kernels.device, "current_gpu", lambda _: H200)
    monkeypatch.setattr(tuner.peers, "available", lambda: ["fa4"])
    monkeypatch.setattr(tuner.worker, "_spawn", refuse)
    with pytest.raises(UsageError, match="no compile process is left, .* could not be made: Res"):
        run_peers(SpaceFilter(("causal",), (128,), (4096,)), None, None, 3, False)


def test_without_rows_the_default_rule_stands_for_us(tmp_path: Path) -> None:
    with Store.open(tmp_path / "rows.sqlite") as store:
        ours = our_configs(PROBLEM, H200, store)
    assert ours["dash_served"].schedule == "shortest_first"
    assert ours["dash_best"] == ours["dash_served"]
    assert ours["dash_unordered"].policy == "unordered"
    assert ours["dash_ascending"].schedule == "ascending"


def test_stored_winners_of_exactly_this_cell_stand_for_us(tmp_path: Path) -> None:
    configs = {
        "served": (Config(schedule="descending", launch_order="ascending"), 510.0, 1),
        "best": (Config(schedule="shift", launch_order="ascending"), 530.0, 32),
        "unordered": (Config(policy="unordered", heads_interleaved=8), 560.0, 1),
    }
    windowed = replace(PROBLEM, window_left=1023)
    grouped = replace(PROBLEM, heads_kv=2)
    with Store.open(tmp_path / "rows.sqlite") as store:
        run = store.start_run(RunInfo("h200", {"gpu": "h200"}))
        for problem in (windowed, grouped):
            fast = Config(schedule="ascending", launch_order="ascending", heads_interleaved=2)
            values = {"tflops": 900.0, "ms": 1.0, "min_resident": 1}
            store.add(run, ResultRow.of(problem, fast, gpu="h200", **values))
        for config, tflops, residents in configs.values():
            row = ResultRow.of(
                PROBLEM, config, gpu="h200", tflops=tflops, ms=1.0, min_resident=residents
            )
            store.add(run, row)
        ours = our_configs(PROBLEM, H200, store)
        other = our_configs(Problem("causal", 128, 8192, batch=2, heads=16), H200, store)
    assert ours["dash_served"] == configs["served"][0]
    assert ours["dash_best"] == configs["best"][0]
    assert ours["dash_unordered"] == configs["unordered"][0]
    assert other["dash_served"].schedule == "shortest_first"


def test_peers_stand_beside_what_they_compute_only() -> None:
    assert takes_peers(PROBLEM)
    assert takes_peers(Problem("causal", 192, 1024, head_dim_v=128))
    for options in ({"window_left": 7}, {"softcap": True}, {"varlen": True}, {"heads_kv": 2}):
        assert not takes_peers(replace(PROBLEM, **options))


def row(mask: str, **tflops: float) -> dict[str, Any]:
    return {"mask": mask, "peers": {name: {"tflops": speed} for name, speed in tflops.items()}}


def test_summary_is_a_geometric_mean_and_a_count() -> None:
    rows = [
        row("causal", dash_served=500.0, fa4_det=400.0, dash_ascending=250.0),
        row("full", dash_served=540.0, fa4_det=600.0, dash_ascending=540.0),
    ]
    found = summary(rows)
    both = found["dash_served/fa4_det all"]
    assert both["geometric_mean"] == pytest.approx(math.sqrt(1.25 * 0.9), abs=1e-4)
    assert (both["at_least_equal"], both["cells"]) == (1, 2)
    assert found["dash_served/dash_ascending causal"]["geometric_mean"] == 2.0
    assert found["dash_served/dash_ascending full"]["at_least_equal"] == 1


def test_a_kernel_that_failed_has_no_part_in_the_means() -> None:
    broken = row("causal", dash_served=500.0)
    broken["peers"]["fa4_det"] = {"error": "RuntimeError: unsupported"}
    assert summary([broken]) == {}


def test_the_file_is_whole_after_each_row(tmp_path: Path) -> None:
    path = tmp_path / "results" / "peers.json"
    for count in (1, 2):
        write(path, {"rows": [row("full", dash_served=1.0)] * count})
        assert len(json.loads(path.read_text())["rows"]) == count
    assert list(path.parent.iterdir()) == [path]
