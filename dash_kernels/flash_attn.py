"""flash-attn 2's functions, deterministic unless told otherwise; see :func:`dash_kernels.attention`.

With ``return_attn_probs`` each answers (out, softmax_lse, None): the log-sum-exp, (batch, heads, seq_len) or (heads,
total) of packed sequences, is differentiable, and probabilities are never made. Dropout, ALiBi and paged keys are
refused by name (NotImplementedError).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dash_kernels.checks import refuse_unsupported
from dash_kernels.ops import attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = True,
    return_attn_probs: bool = False,
) -> Any:
    """flash-attn 2's function of this name: q (batch, seq_len, heads, head_dim), k and v with seq_len_kv and heads_kv."""
    refuse_unsupported(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    answer = attention(
        q, k, v, causal=causal, scale=softmax_scale, window_size=window_size, softcap=softcap,
        deterministic=deterministic, return_lse=return_attn_probs,
    )  # fmt: skip
    return (*answer, None) if return_attn_probs else answer


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = True,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """flash-attn 2's function for packed sequences: q (total_q, heads, head_dim), k and v (total_k, heads_kv, head_dim).

    ``cu_seqlens_q`` and ``cu_seqlens_k`` are int32 (batch + 1) on q's device; sequences may be empty.
    """
    refuse_unsupported(dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    answer = attention(
        q, k, v, causal=causal, scale=softmax_scale, window_size=window_size, softcap=softcap,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        deterministic=deterministic, return_lse=return_attn_probs,
    )  # fmt: skip
    return (*answer, None) if return_attn_probs else answer


def flash_attn_qkvpacked_func(qkv: Tensor, *arguments: Any, **options: Any) -> Any:
    """:func:`flash_attn_func` on q, k and v in one tensor, (batch, seq_len, 3, heads, head_dim), read in place."""
    _check_stacked("qkv", qkv, 5, 3)
    return flash_attn_func(*qkv.unbind(2), *arguments, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Any:
    """:func:`flash_attn_func` on k and v in one tensor, (batch, seq_len_kv, 2, heads_kv, head_dim), read in place."""
    _check_stacked("kv", kv, 5, 2)
    return flash_attn_func(q, *kv.unbind(2), *arguments, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *arguments: Any, **options: Any
) -> Any:
    """:func:`flash_attn_varlen_func` on q, k and v in one tensor, (total, 3, heads, head_dim), read in place."""
    _check_stacked("qkv", qkv, 4, 3)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *arguments, **options
    )


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Any:
    """:func:`flash_attn_varlen_func` on k and v in one tensor, (total_k, 2, heads_kv, head_dim), read in place."""
    _check_stacked("kv", kv, 4, 2)
    return flash_attn_varlen_func(q, *kv.unbind(1), *arguments, **options)


def _check_stacked(name: str, x: Any, dimensions: int, parts: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; give a tensor")
    if x.ndim != dimensions or x.shape[-3] != parts:
        raise ValueError(
            f"{name} is {tuple(x.shape)}; it must have {dimensions} dimensions and {parts} in its third from last"
        )
