"""Bodies and a token for tests that write to the service. Every number here is FAKE."""

from __future__ import annotations

from typing import Any

from dash_kernels.problem import Config

TOKEN = {"Authorization": "Bearer fake-token"}


def body_of(*rows: dict[str, Any], gpu: str = "h200", **run: Any) -> dict[str, Any]:
    return {"run": {"gpu": gpu, "environment": {"note": "FAKE"}, **run}, "results": list(rows)}


def row_body(**values: Any) -> dict[str, Any]:
    problem = {"mask": "causal", "head_dim": 128, "seq_len": 1024, "heads": 16}
    config = Config(schedule="descending").to_dict()
    return {
        "problem": problem,
        "config": config,
        "ms": 1.0,
        "tflops": 300.0,
        "min_resident": 1,
        **values,
    }
