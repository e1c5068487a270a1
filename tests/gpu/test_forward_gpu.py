"""The forward that the backward is built on: alignment, log-sum-exp, and bits that no batch changes."""

from __future__ import annotations

import math

import pytest
from gpu_cases import MASKS, torch

from dash_kernels import reference
from dash_kernels.kernels.forward import forward
from dash_kernels.problem import Problem
from dash_kernels.testing import assert_bits_equal, make_inputs


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("seq_len", "seq_len_kv", "heads", "heads_kv"),
    [(300, 300, 4, 4), (200, 333, 4, 2), (333, 200, 6, 3), (1, 4096, 8, 2), (76, 1, 1, 1)],
)
def test_output_and_lse_are_attention_bottom_right_aligned(
    seq_len: int, seq_len_kv: int, heads: int, heads_kv: int, mask: str
) -> None:
    problem = Problem(
        mask, 64, seq_len, batch=2, heads=heads, heads_kv=heads_kv, seq_len_kv=seq_len_kv
    )
    _, q, k, v = (x.detach() for x in make_inputs(problem))
    out, lse = forward(q, k, v, causal=problem.causal, scale=0.125)
    exact, exact_lse = reference.attention_forward(q, k, v, causal=problem.causal, scale=0.125)
    assert (out.shape, lse.shape) == (q.shape, (2, heads, seq_len))
    assert out.is_contiguous()
    assert lse.is_contiguous()
    torch.testing.assert_close(out.double(), exact, atol=0.02, rtol=0.02)
    blind = exact_lse == math.inf
    assert torch.equal(lse == math.inf, blind)
    torch.testing.assert_close(lse[~blind].double(), exact_lse[~blind], atol=1e-4, rtol=1e-5)
    assert not out.transpose(1, 2)[blind].any()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("seq_len", "seq_len_kv"), [(64, 4096), (1, 8192), (500, 500)])
def test_a_batch_changes_no_bit(seq_len: int, seq_len_kv: int, mask: str) -> None:
    """Few queries and many keys: where PyTorch's dense entry would split the keys by how full the chip is."""
    problem = Problem(mask, 128, seq_len, batch=64, heads=8, seq_len_kv=seq_len_kv)
    _, q, k, v = (x.detach() for x in make_inputs(problem))
    out, lse = forward(q, k, v, causal=problem.causal, scale=0.1)
    alone, alone_lse = forward(q[:1], k[:1], v[:1], causal=problem.causal, scale=0.1)
    assert_bits_equal(alone, out[:1], "out")
    assert_bits_equal(alone_lse, lse[:1], "lse")


def test_any_strides_are_read() -> None:
    _, q, k, v = (x.detach() for x in make_inputs(Problem("causal", 64, 200, batch=2, heads=4)))
    expected = forward(q, k, v, causal=True, scale=0.125)
    packed = torch.stack([q, k, v], dim=2).unbind(2)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    dim_first = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    for inputs in (packed, heads_first, dim_first):
        for mine, theirs in zip(forward(*inputs, causal=True, scale=0.125), expected, strict=True):
            assert_bits_equal(mine, theirs)
