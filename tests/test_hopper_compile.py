"""The Hopper kernel, compiled for sm_90a without a GPU or torch by the oldest and the newest Triton that we support."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPILE = ["-m", "dash_kernels.kernels.compile"]


def compiled(python: Path, cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """The reports that the compile command prints."""
    ran = subprocess.run(
        [str(python), *COMPILE, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def test_no_shipped_winner_spills_or_serialises(triton_pythons: list[Path], tmp_path: Path) -> None:
    """The table's own Triton: zero spill bytes, no C75xx, and the registers and bytes that the table says."""
    reports = compiled(triton_pythons[0], tmp_path, "--shipped")
    assert {report["mask"] for report in reports} == {"full", "causal"}
    assert {report["head_dim"] for report in reports} == {64, 128}
    for report in reports:
        assert report["spill_bytes"] == 0, report
        assert report["warnings"] == [], report
    table = json.loads((ROOT / "dash_kernels" / "tables" / "h200.json").read_text())
    assert table["environment"]["triton"] == reports[0]["triton_version"]
    shared = {report["shared_bytes"] for report in reports}
    for cell in table["cells"]:
        for name in ("served", "best"):
            assert cell[name]["spill_bytes"] == 0
            assert cell[name]["registers"] == reports[0]["registers"]
            assert cell[name]["shared_bytes"] in shared


def test_symmetric_shift_costs_no_registers(triton_pythons: list[Path], tmp_path: Path) -> None:
    """The paper's kind spilled at head_dim 128; read from arrays it has the registers of every other kind."""
    for head_dim, block_m in ((64, 128), (128, 64)):
        tile = {"block_m": block_m, "signal": "plain"}
        shift = {**tile, "schedule": "symmetric_shift", "launch_order": "ascending"}
        pair = [
            compiled(triton_pythons[0], tmp_path, "--head-dim", str(head_dim), "--config", *arguments)[0]
            for arguments in ([json.dumps(shift), "--cooperative"], [json.dumps(tile)])
        ]  # fmt: skip
        assert pair[0]["registers"] == pair[1]["registers"]
        assert [report["spill_bytes"] for report in pair] == [0, 0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mask", "full", "--dtype", "float16"],
        ["--mask", "causal", "--config", '{"policy": "unordered", "signal": "plain"}'],
        ["--cooperative", "--config", '{"schedule": "symmetric_shift", "launch_order": "ascending"}'],
        ["--head-dim", "64", "--config", '{"block_m": 64, "num_stages": 3}'],
        ["--head-dim", "64", "--dtype", "float16", "--config", '{"block_m": 128, "signal": "plain"}'],
    ],
)  # fmt: skip
def test_every_form_compiles_with_the_newest(
    triton_pythons: list[Path], tmp_path: Path, arguments: list[str]
) -> None:
    (report,) = compiled(triton_pythons[-1], tmp_path, *arguments)
    assert report["kernel"] == "backward_hopper"
    assert report["warnings"] == []
    assert 0 < report["shared_bytes"] <= 232448


def test_a_config_of_another_kernel_is_named(triton_pythons: list[Path], tmp_path: Path) -> None:
    ran = subprocess.run(
        [str(triton_pythons[0]), *COMPILE, "--config", '{"block_q": 64}'],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert ran.returncode == 2
    assert "block_q" in ran.stderr
