"""Worker handlers that stand in for the GPU and the compiler: what they do is written in the candidate itself.

``FakeMeasurer`` reads its orders from the options of the worker: ``{"plan": {schedule: action}}``. Actions: ok,
hang (with a child process), exit, raise, sticky, wrong, varies, slow. A plan may name a GPU instead, by its uuid; of
the one in ``DASH_FAKE_START_ONCE`` a second worker does not start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dash_kernels.problem import Config, Problem
from tuner.failures import CandidateError

ENVIRONMENT = {
    "gpu": "h200",
    "gpu_name": "NVIDIA H200",
    "sms": 132,
    "capability": "9.0",
    "torch": "fake",
}
SPEED = {"ascending": 300.0, "descending": 350.0, "shortest_first": 500.0, "shift": 560.0}


class FakeMeasurer:
    """Answers as the measurer does, from ``DASH_FAKE_PLAN`` ("schedule=action,...") in its environment."""

    def __init__(self, options: dict[str, Any]) -> None:
        plan = os.environ.get("DASH_FAKE_PLAN", "")
        self.plan = dict(part.split("=") for part in plan.split(",") if part)
        if self.plan.get("start") == "fail":
            raise RuntimeError("no CUDA driver in this test")
        self.uuid = options.get("uuid", "")
        self.log = Path(os.environ["DASH_FAKE_LOG"]) if "DASH_FAKE_LOG" in os.environ else None
        if self.log and self.uuid == os.environ.get("DASH_FAKE_START_ONCE"):
            try:
                self.log.with_suffix(".started").touch(exist_ok=False)
            except FileExistsError:
                self.log.with_suffix(".lost").touch()
                raise RuntimeError("the GPU has fallen off the bus") from None
        self.sticky = False
        self.info = {"environment": ENVIRONMENT}

    def handle(self, task: dict[str, Any]) -> dict[str, Any]:
        problem = Problem.from_dict(task["problem"])
        results = [
            self._one(problem, Config.from_dict(entry["config"]), task) for entry in task["entries"]
        ]
        if task["kind"] == "final":
            for result in results:
                result["telemetry"] = {"round": "final"}
            return {"results": results}
        return results[0]

    def _one(self, problem: Problem, config: Config, task: dict[str, Any]) -> dict[str, Any]:
        if self.log:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()} {config.schedule}\n")
        self._wait_for_the_loss()
        words = (self.uuid, config.policy, config.schedule)
        action = next((self.plan[word] for word in words if word in self.plan), "ok")
        if action == "hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            if self.log:
                self.log.with_suffix(".child").write_text(str(child.pid))
            time.sleep(600)
        if action == "exit":
            print(
                "CUDA error: an illegal memory access was encountered", file=sys.stderr, flush=True
            )
            os._exit(7)
        if action == "raise":
            raise RuntimeError("CUDA out of memory")
        if action == "sticky":
            self.sticky = True
            raise RuntimeError("CUDA error: misaligned address")
        if action == "wrong":
            raise CandidateError(
                "correctness",
                "dq: error 1 relative; the budget is 0.01",
                rel_error=1.0,
                budget=0.01,
            )
        if action == "varies":
            raise CandidateError(
                "nondeterministic", "dk, run 2 of 4: 3 elements differ", bits_equal=False
            )
        if action == "refused":
            raise CandidateError(
                "constraints", "needs 300000 bytes", required_bytes=300000, limit_bytes=232448
            )
        if action == "slow":
            time.sleep(0.3)
        tflops = SPEED.get(config.schedule, 400.0) + config.heads_interleaved
        ms = problem.flops() / tflops * 1e-9
        return {
            "tflops": tflops,
            "ms": ms,
            "samples": [ms, 1.01 * ms, 0.99 * ms],
            "speedup_vs_baseline": tflops / SPEED["ascending"] if task.get("baseline") else None,
            "bits_equal": config.deterministic,
            "runs_compared": 4,
            "numerics_key": "fake",
            "telemetry": {"sm_mhz": 1500},
        }

    def _wait_for_the_loss(self) -> None:
        """The other GPU is lost before this one can have done all the work."""
        bad, end = os.environ.get("DASH_FAKE_START_ONCE"), time.monotonic() + 10
        while self.log and bad not in (None, self.uuid) and time.monotonic() < end:
            if self.log.with_suffix(".lost").exists():
                return
            time.sleep(0.01)

    def healthy(self) -> bool:
        return not self.sticky


class FakeCompiler:
    """Proves for real; "compiles" at once, or fails as ``DASH_FAKE_COMPILE`` says (fail, hang, large)."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.info: dict[str, Any] = {}

    def handle(self, task: dict[str, Any]) -> dict[str, Any]:
        from dash_kernels.device import resolve_gpu
        from tuner.compile import predict_ms, prove

        if task["kind"] == "predict":
            problem, config = Problem.from_dict(task["problem"]), Config.from_dict(task["config"])
            return {"predicted": predict_ms(problem, config, resolve_gpu("h800"))}
        if task["kind"] == "prove":
            if task["config"]["schedule"] == os.environ.get("DASH_FAKE_CYCLE"):
                raise CandidateError("constraints", "a cycle of turns")
            return {
                "min_resident": prove(
                    Problem.from_dict(task["problem"]), Config.from_dict(task["config"])
                )
            }
        how = os.environ.get("DASH_FAKE_COMPILE", "")
        portable = task["config"]["backend"] == "portable"
        if how == "fail" and portable:
            raise CandidateError("compile", "ptxas fatal: out of registers")
        if how == "hang":
            time.sleep(600)
        large = how == "large" and portable
        shared = 240000 if large else 214016
        return {"registers": 168, "spill_bytes": 0, "shared_bytes": shared}

    def healthy(self) -> bool:
        return True


class Echo:
    """Answers what it is sent; ``{"do": "die" | "raise" | "sleep" | "child"}`` misbehaves."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.info = {"options": options}

    def handle(self, task: dict[str, Any]) -> dict[str, Any]:
        if task.get("do") == "die":
            print("last words", flush=True)
            os._exit(3)
        if task.get("do") == "raise":
            raise ValueError("a bad task")
        if task.get("do") == "child":
            command = [sys.executable, "-c", "import time; time.sleep(600)"]
            child = subprocess.Popen(command, start_new_session=task.get("apart", False))
            Path(task["file"]).write_text(str(child.pid))
            time.sleep(600)
        return {"echo": task, "pid": os.getpid(), "cuda": os.environ.get("CUDA_VISIBLE_DEVICES")}

    def healthy(self) -> bool:
        return True
