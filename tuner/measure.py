"""What happens to a candidate on a GPU: its gates, its timing, its telemetry.

:class:`Measurer` is the handler of the GPU worker processes (``tuner.worker``). It keeps the inputs, the float64
reference and PyTorch's own errors of each cell, so that a candidate costs its launches and little more. The order is
fixed: the correctness gate, the determinism gate, the timing, and the gates once more on what the timed launches
left behind. No time is reported for a config that failed a gate.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from dash_kernels.problem import Config, Problem
from tuner.failures import CandidateError
from tuner.nvml import SPOILING, Monitor, throttle_names
from tuner.policy import MeasurementPolicy
from tuner.stats import interval_width, median_interval

BATCH_ROUNDS = 6
LONGEST_SPIN_S = 0.05
CELL_MEMORY_SHARE = 0.25


class Measurer:
    """Worker handler for one GPU (the only one its process sees). Tasks ``measure`` and ``final``."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        from dash_kernels.device import current_gpu, environment

        self.torch = torch
        self.gpu = current_gpu(0)
        torch.cuda.set_device(0)
        torch.cuda.init()
        self.policy = MeasurementPolicy.from_dict(options["policy"])
        self.monitor = Monitor(options.get("uuid", ""))
        self.flush = torch.empty(
            max(2 * self.gpu.l2_bytes, 1 << 20), dtype=torch.int8, device="cuda"
        )
        self.environment = environment(0)
        self.info: dict[str, Any] = {
            "environment": self.environment,
            "memory_bytes": self._memory(),
        }
        self.cells: OrderedDict[Problem, Cell] = OrderedDict()

    def _memory(self) -> int:
        return int(self.torch.cuda.get_device_properties(0).total_memory)

    def handle(self, task: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._handle(task)
        except CandidateError:
            raise
        except Exception as error:  # whatever a candidate raises becomes the class of its row
            raise classified(error) from error

    def _handle(self, task: dict[str, Any]) -> dict[str, Any]:
        problem = Problem.from_dict(task["problem"])
        baseline = Config.from_dict(task["baseline"]) if task.get("baseline") else None
        if task["kind"] == "measure":
            entry = task["entries"][0]
            return self._measure(problem, Entry.of(entry), baseline)
        return self._final(problem, [Entry.of(entry) for entry in task["entries"]])

    def healthy(self) -> bool:
        """Free the failed candidate's memory; False when CUDA no longer answers in this process."""
        try:
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()
            probe = self.torch.ones(1, device="cuda")
            return bool(probe.item() == 1.0)
        except Exception:  # any error here means that the context is lost, whatever its type
            return False

    # -- one candidate ----------------------------------------------------------------------------------------------

    def _measure(self, problem: Problem, entry: Entry, baseline: Config | None) -> dict[str, Any]:
        cell = self._cell(problem)
        run = cell.runner(entry)
        gates = cell.gate(entry.config, run, self.policy.runs_compared)
        beside = None
        if baseline is not None and baseline != entry.config:
            beside = cell.runner(Entry(baseline, 1))
        timing = self._time([run] if beside is None else [run, beside])
        cell.gate_after_timing(entry.config, run, gates)
        result = self._result(problem, entry, gates, timing, 0)
        base_ms = median_interval(timing.samples[-1])[0]
        result["speedup_vs_baseline"] = base_ms / result["ms"] if baseline is not None else None
        return result

    def _final(self, problem: Problem, entries: list[Entry]) -> dict[str, Any]:
        """Close rivals sampled in turn, so that clocks move under all of them alike; the first is the baseline."""
        cell = self._cell(problem)
        results: list[dict[str, Any]] = []
        passed = []
        for entry in entries:
            run = cell.runner(entry)
            try:
                results.append(cell.gate(entry.config, run, self.policy.runs_compared))
                passed.append(run)
            except CandidateError as error:
                results.append({**error.details, "status": error.failure, "error": str(error)})
        cell.first = ()
        if not passed:
            return {"results": results}
        timing = self._time(passed)
        place = 0
        for index, (entry, gates) in enumerate(zip(entries, results, strict=True)):
            if "status" not in gates:
                results[index] = self._result(problem, entry, gates, timing, place)
                results[index]["telemetry"]["round"] = "final"
                place += 1
        base = results[0].get("ms")
        for result in results:
            result["speedup_vs_baseline"] = base / result["ms"] if base and "ms" in result else None
        return {"results": results}

    def _result(
        self, problem: Problem, entry: Entry, gates: dict[str, Any], timing: _Timing, place: int
    ) -> dict[str, Any]:
        from dash_kernels.numerics import config_key

        samples = timing.samples[place]
        middle, low, high = median_interval(samples)
        tflops = problem.tflops(middle)
        peak = self.gpu.spec.peak_tflops if self.gpu.spec else None
        return {
            **gates,
            "ms": middle,
            "ms_low": low,
            "ms_high": high,
            "samples": [round(sample, 6) for sample in samples],
            "tflops": tflops,
            "above_peak": bool(peak and tflops > peak),
            "numerics_key": config_key(
                entry.config,
                dtype=problem.dtype,
                head_dim=problem.head_dim,
                environment=self.environment,
            ),
            "telemetry": dict(timing.telemetry, interval=interval_width(samples)),
        }

    # -- timing -----------------------------------------------------------------------------------------------------

    def _time(self, runs: Sequence[Callable[[], Any]]) -> _Timing:
        timing = self._sample(runs)
        if timing.spoiled:  # a thermal or hardware slowdown is not the config's: once more
            time.sleep(1.0)
            again = self._sample(runs)
            again.telemetry["discarded_rounds"] = len(timing.samples[0])
            return again
        return timing

    def _sample(self, runs: Sequence[Callable[[], Any]]) -> _Timing:
        policy, torch = self.policy, self.torch
        spin = self._warm_up(runs)
        timing = _Timing([[] for _ in runs])
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
        torch.cuda._sleep(int(spin * 1.7e9))
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

    # -- cells ------------------------------------------------------------------------------------------------------

    def _cell(self, problem: Problem) -> Cell:
        if problem in self.cells:
            self.cells.move_to_end(problem)
            return self.cells[problem]
        budget = CELL_MEMORY_SHARE * self.info["memory_bytes"]
        while (
            self.cells
            and sum(cell.bytes for cell in self.cells.values()) + cell_bytes(problem) > budget
        ):
            self.cells.popitem(last=False)
        self.cells[problem] = Cell(self.torch, problem, self.policy.reference_heads)
        return self.cells[problem]


def classified(error: Exception) -> CandidateError:
    """What launching a kernel raised, with the class that its row gets."""
    said = f"{type(error).__name__}: {str(error).strip()}"
    if (
        type(error).__name__ == "OutOfResources"
    ):  # Triton's: the built kernel asks for more than the chip has
        return CandidateError(
            "constraints",
            said,
            required_bytes=getattr(error, "required", None),
            limit_bytes=getattr(error, "limit", None),
        )
    if type(error).__module__.startswith("triton"):
        return CandidateError("compile", said)
    return CandidateError("runtime", said)


class Entry:
    """A config and the CTAs that must be resident at once for it."""

    def __init__(self, config: Config, min_resident: int) -> None:
        self.config = config
        self.min_resident = min_resident

    @classmethod
    def of(cls, data: dict[str, Any]) -> Entry:
        return cls(Config.from_dict(data["config"]), int(data["min_resident"]))


class _Timing:
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


class Cell:
    """The inputs of one problem, and the truth about its gradients: float64 for a few heads, PyTorch's for all.

    Raises CandidateError (constraints) when the inputs do not fit into the GPU's memory.
    """

    def __init__(self, torch: Any, problem: Problem, reference_heads: int) -> None:
        self.torch, self.problem = torch, problem
        self.bytes = cell_bytes(problem)
        self.scale = 1 / math.sqrt(problem.head_dim)
        self.first: tuple[Any, ...] = ()
        try:
            self._make_inputs()
            self._make_truth(_sample_heads(problem, reference_heads))
        except torch.cuda.OutOfMemoryError as error:
            raise CandidateError(
                "constraints", f"the inputs do not fit into GPU memory: {error}"
            ) from error

    def _make_inputs(self) -> None:
        from dash_kernels.kernels.forward import forward

        torch, problem = self.torch, self.problem
        maker = torch.Generator(device="cuda")
        maker.manual_seed(secrets.randbits(62))

        def normal(length: int, heads: int) -> Any:
            shape = (problem.batch, length, heads, problem.head_dim)
            dtype = getattr(torch, problem.dtype)
            return torch.randn(shape, dtype=dtype, device="cuda", generator=maker)

        self.q, self.dout = (normal(problem.seq_len, problem.heads) for _ in range(2))
        self.k, self.v = (normal(problem.seq_len_kv, problem.heads_kv) for _ in range(2))
        self.out, self.lse = forward(
            self.q, self.k, self.v, causal=problem.causal, scale=self.scale
        )

    def _make_truth(self, sample: list[tuple[int, int]]) -> None:
        from dash_kernels.testing import budgets_of, torch_flash_gradients

        self.sample = sample
        inputs = (self.dout, self.q, self.k, self.v)
        how: dict[str, Any] = {"causal": self.problem.causal, "scale": self.scale}
        self.exact, self.budgets = budgets_of(*map(self._pick, inputs), **how)
        self.peer = torch_flash_gradients(*inputs, **how)

    def _pick(self, x: Any) -> Any:
        """(samples, S, 1, D): the sampled heads as a batch."""
        return self.torch.stack([x[batch, :, head] for batch, head in self.sample])[:, :, None]

    def runner(self, entry: Entry) -> Callable[[], tuple[Any, Any, Any]]:
        """A call that runs the whole backward of ``entry`` once and answers dq, dk, dv."""
        from dash_kernels.kernels.launch import backward

        def run() -> tuple[Any, Any, Any]:
            grads: tuple[Any, Any, Any] = backward(
                self.dout,
                self.q,
                self.k,
                self.v,
                self.out,
                self.lse,
                config=entry.config,
                causal=self.problem.causal,
                scale=self.scale,
                allow_resident=entry.min_resident > 1,
            )
            return grads

        return run

    def gate(self, config: Config, run: Callable[[], Any], runs: int) -> dict[str, Any]:
        """Columns of the row that passes: errors, their budget, bits compared. Raises CandidateError at a failure.

        The first run writes into poisoned memory. ``runs`` counts it.
        """
        from dash_kernels.testing import poisoned_outputs

        try:
            with poisoned_outputs():
                self.first = run()
        except (
            ValueError
        ) as error:  # the launcher refuses what cannot run here, before anything is launched
            raise CandidateError("constraints", str(error)) from error
        found = self._check(self.first)
        found["runs_compared"] = runs
        found["bits_equal"] = True
        for again in range(1, runs):
            self._compare(config, run(), f"run {again + 1} of {runs}", found)
        return found

    def gate_after_timing(
        self, config: Config, run: Callable[[], Any], found: dict[str, Any]
    ) -> None:
        """The same gates on one more run: the timed launches must not have left anything behind."""
        grads = run()
        self._check(grads)
        found["runs_compared"] += 1
        self._compare(config, grads, "the run after timing", found)
        self.first = ()

    def _check(self, grads: Sequence[Any]) -> dict[str, Any]:
        """Errors against float64 on the sampled heads, and every head against PyTorch's gradients."""
        from dash_kernels.testing import GRADIENTS, error_of

        worst: dict[str, Any] = {}
        for name, grad, peer in zip(GRADIENTS, grads, self.peer, strict=True):
            error, budget = error_of(self._pick(grad), self.exact[name]), self.budgets[name]
            share = max(error.max_abs / budget.max_abs, error.relative / budget.relative)
            columns = {
                "max_abs_error": error.max_abs,
                "rel_error": error.relative,
                "budget": budget.relative,
            }
            if not error.within(budget):
                said = (
                    f"{name}: error {error.max_abs:.3g} absolute, {error.relative:.3g} relative; the budget is "
                    f"{budget.max_abs:.3g}, {budget.relative:.3g}"
                )
                raise CandidateError("correctness", said, **columns)
            self._check_heads(name, grad, peer, 2 * budget.relative)
            if share > worst.get("share", 0.0):
                worst = {"share": share, **columns}
        worst.pop("share", None)
        return worst

    def _check_heads(self, name: str, grad: Any, peer: Any, limit: float) -> None:
        """Two results in budget are at most two budgets apart."""
        distance = (grad.float() - peer.float()).norm(dim=(1, 3)) / peer.float().norm(dim=(1, 3))
        bad = (~(distance <= limit)).nonzero()
        if len(bad):
            batch, head = bad[0].tolist()
            said = (
                f"{name} of batch {batch}, head {head} is {distance[batch, head].item():.3g} from PyTorch's "
                f"(limit {limit:.3g}); {len(bad)} heads are wrong"
            )
            raise CandidateError("correctness", said)

    def _compare(
        self, config: Config, grads: Sequence[Any], which: str, found: dict[str, Any]
    ) -> None:
        from dash_kernels.testing import GRADIENTS, first_difference

        for name, again, first in zip(GRADIENTS, grads, self.first, strict=True):
            if self.torch.equal(again.view(self.torch.int16), first.view(self.torch.int16)):
                continue
            found["bits_equal"] = False
            if config.deterministic:
                said = f"{name}, {which}: {first_difference(again, first)}"
                raise CandidateError("nondeterminism", said, **found)


def cell_bytes(problem: Problem) -> int:
    """GPU memory of a cell: q, dout, out, dq and k, v, dk, dv, and three of PyTorch's gradients."""
    q_rows = 5 * problem.seq_len * problem.heads
    kv_rows = 6 * problem.seq_len_kv * problem.heads_kv
    return 2 * problem.batch * problem.head_dim * (q_rows + kv_rows)


def _sample_heads(problem: Problem, count: int) -> list[tuple[int, int]]:
    """(batch, head) pairs spread over the first and the last: an indexing error shows at the ends."""
    total = problem.batch * problem.heads
    picks = sorted({round(i * (total - 1) / max(1, count - 1)) for i in range(count)})
    return [divmod(pick, problem.heads) for pick in picks]
