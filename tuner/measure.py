"""What happens to a candidate on a GPU: its gates, its timing, its telemetry.

:class:`Measurer` is the handler of the GPU worker processes (``tuner.worker``). It keeps the inputs, the float64
reference and PyTorch's own errors of each cell, so that a candidate costs its launches and little more. The order is
fixed: the correctness gate, the determinism gate, the timing, and the gates once more on what the timed launches
left behind. No time is reported for a config that failed a gate.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections import OrderedDict
from typing import Any

from dash_kernels.problem import Config, Problem
from tuner.failures import CandidateError
from tuner.gates import Cell, Entry, cell_bytes
from tuner.nvml import Monitor
from tuner.policy import MeasurementPolicy
from tuner.sampling import Sampler, Timing, flush_buffer, matmul_tflops
from tuner.stats import interval_width, median_interval

CELL_MEMORY_SHARE = 0.25
NOT_A_LEAK_BYTES = 64 << 20  # what allocators and other processes' contexts move by
MEMORY_WAIT_S = 10.0  # the driver takes a moment to free what a killed process held


class Measurer:
    """Worker handler for one GPU (the only one its process sees). Tasks ``measure`` and ``final``."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        from dash_kernels.device import current_gpu, environment

        self.torch = torch
        uuid = options.get("uuid", "")
        monitor = Monitor(uuid)
        self.left_behind = left_behind(monitor, options.get("held_bytes", {}).get(uuid))
        self.gpu = current_gpu(0)
        torch.cuda.set_device(0)
        torch.cuda.init()
        self.policy = MeasurementPolicy.from_dict(options["policy"])
        flush = flush_buffer(torch, self.gpu.l2_bytes)
        self.sampler = Sampler(torch, self.policy, monitor, flush)
        self.environment = environment(0)
        self.info: dict[str, Any] = {
            "environment": self.environment,
            "memory_bytes": self._memory(),
        }
        self.cells: OrderedDict[Problem, Cell] = OrderedDict()
        self.ceiling = round(matmul_tflops(torch, self.sampler), 1)
        self.at_rest = torch.cuda.memory_allocated()

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
        """Free the failed candidate's memory; False when CUDA no longer answers, or some of it is not given back."""
        try:
            self.torch.cuda.synchronize()
            forget_frames(sys.exc_info()[1])
            for cell in self.cells.values():
                cell.first = ()
            gc.collect()
            self.torch.cuda.empty_cache()
            probe = self.torch.ones(1, device="cuda")
            leaked = self.torch.cuda.memory_allocated() - self.at_rest
            return bool(probe.item() == 1.0) and leaked <= NOT_A_LEAK_BYTES
        except Exception:  # any error here means that the context is lost, whatever its type
            return False

    # -- one candidate ----------------------------------------------------------------------------------------------

    def _measure(self, problem: Problem, entry: Entry, baseline: Config | None) -> dict[str, Any]:
        cell = self._cell(problem)
        self.at_rest = self.torch.cuda.memory_allocated()
        run = cell.runner(entry)
        gates = cell.gate(entry.config, run, self.policy.runs_compared)
        beside = None
        if baseline is not None and baseline != entry.config:
            beside = cell.runner(Entry(baseline, 1))
        timing = self.sampler.run([run] if beside is None else [run, beside])
        cell.gate_after_timing(entry.config, run, gates)
        result = self._result(cell, entry, gates, timing, 0)
        base_ms = median_interval(timing.samples[-1])[0]
        result["speedup_vs_baseline"] = base_ms / result["ms"] if baseline is not None else None
        return result

    def _final(self, problem: Problem, entries: list[Entry]) -> dict[str, Any]:
        """Close rivals sampled in turn, so that clocks move under all of them alike; the first is the baseline."""
        cell = self._cell(problem)
        self.at_rest = self.torch.cuda.memory_allocated()
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
        timing = self.sampler.run(passed)
        place = 0
        for index, (entry, gates) in enumerate(zip(entries, results, strict=True)):
            if "status" not in gates:
                results[index] = self._result(cell, entry, gates, timing, place)
                results[index]["telemetry"]["round"] = "final"
                place += 1
        base = results[0].get("ms")
        for result in results:
            result["speedup_vs_baseline"] = base / result["ms"] if base and "ms" in result else None
        return {"results": results}

    def _result(
        self, cell: Cell, entry: Entry, gates: dict[str, Any], timing: Timing, place: int
    ) -> dict[str, Any]:
        from dash_kernels.numerics import config_key

        problem = cell.problem
        samples = timing.samples[place]
        middle, low, high = median_interval(samples)
        return {
            **gates,
            "ms": middle,
            "ms_low": low,
            "ms_high": high,
            "samples": [round(sample, 6) for sample in samples],
            "tflops": cell.tflops(middle),
            "numerics_key": config_key(
                entry.config,
                dtype=problem.dtype,
                head_dim=problem.head_dim,
                environment=self.environment,
            ),
            "telemetry": {
                **timing.telemetry,
                "interval": interval_width(samples),
                "settled": interval_width(samples) <= self.policy.target_interval,
                "matmul_tflops": self.ceiling,
                **({"memory_left_behind": self.left_behind} if self.left_behind else {}),
            },
        }

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


def left_behind(monitor: Monitor, held: int | None) -> int:
    """Bytes of GPU memory that a killed worker has not given back, after waiting for it; 0 when all is back."""
    deadline = time.monotonic() + MEMORY_WAIT_S
    while held is not None:
        used = monitor.memory_used()
        extra = 0 if used is None else used - held
        if extra <= NOT_A_LEAK_BYTES:
            return 0
        if time.monotonic() >= deadline:
            return extra
        time.sleep(0.1)
    return 0


def forget_frames(error: BaseException | None) -> None:
    """Let go of the tensors in the frames of an exception and its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


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
