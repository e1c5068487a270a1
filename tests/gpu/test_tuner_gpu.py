"""A short sweep on a real GPU: rows that pass both gates, baselines of the same run, and nothing left in memory."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuner.command import SweepRequest, run_sweep
from tuner.nvml import session, visible_gpus
from tuner.results import ResultRow, Store
from tuner.space import SpaceFilter

pytestmark = pytest.mark.gpu
SHORT = SpaceFilter(("causal",), (64,), (1024,), schedules=("shortest_first",), tokens=4096)


def memory_used() -> int:
    """Bytes in use on the first GPU, by every process."""
    with session() as nvml:
        handle = nvml.nvmlDeviceGetHandleByIndex(visible_gpus()[0].index)
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)


@pytest.fixture(scope="module")
def request_(tmp_path_factory: pytest.TempPathFactory) -> SweepRequest:
    folder = tmp_path_factory.mktemp("sweep")
    return SweepRequest(gpu="auto", filters=SHORT, db=str(folder / "rows.sqlite"))


@pytest.fixture(scope="module")
def rows(request_: SweepRequest) -> list[ResultRow]:
    before = memory_used()
    assert run_sweep(request_) == 0
    assert memory_used() <= before + (64 << 20)
    with Store.open(request_.db) as store:
        return store.results(limit=None)


def test_every_row_is_measured_and_passed_its_gates(rows: list[ResultRow]) -> None:
    assert len(rows) >= 6
    for row in rows:
        assert row.status == "ok", row.error
        assert row.tflops is not None
        assert not row.above_peak
        assert row.rel_error is not None
        assert row.budget is not None
        assert row.rel_error <= row.budget
        assert row.bits_equal or row.policy == "unordered"
        assert row.registers
        assert row.spill_bytes is not None
        assert row.speedup_vs_baseline is not None
        assert row.samples


def test_both_baselines_and_a_final_round_are_there(
    rows: list[ResultRow], request_: SweepRequest
) -> None:
    assert {"unordered", "ordered"} <= {row.policy for row in rows}
    assert any((row.telemetry or {}).get("round") == "final" for row in rows)
    with Store.open(request_.db) as store:
        (cell,) = store.winners(rows[0].gpu)
    assert cell.served is not None
    assert {"ascending", "unordered"} <= set(cell.baselines)


def test_a_resumed_sweep_adds_nothing_and_is_quick(
    rows: list[ResultRow], request_: SweepRequest
) -> None:
    started = time.monotonic()
    assert run_sweep(replace(request_)) == 0
    assert time.monotonic() - started < 5
    with Store.open(request_.db) as store:
        assert store.count() == len(rows)


@pytest.mark.parametrize(
    "options",
    [
        {"windows": ((255, 0),), "head_groups": (4,)},
        {"softcaps": (True,)},
        {"varlens": (True,)},
        {"head_dims": (96,)},
        {"head_dims": ((192, 128),)},
    ],
    ids=["window, grouped heads", "softcap", "packed", "padded", "V narrower"],
)
def test_options_are_measured_and_pass_their_gates(options: dict[str, Any], tmp_path: Path) -> None:
    filters = replace(SHORT, seq_lens=(512,), tokens=2048, stages=(2,), **options)
    request = SweepRequest(gpu="auto", filters=filters, db=str(tmp_path / "rows.sqlite"))
    assert run_sweep(request) == 0
    with Store.open(request.db) as store:
        found = store.results(limit=None)
        assert {row.status for row in found} == {"ok"}
        (cell,) = store.winners(found[0].gpu)
    assert cell.served is not None
