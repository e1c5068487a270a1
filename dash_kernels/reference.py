"""What attention is, in float64, and a CPU executor that adds tile by tile in a schedule's own order.

The float64 functions are what every error budget is taken from and what serves CPU tensors. The executor shows what a
schedule does to bits without a GPU: two kinds of schedule round differently, one kind never does, however the CTAs
interleave.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dash_kernels.schedules import Schedule

SCORES_AT_ONCE = 1 << 26  # float64 scores held at a time: half a gibibyte


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (B, Sq, H, D) and log-sum-exp (B, H, Sq), natural log, both float64.

    q is (B, Sq, H, D), k and v (B, Sk, Hk, D) with H a multiple of Hk. ``causal`` is bottom-right aligned: query i
    sees key j if j <= i + Sk - Sq. A row that sees no key gives zeros and a log-sum-exp of +inf.
    """
    q, k, v = (_heads_first(x, q.shape[2]) for x in (q, k, v))
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:3], math.inf, dtype=torch.float64, device=q.device)
    if q.numel() and k.shape[2]:
        for rows in _row_chunks(q, k):
            weights, lse[:, :, rows] = _softmax(q, k, rows, causal, scale)
            out[:, :, rows] = weights @ v
    return out.transpose(1, 2), lse


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv of :func:`attention_forward`, float64, in the shapes of q, k and v."""
    heads_kv = k.shape[2]
    dout, q, k, v = (_heads_first(x, q.shape[2]) for x in (dout, q, k, v))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    if q.numel() and k.shape[2]:
        for rows in _row_chunks(q, k):
            weights, _ = _softmax(q, k, rows, causal, scale)
            dv += weights.mT @ dout[:, :, rows]
            dweights = dout[:, :, rows] @ v.mT
            dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) * scale
            dq[:, :, rows] = dscores @ k
            dk += dscores.mT @ q[:, :, rows]
    return dq.transpose(1, 2), _sum_groups(dk, heads_kv), _sum_groups(dv, heads_kv)


def _heads_first(x: Tensor, heads: int) -> Tensor:
    """(B, S, Hk, D) in any dtype -> (B, heads, S, D) float64, KV heads repeated for their query heads."""
    return x.double().transpose(1, 2).repeat_interleave(heads // x.shape[2], dim=1)


def _sum_groups(grad: Tensor, heads_kv: int) -> Tensor:
    batch, heads, length, dim = grad.shape
    return grad.view(batch, heads_kv, heads // heads_kv, length, dim).sum(2).transpose(1, 2)


def _row_chunks(q: Tensor, k: Tensor) -> list[slice]:
    size = max(1, SCORES_AT_ONCE // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(start, min(start + size, q.shape[2])) for start in range(0, q.shape[2], size)]


def _softmax(
    q: Tensor, k: Tensor, rows: slice, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = (q[:, :, rows] @ k.mT) * scale
    if causal:
        offset = k.shape[2] - q.shape[2]
        last_key = torch.arange(rows.start, rows.stop, device=q.device) + offset
        hidden = torch.arange(k.shape[2], device=q.device) > last_key[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    lse = torch.where(lse == -math.inf, math.inf, lse)
    return (scores - lse[..., None]).exp(), lse


def run_schedule(
    schedule: Schedule,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    interleaving: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of one head in float32, computed tile by tile as the kernels do, in this schedule's order.

    q and dout are (Sq, D), k and v (Sk, D), bf16 or fp16. Each tile's dK and dV are added in visit order; its dQ is
    added when its turn has come. ``interleaving`` seeds the choice of which CTA takes the next legal step: it cannot
    change a bit of the result. Raises RuntimeError naming the blocked steps when no CTA can go on.
    """
    grid = schedule.grid
    dtype = q.dtype
    out, lse = attention_forward(
        q[None, :, None], k[None, :, None], v[None, :, None], causal=grid.causal, scale=scale
    )
    lse32 = lse[0, 0].float()
    delta = (out[0, :, 0].to(dtype).float() * dout.float()).sum(-1)
    q32, k32, v32, dout32 = (x.float() for x in (q, k, v, dout))
    dq, dk, dv = torch.zeros_like(q32), torch.zeros_like(k32), torch.zeros_like(v32)
    offset = grid.seq_len_kv - grid.seq_len
    added = [0] * grid.num_m
    step = [0] * len(schedule.items)
    chooser = random.Random(interleaving)
    while True:
        waiting = [item for item, tiles in enumerate(schedule.visit) if step[item] < len(tiles)]
        ready = [
            i for i in waiting if added[schedule.visit[i][step[i]][1]] == schedule.turn[i][step[i]]
        ]
        if not ready:
            break
        item = chooser.choice(ready)
        n_block, m_block = schedule.visit[item][step[item]]
        rows = slice(m_block * grid.block_m, min((m_block + 1) * grid.block_m, grid.seq_len))
        keys = slice(n_block * grid.block_n, min((n_block + 1) * grid.block_n, grid.seq_len_kv))
        weights = ((q32[rows] @ k32[keys].T) * scale - lse32[rows, None]).exp()
        if grid.causal:
            row_ids = torch.arange(rows.start, rows.stop)[:, None] + offset
            weights = weights.masked_fill(torch.arange(keys.start, keys.stop) > row_ids, 0.0)
        dscores = weights * (dout32[rows] @ v32[keys].T - delta[rows, None])
        rounded = dscores.to(dtype).float()
        dv[keys] += weights.to(dtype).float().T @ dout32[rows]
        dk[keys] += rounded.T @ q32[rows]
        dq[rows] += rounded @ k32[keys]
        added[m_block] += 1
        step[item] += 1
    if waiting:
        stuck = [(*schedule.visit[i][step[i]], schedule.turn[i][step[i]]) for i in waiting[:4]]
        raise RuntimeError(f"no CTA can go on; (n_block, m_block, turn) waited for: {stuck}")
    return dq * scale, dk * scale, dv
