"""Timing on a GPU: whole calls between CUDA events, several in turn, with what NVML said meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tuner.failures import CandidateError
from tuner.nvml import SPOILING, Monitor, throttle_names
from tuner.policy import MeasurementPolicy
from tuner.stats import interval_width, median_interval

Reading = dict[str, int | float]

BATCH_ROUNDS = 6
READ_EVERY_S = 0.002
FIRST_PAUSE_S = 0.5
MATMUL = 8192
LONGEST_SPIN_S = 0.2
SPIN_HZ = 1.7e9  # cycles a second that torch.cuda._sleep counts, near enough for a lead


class Timing:
    """Samples in ms, one list a run, and what NVML said while they were taken."""

    def __init__(self, count: int) -> None:
        self.samples: list[list[float]] = [[] for _ in range(count)]
        self.telemetry: dict[str, Any] = {}
        self._seen: list[Reading] = []

    def add(self, events: Sequence[tuple[int, Any, Any]], readings: Sequence[Reading]) -> None:
        for place, begin, end in events:
            self.samples[place].append(begin.elapsed_time(end))
        self._seen += readings

    def finish(self, discarded: int) -> None:
        """Sum up the readings; ``discarded`` rounds were thrown away."""
        if discarded:
            self.telemetry["discarded_rounds"] = discarded
        if not self._seen:
            return
        for name in ("sm_mhz", "memory_mhz", "celsius", "watts"):
            values = [reading[name] for reading in self._seen if name in reading]
            if values:
                self.telemetry[name] = round(sum(values) / len(values), 1)
            if values and name == "sm_mhz":
                self.telemetry["sm_mhz_range"] = [min(values), max(values)]
        self.telemetry["throttle"] = throttle_names(_throttle(self._seen))


def _throttle(readings: Sequence[Reading]) -> int:
    bits = 0
    for reading in readings:
        bits |= int(reading.get("throttle", 0))
    return bits


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
        """Sample each of ``runs`` in turn until the policy is content.

        Raises CandidateError (runtime) when the GPU stays under a thermal or hardware slowdown.
        """
        policy = self.policy
        spin = self._warm_up(runs)
        timing = Timing(len(runs))
        started, paused, discarded, pauses = time.perf_counter(), 0.0, 0, 0
        while True:
            count = len(timing.samples[0])
            rounds = min(BATCH_ROUNDS, policy.max_samples - count)
            events = self._enqueue(runs, rounds, spin)
            readings = self._watch(events[-1][2])
            if (bits := _throttle(readings)) & SPOILING:  # the chip's state, not the config's
                discarded += rounds
                paused += self._pause(pauses, paused, bits)
                pauses += 1
                continue
            timing.add(events, readings)
            count += rounds
            spent = (time.perf_counter() - started - paused) * 1e3
            settled = all(
                interval_width(samples) <= policy.target_interval for samples in timing.samples
            )
            enough = settled or spent >= policy.time_limit_ms
            if count >= policy.max_samples or (count >= policy.min_samples and enough):
                timing.finish(discarded)
                return timing

    def _watch(self, last: Any) -> list[Reading]:
        """Read NVML until the queued samples have run, once at least."""
        readings = [self.monitor.sample()]
        while not last.query():
            time.sleep(READ_EVERY_S)
            readings.append(self.monitor.sample())
        self.torch.cuda.synchronize()
        return [reading for reading in readings if reading]

    def _pause(self, earlier: int, paused: float, bits: int) -> float:
        """Let the GPU recover; answers for how many seconds."""
        left = self.policy.cool_down_s - paused
        if left <= 0:
            reasons = ", ".join(throttle_names(bits & SPOILING))
            raise CandidateError(
                "runtime",
                f"the GPU stayed under {reasons} for {paused:.0f} s, so no sample is worth keeping: "
                "cool it or check its power, then --retry",
            )
        seconds = min(left, FIRST_PAUSE_S * 2.0**earlier)
        time.sleep(seconds)
        return seconds

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
