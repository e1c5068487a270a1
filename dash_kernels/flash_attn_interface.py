"""The same functions with FlashAttention-3's signatures, deterministic unless told otherwise.

The log-sum-exp comes only with ``return_attn_probs=True``: (out, softmax_lse). Every argument that asks for something
this release lacks is refused by name.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dash_kernels.ops import VARLEN_MESSAGE, attention, refuse_unsupported, window_is_causal

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


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
    """FA3's function of this name; see :func:`dash_kernels.attention`. ``pack_gqa`` is a hint and changes nothing."""
    refuse_unsupported(
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        softcap=softcap,
    )
    if num_splits not in (0, 1):
        raise NotImplementedError(
            f"num_splits is {num_splits}; this release never splits the keys: use 1"
        )
    return attention(
        q,
        k,
        v,
        causal=window_is_causal(window_size, causal),
        scale=softmax_scale,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_lse=return_attn_probs,
    )


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
    """FA3's function for packed sequences: not in this release, and it says so (NotImplementedError)."""
    raise NotImplementedError(VARLEN_MESSAGE)
