"""Forward pass behind one function: it picks the kernel, and fixes alignment, layout and order whichever runs.

The Hopper kernel where it runs the call, else PyTorch's flash attention, else (softcap) the portable kernel. The choice
looks at shapes of one head, options and compute capability, never at batch, heads or SMs; numerics.FORWARD_BACKEND
names the rule.

PyTorch's dense entry splits the keys over CTAs by how full the GPU is, so that its bits depend on batch, heads and SMs.
The entry for packed sequences never splits when every sequence has its own queries; it is called here with sequences of
equal length, so a sample's output has the same bits alone and in a batch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from dash_kernels.layouts import kernel_ready, pad_head_dim

LARGEST_GRID = (
    65535  # CTAs along a grid's second and third axis: aten puts sequences and heads there
)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, sequences: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, Sq, H, Dv), contiguous, in q's dtype, and log-sum-exp (B, H, Sq), float32, natural log.

    q is (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv) with H a multiple of Hk and D and Dv multiples of 8 up
    to 256, any strides; CUDA, bf16 or fp16, no size zero. Causal and ``window`` (left, right) are bottom-right aligned;
    a row that sees no key gives zeros and +inf. With ``sequences`` (kernels.sequences.Sequences) B is 1 and the rows
    are packed.
    """
    kernel = pick_kernel(q.shape[3], v.shape[3], q.dtype, _capability(q.device), softcap > 0)
    if kernel == "hopper":
        from dash_kernels.kernels.forward_hopper import forward_hopper

        q, k, v = (kernel_ready(x, elements=8) for x in (q, k, v))
        return forward_hopper(
            q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, sequences=sequences
        )
    q, k, v = (kernel_ready(x, copies=False, elements=8) for x in (q, k, v))
    if kernel == "flash":
        return _flash(q, k, v, causal, scale, window, sequences)
    from dash_kernels.kernels.forward_portable import forward_portable

    return forward_portable(
        q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, sequences=sequences
    )


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.lru_cache(maxsize=1024)
def pick_kernel(
    head_dim: int, head_dim_v: int, dtype: Any, capability: tuple[int, int], softcap: bool
) -> str:  # fmt: skip
    """What runs such a forward: hopper, flash or portable."""
    from dash_kernels.kernels.forward_hopper import supports_forward

    if not supports_forward(head_dim, head_dim_v, dtype, capability):
        return "hopper"
    return "portable" if softcap else "flash"


def _flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: tuple[int, int], sequences: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """PyTorch's flash attention, with one head_dim for q, k and v."""
    batch, seq_len = q.shape[:2]
    dim_v = v.shape[3]
    widest = max(q.shape[3], dim_v)
    q, k, v = (pad_head_dim(x, widest) for x in (q, k, v))
    if sequences is None:
        lengths = seq_len, k.shape[1]
        pieces = [slice(at, at + LARGEST_GRID) for at in range(0, batch, LARGEST_GRID)]
        parts = [_flash_equal(q[at], k[at], v[at], causal, scale, window, lengths) for at in pieces]
        out, lse = parts[0] if len(parts) == 1 else (torch.cat(x) for x in zip(*parts, strict=True))
    else:
        count = sequences.cu_seqlens_q.shape[0] - 1
        if count > LARGEST_GRID:
            raise ValueError(
                f"cu_seqlens_q packs {count} sequences; the forward takes up to {LARGEST_GRID} a call: split them"
            )
        packed, lse = _flash_packed(q[0], k[0], v[0], causal, scale, window, *sequences)
        out, lse = packed[None], lse[None]
    return (out if widest == dim_v else out[..., :dim_v].contiguous()), lse


def _flash_equal(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: tuple[int, int], lengths: tuple[int, int]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A batch as packed sequences of equal length."""
    batch, seq_len, heads, _ = q.shape
    starts = {
        length: torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
        for length in set(lengths)
    }
    rows = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    out, lse = _flash_packed(*rows, causal, scale, window, *(starts[x] for x in lengths), *lengths)
    lse = lse.reshape(heads, batch, seq_len).transpose(0, 1)
    return out.reshape(batch, seq_len, heads, -1), lse.contiguous()


def _flash_packed(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: tuple[int, int],
    starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(total, H, D) and (H, total) of packed sequences."""
    heads, heads_kv = q.shape[1], k.shape[1]
    group = heads // heads_kv
    if heads > LARGEST_GRID:
        step = max(1, LARGEST_GRID // group)
        parts = [
            _flash_packed(
                q[:, at * group : (at + step) * group], k[:, at : at + step], v[:, at : at + step],
                causal, scale, window, starts_q, starts_k, longest_q, longest_k,
            )
            for at in range(0, heads_kv, step)
        ]  # fmt: skip
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, 1), torch.cat(lses)
    if longest_q == 1 and group > 1:
        # With one query and grouped heads aten folds the group into the rows and splits the keys after all.
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    out, lse = torch.ops.aten._flash_attention_forward(
        q, k, v, starts_q, starts_k, longest_q, longest_k, 0.0, causal, False, scale=scale,
        window_size_left=window[0], window_size_right=window[1],
    )[:2]  # fmt: skip
    return out.contiguous(), lse.contiguous()
