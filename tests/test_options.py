"""Every option of attention on CPU tensors, combined pairwise, against autograd through a softmax written out in full."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from dash_kernels import attention, flash_attn_varlen_func
from dash_kernels.testing import assert_bits_equal, error_of

INF = math.inf


def written_out(
    q: Any, k: Any, v: Any, *, scale: float, causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0,
    sink: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output and log-sum-exp of float64 tensors, differentiable by autograd; nothing shared with the package."""
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = scores.shape[2:]
    distance = torch.arange(keys)[None] - (torch.arange(rows)[:, None] + keys - rows)
    left, right = window_size
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    if causal:
        seen &= distance <= 0
    scores = scores.masked_fill(~seen, -INF)
    blind = ~seen.any(1)
    if sink is not None:
        column = sink[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    kept = scores.masked_fill(blind[:, None], 0.0)  # no NaN where there is nothing to add up
    weights = kept.softmax(-1).masked_fill(blind[:, None], 0.0)[..., :keys]
    out = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(group, 2))
    return out, kept.logsumexp(-1).masked_fill(blind, INF)


MASKS = (
    {}, {"causal": True}, {"window_size": (5, -1)}, {"window_size": (-1, 3)}, {"window_size": (4, 6)},
    {"causal": True, "window_size": (7, 2)}, {"window_size": (0, 0)},
)  # fmt: skip
SHAPES = ((17, 17), (9, 23), (23, 9), (1, 13), (20, 1))  # (Sq, Sk)
HEADS = ((2, 2, 32, 32), (4, 2, 24, 16), (3, 1, 16, 40))  # heads, heads_kv, head_dim, head_dim of v
EXTRAS = (
    {}, {"softcap": 1.5}, {"sink": True}, {"lse": True}, {"softcap": 2.0, "sink": True, "lse": True},
)  # fmt: skip
PAIRWISE = [
    (mask, SHAPES[(i + j) % len(SHAPES)], HEADS[(i + 2 * j) % len(HEADS)], extra)
    for (i, mask), (j, extra) in itertools.product(enumerate(MASKS), enumerate(EXTRAS))
] + [
    (MASKS[(i * 2 + j) % len(MASKS)], shape, heads, EXTRAS[(i + j) % len(EXTRAS)])
    for (i, shape), (j, heads) in itertools.product(enumerate(SHAPES), enumerate(HEADS))
]  # fmt: skip


def made(
    shape: tuple[int, int], heads: tuple[int, int, int, int], extra: dict[str, Any]
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k, v and perhaps a sink, requiring grad, and what attention is called with."""
    generator = torch.Generator().manual_seed(7)
    count, count_kv, dim, dim_v = heads
    tensors = [
        torch.randn(2, length, number, width, generator=generator).to(torch.bfloat16).requires_grad_()
        for length, number, width in (
            (shape[0], count, dim), (shape[1], count_kv, dim), (shape[1], count_kv, dim_v),
        )
    ]  # fmt: skip
    options = {name: value for name, value in extra.items() if name == "softcap"}
    if extra.get("sink"):
        options["sink"] = torch.randn(count, generator=generator).requires_grad_()
        tensors.append(options["sink"])
    return tensors, options


@pytest.mark.parametrize(("mask", "shape", "heads", "extra"), PAIRWISE)
def test_gradients_are_one_rounding_from_autograd(
    mask: dict[str, Any], shape: tuple[int, int], heads: tuple[int, int, int, int], extra: dict[str, Any]
) -> None:  # fmt: skip
    tensors, options = made(shape, heads, extra)
    out, lse = attention(*tensors[:3], scale=0.3, return_lse=True, **mask, **options)
    exact_tensors = [x.detach().double().requires_grad_() for x in tensors]
    if "sink" in options:
        options["sink"] = exact_tensors[3]
    exact, exact_lse = written_out(*exact_tensors[:3], scale=0.3, **mask, **options)
    assert error_of(out, exact).relative < 2**-8
    blind = exact_lse == INF
    assert torch.equal(lse == INF, blind)
    torch.testing.assert_close(lse[~blind].double(), exact_lse[~blind], rtol=1e-6, atol=1e-6)

    generator = torch.Generator().manual_seed(8)
    dout = torch.randn(out.shape, generator=generator).to(out.dtype)
    dlse = (
        torch.randn(lse.shape, generator=generator) if extra.get("lse") else torch.zeros_like(lse)
    )
    mine = torch.autograd.grad(
        (out, lse) if extra.get("lse") else (out,), tensors, (dout, dlse) if extra.get("lse") else (dout,)
    )  # fmt: skip
    finite = exact_lse.masked_fill(blind, 0.0)
    total = (exact * dout).sum() + (finite * dlse).sum()
    for name, x, y in zip(("dq", "dk", "dv", "dsink"), mine, torch.autograd.grad(total, exact_tensors), strict=False):  # fmt: skip
        eps = torch.finfo(x.dtype).eps
        assert (x.double() - y).abs().max() <= eps * y.abs().max() + 1e-12, name


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (3, 1)}])
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0, "sink": True}])
def test_packed_sequences_are_each_on_its_own(mask: dict[str, Any], extra: dict[str, Any]) -> None:
    """Empty sequences, lengths of 1, queries without keys, rows of no sequence."""
    lengths_q, lengths_k = (0, 5, 1, 7, 3, 0), (4, 5, 1, 9, 0, 0)
    starts = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (lengths_q, lengths_k)]  # fmt: skip
    tensors, options = made((18, 21), (4, 2, 32, 16), extra)
    options |= {"scale": 0.3, "return_lse": True, **mask}
    q, k, v = (x[0].detach().requires_grad_() for x in tensors[:3])
    out, lse = attention(
        q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=7, max_seqlen_k=9, **options
    )  # fmt: skip
    assert (out.shape, lse.shape) == ((18, 4, 16), (4, 18))
    dout = torch.randn(out.shape).to(out.dtype)
    dlse = torch.randn(lse.shape)
    sinks = tensors[3:]
    grads = torch.autograd.grad((out, lse), (q, k, v, *sinks), (dout, dlse))
    dsink = torch.zeros(4, dtype=torch.float64)
    for rows, keys in zip(*([slice(*e) for e in itertools.pairwise(x.tolist())] for x in starts), strict=True):  # fmt: skip
        alone = [x[None].detach().requires_grad_() for x in (q[rows], k[keys], v[keys])]
        one, one_lse = attention(*alone, **options)
        assert_bits_equal(out[rows], one[0])
        assert_bits_equal(lse[:, rows], one_lse[0])
        parts = torch.autograd.grad(
            (one, one_lse), (*alone, *sinks), (dout[None, rows], dlse[None, :, rows])
        )
        for grad, part, at in zip(grads, parts, (rows, keys, keys), strict=False):
            assert_bits_equal(grad[at], part[0])
        dsink += parts[3].double() if sinks else 0
    if sinks:
        torch.testing.assert_close(grads[3].double(), dsink, rtol=1e-5, atol=1e-5)
    for x, used in ((out, 16), (lse.T, 16), (grads[0], 16), (grads[1], 19), (grads[2], 19)):
        assert torch.equal(x[used:], torch.full_like(x[used:], INF if x.dtype == torch.float32 else 0))  # fmt: skip


def drawn(batch: int, length: int, heads: int, dim: int, size: float = 3.0) -> torch.Tensor:
    """Inputs of the cases from the field: fp16, three times normal."""
    generator = torch.Generator().manual_seed(length + dim)
    return (
        torch.randn(batch, length, heads, dim, generator=generator)
        .mul(size)
        .half()
        .requires_grad_()
    )


def test_case_5_rows_that_see_no_key_are_exact() -> None:
    q, k, v = drawn(1, 76, 1, 32), drawn(1, 1, 1, 32), drawn(1, 1, 1, 32)
    out = attention(q, k, v, causal=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not out[:, :75].any()
    assert not dq.any()
    assert not dk.any()
    assert (dv == 1).all()
    q, k, v = (drawn(1, length, 2, 16, size=1.0) for length in (128, 32, 32))
    (dq,) = torch.autograd.grad(attention(q, k, v, causal=True).sum(), q)
    assert not dq[:, :96].any()
    assert dq[:, 97:].abs().amax((0, 2, 3)).all()


def test_case_6_one_row() -> None:
    q, k, v = (x.detach().requires_grad_() for x in drawn(3, 1, 1, 16).split(1))
    out = attention(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert (dv == 1).all()
    assert not dq.any()
    assert not dk.any()


def test_case_8_strides_change_no_bit() -> None:
    q, k, v, dout = drawn(8, 9, 4, 16).detach().chunk(4)
    for inputs in (
        (q, k, v, dout[..., :1].expand(dout.shape)),
        (q, k, v, dout.transpose(1, 2).contiguous().transpose(1, 2)),
        (q, k.transpose(2, 3).contiguous().transpose(2, 3), v[:, :, :1].expand(v.shape), dout),
        (*torch.stack([q, k, v], 2).unbind(2), dout),
    ):
        results = []
        for *qkv, gradient in (inputs, [x.contiguous() for x in inputs]):
            qkv = [x.detach().requires_grad_() for x in qkv]
            results.append(torch.autograd.grad(attention(*qkv, causal=True), qkv, gradient))
        for x, y in zip(*results, strict=True):
            assert_bits_equal(x, y)


def test_a_window_right_of_zero_is_causal_and_none_is_unlimited() -> None:
    tensors, _ = made((9, 12), (2, 2, 16, 16), {})
    causal = attention(*tensors, causal=True)
    for window in ((-1, 0), (None, 0), (11, 0), (10**30, 0)):
        assert_bits_equal(attention(*tensors, window_size=window), causal)
    assert_bits_equal(attention(*tensors, causal=True, window_size=(-1, 5)), causal)
    for window in ((None, None), (2**63, 2**63)):
        assert_bits_equal(attention(*tensors, window_size=window), attention(*tensors))


def test_ring_steps_merge_by_their_lse() -> None:
    """Two halves of the keys, merged by log-sum-exp, have the gradients of the whole: what ring attention does."""
    (q, k, v), _ = made((16, 16), (2, 2, 32, 32), {})
    whole = attention(q, k, v)
    dout = torch.randn(whole.shape).to(whole.dtype)
    expected = torch.autograd.grad(whole, (q, k, v), dout)
    halves = [attention(q, k[:, at], v[:, at], return_lse=True) for at in (slice(8), slice(8, 16))]
    total = torch.logaddexp(halves[0][1], halves[1][1])
    merged = sum(
        out.float() * (lse - total).exp().transpose(1, 2)[..., None] for out, lse in halves
    )
    for x, y in zip(torch.autograd.grad(merged, (q, k, v), dout.float()), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0.05, atol=0.02)


def test_only_the_lse_used_or_only_a_sink_requiring_grad() -> None:
    tensors, options = made((9, 12), (2, 2, 16, 16), {"sink": True})
    _, lse = attention(*tensors[:3], return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), tensors[:3])
    assert dq.any()
    assert dk.any()
    assert not dv.any()
    frozen = [x.detach() for x in tensors[:3]]
    (dsink,) = torch.autograd.grad(attention(*frozen, **options).sum(), options["sink"])
    assert dsink.shape == (2,)
    assert dsink.all()


STARTS = torch.tensor([0, 5, 9], dtype=torch.int32)
PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 5, "max_seqlen_k": 5}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"window_size": 5}, ValueError, r"window_size is 5; give \(left, right\)"),
        ({"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\); each side is a number of keys"),
        ({"window_size": (0.5, 0)}, ValueError, r"window_size is \(0.5, 0\)"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0; give a positive number, or 0"),
        ({"softcap": math.nan}, ValueError, "softcap is nan"),
        ({"softcap": None}, TypeError, "softcap is None; give a number"),
        ({"scale": "0.1"}, TypeError, "scale is '0.1'; give a number"),
        ({"scale": torch.ones((), requires_grad=True)}, TypeError, "scale requires a gradient"),
        ({"sink": 0.5}, TypeError, "sink is a float"),
        ({"sink": torch.zeros(3)}, ValueError, r"sink is \(3,\); it must be \(2,\)"),
        ({"sink": torch.zeros(2).double()}, TypeError, "sink is torch.float64; give float32"),
        ({"sink": torch.zeros(2, device="meta")}, ValueError, "sink is on meta but q is on cpu"),
        ({"max_seqlen_q": 5}, ValueError, "max_seqlen_q and max_seqlen_k go with cu_seqlens_q"),
        (PACKED | {"cu_seqlens_k": None}, TypeError, "cu_seqlens_k is a NoneType; give an int32 tensor"),
        (PACKED | {"cu_seqlens_q": STARTS.long()}, TypeError, "cu_seqlens_q is torch.int64"),
        (PACKED | {"cu_seqlens_q": STARTS[:1]}, ValueError, r"cu_seqlens_q is \(1,\); give \(batch \+ 1,\)"),
        (PACKED | {"cu_seqlens_k": STARTS[:2]}, ValueError, "cu_seqlens_k has 2 starts but cu_seqlens_q has 3"),
        (PACKED | {"cu_seqlens_q": STARTS.to("meta")}, ValueError, "cu_seqlens_q is on meta but q is on cpu"),
        (PACKED | {"max_seqlen_k": torch.tensor(5)}, TypeError, "max_seqlen_k is a Tensor; give the longest"),
        (PACKED | {"max_seqlen_q": None}, TypeError, "max_seqlen_q is a NoneType"),
        (PACKED | {"max_seqlen_q": -5}, ValueError, "max_seqlen_q is -5"),
        (PACKED | {"max_seqlen_q": 4}, ValueError, "max_seqlen_q is 4 but a sequence has 5 rows"),
        (PACKED | {"max_seqlen_q": 0}, ValueError, "max_seqlen_q is 0 but a sequence has 5 rows"),
        (PACKED | {"max_seqlen_k": 0}, ValueError, "max_seqlen_k is 0 but a sequence has 5 rows"),
        (PACKED | {"cu_seqlens_q": STARTS + 1}, ValueError, r"cu_seqlens_q is \[1, 6, 10\]; it must rise from 0"),
        (PACKED | {"cu_seqlens_k": STARTS.flip(0)}, ValueError, "cu_seqlens_k is .*; it must rise from 0"),
    ],
)  # fmt: skip
def test_bad_options_are_named(change: dict[str, Any], error: type[Exception], says: str) -> None:
    x = torch.zeros(9, 2, 16, dtype=torch.float16)
    if not any(name.startswith("cu_") for name in change):
        x = x[None]
    with pytest.raises(error, match=says):
        attention(x, x, x, **change)


def test_dimensions_and_dtypes_of_packed_and_padded_calls_are_named() -> None:
    x = torch.zeros(2, 9, 2, 16, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"q has 4 dimensions; give \(total, heads, head_dim\)"):
        attention(x, x, x, **PACKED)
    with pytest.raises(ValueError, match=r"q has 3 dimensions; give \(batch, seq_len, heads"):
        attention(x[0], x[0], x[0])
    with pytest.raises(ValueError, match="head_dim of v is 20; it must be a multiple of 8"):
        attention(x, x, torch.zeros(2, 9, 2, 20, dtype=torch.float16))
    with pytest.raises(ValueError, match="head_dim of v is 264; this release runs up to 256"):
        attention(x, x, torch.zeros(2, 9, 2, 264, dtype=torch.float16))


@pytest.mark.parametrize("longest", [0, 5])
def test_packs_of_empty_sequences_give_zeros(longest: int) -> None:
    starts = torch.tensor([0, 0, 5 * (longest > 0), 5 * (longest > 0)], dtype=torch.int32)
    q = torch.zeros(5 * (longest > 0), 2, 32, dtype=torch.float16, requires_grad=True)
    k = torch.zeros(0, 2, 32, dtype=torch.float16, requires_grad=True)
    none = torch.zeros(4, dtype=torch.int32)
    out, lse, _ = flash_attn_varlen_func(q, k, k, starts, none, longest, 0, return_attn_probs=True)
    assert out.shape == q.shape
    assert (lse == INF).all()
    dq, dk = torch.autograd.grad(out.sum() + 0 * lse.nan_to_num().sum(), (q, k))
    assert (dq.shape, dk.shape) == (q.shape, k.shape)
    assert not dq.any()
