"""Timing on a GPU: whole calls between CUDA events, several in turn, with what NVML said meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tuner.nvml import SPOILING, Monitor, throttle_names
from tuner.policy import MeasurementPolicy
from tuner.stats import interval_width, median_interval

BATCH_ROUNDS = 6
MATMUL = 8192
LONGEST_SPIN_S = 0.2
SPIN_HZ = 1.7e9  # cycles a second that torch.cuda._sleep counts, near enough for a lead


class Timing:
    """Samples in ms, one list a run, and what NVML said while they were taken."""

    def __init__(self, samples: list[list[float]]) -> None:
        self.samples = samples
        self.telemetry: dict[str, Any] = {}
        self.spoiled = False
        self._seen: list[dict[str, int | float]] = []

    def observe(self, reading: dict[str, int | float]) -> None:
        if reading:
            self._seen.append(reading)

    def finish(self) -> None:
        if not self._seen:
            return
        bits = 0
        for reading in self._seen:
            bits |= int(reading.get("throttle", 0))
        self.spoiled = bool(bits & SPOILING)
        for name in ("sm_mhz", "memory_mhz", "celsius", "watts"):
            values = [reading[name] for reading in self._seen if name in reading]
            if values:
                self.telemetry[name] = round(sum(values) / len(values), 1)
        self.telemetry["throttle"] = throttle_names(bits)


def flush_buffer(torch: Any, l2_bytes: int) -> Any:
    """Twice the L2, on the current GPU."""
    return torch.empty(max(2 * l2_bytes, 1 << 20), dtype=torch.int8, device="cuda")


def matmul_tflops(torch: Any, sampler: Sampler) -> float:
    """The chip's ceiling as it runs here: TFLOPS of a square bf16 matrix product of MATMUL rows."""
    a, b = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    timing = sampler.run([lambda: torch.mm(a, b)])
    return 2.0 * MATMUL**3 / median_interval(timing.samples[0])[0] * 1e-9


class Sampler:
    """Samples calls on the current GPU by one policy. ``flush`` is written before each sample to empty the L2."""

    def __init__(self, torch: Any, policy: MeasurementPolicy, monitor: Monitor, flush: Any) -> None:
        self.torch, self.policy, self.monitor, self.flush = torch, policy, monitor, flush

    def run(self, runs: Sequence[Callable[[], Any]]) -> Timing:
        """Sample each of ``runs`` in turn until the policy is content."""
        timing = self._once(runs)
        if timing.spoiled:  # a thermal or hardware slowdown is not the config's: once more
            time.sleep(1.0)
            again = self._once(runs)
            again.telemetry["discarded_rounds"] = len(timing.samples[0])
            return again
        return timing

    def _once(self, runs: Sequence[Callable[[], Any]]) -> Timing:
        policy, torch = self.policy, self.torch
        spin = self._warm_up(runs)
        timing = Timing([[] for _ in runs])
        started = time.perf_counter()
        while True:
            rounds = min(BATCH_ROUNDS, policy.max_samples - len(timing.samples[0]))
            events = self._enqueue(runs, rounds, spin)
            timing.observe(self.monitor.sample())
            torch.cuda.synchronize()
            for place, begin, end in events:
                timing.samples[place].append(begin.elapsed_time(end))
            count = len(timing.samples[0])
            if count >= policy.max_samples:
                break
            spent = (time.perf_counter() - started) * 1e3
            settled = all(
                interval_width(samples) <= policy.target_interval for samples in timing.samples
            )
            if count >= policy.min_samples and (settled or spent >= policy.time_limit_ms):
                break
        timing.finish()
        return timing

    def _warm_up(self, runs: Sequence[Callable[[], Any]]) -> float:
        """Run everything for a while; answers the seconds by which a batch's launches must lead the GPU."""
        torch = self.torch
        for run in runs:
            run()
        torch.cuda.synchronize()
        deadline = time.perf_counter() + self.policy.warmup_ms / 1e3
        enqueue, total, rounds = 0.0, 0.0, 0
        while rounds == 0 or time.perf_counter() < deadline:
            begin = time.perf_counter()
            for run in runs:
                self.flush.zero_()
                run()
            enqueue += time.perf_counter() - begin
            torch.cuda.synchronize()
            total += time.perf_counter() - begin
            rounds += 1
        lag = max(0.0, enqueue / rounds - max(0.0, total - enqueue) / rounds)
        return min(LONGEST_SPIN_S, BATCH_ROUNDS * lag + enqueue / rounds)

    def _enqueue(
        self, runs: Sequence[Callable[[], Any]], rounds: int, spin: float
    ) -> list[tuple[int, Any, Any]]:
        """Queue ``rounds`` samples of each run behind a spin, so that no sample waits for the CPU."""
        torch = self.torch
        torch.cuda._sleep(int(spin * SPIN_HZ))
        events = []
        for _ in range(rounds):
            for place, run in enumerate(runs):
                begin, end = (
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
                self.flush.zero_()
                begin.record()
                run()
                end.record()
                events.append((place, begin, end))
        return events
