"""One forward and one backward on checked tensors: kernels for CUDA, the float64 reference for the CPU.

The torch.library ops and the eager path both end here. Tensors are (batch, seq_len, heads, head_dim), or packed,
(total, heads, head_dim), with ``cu_seqlens``; a log-sum-exp is (batch, heads, seq_len) or (heads, total).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_kernels.problem import Config

_NAME_FIELDS = ("backend", "schedule", "policy", "signal", "launch_order")
_NUMBER_FIELDS = tuple(name for name in Config.__dataclass_fields__ if name not in _NAME_FIELDS)


class Options(NamedTuple):
    """What a call asks for beside its tensors, in the order of the ops' last arguments.

    ``names`` and ``numbers`` are the pinned config as an op can carry it, empty to look one up. The longest lengths
    are 0 unless sequences are packed.
    """

    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window_left: int
    window_right: int
    scale: float
    softcap: float
    names: str
    numbers: tuple[int, ...]
    deterministic: bool
    allow_resident: bool
    sm_margin: int


def encode_config(config: Config | None) -> tuple[str, tuple[int, ...]]:
    """A config as what a torch.library op can carry: its names, joined, and its numbers; empty for None."""
    if config is None:
        return "", ()
    names = " ".join([getattr(config, name) for name in _NAME_FIELDS])
    return names, tuple([getattr(config, name) for name in _NUMBER_FIELDS])


@functools.lru_cache(maxsize=1024)
def decode_config(names: str, numbers: tuple[int, ...]) -> Config:
    fields: dict[str, Any] = dict(zip(_NAME_FIELDS, names.split(), strict=True))
    fields.update(zip(_NUMBER_FIELDS, numbers, strict=True))
    return Config(**fields)


def run_forward(
    options: Options, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, in q's dtype, and log-sum-exp, float32, both contiguous."""
    if _is_empty(q, k, cu_seqlens_q, options):
        if cu_seqlens_q is not None and cu_seqlens_k is not None and not q.is_cuda:
            from dash_kernels.on_cpu import check_starts

            check_starts(options, q, k, cu_seqlens_q, cu_seqlens_k)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        return out, q.new_full(lse_shape(q), math.inf, dtype=torch.float32)
    if q.is_cuda:
        from dash_kernels.on_gpu import forward
    else:
        from dash_kernels.on_cpu import forward
    return forward(options, q, k, v, sink, cu_seqlens_q, cu_seqlens_k)


def run_backward(
    options: Options, dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, out: Tensor, lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of q, k, v and sink, contiguous. None for ``dout`` or ``dlse`` is zeros."""
    if _is_empty(q, k, cu_seqlens_q, options):
        dsink = None if sink is None else torch.zeros_like(sink)
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), dsink
    dout = torch.zeros_like(out) if dout is None else dout
    if q.is_cuda:
        from dash_kernels.on_gpu import backward

        return backward(options, dout, dlse, q, k, v, sink, cu_seqlens_q, cu_seqlens_k, out, lse)
    from dash_kernels import on_cpu

    return on_cpu.backward(options, dout, dlse, q, k, v, sink, cu_seqlens_q, cu_seqlens_k)


def _is_empty(q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, options: Options) -> bool:
    """Whether no query meets a key, as the host can tell."""
    if cu_seqlens_q is not None and not (options.max_seqlen_q and options.max_seqlen_k):
        return True
    return bool(q.numel() == 0 or k.numel() == 0)


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """Shape of the log-sum-exp: (batch, heads, seq_len), or (heads, total) of packed sequences."""
    *batch, seq_len, heads, _ = q.shape
    return (*batch, heads, seq_len)
