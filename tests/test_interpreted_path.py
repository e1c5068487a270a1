"""The CUDA path in Triton's interpreter, against float64: sinks, packed tails, and attention whole."""

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


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "interpreted_path.py")],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    lines = run.stdout.splitlines()
    assert len(lines) == 8, run.stderr
    return [json.loads(line) for line in lines]


def test_sinks_take_their_share_and_have_its_gradient(answers: list[dict[str, Any]]) -> None:
    for errors in answers[:3]:
        assert errors["out"] <= 4 * 2**-11  # one rounding to fp16 of values below 4
        assert errors["lse"] <= 1e-5
        assert errors["dsink"] <= 1e-3


def test_only_rows_of_no_sequence_are_cleared(answers: list[dict[str, Any]]) -> None:
    assert [answer["cleared"] for answer in answers[3:6]] == [True, True, True]


def test_attention_from_its_options_to_its_gradients(answers: list[dict[str, Any]]) -> None:
    for errors in answers[6:]:
        assert list(errors) == ["out", "lse", "dq", "dk", "dv", "dsink"]
        assert errors.pop("lse") <= 1e-5
        assert max(errors.values()) <= 2 * 2**-10, errors  # P and dS rounded to fp16 on the way
