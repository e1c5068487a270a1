"""A whole sweep with a fake GPU: order, rows, failures by class, resume, budget, interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_handlers import ENVIRONMENT
from processes import gone_within

import tuner.command
import tuner.resume
from tuner.command import SweepRequest, UsageError, run_sweep
from tuner.engines.local import Pool
from tuner.nvml import VisibleGpu
from tuner.plan import SweepSettings
from tuner.results import ResultRow, Store
from tuner.space import SpaceFilter, space
from tuner.sweep import Sweep, items_of
from tuner.winners import winners
from tuner.worker import Reply

GPU = VisibleGpu(0, "GPU-fake", "NVIDIA H200", (9, 0))
SMALL = SpaceFilter(
    ("causal",), (128,), (1024,), schedules=("shortest_first", "descending", "shift")
)


@pytest.fixture
def request_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepRequest:
    """A sweep of a dozen configs on one fake H200."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("DASH_FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(tuner.command, "visible_gpus", lambda: [GPU])
    return SweepRequest(
        gpu="h200",
        filters=SMALL,
        db=str(tmp_path / "rows.sqlite"),
        jobs=1,
        timeout_s=1.5,
        compile_timeout_s=20.0,
        measurer="fake_handlers:FakeMeasurer",
        compiler="fake_handlers:FakeCompiler",
    )


def rows(request: SweepRequest) -> list[ResultRow]:
    with Store.open(request.db) as store:
        return store.results(limit=None)


def first_pass(request: SweepRequest) -> list[ResultRow]:
    return [row for row in rows(request) if (row.telemetry or {}).get("round") != "final"]


def plan(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DASH_FAKE_PLAN", text)


def test_every_config_gets_one_row_with_its_resources_and_baseline(request_: SweepRequest) -> None:
    assert run_sweep(request_) == 0
    found = first_pass(request_)
    assert len({row.config_hash for row in found}) == len(found) > 8
    assert {row.status for row in found} == {"ok"}
    assert found[0].schedule == "ascending"
    for row in found:
        assert (row.registers, row.spill_bytes, row.shared_bytes) == (168, 0, 214016)
        assert row.min_resident is not None
        assert row.speedup_vs_baseline is not None
    shift = next(row for row in found if row.schedule == "shift")
    assert shift.min_resident == 8


def test_the_final_round_holds_the_baselines_and_the_leaders(request_: SweepRequest) -> None:
    run_sweep(request_)
    final = [row for row in rows(request_) if (row.telemetry or {}).get("round") == "final"]
    assert final[0].schedule == "ascending"
    assert {"unordered", "ordered"} <= {row.policy for row in final}
    assert {"shortest_first", "shift"} <= {row.schedule for row in final}
    with Store.open(request_.db) as store:
        assert {run.command for run in store.runs()} == {"dash-tune", "dash-tune (final round)"}
        (cell,) = store.winners("h200")
    assert cell.served is not None
    assert cell.served.row.schedule == "shortest_first"
    assert cell.best.row.schedule == "shift"
    assert set(cell.baselines) == {"ascending", "unordered"}


def test_rows_of_the_final_round_decide_over_earlier_ones(request_: SweepRequest) -> None:
    run_sweep(request_)
    with Store.open(request_.db) as store:
        (cell,) = store.winners("h200")
        assert cell.served is not None
        slower = next(row for row in store.results(limit=None) if row.schedule == "descending")
        lucky = replace(slower, tflops=900.0, id=None, run_id=None, run_uuid=None, created_at=None)
        run = store.start_run(replace(store.runs()[0], id=None, uuid="earlier", finished=None))
        store.add(run, lucky)
        (after,) = store.winners("h200")
        assert after.served is not None
        assert after.served.row.tflops == 900.0, "a newer row competes"
    older = replace(cell.served.row, telemetry=None, id=1, tflops=999.0, config_hash="other")
    final = [cell.served.row, cell.best.row]
    (judged,) = winners([(row, "sweep") for row in [older, *final]])
    assert judged.served is not None
    assert judged.served.row.config_hash == cell.served.row.config_hash


def test_resume_does_nothing_new_and_fresh_does_all_again(
    request_: SweepRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sweep(request_)
    before, work = len(rows(request_)), (tmp_path / "log").read_text()
    assert run_sweep(request_) == 0
    assert len(rows(request_)) == before
    assert (tmp_path / "log").read_text() == work
    assert "0 configs to do" in capsys.readouterr().out
    assert run_sweep(replace(request_, fresh=True)) == 0
    assert len(rows(request_)) == 2 * before


def test_each_failure_is_a_row_of_its_class_and_the_sweep_goes_on(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(monkeypatch, "descending=wrong,shift=varies,two_pass=refused,unordered=raise")
    assert run_sweep(request_) == 3
    classes = {
        (row.schedule if row.policy == "ordered" else row.policy): row.status
        for row in first_pass(request_)
    }
    assert classes == {
        "ascending": "ok",
        "shortest_first": "ok",
        "descending": "correctness",
        "shift": "nondeterministic",
        "two_pass": "constraints",
        "unordered": "runtime",
    }
    refused = next(row for row in rows(request_) if row.status == "constraints")
    assert (refused.required_bytes, refused.limit_bytes) == (300000, 232448)
    wrong = next(row for row in rows(request_) if row.status == "correctness")
    assert (wrong.rel_error, wrong.budget, wrong.tflops) == (1.0, 0.01, None)
    out = capsys.readouterr().out
    counted = Counter(row.status for row in first_pass(request_))
    for name in ("correctness", "nondeterministic", "constraints", "runtime"):
        assert f"  {name}: {counted[name]}" in out


def test_a_resumed_sweep_remembers_which_gates_failed(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(monkeypatch, "ascending=wrong,shift=varies")
    assert run_sweep(request_) == 3
    failed = sum(row.status != "ok" for row in rows(request_))
    capsys.readouterr()
    plan(monkeypatch, "")
    more = replace(
        request_, filters=replace(SMALL, schedules=("shortest_first", "shift", "ascending"))
    )
    assert run_sweep(more) == 3, "they failed before, so not all is measured"
    assert f"{failed} failed before" in capsys.readouterr().out


def test_a_hang_is_a_timeout_and_leaves_no_process(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan(monkeypatch, "shift=hang")
    request = replace(request_, compile_timeout_s=0.5)
    assert run_sweep(request) == 3
    found = first_pass(request)
    assert {row.status for row in found if row.schedule == "shift"} == {"timeout"}
    assert {row.status for row in found if row.schedule != "shift"} == {"ok"}
    assert all(row.ms is None for row in found if row.status == "timeout")
    assert gone_within(int((tmp_path / "log.child").read_text()))


@pytest.mark.parametrize(
    ("action", "said"), [("exit", "illegal memory access"), ("sticky", "misaligned")]
)
def test_a_lost_context_is_a_runtime_failure_and_the_next_config_runs_in_a_new_process(
    request_: SweepRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    action: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan(monkeypatch, f"descending={action}")
    assert run_sweep(request_) == 3
    found = first_pass(request_)
    lost = [row for row in found if row.status != "ok"]
    assert {(row.schedule, row.status) for row in lost} == {("descending", "runtime")}
    assert f"{len(lost)} failed" in capsys.readouterr().out
    assert all(row.ms is None and row.tflops is None for row in lost), "a death is never slow"
    assert all(said in (row.error or "") for row in lost)
    assert len(found) - len(lost) > 5
    pids = {line.split()[0] for line in (tmp_path / "log").read_text().splitlines()}
    assert len(pids) == len(lost) + 1


def test_without_a_good_baseline_there_is_no_speedup(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(monkeypatch, "ascending=exit")
    assert run_sweep(request_) == 3
    with Store.open(request_.db) as store:
        (cell,) = store.winners("h200")
    assert "ascending" not in cell.baselines
    assert cell.best.speedup_vs_baseline is None


def test_a_kernel_that_does_not_compile_is_never_launched(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASH_FAKE_COMPILE", "fail")
    assert run_sweep(request_) == 3
    found = first_pass(request_)
    portable = [row for row in found if row.backend == "portable"]
    assert portable
    assert {row.status for row in portable} == {"compile"}
    assert all("out of registers" in (row.error or "") for row in portable)
    assert all(row.status == "ok" for row in found if row not in portable)


def test_a_compiler_that_hangs_times_out_and_nothing_usable_is_exit_1(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DASH_FAKE_COMPILE", "hang")
    filters = replace(SMALL, schedules=("shortest_first",))
    request = replace(request_, compile_timeout_s=0.5, filters=filters)
    assert run_sweep(request) == 1
    assert {row.status for row in rows(request)} == {"timeout"}
    assert "nothing usable" in capsys.readouterr().out


def test_what_does_not_fit_is_a_constraints_row_with_bytes_and_exit_1(
    request_: SweepRequest,
) -> None:
    filters = SpaceFilter(("full",), (256,), (1024,), tiles=((128, 256),), stages=(6,))
    only = replace(request_, filters=filters)
    assert run_sweep(only) == 1
    found = rows(only)
    assert {row.status for row in found} == {"constraints"}
    assert all(row.error and row.tflops is None for row in found)
    assert all((row.required_bytes or 0) > (row.limit_bytes or 0) > 0 for row in found)
    with Store.open(only.db) as store:
        assert store.winners("h200") == []


def test_more_residents_than_sms_is_left_out_or_said_when_asked_for(request_: SweepRequest) -> None:
    wide = SpaceFilter(("full",), (128,), (32768,), schedules=("shift",))
    request = replace(request_, filters=wide)
    assert run_sweep(request) == 3
    status = {
        row.schedule: (row.status, row.error) for row in rows(request) if row.policy == "ordered"
    }
    assert status["ascending"][0] == "ok"
    assert status["shift"][0] == "constraints"
    assert "256 CTAs" in (status["shift"][1] or "")


def test_a_kernel_with_more_shared_memory_than_the_chip_has_is_never_launched(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASH_FAKE_COMPILE", "large")
    assert run_sweep(request_) == 3
    refused = [row for row in rows(request_) if row.backend == "portable"]
    assert refused
    assert {row.status for row in refused} == {"constraints"}
    assert {(row.required_bytes, row.limit_bytes) for row in refused} == {(240000, 232448)}
    unasked = replace(request_, filters=replace(SMALL, schedules=()), db=request_.db + ".2")
    assert run_sweep(unasked) == 0
    assert {row.backend for row in rows(unasked)} == {"hopper"}


def test_a_config_whose_tables_would_deadlock_never_reaches_a_gpu(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DASH_FAKE_CYCLE", "descending")
    only = replace(request_, filters=replace(SMALL, schedules=("descending",)))
    assert run_sweep(only) == 3
    refused = [row for row in rows(only) if row.schedule == "descending"]
    assert {(row.status, row.error) for row in refused} == {("constraints", "a cycle of turns")}
    assert "descending" not in (tmp_path / "log").read_text()


def test_a_resumed_sweep_with_nothing_to_do_starts_no_process_and_is_quick(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {name: value for name, value in ENVIRONMENT.items() if name == "torch"}
    monkeypatch.setattr(tuner.resume, "software", lambda: about)
    run_sweep(request_)
    capsys.readouterr()

    def never(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(tuner.command, "gpu_pool", never)
    monkeypatch.setattr(tuner.command, "compile_pool", never)
    started = time.monotonic()
    assert run_sweep(request_) == 0
    assert time.monotonic() - started < 5
    assert "0 configs to do" in capsys.readouterr().out
    monkeypatch.setattr(tuner.resume, "software", lambda: {"torch": "newer"})
    with pytest.raises(AssertionError, match="a process was started"):
        run_sweep(request_)


def test_a_final_round_stays_within_the_cells_of_its_command(request_: SweepRequest) -> None:
    """Rows of another cell that no final round has decided are no business of this command."""
    run_sweep(request_)
    other = replace(SMALL, masks=("full",), schedules=("ascending", "descending"))
    with Store.open(request_.db) as store:
        (run,) = [run for run in store.runs() if run.command == "dash-tune"]
        first = next(row for row in store.results(limit=None) if row.schedule == "ascending")
        again = store.start_run(replace(run, id=None, uuid="other", finished=None))
        for row in first_pass(request_)[:2]:
            problem = replace(row.to_problem(), seq_len=2048, seq_len_kv=2048)
            values = {"tflops": first.tflops, "ms": 1.0, "min_resident": 1}
            store.add(again, ResultRow.of(problem, row.to_config(), gpu="h200", **values))
    run_sweep(replace(request_, filters=other))
    final = [row for row in rows(request_) if (row.telemetry or {}).get("round") == "final"]
    assert {(row.mask, row.seq_len) for row in final} == {("causal", 1024), ("full", 1024)}


def test_the_model_puts_the_most_promising_candidate_of_a_tier_first() -> None:
    settings = SweepSettings("h200", (9, 0), 132, model=True)
    items = items_of(space((9, 0), replace(SMALL, schedules=())), "measured")
    slot = SimpleNamespace(held=None)
    pools: Any = SimpleNamespace(slots=[slot])
    sweep = Sweep(None, settings, items, pools, pools, {}, None)  # type: ignore[arg-type]
    done = sweep.prepared.done
    for place, item in enumerate(items):
        item.kernel_key = item.hash
        done["prove", item.prove_key] = Reply(True, {"min_resident": 1})
        done["compile", item.hash] = Reply(True, {})
        done["predict", item.predict_key] = Reply(True, {"predicted": float(-place)})
        if item.candidate.tier == 0:
            item.state = "done"
    wanted = sweep._wanted_by(slot)  # type: ignore[arg-type]
    assert {item.candidate.tier for item in wanted} == {1}
    times = [sweep.prepared.predicted_ms(item) for item in wanted]
    assert times == sorted(times)
    assert wanted != [item for item in items if item.candidate.tier == 1], "not the space's order"


def test_a_window_is_a_cell_of_its_own_and_resumes_as_one(request_: SweepRequest) -> None:
    filters = replace(SMALL, schedules=("descending",), windows=((-1, -1), (255, 0)), stages=(2,))
    both = replace(request_, filters=filters)
    assert run_sweep(both) == 0
    with Store.open(both.db) as store:
        plain, windowed = store.winners("h200")
        assert (plain.window_left, windowed.window_left) == (-1, 255)
        assert {row.window_left for row in plain.servable} == {-1}
        before = store.count()
    assert run_sweep(both) == 0
    assert len(rows(both)) == before


def test_cores_are_those_of_the_container(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    here = tuner.command.cpu_cores(quota)
    assert here >= 1
    quota.write_text("max 100000")
    assert tuner.command.cpu_cores(quota) == here
    quota.write_text("150000 100000")
    assert tuner.command.cpu_cores(quota) == 1


def test_a_budget_stops_in_order_and_the_same_command_finishes(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(monkeypatch, ",".join(f"{kind}=slow" for kind in ("ascending", "shortest_first", "shift")))
    assert run_sweep(replace(request_, budget_s=1.5)) in (0, 1)
    some = len(rows(request_))
    assert "the same command goes on from here" in capsys.readouterr().out
    monkeypatch.delenv("DASH_FAKE_PLAN")
    assert run_sweep(request_) == 0
    found = first_pass(request_)
    assert some < len(found) == len({row.config_hash for row in found})


def test_retry_repeats_timeouts_and_deaths_only(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(monkeypatch, "descending=exit,shift=wrong")
    assert run_sweep(request_) == 3
    plan(monkeypatch, "")
    assert run_sweep(replace(request_, retry=True)) in (0, 3)
    last = {row.config_hash: row for row in first_pass(request_)}
    assert {row.status for row in last.values() if row.schedule == "descending"} == {"ok"}
    assert {row.status for row in last.values() if row.schedule == "shift"} == {"correctness"}


def test_a_worker_that_cannot_start_is_one_line_and_no_row(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(monkeypatch, "start=fail")
    with pytest.raises(UsageError, match="no CUDA driver in this test"):
        run_sweep(request_)
    assert rows(request_) == []


def test_without_a_gpu_a_short_budget_gives_rows(
    request_: SweepRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second task is a prediction: the first rows come before the last kernel, however slow compiling is."""
    begun: list[str] = []
    submit = Pool.submit

    def noted(self: Pool, slot: Any, key: Any, *rest: Any) -> None:
        begun.append(key[0])
        submit(self, slot, key, *rest)

    monkeypatch.setattr(Pool, "submit", noted)
    assert run_sweep(replace(request_, gpu="h800", compile_only=True, simulate=True)) == 0
    assert "predict" not in begun[:8:2]
    assert begun[1:8:2] == ["predict"] * 4


def test_without_a_gpu_rows_are_compiled_and_modelled_and_never_measured(
    request_: SweepRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    request = replace(request_, gpu="h800", compile_only=True, simulate=True, as_json=True)
    assert run_sweep(request) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[0]["event"] == "begin"
    assert events[-1]["exit_code"] == 0
    assert events[-1]["ok"] == events[0]["total"] == len(events) - 2
    found = rows(request)
    assert Counter(row.source for row in found) == {
        "compiled": len(found) // 2,
        "modelled": len(found) // 2,
    }
    assert all(row.gpu == "h800" and row.tflops is None and row.ms is None for row in found)
    times = {row.schedule: row.predicted for row in found if row.source == "modelled"}
    assert times["shift"] < times["ascending"]  # type: ignore[operator]
    with Store.open(request.db) as store:
        assert store.winners("h800") == []
        (cell,) = store.winners("h800", source="modelled")
        assert cell.best.row.predicted == min(
            row.predicted for row in found if row.predicted and row.policy != "unordered"
        )
        run = store.runs()[0]
    assert run.environment["gpu"] == "h800"
    assert run.environment["sms"] == 132
    assert run.environment["gpu_name"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_rows_and_children_do_not_survive(
    request_: SweepRequest, tmp_path: Path, number: int
) -> None:
    script = f"""
import sys
import tuner.command
import tuner.resume
from fake_handlers import ENVIRONMENT
from tuner.command import SweepRequest, run_sweep
from tuner.nvml import VisibleGpu
from tuner.plan import SweepSettings
from tuner.space import SpaceFilter, space
from tuner.sweep import Sweep, items_of
from tuner.winners import winners
from tuner.worker import Reply
tuner.command.visible_gpus = lambda: [VisibleGpu(0, "GPU-fake", "NVIDIA H200", (9, 0))]
sys.exit(run_sweep(SweepRequest(gpu="h200", filters={SMALL!r}, db={request_.db!r}, jobs=1,
    measurer={request_.measurer!r}, compiler={request_.compiler!r})))
"""
    env = {**os.environ, "DASH_FAKE_PLAN": "shift=hang"}
    env["PYTHONPATH"] = os.pathsep.join(
        (str(Path(__file__).parent), str(Path(__file__).parents[1]))
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    marker = tmp_path / "log.child"
    deadline = time.monotonic() + 30
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(child.pid, number)
    out, _ = child.communicate(timeout=20)
    assert child.returncode == 130, out
    assert "the same command goes on from here" in out
    kept = rows(request_)
    assert kept
    assert {row.status for row in kept} == {"ok"}
    assert gone_within(int(marker.read_text()))
