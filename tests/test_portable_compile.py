"""The portable kernels compiled without a GPU and without torch: no spill, and a Q loop that stays pipelined.

A few of many: benchmarks/results/portable-triton-*.json has every option on every capability.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dash_kernels.problem import Config, Problem, supports

ROOT = Path(__file__).resolve().parent.parent
EVERY = {"grouped": True, "window": (256, 0), "softcap": True, "varlen": True, "dlse": True}
REQUESTS: dict[str, dict[str, Any]] = {
    "9.0, d=64, causal": {
        "config": {"schedule": "shortest_first", "block_m": 64, "block_n": 128, "num_warps": 8},
        "capability": (9, 0), "head_dim": 64, "causal": True, "kernels": ["kv_tiles", "prepare_tiles", "cast_tiles"],
    },
    "8.0, d=128, full": {
        "config": {"schedule": "ascending", "block_m": 64, "block_n": 64, "num_warps": 8},
        "capability": (8, 0), "head_dim": 128, "causal": False,
    },
    "9.0, d=64, two_pass": {
        "config": {"schedule": "ascending", "policy": "two_pass", "block_m": 64, "block_n": 64, "num_warps": 4},
        "capability": (9, 0), "head_dim": 64, "causal": False, "kernels": ["dq_tiles"],
    },
    "10.0, d=128, causal": {
        "config": {"schedule": "shortest_first", "block_m": 32, "block_n": 128, "num_warps": 8},
        "capability": (10, 0), "head_dim": 128, "causal": True,
    },
    "9.0, d=256, head_dim of V 128, causal": {
        "config": {"schedule": "shortest_first", "block_m": 32, "block_n": 64, "num_warps": 8},
        "capability": (9, 0), "head_dim": 256, "causal": True, "options": {"head_dim_v": 128},
    },
    "8.9, d=128, every option": {
        "config": {"schedule": "shortest_first", "block_m": 64, "block_n": 64, "num_warps": 8, "num_stages": 2},
        "capability": (8, 9), "head_dim": 128, "causal": True, "options": EVERY,
        "kernels": ["kv_tiles", "prepare_tiles", "cast_tiles"],
    },
    "8.0, d=64, forward, every option": {
        "capability": (8, 0), "head_dim": 64, "causal": True,
        "options": {"window": (256, 0), "softcap": True, "varlen": True, "head_dim_v": 128},
    },
}  # fmt: skip
ORDERED = ["9.0, d=64, causal", "8.0, d=128, full", "10.0, d=128, causal"]


@pytest.fixture(scope="module")
def compiled(
    triton_pythons: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Answers of the torch-free interpreters, oldest Triton first, asked at the same time."""
    asked = [
        subprocess.Popen(
            [str(python), str(ROOT / "tests" / "portable_compile_report.py"), json.dumps(REQUESTS)],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for python in triton_pythons
    ]
    answers = []
    for process in asked:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        answers.append(json.loads(output))
    return answers


def test_no_torch_is_needed(compiled: list[dict[str, Any]]) -> None:
    assert [answer["torch"] for answer in compiled] == [False] * len(compiled)


@pytest.mark.parametrize("name", ORDERED)
def test_the_q_loop_stays_pipelined_around_the_turnstile(
    name: str, compiled: list[dict[str, Any]]
) -> None:
    """Copies of a later Q tile are in flight while a step waits for its turn: in every loop one peek, signal and wait."""
    for answer in compiled:
        loops = answer["reports"][name][0]["loops"]
        assert loops, answer["triton"]
        for loop in loops:
            assert loop["assembly"] == 3
            assert loop["additions"] == 1
            assert loop["copies"] >= 2
            assert loop["in_flight"] >= 1


@pytest.mark.parametrize("name", [name for name in REQUESTS if not name.startswith("10")])
def test_no_spill_with_the_oldest_triton(name: str, compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled[0]["reports"][name]:
        assert kernel["spill_bytes"] == 0, kernel


@pytest.mark.parametrize("name", REQUESTS)
def test_what_was_compiled_can_be_launched(name: str, compiled: list[dict[str, Any]]) -> None:
    for answer in compiled:
        for kernel in answer["reports"][name]:
            assert kernel["shared_bytes"] <= kernel["shared_limit"]
            assert not kernel["trap"]


def test_every_loop_of_a_window_keeps_the_turnstile(compiled: list[dict[str, Any]]) -> None:
    """Masked, plain, masked; query heads of a group go through the same three."""
    for answer in compiled:
        kernel = answer["reports"]["8.9, d=128, every option"][0]
        assert [(loop["assembly"], loop["additions"]) for loop in kernel["loops"]] == [(3, 1)] * 3


def test_a_schedule_compiles_only_the_loops_it_has(compiled: list[dict[str, Any]]) -> None:
    """Causal shortest_first: masked, then plain. Full, whole tiles: plain. On 10.x one loop for tensor memory's sake."""
    for answer in compiled:
        counts = {name: len(answer["reports"][name][0]["loops"]) for name in ORDERED}
        assert counts == {"9.0, d=64, causal": 2, "8.0, d=128, full": 1, "10.0, d=128, causal": 1}


@pytest.mark.parametrize("name", ["8.0, d=128, full", "8.9, d=128, every option"])
def test_no_matmul_is_computed_twice(name: str, compiled: list[dict[str, Any]]) -> None:
    """Five matmuls a step; before Hopper an instruction multiplies 16 x 8 by 16 for one warp."""
    request = REQUESTS[name]
    tile = [request["config"][side] for side in ("block_m", "block_n", "num_warps")]
    wanted = 5 * tile[0] * tile[1] * request["head_dim"] // (16 * 8 * 16) // tile[2]
    for answer in compiled:
        loops = answer["reports"][name][0]["machine_loops"]
        assert {loop["matmuls"] for loop in loops} == {wanted}


def test_dq_leaves_hopper_in_four_wide_additions(compiled: list[dict[str, Any]]) -> None:
    for answer in compiled:
        kernel = answer["reports"]["9.0, d=64, causal"][0]
        assert kernel["wide_additions"] == 2 * 64 * 64 // (
            256 * 4
        )  # two loops, a tile's elements over 256 threads


def test_tensor_memory_is_enough(compiled: list[dict[str, Any]]) -> None:
    """Beyond 512 columns Triton compiles a trap in place of the kernel: such tiles are refused by name."""
    for answer in compiled:
        assert 0 < answer["reports"]["10.0, d=128, causal"][0]["tensor_memory"] <= 512
    config = Config(backend="portable", signal="plain", block_m=64, block_n=128)
    support = supports(config, Problem("causal", 128, 4096), (10, 0))
    assert "64x128 overflows the tensor memory" in support.reason
    assert supports(config, Problem("causal", 64, 4096), (10, 0))
    assert supports(config.with_(block_m=32), Problem("causal", 128, 4096), (10, 0))
