"""FlashAttention-3's functions with its signatures, deterministic unless told otherwise.

The log-sum-exp comes only with ``return_attn_probs=True``: (out, softmax_lse). Every argument that asks for something
this release lacks is refused by name (NotImplementedError); ``pack_gqa`` is a hint and changes nothing. See
:func:`dash_kernels.attention` for the rest.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dash_kernels.checks import refuse_unsupported
from dash_kernels.ops import attention

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = True,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """FA3's function of this name: q (batch, seq_len, heads, head_dim), k and v with seq_len_kv and heads_kv."""
    _refuse(num_splits, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
            attention_chunk=attention_chunk)  # fmt: skip
    return attention(
        q, k, v, causal=causal, scale=softmax_scale, window_size=window_size, softcap=softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_lse=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = True,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """FA3's function for packed sequences: q (total_q, heads, head_dim), k and v (total_k, heads_kv, head_dim)."""
    _refuse(num_splits, seqused_q=seqused_q, seqused_k=seqused_k, qv=qv, q_descale=q_descale, k_descale=k_descale,
            v_descale=v_descale, attention_chunk=attention_chunk)  # fmt: skip
    return attention(
        q, k, v, causal=causal, scale=softmax_scale, window_size=window_size, softcap=softcap,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        deterministic=deterministic, sm_margin=sm_margin, return_lse=return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = True,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """FA3's function of this name: qkv (batch, seq_len, 3, heads, head_dim), or (batch, seq_len, all heads, head_dim)
    with ``num_heads_q`` of the heads being q's, read in place. Raises ValueError for another shape.
    """
    if isinstance(qkv, Tensor) and qkv.ndim == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif isinstance(qkv, Tensor) and qkv.ndim == 4 and num_heads_q is not None:
        rest = qkv.shape[2] - num_heads_q
        if num_heads_q < 1 or rest < 2 or rest % 2:
            raise ValueError(
                f"num_heads_q is {num_heads_q} of {qkv.shape[2]} heads of qkv; k and v share the rest"
            )
        q, k, v = qkv.split([num_heads_q, rest // 2, rest // 2], dim=2)
    else:
        raise ValueError(
            f"qkv is {tuple(getattr(qkv, 'shape', ()))}; give (batch, seq_len, 3, heads, head_dim), or "
            "(batch, seq_len, all heads, head_dim) and num_heads_q"
        )
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def _refuse(num_splits: int, **arguments: Any) -> None:
    refuse_unsupported(**arguments)
    if num_splits not in (0, 1):
        raise NotImplementedError(
            f"num_splits is {num_splits}; this release never splits the keys: use 1"
        )
