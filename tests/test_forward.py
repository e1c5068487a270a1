"""Which kernel runs a forward, and what PyTorch's is handed: on the CPU, where a stand-in computes it with the reference."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import pytest
import torch

from dash_kernels import reference
from dash_kernels.kernels import forward as module
from dash_kernels.testing import assert_bits_equal


class Sequences(NamedTuple):
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of aten's flash attention, which is replaced; at most 3 sequences and 4 heads a call."""
    seen: list[dict[str, Any]] = []

    def flash(q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, longest_q: int, longest_k: int, dropout: float,
              causal: bool, debug: bool, *, scale: float, window_size_left: int, window_size_right: int) -> Any:  # fmt: skip
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        assert len(starts_q) == len(starts_k) <= 4
        assert q.shape[1] <= 4
        assert max(starts_q.diff()) <= longest_q
        assert max(starts_k.diff()) <= longest_k
        seen.append({"heads": (q.shape[1], k.shape[1])})
        window = window_size_left, window_size_right
        out, lse = reference.packed_forward(
            q, k, v, starts_q, starts_k, causal=causal, scale=scale, window=window
        )
        return out.to(q.dtype), lse.float(), None, None, None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    monkeypatch.setattr(module, "LARGEST_GRID", 4)
    monkeypatch.setattr(module, "pick_kernel", lambda *_: "flash")
    monkeypatch.setattr(module, "_capability", lambda _: (8, 0))
    return seen


def qkv(batch: int, lengths: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int]) -> list[torch.Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(batch, length, count, dim, generator=generator).half()
        for length, count, dim in (
            (lengths[0], heads[0], dims[0]), (lengths[1], heads[1], dims[0]), (lengths[1], heads[1], dims[1]),
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "lengths", "heads", "dims", "options"),
    [
        (2, (9, 9), (4, 2), (16, 16), {"causal": True}),
        (3, (9, 14), (4, 1), (16, 8), {"window": (3, 2)}),
        (2, (1, 14), (4, 2), (8, 16), {}),
        (2, (12, 12), (4, 4), (16, 16), {"causal": True, "window": (5, -1)}),
    ],
)
def test_a_batch_is_packed_sequences_of_equal_length(
    calls: list[Any], batch: int, lengths: Any, heads: Any, dims: Any, options: dict[str, Any]
) -> None:
    tensors = qkv(batch, lengths, heads, dims)
    options = {"causal": False, "scale": 0.3, **options}
    out, lse = module.forward(*tensors, **options)
    exact, exact_lse = reference.attention_forward(*tensors, **options)
    assert_bits_equal(out, exact.half())
    assert_bits_equal(lse, exact_lse.float())
    assert out.is_contiguous()
    assert lse.is_contiguous()
    if lengths[0] == 1:
        assert calls[0]["heads"] == (4, 4)  # aten would split the keys of a group's only query


@pytest.mark.parametrize(("batch", "heads"), [(9, (2, 2)), (2, (12, 6)), (1, (6, 2))])
def test_large_batches_and_many_heads_go_in_pieces(
    calls: list[Any], batch: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGEST_GRID", 3 if batch > 3 else 4)
    tensors = qkv(batch, (7, 7), heads, (16, 16))
    out, lse = module.forward(*tensors, causal=True, scale=0.3)
    exact, exact_lse = reference.attention_forward(*tensors, causal=True, scale=0.3)
    assert len(calls) == 3 if batch > 3 or heads[0] > 6 else 2
    assert_bits_equal(out, exact.half())
    assert_bits_equal(lse, exact_lse.float())


def test_strides_are_read_in_place_or_copied(calls: list[Any]) -> None:
    q, k, v = qkv(2, (9, 9), (4, 4), (16, 16))
    expected = module.forward(q, k, v, causal=True, scale=0.3)
    packed = torch.stack([q, k, v], 2).unbind(2)
    strided = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    for tensors in (packed, strided):
        for x, y in zip(module.forward(*tensors, causal=True, scale=0.3), expected, strict=True):
            assert_bits_equal(x, y)


def test_packed_sequences_pass_through_and_too_many_are_refused(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = qkv(1, (9, 12), (4, 2), (16, 8))
    starts = (
        torch.tensor([0, 4, 4, 9], dtype=torch.int32),
        torch.tensor([0, 6, 7, 12], dtype=torch.int32),
    )
    sequences = Sequences(*starts, 5, 6)
    out, lse = module.forward(*tensors, causal=True, scale=0.3, sequences=sequences)
    exact, exact_lse = reference.packed_forward(
        *(x[0] for x in tensors), *starts, causal=True, scale=0.3
    )
    assert_bits_equal(out, exact.half()[None])
    assert_bits_equal(lse, exact_lse.float()[None])
    monkeypatch.setattr(module, "LARGEST_GRID", 2)
    with pytest.raises(
        ValueError, match="cu_seqlens_q packs 3 sequences; the forward takes up to 2 a call"
    ):
        module.forward(*tensors, causal=True, scale=0.3, sequences=sequences)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="not installed: triton")
@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({}, "hopper"),
        ({"head_dim": 40}, "hopper"),
        ({"head_dim_v": 64}, "hopper"),
        ({"capability": (8, 0)}, "flash"),
        ({"capability": (10, 0)}, "flash"),
        ({"head_dim": 192}, "hopper"),
        ({"head_dim_v": 256}, "hopper"),
        ({"softcap": True}, "hopper"),
        ({"softcap": True, "head_dim": 192}, "hopper"),
        ({"softcap": True, "capability": (8, 0)}, "portable"),
    ],
)
def test_the_rule_that_picks_a_kernel(change: dict[str, Any], kernel: str) -> None:
    call = {"head_dim": 128, "head_dim_v": 128, "dtype": torch.bfloat16, "capability": (9, 0), "softcap": False}  # fmt: skip
    assert module.pick_kernel(**call | change) == kernel
