"""The portable forward's arithmetic on the CPU, in Triton's interpreter, against float64, and its tiles."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from portable_process import ask, needs_interpreter, within_budget

CASES: dict[str, dict[str, Any]] = {
    "full, ragged": {"seq_lens": (77, 50), "causal": False},
    "more queries than keys: rows without keys": {"seq_lens": (77, 40), "causal": True},
    "one query": {"seq_lens": (1, 70), "causal": True, "heads": 4, "heads_kv": 1},
    "head_dim 96, of V 40": {"seq_lens": (40, 70), "causal": True, "dim": 96, "dim_v": 40},
    "head_dim 8": {"seq_lens": (40, 40), "causal": False, "dim": 8},
    "a window before all keys": {"seq_lens": (90, 20), "causal": False, "window": (3, 5)},
    "packed, empty sequences": {"lengths": ((0, 3), (70, 0), (1, 1), (33, 64)), "causal": True},
}


@needs_interpreter
@pytest.mark.parametrize("name", CASES)
def test_out_and_lse_within_budget(name: str) -> None:
    within_budget(ask({"what": "forward", "tile": (32, 32), **CASES[name]}), ("out", "lse"))


@st.composite
def options(draw: Any) -> dict[str, Any]:
    causal, length = draw(st.booleans()), st.integers(0, 60)
    side = st.integers(-1, 50)
    chosen = {
        "what": "forward",
        "causal": causal,
        "tile": draw(st.sampled_from([(16, 32), (32, 32)])),
        "window": (draw(side), -1 if causal else draw(side)),
        "softcap": draw(st.sampled_from([0.0, 1.5, 30.0])),
        "heads_kv": draw(st.sampled_from([1, 2])),
        "dim": draw(st.sampled_from([32, 40])),
        "dim_v": draw(st.sampled_from([16, 64])),
        "apart": True,
    }
    chosen["heads"] = chosen["heads_kv"] * draw(st.sampled_from([1, 2]))
    if draw(st.booleans()):
        pairs = st.lists(st.tuples(length, length), min_size=1, max_size=2)
        return {**chosen, "lengths": draw(pairs)}
    sizes = draw(st.integers(1, 80)), draw(st.integers(1, 80))
    return {**chosen, "seq_lens": sizes, "batch": draw(st.sampled_from([1, 2]))}


@needs_interpreter
@given(options())
@settings(max_examples=7, deadline=None, derandomize=True, database=None)
def test_options_combined(chosen: dict[str, Any]) -> None:
    """In budget; and a sample in a batch, or a packed sequence, has the bits that it has alone."""
    answer = ask(chosen)
    within_budget(answer, ("out", "lse"))
    assert answer["same_bits"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="not installed: triton")
def test_a_head_dim_above_256_is_refused_before_anything_is_launched() -> None:
    torch = pytest.importorskip("torch")
    from dash_kernels.kernels.forward_portable import forward_portable

    q = torch.zeros(1, 4, 1, 264, dtype=torch.float16)
    with pytest.raises(ValueError, match="head_dim is 264; the portable forward takes up to 256"):
        forward_portable(q, q, q, causal=True, scale=1.0)
