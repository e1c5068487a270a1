"""A GPU whose worker does not start again costs itself only; a sweep that has lost all of them keeps its rows."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import tuner.command
import tuner.worker
from tuner.command import SweepRequest, UsageError, run_sweep
from tuner.nvml import VisibleGpu
from tuner.results import ResultRow, Store
from tuner.space import SpaceFilter

GOOD, BAD = (VisibleGpu(n, f"GPU-{n}", "NVIDIA H200", (9, 0)) for n in (0, 1))


@pytest.fixture
def request_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepRequest:
    """A small sweep. Every config kills the worker of BAD, which starts once only."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("DASH_FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("DASH_FAKE_PLAN", f"{BAD.uuid}=exit")
    monkeypatch.setenv("DASH_FAKE_START_ONCE", BAD.uuid)
    return SweepRequest(
        gpu="h200",
        filters=SpaceFilter(("causal",), (128,), (1024, 2048), schedules=("descending",)),
        db=str(tmp_path / "rows.sqlite"),
        jobs=1,
        measurer="fake_handlers:FakeMeasurer",
        compiler="fake_handlers:FakeCompiler",
    )


def use(monkeypatch: pytest.MonkeyPatch, *gpus: VisibleGpu) -> None:
    monkeypatch.setattr(tuner.command, "visible_gpus", lambda: list(gpus))


def rows(request: SweepRequest) -> list[ResultRow]:
    with Store.open(request.db) as store:
        return store.results(limit=None)


def test_the_other_gpus_go_on(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, BAD, GOOD)
    assert run_sweep(request_) == 3
    lost = [row for row in rows(request_) if row.status != "ok"]
    assert [row.status for row in lost] == ["runtime"], "the config in hand, and no other"
    assert len(rows(request_)) > 10
    assert rows(request_)[-1].status == "ok"
    said = "the GPU worker of GPU-1 could not start, the others go on without it: "
    assert f"{said}RuntimeError: the GPU has fallen off the bus\n" in capsys.readouterr().out


def test_a_gpu_that_never_starts_is_left_out_too(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "log.started").touch()
    use(monkeypatch, BAD, GOOD)
    assert run_sweep(replace(request_, budget_s=60.0)) == 0
    assert {row.status for row in rows(request_)} == {"ok"}


def test_a_gpu_that_the_system_gives_no_second_process_is_lost_too(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As for want of memory: the row in hand is kept, and with no GPU left all are."""
    spawn, given = tuner.worker._spawn, []

    def once(end: Any, log: Any, handler: str, options: Any, env: Any) -> Any:
        if handler == request_.measurer and given:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        given.extend([handler] * (handler == request_.measurer))
        return spawn(end, log, handler, options, env)

    monkeypatch.setattr(tuner.worker, "_spawn", once)
    use(monkeypatch, BAD)
    with pytest.raises(UsageError) as end:
        run_sweep(replace(request_, budget_s=60.0))
    said = "no GPU worker is left, the last could not start: a worker process could not be made: "
    assert f"{said}Cannot allocate memory; 1 rows of this command are kept" in str(end.value)
    assert [row.status for row in rows(request_)] == ["runtime"]
    with Store.open(request_.db) as store:
        assert all(run.finished for run in store.runs())


def test_with_none_left_the_sweep_ends_with_its_rows_and_the_same_command_goes_on(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, BAD)
    with pytest.raises(UsageError) as end:
        run_sweep(replace(request_, budget_s=60.0))
    assert "no GPU worker is left, the last could not start: RuntimeError: the GPU has" in str(
        end.value
    )
    assert "; 1 rows of this command are kept, the same command goes on; dash-tune doctor" in str(
        end.value
    )
    (row,) = rows(request_)
    assert row.status == "runtime"
    with Store.open(request_.db) as store, store.reading() as connection:
        held = connection.scalar(text("select count(*) from dash_claims where state = 'taken'"))
        assert held == 0
        assert all(run.finished for run in store.runs())
    use(monkeypatch, GOOD)
    assert run_sweep(request_) == 3, "one failed before"
    assert len(rows(request_)) > 10
