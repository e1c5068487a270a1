"""The gates and the sampling, with the CPU in the GPU's place: what passes, what fails and as what."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dash_kernels import reference, testing
from dash_kernels.kernels import forward as forward_module
from dash_kernels.problem import Config, Problem
from tuner.failures import TRANSIENT, CandidateError
from tuner.gates import Cell, Entry
from tuner.measure import Measurer, classified, left_behind
from tuner.nvml import VisibleGpu, _selected, throttle_names
from tuner.policy import MeasurementPolicy
from tuner.sampling import Sampler
from tuner.stats import interval_width, median_interval
from tuner.truth import packed_lengths, spread, work_share

PROBLEM = Problem("causal", 64, 48, batch=2, heads=3)
ORDERED, UNORDERED = Config(), Config(policy="unordered")


OPTIONS = ("causal", "scale", "window", "softcap")


def rounded_gradients(dout: Any, q: Any, k: Any, v: Any, **how: Any) -> tuple[Any, ...]:
    """What a good kernel answers: float64 gradients, rounded."""
    named = {name: how[name] for name in OPTIONS if name in how}
    if "sequences" not in how:
        exact = reference.attention_backward(dout, q, k, v, **named)
        return tuple(x.to(q.dtype) for x in exact)
    starts = how["sequences"].cu_seqlens_q, how["sequences"].cu_seqlens_k
    packed = reference.packed_gradients(dout[0], q[0], k[0], v[0], *starts, **named)
    return tuple(x[None].to(q.dtype) for x in packed[:3])


class FakeKernel(ModuleType):
    """``dash_kernels.kernels.launch`` with a backward that can be told to misbehave at its n-th call."""

    def __init__(self) -> None:
        super().__init__("dash_kernels.kernels.launch")
        self.calls = 0
        self.spoil: dict[int, Any] = {}
        self.allowed: list[bool] = []
        self.missed = ""
        self.TurnTimeout = type("TurnTimeout", (RuntimeError,), {})

    def raise_if_turn_missed(self, device: Any) -> None:
        if self.missed:
            said, self.missed = self.missed, ""
            raise self.TurnTimeout(said)

    def backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **how: Any) -> Any:
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        self.calls += 1
        self.allowed.append(how["allow_resident"])
        grads = [x.clone() for x in rounded_gradients(dout, q, k, v, **how)]
        if self.calls in self.spoil:
            self.spoil[self.calls](*grads)
        return tuple(grads)


class Clock:
    """CUDA events on the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Clock) -> float:
        return (end.at - self.at) * 1e3


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKernel]:
    fake = FakeKernel()
    monkeypatch.setitem(sys.modules, "dash_kernels.kernels.launch", fake)
    monkeypatch.setattr(testing, "torch_flash_gradients", rounded_gradients)

    def forward(q: Any, k: Any, v: Any, sequences: Any = None, **how: Any) -> Any:
        if sequences is None:
            out, lse = reference.attention_forward(q, k, v, **how)
            return out.to(q.dtype), lse.float()
        starts = sequences.cu_seqlens_q, sequences.cu_seqlens_k
        out, lse = reference.packed_forward(q[0], k[0], v[0], *starts, **how)
        return out[None].to(q.dtype), lse[None].float()

    monkeypatch.setattr(forward_module, "forward", forward)
    return fake


@pytest.fixture
def cell(kernel: FakeKernel) -> Cell:
    return Cell(torch, PROBLEM, 2, "cpu")


@pytest.fixture
def packed_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """``kernels.sequences`` where there is no Triton: the tuple alone."""
    module: Any = ModuleType("dash_kernels.kernels.sequences")
    module.Sequences = namedtuple(
        "Sequences", "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    )
    monkeypatch.setitem(sys.modules, "dash_kernels.kernels.sequences", module)


@pytest.fixture
def measurer(cell: Cell) -> Measurer:
    made = object.__new__(Measurer)
    cuda = SimpleNamespace(
        Event=Clock,
        synchronize=lambda: None,
        _sleep=lambda cycles: None,
        memory_allocated=lambda: 0,
        empty_cache=lambda: None,
    )
    made.torch = SimpleNamespace(cuda=cuda)
    made.policy = MeasurementPolicy(warmup_ms=1.0, min_samples=6, max_samples=7, time_limit_ms=50.0)
    made.gpu = SimpleNamespace(spec=SimpleNamespace(peak_tflops=989.5))
    monitor = SimpleNamespace(sample=lambda: {"sm_mhz": 1500, "throttle": 0x4})
    made.sampler = Sampler(made.torch, made.policy, monitor, torch.empty(16, dtype=torch.int8))
    made.environment = {"capability": "9.0"}
    made.info = {"memory_bytes": 1 << 30}
    made.cells = OrderedDict({PROBLEM: cell})
    made.ceiling, made.at_rest, made.left_behind = 700.0, 0, 0
    return made


def task(kind: str, *configs: Config, baseline: Config | None = None) -> dict[str, Any]:
    return {
        "kind": kind,
        "problem": PROBLEM.to_dict(),
        "entries": [{"config": config.to_dict(), "min_resident": 1} for config in configs],
        "baseline": baseline.to_dict() if baseline else None,
    }


def test_a_good_config_passes_with_its_errors_and_comparisons(cell: Cell) -> None:
    found = cell.gate(ORDERED, cell.runner(Entry(ORDERED, 1)), 4)
    assert found["bits_equal"]
    assert found["runs_compared"] == 4
    assert 0 < found["rel_error"] <= found["budget"]


def test_a_wrong_value_in_a_sampled_head_is_over_budget(cell: Cell, kernel: FakeKernel) -> None:
    kernel.spoil[1] = lambda dq, dk, dv: dk[0, :, 0].mul_(1.1)
    with pytest.raises(CandidateError, match=r"dk: error .* the budget is") as failed:
        cell.gate(ORDERED, cell.runner(Entry(ORDERED, 1)), 4)
    assert failed.value.failure == "correctness"
    assert failed.value.details["rel_error"] > failed.value.details["budget"]


def test_a_wrong_head_outside_the_sample_is_named(cell: Cell, kernel: FakeKernel) -> None:
    assert cell.truth.peer is not None
    kernel.spoil[1] = lambda dq, dk, dv: dq[0, :, 1].zero_()
    with pytest.raises(CandidateError, match="dq of batch 0, head 1") as failed:
        cell.gate(ORDERED, cell.runner(Entry(ORDERED, 1)), 4)
    assert failed.value.failure == "correctness"


@pytest.mark.parametrize("where", [(0, 0), (0, 1)])
def test_a_nan_never_passes(cell: Cell, kernel: FakeKernel, where: tuple[int, int]) -> None:
    batch, head = where
    kernel.spoil[1] = lambda dq, dk, dv: dv[batch, 3, head].fill_(math.nan)
    with pytest.raises(CandidateError, match="dv") as failed:
        cell.gate(ORDERED, cell.runner(Entry(ORDERED, 1)), 2)
    assert failed.value.failure == "correctness"


def flip_a_bit(dq: Any, dk: Any, dv: Any) -> None:
    dk.view(torch.int16)[1, 5, 2, 7] ^= 1


def test_one_bit_in_a_later_run_is_nondeterminism_and_says_where(
    cell: Cell, kernel: FakeKernel
) -> None:
    kernel.spoil[3] = flip_a_bit
    with pytest.raises(CandidateError, match=r"dk, run 3 of 4: .*\(1, 5, 2, 7\)") as failed:
        cell.gate(ORDERED, cell.runner(Entry(ORDERED, 1)), 4)
    assert failed.value.failure == "nondeterministic"
    assert failed.value.details["bits_equal"] is False


def test_the_unordered_yardstick_may_vary_and_is_marked(cell: Cell, kernel: FakeKernel) -> None:
    kernel.spoil[2] = flip_a_bit
    found = cell.gate(UNORDERED, cell.runner(Entry(UNORDERED, 1)), 3)
    assert found["bits_equal"] is False


SHAPE: dict[str, Any] = {"mask": "causal", "head_dim": 64, "seq_len": 48, "heads": 4}
WITH_OPTIONS = {
    "window": (Problem(**SHAPE, window_left=7), "window"),
    "window on both sides": (
        Problem(**{**SHAPE, "mask": "full"}, window_left=7, window_right=3),
        "window",
    ),
    "softcap": (Problem(**SHAPE, softcap=True), "softcap"),
    "packed": (Problem(**SHAPE, batch=3, varlen=True), "sequences"),
    "grouped heads": (Problem(**SHAPE, heads_kv=2), ""),
    "padded": (Problem(**{**SHAPE, "head_dim": 72}), ""),
    "V narrower": (Problem(**{**SHAPE, "head_dim": 72}, head_dim_v=40), ""),
    "all at once": (
        Problem(**SHAPE, batch=2, heads_kv=1, window_left=9, softcap=True, varlen=True),
        "softcap",
    ),
}


@pytest.mark.parametrize(("problem", "forgotten"), WITH_OPTIONS.values(), ids=WITH_OPTIONS)
def test_options_reach_the_kernel_and_one_that_forgets_them_is_wrong(
    problem: Problem,
    forgotten: str,
    kernel: FakeKernel,
    packed_module: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = Cell(torch, problem, 2, "cpu")
    found = cell.gate(ORDERED, cell.runner(Entry(ORDERED, 1)), 2)
    assert 0 < found["rel_error"] <= found["budget"]
    dq, dk, dv = cell.first
    assert (dq.shape, dk.shape, dv.shape) == (cell.q.shape, cell.k.shape, cell.v.shape)
    if not forgotten:
        return
    plain = kernel.backward

    def forgets(*tensors: Any, **how: Any) -> Any:
        del how[forgotten]
        return plain(*tensors, **how)

    monkeypatch.setattr(kernel, "backward", forgets)
    with pytest.raises(CandidateError, match="the budget is") as failed:
        cell.gate(ORDERED, cell.runner(Entry(ORDERED, 1)), 2)
    assert failed.value.failure == "correctness"


def test_packed_sequences_count_the_work_that_they_are() -> None:
    problem = Problem("causal", 64, 4096, batch=4, varlen=True)
    assert packed_lengths(problem) == [(n, n) for n in (4096, 3072, 2048, 1024)]
    assert work_share(problem) == (1 + 4 + 9 + 16) / 64
    assert work_share(PROBLEM) == 1.0


def test_a_forward_that_no_kernel_computes_is_constraints(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **how: Any) -> Any:
        assert how["softcap"] == testing.SOFTCAP
        raise NotImplementedError("no forward kernel caps scores")

    monkeypatch.setattr(forward_module, "forward", refuse)
    with pytest.raises(CandidateError, match="caps scores") as failed:
        Cell(torch, Problem(**SHAPE, softcap=True), 2, "cpu")
    assert failed.value.failure == "constraints"


def test_a_refusal_before_launch_is_constraints(
    cell: Cell, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("needs 200 CTAs at once")

    monkeypatch.setattr(kernel, "backward", refuse)
    with pytest.raises(CandidateError, match="200 CTAs") as failed:
        cell.gate(ORDERED, cell.runner(Entry(ORDERED, 1)), 2)
    assert failed.value.failure == "constraints"


def test_a_turn_that_never_came_is_a_timeout_of_this_config(cell: Cell, kernel: FakeKernel) -> None:
    kernel.missed = "head 3, Q tile 7: turn 2 did not come"
    with pytest.raises(CandidateError, match="head 3, Q tile 7") as failed:
        cell.gate(ORDERED, cell.runner(Entry(ORDERED, 1)), 2)
    assert failed.value.failure == "timeout"
    assert cell.gate(ORDERED, cell.runner(Entry(ORDERED, 1)), 2)["bits_equal"]


def test_only_a_config_that_waits_on_later_ctas_is_allowed_residents(
    cell: Cell, kernel: FakeKernel
) -> None:
    cell.runner(Entry(ORDERED, 1))()
    cell.runner(Entry(ORDERED, 32))()
    assert kernel.allowed == [False, True]


def test_measuring_alternates_with_the_baseline(measurer: Measurer) -> None:
    baseline = Config(schedule="ascending", launch_order="ascending")
    result = measurer.handle(task("measure", ORDERED, baseline=baseline))
    assert 6 <= len(result["samples"]) <= 7
    assert result["ms_low"] <= result["ms"] <= result["ms_high"]
    assert result["tflops"] == pytest.approx(PROBLEM.flops() / result["ms"] * 1e-9)
    assert result["speedup_vs_baseline"] > 0
    assert result["runs_compared"] == 5
    assert result["telemetry"]["sm_mhz"] == 1500
    assert result["telemetry"]["throttle"] == ["software power cap"]


def test_what_the_timed_launches_leave_behind_is_checked(
    measurer: Measurer, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dQ that grows with every launch is right at first and wrong later."""
    plain = kernel.backward

    def grows(*args: Any, **how: Any) -> Any:
        dq, dk, dv = plain(*args, **how)
        return dq + (kernel.calls > 8), dk, dv

    monkeypatch.setattr(kernel, "backward", grows)
    with pytest.raises(CandidateError) as failed:
        measurer.handle(task("measure", ORDERED))
    assert failed.value.failure == "correctness"


def test_samples_under_a_thermal_slowdown_are_taken_again(
    measurer: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    readings = iter([{"throttle": 0x20}, {"throttle": 0x40}])
    monkeypatch.setattr(measurer.sampler.monitor, "sample", lambda: next(readings, {"throttle": 0}))
    monkeypatch.setattr(time, "sleep", slept.append)
    result = measurer.handle(task("measure", ORDERED))
    assert result["telemetry"]["discarded_rounds"] == 12
    assert result["telemetry"]["throttle"] == []
    assert slept == [0.5, 1.0]


def test_a_gpu_that_stays_hot_is_a_failure_and_never_a_slow_config(
    measurer: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(measurer.sampler.monitor, "sample", lambda: {"throttle": 0x4 | 0x40})
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(CandidateError, match="stayed under hardware thermal slowdown") as failed:
        measurer.handle(task("measure", ORDERED))
    assert failed.value.failure in TRANSIENT
    assert sum(slept) == pytest.approx(measurer.policy.cool_down_s)


def test_a_median_that_is_not_known_well_enough_says_so(
    measurer: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.cycle([1.0, 1.1, 1.2])
    monkeypatch.setattr(Clock, "elapsed_time", lambda self, end: next(times))
    noisy = measurer.handle(task("measure", ORDERED))["telemetry"]
    assert (noisy["settled"], noisy["interval"] > 0.005) == (False, True)
    monkeypatch.setattr(Clock, "elapsed_time", lambda self, end: 1.0)
    steady = measurer.handle(task("measure", ORDERED))["telemetry"]
    assert (steady["settled"], steady["interval"]) == (True, 0.0)


def test_a_worker_whose_failed_candidate_keeps_memory_is_replaced(
    measurer: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurer.torch, "ones", lambda *_, **__: torch.ones(1), raising=False)
    assert measurer.healthy()
    measurer.torch.cuda.memory_allocated = lambda: 1 << 30
    assert not measurer.healthy()


def test_a_new_worker_waits_until_the_killed_one_has_given_its_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    used = iter([9 << 30, 5 << 30, 1 << 30])
    monitor: Any = SimpleNamespace(memory_used=lambda: next(used))
    assert left_behind(monitor, 1 << 30) == 0
    assert next(used, None) is None
    ticks = itertools.count(step=6.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    stuck: Any = SimpleNamespace(memory_used=lambda: 3 << 30)
    assert left_behind(stuck, 1 << 30) == 2 << 30
    assert left_behind(stuck, None) == 0, "nothing is known of the time before"


def test_a_final_round_samples_rivals_in_turn_and_keeps_going_past_a_failure(
    measurer: Measurer, kernel: FakeKernel
) -> None:
    rival = Config(schedule="descending", launch_order="ascending")
    runs = measurer.policy.runs_compared
    kernel.spoil[runs + 2] = flip_a_bit
    answer = measurer.handle(task("final", ORDERED, rival, UNORDERED))["results"]
    assert [result.get("status", "ok") for result in answer] == ["ok", "nondeterministic", "ok"]
    assert answer[0]["speedup_vs_baseline"] == 1.0
    assert answer[1]["speedup_vs_baseline"] is None
    assert len(answer[0]["samples"]) == len(answer[2]["samples"])
    assert answer[2]["telemetry"]["round"] == "final"


def test_launch_errors_get_the_class_of_their_cause() -> None:
    class OutOfResources(Exception):
        required, limit = 300000, 232448

    found = classified(OutOfResources("out of resource: shared memory"))
    assert (found.failure, found.details) == (
        "constraints",
        {"required_bytes": 300000, "limit_bytes": 232448},
    )
    broken = type("CompilationError", (Exception,), {"__module__": "triton.compiler.errors"})
    assert classified(broken("at 3:4")).failure == "compile"
    assert classified(RuntimeError("CUDA error")).failure == "runtime"


def test_sampled_heads_are_the_first_and_the_last() -> None:
    assert spread(6, 2) == [0, 5]
    assert spread(1, 2) == [0]
    assert spread(3, 9) == [0, 1, 2]


def test_median_interval_covers_the_median_and_narrows() -> None:
    samples = [1.0 + i / 1000 for i in range(40)]
    middle, low, high = median_interval(samples)
    assert low < middle < high
    assert (high - low) < samples[-1] - samples[0]
    assert median_interval([2.0, 1.0, 3.0]) == (2.0, 1.0, 3.0)
    assert interval_width([1.0] * 10) == 0.0
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])


def test_visible_devices_are_read_as_cuda_reads_them() -> None:
    gpus = [VisibleGpu(i, f"GPU-{i}", "NVIDIA H200", (9, 0)) for i in range(3)]
    assert _selected(gpus, None) == gpus
    assert _selected(gpus, "") == []
    assert _selected(gpus, "-1") == []
    assert _selected(gpus, "2,0") == [gpus[2], gpus[0]]
    assert _selected(gpus, "1,9,2") == [gpus[1]]
    assert _selected(gpus, "GPU-2") == [gpus[2]]


def test_throttle_bits_have_names() -> None:
    assert throttle_names(0x4 | 0x40) == ["software power cap", "hardware thermal slowdown"]
    assert throttle_names(0x1) == [], "an idle chip is not held back"
