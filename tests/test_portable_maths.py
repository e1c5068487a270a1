"""The portable kernels' arithmetic on the CPU, in Triton's interpreter, against float64."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDED = [name for name in ("torch", "triton", "numpy") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(NEEDED), reason=f"not installed: {', '.join(NEEDED)}")


def case(
    schedule: str, policy: str, seq_lens: tuple[int, int], tile: tuple[int, int], **more: Any
) -> dict[str, Any]:
    causal = more.pop("causal", schedule != "ascending")
    return {
        "schedule": schedule,
        "policy": policy,
        "seq_lens": seq_lens,
        "tile": tile,
        "causal": causal,
        **more,
    }


CASES = {
    "full, ragged": case("ascending", "ordered", (77, 50), (32, 64)),
    "full, ragged, no turnstile": case("ascending", "unordered", (77, 50), (32, 64)),
    "full, two passes": case("ascending", "two_pass", (50, 77), (32, 64)),
    "more keys than queries": case("shortest_first", "ordered", (50, 77), (32, 64)),
    "more queries than keys": case("shortest_first", "ordered", (77, 40), (32, 64)),
    "causal, two passes": case("shortest_first", "two_pass", (77, 50), (32, 64)),
    "one key": case("shortest_first", "ordered", (40, 1), (32, 64)),
    "one query": case("ascending", "ordered", (1, 40), (32, 64), causal=True),
    "the diagonal last, persistent": case(
        "descending", "ordered", (130, 130), (32, 32), heads=1, persistent=True
    ),
    "heads interleaved, head_dim 128": case(
        "shortest_first", "ordered", (70, 100), (64, 64), batch=2, heads=3, interleaved=4, dim=128
    ),
    "a turn too high": case("shortest_first", "ordered", (50, 77), (32, 64), wrong_turn=True),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "portable_interpreter.py")],
        input="".join(json.dumps(numbers) + "\n" for numbers in CASES.values()),
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = run.stdout.splitlines()
    assert len(lines) == len(CASES), run.stderr
    return dict(zip(CASES, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("name", [name for name in CASES if name != "a turn too high"])
def test_gradients_within_budget(name: str, answers: dict[str, dict[str, Any]]) -> None:
    answer = answers[name]
    assert "raised" not in answer, answer["raised"]
    for gradient, error, budget in zip(
        ("dq", "dk", "dv"), answer["errors"], answer["budgets"], strict=True
    ):
        assert error <= budget, f"{gradient}: {error} > {budget}"


def test_storing_turn_0_equals_adding_to_zeros(answers: dict[str, dict[str, Any]]) -> None:
    """Programs run in ticket order here, so the unordered sum has the ordered one's order, from a zeroed buffer."""
    assert answers["full, ragged"]["dq"] == answers["full, ragged, no turnstile"]["dq"]


def test_a_turn_that_has_not_come_is_seen(answers: dict[str, dict[str, Any]]) -> None:
    assert "has not come" in answers["a turn too high"]["raised"]
