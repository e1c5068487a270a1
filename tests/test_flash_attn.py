"""flash-attn 2's and 3's functions: their signatures, what they answer, and what they refuse by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import dash_kernels
from dash_kernels import attention, flash_attn, flash_attn_func, flash_attn_interface
from dash_kernels.testing import assert_bits_equal

BEHIND = ["softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs"]  # fmt: skip
PACKS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
THREE = ["softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale", "window_size", "attention_chunk",
         "softcap", "num_splits", "pack_gqa", "deterministic", "sm_margin", "return_attn_probs"]  # fmt: skip
STARTS = torch.tensor([0, 3, 3, 9], dtype=torch.int32)


def qkv(packed: bool = False) -> torch.Tensor:
    """q, k and v in one tensor, third from last."""
    generator = torch.Generator().manual_seed(3)
    shape = (9, 3, 4, 32) if packed else (2, 9, 3, 4, 32)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (flash_attn.flash_attn_func, ["q", "k", "v", "dropout_p", *BEHIND]),
        (flash_attn.flash_attn_varlen_func, ["q", "k", "v", *PACKS, "dropout_p", *BEHIND, "block_table"]),
        (flash_attn_interface.flash_attn_func, ["q", "k", "v", *THREE]),
        (flash_attn_interface.flash_attn_varlen_func, ["q", "k", "v", *PACKS, "seqused_q", "seqused_k", *THREE]),
        (flash_attn_interface.flash_attn_qkvpacked_func,
         ["qkv", *(x for x in THREE if x not in ("qv", "num_splits", "pack_gqa", "sm_margin", "return_attn_probs")),
          "num_heads_q", "sm_margin", "return_attn_probs"]),
    ],
)  # fmt: skip
def test_signatures_are_theirs(function: Any, names: list[str]) -> None:
    signature = inspect.signature(function).parameters
    assert list(signature) == names
    assert signature["deterministic"].default is True


def test_all_of_flash_attn_2_is_exported() -> None:
    for name in flash_attn.__all__:
        assert getattr(dash_kernels, name) is getattr(flash_attn, name)


@pytest.mark.parametrize(
    ("function", "extra"), [(flash_attn_func, (None,)), (flash_attn_interface.flash_attn_func, ())]
)
def test_they_are_attention(function: Any, extra: tuple[None, ...]) -> None:
    q, k, v = qkv().unbind(2)
    k, v = k[:, :, :2], v[:, :, :2]
    for options in (
        {"causal": True},
        {"window_size": (2, 3), "softcap": 1.5},
        {"window_size": (-1, 0)},
    ):
        out, lse = attention(q, k, v, scale=0.5, return_lse=True, **options)
        assert_bits_equal(function(q, k, v, softmax_scale=0.5, **options), out)
        answer = function(q, k, v, softmax_scale=0.5, return_attn_probs=True, **options)
        assert_bits_equal(answer[0], out)
        assert_bits_equal(answer[1], lse)
        assert answer[2:] == extra


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
def test_packed_sequences_go_through_both(module: Any) -> None:
    q, k, v = qkv(packed=True).unbind(1)
    out, lse = attention(q, k, v, causal=True, softcap=2.0, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS,
                         max_seqlen_q=6, max_seqlen_k=6, return_lse=True)  # fmt: skip
    answer = module.flash_attn_varlen_func(
        q, k, v, STARTS, STARTS, 6, 6, causal=True, softcap=2.0, return_attn_probs=True
    )
    assert_bits_equal(answer[0], out)
    assert_bits_equal(answer[1], lse)
    assert answer[1].shape == (4, 9)


def test_stacked_tensors_are_their_parts() -> None:
    stacked, packed = qkv(), qkv(packed=True)
    whole = stacked.requires_grad_()
    out = flash_attn.flash_attn_qkvpacked_func(whole, 0.0, 0.3, True)
    assert_bits_equal(out, flash_attn_func(*stacked.unbind(2), softmax_scale=0.3, causal=True))
    (grad,) = torch.autograd.grad(out.sum(), whole)
    parts = [x.detach().requires_grad_() for x in stacked.unbind(2)]
    expected = torch.autograd.grad(attention(*parts, causal=True, scale=0.3).sum(), parts)
    assert_bits_equal(grad, torch.stack(expected, 2))
    q, kv = stacked[:, :, 0], stacked[:, :, 1:]
    assert_bits_equal(
        flash_attn.flash_attn_kvpacked_func(q, kv, softmax_scale=0.3, causal=True), out
    )
    expected = flash_attn.flash_attn_varlen_func(
        *packed.unbind(1), STARTS, STARTS, 6, 6, causal=True
    )
    for other in (
        flash_attn.flash_attn_varlen_qkvpacked_func(packed, STARTS, 6, causal=True),
        flash_attn.flash_attn_varlen_kvpacked_func(
            packed[:, 0], packed[:, 1:], STARTS, STARTS, 6, 6, causal=True
        ),
    ):
        assert_bits_equal(other, expected)
    three = flash_attn_interface.flash_attn_qkvpacked_func
    assert_bits_equal(three(stacked, 0.3, True), out)
    assert_bits_equal(three(stacked.flatten(2, 3), 0.3, True, num_heads_q=4), out)


@pytest.mark.parametrize(
    ("module", "name", "arguments", "says"),
    [
        (flash_attn, "flash_attn_func", {"dropout_p": 0.1}, "dropout_p is 0.1"),
        (flash_attn, "flash_attn_func", {"alibi_slopes": STARTS}, "alibi_slopes is a tensor"),
        (flash_attn, "flash_attn_varlen_func", {"block_table": STARTS}, "block_table is a tensor"),
        (flash_attn_interface, "flash_attn_func", {"qv": STARTS}, "qv is a tensor"),
        (flash_attn_interface, "flash_attn_func", {"k_descale": STARTS}, "k_descale is a tensor"),
        (flash_attn_interface, "flash_attn_func", {"attention_chunk": 64}, "attention_chunk is 64"),
        (flash_attn_interface, "flash_attn_func", {"num_splits": 4}, "num_splits is 4; .*: use 1"),
        (flash_attn_interface, "flash_attn_varlen_func", {"seqused_q": STARTS}, "seqused_q is a tensor"),
    ],
)  # fmt: skip
def test_what_this_release_lacks_is_refused_by_name(
    module: Any, name: str, arguments: dict[str, Any], says: str
) -> None:
    packed = "varlen" in name
    tensors = qkv(packed).unbind(1 if packed else 2)
    packs = (STARTS, STARTS, 6, 6) if packed else ()
    with pytest.raises(NotImplementedError, match=says):
        getattr(module, name)(*tensors, *packs, **arguments)


def test_neutral_values_of_flash_attn_3_are_taken() -> None:
    q, k, v = qkv().unbind(2)
    plain = flash_attn_interface.flash_attn_func(q, k, v)
    for neutral in (
        {"num_splits": 0},
        {"pack_gqa": True},
        {"sm_margin": 16},
        {"attention_chunk": 0},
    ):
        assert_bits_equal(flash_attn_interface.flash_attn_func(q, k, v, **neutral), plain)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: flash_attn.flash_attn_qkvpacked_func(x[:, :, :2]), "qkv is .*; it must have 5 dimensions and 3"),
        (lambda x: flash_attn.flash_attn_kvpacked_func(x[:, :, 0], x), "kv is .*; it must have 5 dimensions and 2"),
        (lambda x: flash_attn.flash_attn_varlen_qkvpacked_func(x, STARTS, 6), "qkv is .* 4 dimensions and 3"),
        (lambda x: flash_attn_interface.flash_attn_qkvpacked_func(x[0]), "qkv is .*; give .* and num_heads_q"),
        (lambda x: flash_attn_interface.flash_attn_qkvpacked_func(x.flatten(2, 3), num_heads_q=11),
         "num_heads_q is 11 of 12 heads"),
    ],
)  # fmt: skip
def test_wrong_stacks_are_named(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(qkv())
