"""One process of tests/portable_interpreter.py for all tests that ask it."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDED = [name for name in ("torch", "triton", "numpy") if importlib.util.find_spec(name) is None]
needs_interpreter = pytest.mark.skipif(bool(NEEDED), reason=f"not installed: {', '.join(NEEDED)}")


@functools.cache
def _process() -> tuple[subprocess.Popen[str], Any]:
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "portable_interpreter.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    atexit.register(_end, process)
    return process, errors


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def ask(case: dict[str, Any]) -> dict[str, Any]:
    """The interpreter's answer to one case."""
    process, errors = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(case) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        errors.seek(0)
        raise AssertionError(f"the interpreter ended: {errors.read()[-4000:]}")
    return json.loads(line)  # type: ignore[no-any-return]


def within_budget(answer: dict[str, Any], names: tuple[str, ...]) -> None:
    assert "raised" not in answer, answer["raised"]
    for name, error, budget in zip(names, answer["errors"], answer["budgets"], strict=True):
        assert error <= budget, f"{name}: {error} > {budget}"
