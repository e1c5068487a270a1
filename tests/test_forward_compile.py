"""The Gluon forward, compiled for sm_90a without a GPU or torch: no spills, no serialised wgmma, turns in the code."""

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
for head_dim, mask in json.loads(sys.argv[1]):
    print(json.dumps(asdict(compile_spec(forward_spec(head_dim, "bfloat16", mask), (9, 0)))))
"""


def compiled(python: Path, cache: Path, *wanted: tuple[int, str]) -> list[dict[str, Any]]:
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


@pytest.mark.parametrize(("which", "head_dim"), [(0, 128), (-1, 64)])
def test_no_spills_and_no_serialised_matmuls(
    triton_pythons: list[Path], tmp_path: Path, which: int, head_dim: int
) -> None:
    """With the oldest and the newest Triton, in the form with the most registers in use: causal."""
    (report,) = compiled(triton_pythons[which], tmp_path, (head_dim, "causal"))
    assert report["kernel"] == "forward_main"
    assert report["spill_bytes"] == 0, report
    assert report["warnings"] == [], report
    assert report["shared_bytes"] <= 232448
