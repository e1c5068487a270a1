"""Forward pass: PyTorch's own flash attention, behind one function that fixes its alignment, layout and order.

aten's dense entry splits the keys over CTAs by how full the GPU is, so that its bits depend on batch, heads and SMs.
The entry for packed sequences never splits when every sequence has its own queries; it is called here with sequences
of equal length, so a sample's output has the same bits alone and in a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (B, Sq, H, D), contiguous, in q's dtype, and log-sum-exp (B, H, Sq), float32, natural log.

    q is (B, Sq, H, D), k and v (B, Sk, Hk, D) with H a multiple of Hk and D a multiple of 8; CUDA, bf16 or fp16, no
    size zero. Causal is bottom-right aligned; a row that sees no key gives zeros and +inf.
    """
    batch, seq_len, heads, head_dim = q.shape
    seq_len_kv, heads_kv = k.shape[1], k.shape[2]
    if seq_len == 1 and heads != heads_kv:
        # With one query and grouped heads aten folds the group into the rows and splits the keys after all.
        k, v = (x.repeat_interleave(heads // heads_kv, dim=2) for x in (k, v))
    packed = [_last_contiguous(x).reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    starts = [
        torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
        for length in (seq_len, seq_len_kv)
    ]
    out, lse = torch.ops.aten._flash_attention_forward(
        *packed, *starts, seq_len, seq_len_kv, 0.0, causal, False, scale=scale
    )[:2]
    out = out.reshape(batch, seq_len, heads, head_dim).contiguous()
    return out, lse.reshape(heads, batch, seq_len).transpose(0, 1).contiguous()


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
