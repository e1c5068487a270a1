"""docs/options.md: its table of kernels is what supports() and the forward's rule say."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

from dash_kernels import Config, attention
from dash_kernels.problem import HOPPER_TILES, PORTABLE_TILES, Problem, hopper_dims, supports

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "options.md").read_text()
PROBLEMS: dict[str, dict[str, Any]] = {
    "head_dim up to 64": {"head_dim": 64},
    "head_dim 72 to 128": {"head_dim": 72},
    "head_dim 136 to 256": {"head_dim": 136},
    "head_dim of v narrower than q's": {"head_dim": 128, "head_dim_v": 64},
    "head_dim 192 with v 128": {"head_dim": 192, "head_dim_v": 128},
    "groups of query heads": {"heads": 8, "heads_kv": 2},
    "causal": {"mask": "causal"},
    "window on the left, causal": {"mask": "causal", "window_left": 100},
    "window on both sides": {"window_left": 100, "window_right": 100},
    "softcap": {"softcap": True},
    "packed sequences": {"varlen": True},
    "packed sequences, window and softcap": {"varlen": True, "window_left": 100, "softcap": True},
    "policy two_pass": {},
}


def rows() -> dict[str, list[str]]:
    """First words of the cells, by option."""
    table = TEXT.split("## Which kernel runs what")[1]
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")][2:]
    return {cells[0].strip(): [cell.split(",")[0].strip() for cell in cells[1:]] for cells in lines}


def runs(problem: Problem, backend: str, policy: str) -> bool:
    """Whether some tile of this backend runs the problem on an H200."""
    columns = hopper_dims(problem.head_dim, problem.head_dim_v)[0]
    tiles = HOPPER_TILES[columns] if backend == "hopper" else PORTABLE_TILES
    configs = [
        Config(backend=backend, policy=policy, block_m=m, block_n=n, num_stages=stages, signal="plain")
        for m, n in tiles
        for stages in (1, 2)
    ]  # fmt: skip
    return any(supports(config, problem, (9, 0)) for config in configs)


def test_the_table_has_every_option_once() -> None:
    assert list(rows()) == list(PROBLEMS)


@pytest.mark.parametrize("option", PROBLEMS)
def test_the_backwards_are_what_supports_says(option: str) -> None:
    problem = Problem(**{"mask": "full", "head_dim": 128, "seq_len": 512, **PROBLEMS[option]})
    policy = "two_pass" if "two_pass" in option else "ordered"
    said = rows()[option][:2]
    assert said == [
        "yes" if runs(problem, backend, policy) else "no" for backend in ("hopper", "portable")
    ]


def test_every_argument_of_attention_is_described() -> None:
    missing = [name for name in inspect.signature(attention).parameters if f"`{name}`" not in TEXT and f"`{name}=" not in TEXT]  # fmt: skip
    assert not missing


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="not installed: triton")
@pytest.mark.parametrize("option", PROBLEMS)
def test_the_forward_is_what_its_rule_says(option: str) -> None:
    import torch

    from dash_kernels.kernels.forward import pick_kernel

    problem = Problem(**{"mask": "full", "head_dim": 128, "seq_len": 512, **PROBLEMS[option]})
    picked = pick_kernel(
        problem.head_dim, problem.head_dim_v, torch.bfloat16, (9, 0), problem.softcap
    )
    assert rows()[option][2].lower() == picked
