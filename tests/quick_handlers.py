"""Worker handlers that answer at once and import next to nothing: for tests that start and kill many sweeps.

``QuickMeasurer`` sleeps ``DASH_QUICK_S`` seconds for each config and then notes it in ``DASH_QUICK_LOG``: its pid, the
kind of task, problem and config. Speeds are made from the config's words, so every run finds the same winners.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from typing import Any

ENVIRONMENT = {
    "gpu": "h200",
    "gpu_name": "NVIDIA H200",
    "sms": 132,
    "capability": "9.0",
    "torch": "fake",
}


class QuickMeasurer:
    def __init__(self, options: dict[str, Any]) -> None:
        self.info = {"environment": ENVIRONMENT}

    def handle(self, task: dict[str, Any]) -> dict[str, Any]:
        results = [self._one(task, entry["config"]) for entry in task["entries"]]
        return {"results": results} if task["kind"] == "final" else results[0]

    def _one(self, task: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        time.sleep(float(os.environ.get("DASH_QUICK_S", "0")))
        name = json.dumps([task["problem"], config], sort_keys=True)
        if "DASH_QUICK_LOG" in os.environ:
            line = f"{os.getpid()}\t{task['kind']}\t{name}\n"
            with open(os.environ["DASH_QUICK_LOG"], "a") as file:
                file.write(line)
        tflops = 300.0 + zlib.crc32(name.encode()) % 200
        telemetry = {"round": "final"} if task["kind"] == "final" else {}
        return {
            "tflops": tflops,
            "ms": 1e3 / tflops,
            "samples": [1e3 / tflops] * 2,
            "telemetry": telemetry,
        }

    def healthy(self) -> bool:
        return True


class QuickCompiler:
    """Says of everything that it is proven, compiled and predicted."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.info: dict[str, Any] = {}

    def handle(self, task: dict[str, Any]) -> dict[str, Any]:
        if task["kind"] == "prove":
            return {"min_resident": 1}
        if task["kind"] == "predict":
            return {"predicted": 1.0}
        return {"registers": 168, "spill_bytes": 0, "shared_bytes": 200_000}

    def healthy(self) -> bool:
        return True
