"""What the doctor finds on a machine that NVML describes, and what it says to do about it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_driver import Board, FakeNvml, Slice

import tuner.doctor
from tuner.cli import main
from tuner.command import SweepRequest, UsageError, resolve_target, run_sweep
from tuner.doctor import Check, disturbances, examine
from tuner.nvml import Monitor, VisibleGpu, visible_gpus
from tuner.space import SpaceFilter

PART = Slice("NVIDIA H200 MIG 1g.18gb", "MIG-a", used=3)


def install(monkeypatch: pytest.MonkeyPatch, *boards: Board, **driver: object) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*boards, **driver))  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(tuner.doctor, "torch_cuda", lambda: "13.0")


def named(checks: list[Check], start: str) -> Check:
    (found,) = [check for check in checks if check.name.startswith(start)]
    return found


def test_a_machine_in_order_has_nothing_but_free_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Board())
    checks = examine()
    for name in ("gpu", "driver", "persistence", "MIG", "other processes"):
        assert named(checks, name).state == "ok"
    clocks = named(checks, "clocks")
    assert (clocks.state, clocks.spoils) == ("warning", False)
    assert "free to move" in clocks.found
    assert "-lgc" in clocks.remedy
    assert disturbances(visible_gpus()) == []


@pytest.mark.parametrize(
    ("board", "name", "found", "remedy"),
    [
        (Board(throttle=0x40), "clocks", "hardware thermal slowdown", "cool the GPU"),
        (Board(pids=(4711,)), "other processes", "pids 4711", "stop them"),
        (Board(persistence=0), "persistence", "off", "nvidia-smi -pm 1"),
        (Board(slices=[PART]), "MIG", "NVIDIA H200 MIG 1g.18gb's own", "nvidia-smi -mig 0"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(
    board: Board, name: str, found: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, board)
    check = named(examine(), name)
    assert check.state == "warning"
    assert found in check.found
    assert remedy in check.remedy
    told = disturbances(visible_gpus())
    assert told == ([check] if name in ("clocks", "other processes") else [])


def test_clocks_that_the_user_has_set_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Board(throttle=0x2))
    assert named(examine(), "clocks").state == "ok"


def test_a_driver_older_than_pytorchs_cuda_is_missing_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, Board(), driver="550.54", cuda=12040)
    check = named(examine(), "driver")
    assert check.state == "missing"
    assert "550.54 runs CUDA 12, and PyTorch is built for CUDA 13.0" in check.found
    assert "update the driver" in check.remedy


def test_a_slice_is_swept_under_its_own_name_and_never_for_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, Board(slices=[PART]))
    for asked in ("auto", "h200-mig-1g-18gb", "NVIDIA H200 MIG 1g.18gb"):
        target = resolve_target(SweepRequest(asked))
        assert (target.name, target.spec, target.gpus[0].uuid) == (
            "h200-mig-1g-18gb",
            None,
            "MIG-a",
        )
    with pytest.raises(UsageError, match=r"this machine has NVIDIA H200 MIG 1g\.18gb \(h200-mig"):
        resolve_target(SweepRequest("h200"))
    with pytest.raises(UsageError, match="unknown GPU 'h200-mig'"):
        resolve_target(SweepRequest("h200-mig"))


def test_slices_are_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Slice("NVIDIA H200 MIG 2g.35gb", "MIG-b")
    whole = Board(uuid="GPU-1", used=9)
    install(monkeypatch, Board(slices=[PART, other], used=7, sm_mhz=1234), whole)
    names = ["NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 MIG 2g.35gb", "NVIDIA H200"]
    assert [gpu.driver_name for gpu in visible_gpus()] == names
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b")
    assert visible_gpus() == [VisibleGpu(0, "MIG-b", names[1], (9, 0), "GPU-0")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0")
    assert [gpu.uuid for gpu in visible_gpus()] == ["MIG-a"], "CUDA takes the first slice"
    monitor = Monitor("MIG-a")
    assert monitor.sample()["sm_mhz"] == 1234, "clocks are the whole GPU's"
    assert monitor.memory_used() == 3, "memory is the slice's"
    assert Monitor("GPU-1").memory_used() == 9


def test_a_machine_without_a_compiler_or_headers_is_told_before_a_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, Board())
    ok = Check("triton", "ok", "3.6.0")
    for name in ("triton_version", "torch_build", "ptxas"):
        monkeypatch.setattr(tuner.doctor, name, lambda *_: ok)
    monkeypatch.setattr(sys, "argv", ["dash-tune", "--gpu", "h200", "--db", str(tmp_path / "db")])

    def refused() -> str:
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert not (tmp_path / "db").exists(), "nothing is written"
        return capsys.readouterr().err

    with monkeypatch.context() as without:
        without.setattr("shutil.which", lambda name: None)
        without.delenv("CC", raising=False)
        assert "no C compiler (gcc or clang); install gcc" in refused()
        without.setenv("CC", "nvcc-wrapper")
        assert "CC=nvcc-wrapper is not found; set CC" in refused()
    with monkeypatch.context() as without:
        without.setattr("sysconfig.get_path", lambda *_: str(tmp_path / "include"))
        assert f"Python.h is not in {tmp_path}/include; install Python's development" in refused()
    with monkeypatch.context() as without:
        without.setenv("TRITON_CACHE_DIR", "/proc/kernels")
        without.setattr("os.access", lambda *_: False)
        assert "/proc/kernels cannot be written; set TRITON_CACHE_DIR" in refused()


def test_what_spoils_times_is_said_before_the_sweep_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, Board(pids=(4711,)))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    request = SweepRequest(
        "h200",
        SpaceFilter(("causal",), (128,), (1024,), stages=(2,), schedules=("descending",)),
        str(tmp_path / "rows.sqlite"),
        measurer="fake_handlers:FakeMeasurer",
        compiler="fake_handlers:FakeCompiler",
        jobs=1,
    )
    assert run_sweep(request) == 0
    out = capsys.readouterr().out
    assert "warning: other processes on GPU 0: pids 4711; stop them" in out.splitlines()[0]
