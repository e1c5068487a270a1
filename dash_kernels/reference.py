"""What attention is, in float64, and a CPU executor that adds tile by tile in a schedule's own order.

The float64 functions are what every error budget is taken from and what serves CPU tensors. The executor shows what a
schedule does to bits without a GPU: two kinds of schedule round differently, one kind never does, however the CTAs
interleave.

Options mean the same everywhere. ``causal`` and ``window`` are aligned bottom-right: query i stands at key position
i + Sk - Sq and sees the keys from ``window[0]`` before it to ``window[1]`` after it, -1 meaning all; causal is a right
side of 0. ``softcap`` c makes a scaled score x into c * tanh(x / c), 0 leaves it. ``sink`` (H) is a logit more in each
row's softmax, whose weight goes nowhere. A row that sees no key gives zeros and a log-sum-exp of +inf.

``rounded_to`` is a dtype in which tensor cores take their operands: arithmetic is then float32, and P, dS and the output
are rounded to it where flash attention rounds them. That is the peer of error budgets where PyTorch has none.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dash_kernels.schedules.schedule import for_group

if TYPE_CHECKING:
    from dash_kernels.schedules import Schedule

SCORES_AT_ONCE = 1 << 26  # float64 scores held at a time: half a gibibyte


class Gradients(NamedTuple):
    """In the shapes of q, k, v and the sink; ``dsink`` is None without a sink."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, sink: Tensor | None = None, rounded_to: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, Sq, H, Dv) and log-sum-exp (B, H, Sq), natural log, both float64 (float32 if ``rounded_to``).

    q is (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv) with H a multiple of Hk.
    """
    how = _Options(causal, scale, window, softcap, sink, rounded_to)
    q, k, v = (_heads_first(x, q.shape[2], how.arithmetic) for x in (q, k, v))
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full(q.shape[:3], math.inf)
    if q.numel() and k.numel():
        for rows in _row_chunks(q, k):
            weights, lse[:, :, rows], _ = _weights(q, k, rows, how)
            out[:, :, rows] = how.rounded(how.rounded(weights) @ v)
    return out.transpose(1, 2), lse


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of :func:`attention_gradients`, which has the options."""
    dq, dk, dv, _ = attention_gradients(dout, q, k, v, causal=causal, scale=scale, **options)
    return dq, dk, dv


def attention_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, sink: Tensor | None = None, dlse: Tensor | None = None, rounded_to: torch.dtype | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of :func:`attention_forward` from those of its output and, with ``dlse`` (B, H, Sq), of its log-sum-exp.

    Float64; with ``rounded_to`` float32, and the caller rounds them. The sums over the query heads of a KV head are
    not rounded in between.
    """
    how = _Options(causal, scale, window, softcap, sink, rounded_to)
    heads_kv = k.shape[2]
    dout, q, k, v = (_heads_first(x, q.shape[2], how.arithmetic) for x in (dout, q, k, v))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    dlse = q.new_zeros(q.shape[:3]) if dlse is None else dlse.to(how.arithmetic)
    dsink = q.new_zeros(q.shape[1])
    if q.numel() and k.numel():
        for rows in _row_chunks(q, k):
            weights, lse, slope = _weights(q, k, rows, how)
            kept = how.rounded(weights)
            delta = (how.rounded(kept @ v) * dout[:, :, rows]).sum(-1) - dlse[:, :, rows]
            dscores = weights * (dout[:, :, rows] @ v.mT - delta[..., None])
            if slope is not None:
                dscores *= slope
            dscores = how.rounded(dscores)
            dv += kept.mT @ dout[:, :, rows]
            dq[:, :, rows] = dscores @ k * scale
            dk += dscores.mT @ q[:, :, rows] * scale
            if sink is not None:
                dsink -= ((_of_heads(sink, q) - lse).exp() * delta).sum((0, 2))
    return Gradients(
        dq.transpose(1, 2),
        _sum_groups(dk, heads_kv),
        _sum_groups(dv, heads_kv),
        dsink if sink is not None else None,
    )


def packed_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Output (total_q, H, Dv) and log-sum-exp (H, total_q) of packed sequences, one after another.

    q is (total_q, H, D), k and v (total_k, Hk, ..); sequence b has rows ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]``.
    Rows of no sequence are zeros and +inf.
    """
    arithmetic = _arithmetic(options.get("rounded_to"))
    out = q.new_zeros(*q.shape[:2], v.shape[2], dtype=arithmetic)
    lse = q.new_full((q.shape[1], q.shape[0]), math.inf, dtype=arithmetic)
    for rows, keys in sequences_of(cu_seqlens_q, cu_seqlens_k):
        one, one_lse = attention_forward(q[None, rows], k[None, keys], v[None, keys], **options)
        out[rows], lse[:, rows] = one[0], one_lse[0]
    return out, lse


def packed_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    *, dlse: Tensor | None = None, **options: Any,
) -> Gradients:  # fmt: skip
    """Gradients of :func:`packed_forward`; ``dlse`` is (H, total_q). Rows of no sequence have zeros."""
    sink, arithmetic = options.get("sink"), _arithmetic(options.get("rounded_to"))
    dq, dk, dv = (torch.zeros_like(x, dtype=arithmetic) for x in (q, k, v))
    dsink = None if sink is None else torch.zeros_like(sink, dtype=arithmetic)
    for rows, keys in sequences_of(cu_seqlens_q, cu_seqlens_k):
        one = attention_gradients(
            dout[None, rows], q[None, rows], k[None, keys], v[None, keys],
            dlse=None if dlse is None else dlse[None, :, rows], **options,
        )  # fmt: skip
        dq[rows], dk[keys], dv[keys] = one.dq[0], one.dk[0], one.dv[0]
        if dsink is not None:
            dsink += one.dsink
    return Gradients(dq, dk, dv, dsink)


def sequences_of(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """The rows of q and of k and v that belong to each sequence."""
    starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    rows, keys = ([slice(*ends) for ends in pairwise(x)] for x in starts)
    return list(zip(rows, keys, strict=True))


@dataclass(frozen=True, slots=True)
class _Options:
    causal: bool
    scale: float
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sink: Tensor | None = None
    rounded_to: torch.dtype | None = None

    @property
    def arithmetic(self) -> torch.dtype:
        return _arithmetic(self.rounded_to)

    @property
    def hides_keys(self) -> bool:
        return self.causal or max(self.window) >= 0

    def rounded(self, x: Tensor) -> Tensor:
        return x if self.rounded_to is None else x.to(self.rounded_to).to(x.dtype)


def _arithmetic(rounded_to: torch.dtype | None) -> torch.dtype:
    return torch.float64 if rounded_to is None else torch.float32


def _heads_first(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """(B, S, Hk, D) in any dtype -> (B, heads, S, D), KV heads repeated for their query heads."""
    return x.to(dtype).transpose(1, 2).repeat_interleave(heads // x.shape[2], dim=1)


def _of_heads(sink: Tensor, like: Tensor) -> Tensor:
    return sink.to(like.dtype)[:, None]


def _sum_groups(grad: Tensor, heads_kv: int) -> Tensor:
    batch, heads, length, dim = grad.shape
    return grad.view(batch, heads_kv, heads // heads_kv, length, dim).sum(2).transpose(1, 2)


def _row_chunks(q: Tensor, k: Tensor) -> list[slice]:
    size = max(1, SCORES_AT_ONCE // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(start, min(start + size, q.shape[2])) for start in range(0, q.shape[2], size)]


def _weights(
    q: Tensor, k: Tensor, rows: slice, how: _Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """P and log-sum-exp of some rows, and the slope of the softcap where there is one."""
    scores, slope = (q[:, :, rows] @ k.mT) * how.scale, None
    if how.softcap:
        share = (scores / how.softcap).tanh()
        scores, slope = share * how.softcap, 1 - share * share
    if how.hides_keys:
        positions = torch.arange(rows.start, rows.stop, device=q.device) + k.shape[2] - q.shape[2]
        keys = torch.arange(k.shape[2], device=q.device)
        hidden = hidden_keys(positions, keys, how.causal, how.window)
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    blind = lse == -math.inf
    if how.sink is not None:
        lse = torch.logaddexp(lse, _of_heads(how.sink, q))
    lse = lse.masked_fill(blind, math.inf)
    return (scores - lse[..., None]).exp(), lse, slope


def hidden_keys(positions: Tensor, keys: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
    """(positions, keys) bool: which keys a query at each key position does not see."""
    left, right = window[0], 0 if causal else window[1]
    ahead = keys - positions[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if left >= 0:
        hidden |= ahead < -left
    if right >= 0:
        hidden |= ahead > right
    return hidden


def run_schedule(
    schedule: Schedule, dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
    *, scale: float, softcap: float = 0.0, dlse: Tensor | None = None, interleaving: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of one KV head in float32, computed tile by tile as the kernels do, in this schedule's order.

    q is (Sq, D) and dout (Sq, Dv), or (Sq, G, ..) for the G query heads that share the KV head; k is (Sk, D), v (Sk, Dv);
    ``dlse`` is (Sq) or (G, Sq). bf16 or fp16. The mask is the grid's, and only tiles that need it are masked. Each
    tile's dK and dV are added in visit order, head after head; its dQ is added when its turn has come. ``interleaving``
    seeds the choice of which CTA takes the next legal step: it cannot change a bit of the result. Raises RuntimeError
    naming the blocked steps when no CTA can go on.
    """
    grouped = q if q.dim() == 3 else q[:, None]
    dout = dout.view(*grouped.shape[:2], -1)
    run = _Run(schedule, dout, grouped, k, v, scale, softcap, dlse)
    walked = for_group(schedule, grouped.shape[1])
    num_m = schedule.grid.num_m
    added = [0] * (grouped.shape[1] * num_m)
    step = [0] * len(walked.items)
    chooser = random.Random(interleaving)
    while True:
        waiting = [item for item, tiles in enumerate(walked.visit) if step[item] < len(tiles)]
        ready = [
            i for i in waiting if added[walked.visit[i][step[i]][1]] == walked.turn[i][step[i]]
        ]
        if not ready:
            break
        item = chooser.choice(ready)
        n_block, cell = walked.visit[item][step[item]]
        run.add_tile(n_block, cell % num_m, cell // num_m)
        added[cell] += 1
        step[item] += 1
    if waiting:
        stuck = [(*walked.visit[i][step[i]], walked.turn[i][step[i]]) for i in waiting[:4]]
        named = [(n_block, cell % num_m, turn) for n_block, cell, turn in stuck]
        raise RuntimeError(f"no CTA can go on; (n_block, m_block, turn) waited for: {named}")
    return run.dq.view(q.shape) * scale, run.dk * scale, run.dv


class _Run:
    """The tensors of one :func:`run_schedule`, float32."""

    def __init__(
        self, schedule: Schedule, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float,
        dlse: Tensor | None,
    ) -> None:  # fmt: skip
        self.grid, self.dtype, self.scale, self.softcap = schedule.grid, q.dtype, scale, softcap
        self.window = (self.grid.window_left, self.grid.window_right)
        out, lse = attention_forward(
            q[None], k[None, :, None], v[None, :, None],
            causal=self.grid.causal, scale=scale, window=self.window, softcap=softcap,
        )  # fmt: skip
        self.lse = lse[0].float()
        self.delta = (out[0].to(q.dtype).float() * dout.float()).sum(-1).T
        if dlse is not None:
            self.delta = self.delta - dlse.float()
        self.dout, self.q, self.k, self.v = (x.float() for x in (dout, q, k, v))
        self.dq, self.dk, self.dv = (torch.zeros_like(x) for x in (self.q, self.k, self.v))

    def add_tile(self, n_block: int, m_block: int, member: int) -> None:
        grid = self.grid
        rows = slice(m_block * grid.block_m, min((m_block + 1) * grid.block_m, grid.seq_len))
        keys = slice(n_block * grid.block_n, min((n_block + 1) * grid.block_n, grid.seq_len_kv))
        q, dout = self.q[rows, member], self.dout[rows, member]
        scores, slope = (q @ self.k[keys].T) * self.scale, None
        if self.softcap:
            share = (scores / self.softcap).tanh()
            scores, slope = share * self.softcap, 1 - share * share
        weights = (scores - self.lse[member, rows, None]).exp()
        if grid.needs_mask(n_block, m_block):
            positions = torch.arange(rows.start, rows.stop) + grid.seq_len_kv - grid.seq_len
            hidden = hidden_keys(
                positions, torch.arange(keys.start, keys.stop), grid.causal, self.window
            )
            weights = weights.masked_fill(hidden, 0.0)
        dscores = weights * (dout @ self.v[keys].T - self.delta[member, rows, None])
        if slope is not None:
            dscores = dscores * slope
        rounded = dscores.to(self.dtype).float()
        self.dv[keys] += weights.to(self.dtype).float().T @ dout
        self.dk[keys] += rounded.T @ q
        self.dq[rows, member] += rounded @ self.k[keys]
