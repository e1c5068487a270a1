"""The Gluon forward, compiled for sm_90a without a GPU or torch: what spills, and no serialised wgmma."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import json, sys
from dataclasses import asdict
from dash_kernels.kernels.compile import compile_spec
from dash_kernels.kernels.forward_hopper import forward_spec
for head_dim, mask, options in json.loads(sys.argv[1]):
    print(json.dumps(asdict(compile_spec(forward_spec(head_dim, "bfloat16", mask, **options), (9, 0)))))
"""


def compiled(python: Path, cache: Path, *wanted: tuple[Any, ...]) -> list[dict[str, Any]]:
    ran = subprocess.run(
        [str(python), "-c", SCRIPT, json.dumps(wanted)],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


ALL_OPTIONS = {"softcap": True, "packed": True}


@pytest.mark.parametrize(
    ("which", "head_dim", "mask", "options", "spilled"),
    [
        (0, 128, "window", ALL_OPTIONS, 0),
        # Three consumers of 160 registers: faster by 15% than two that spill nothing.
        (-1, 64, "full", {}, 320),
    ],
)
def test_no_serialised_matmuls_and_no_more_spills(
    triton_pythons: list[Path], tmp_path: Path, which: int, head_dim: int, mask: str, options: Any, spilled: int
) -> None:  # fmt: skip
    """With the oldest or the newest Triton."""
    (report,) = compiled(triton_pythons[which], tmp_path, (head_dim, mask, options))
    assert report["kernel"] == "forward_main"
    assert report["spill_bytes"] <= spilled, report
    assert report["warnings"] == [], report
    assert report["shared_bytes"] <= 232448
