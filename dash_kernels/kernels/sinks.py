"""Attention sinks: a logit a head that takes its share of each row's softmax and has no value.

The forward kernels know nothing of it: afterwards out is scaled by the share that the keys keep, sigmoid(lse - sink), and
the log-sum-exp takes the sink in. With that log-sum-exp the backward kernels' P is right as it is, and the sink's own
gradient is minus the sum over the rows of its share times delta.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ROWS = 32
SINK_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}


@triton.jit(do_not_specialize=["heads", "seq_len", "num_tiles"])
def share_with_sink(
    out, lse, shared_lse, sink, heads, seq_len, num_tiles, head_dim,
    BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """out (B, S, H, D) in place, lse (B, H, S) into shared_lse, all contiguous; one tile of rows of one head a program.

    Not lse in place: each warp loads all of a tile's lse, and one warp's store could come before another's load.
    """
    tile = tl.program_id(0)
    row_head = tile // num_tiles
    head = row_head % heads
    rows = (tile % num_tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_DIM)
    inside = rows < seq_len
    at_row = row_head.to(tl.int64) * seq_len + rows
    of_keys = tl.load(lse + at_row, mask=inside, other=float("inf"))
    logit = tl.load(sink + head).to(tl.float32)
    kept = 1.0 / (1.0 + tl.exp(logit - of_keys))
    above = tl.maximum(of_keys, logit)
    both = above + tl.log(1.0 + tl.exp(-tl.abs(of_keys - logit)))
    tl.store(shared_lse + at_row, tl.where(of_keys == float("inf"), of_keys, both), mask=inside)
    row = (row_head // heads).to(tl.int64) * seq_len + rows
    at = out + (row * heads + head)[:, None] * head_dim + columns[None]
    inside_tile = inside[:, None] & (columns < head_dim)[None]
    values = tl.load(at, mask=inside_tile, other=0.0).to(tl.float32)
    tl.store(at, (values * kept[:, None]).to(out.dtype.element_ty), mask=inside_tile)


@triton.jit(do_not_specialize=["heads", "seq_len", "num_tiles"])
def sink_parts(
    dout, out, lse, dlse, sink, parts, dout_batch, dout_row, dout_head, out_batch, out_row, out_head,
    heads, seq_len, num_tiles, head_dim,
    WITH_DLSE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """The share of a tile of rows of one head in the sink's gradient, to parts (H, B * tiles), float32."""
    tile = tl.program_id(0)
    row_head = tile // num_tiles
    head = row_head % heads
    batch = (row_head // heads).to(tl.int64)
    place = tile % num_tiles
    rows = place * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_DIM)
    inside = rows < seq_len
    inside_tile = inside[:, None] & (columns < head_dim)[None]
    long_rows = rows.to(tl.int64)[:, None]
    a = tl.load(
        dout + batch * dout_batch + long_rows * dout_row + head.to(tl.int64) * dout_head + columns[None],
        mask=inside_tile, other=0.0,
    )  # fmt: skip
    b = tl.load(
        out + batch * out_batch + long_rows * out_row + head.to(tl.int64) * out_head + columns[None],
        mask=inside_tile, other=0.0,
    )  # fmt: skip
    delta = tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)
    lse_at = row_head.to(tl.int64) * seq_len + rows
    if WITH_DLSE:
        delta -= tl.load(dlse + lse_at, mask=inside, other=0.0)
    of_all = tl.load(lse + lse_at, mask=inside, other=float("inf"))
    share = tl.exp(tl.load(sink + head).to(tl.float32) - of_all)
    part = tl.sum(tl.where(of_all == float("inf"), 0.0, -share * delta), 0)
    tl.store(parts + (head * (tl.num_programs(0) // heads) + batch * num_tiles + place), part)


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Let ``sink`` (H,) take its share of ``out`` (B, S, H, D), in place, and of ``lse`` (B, H, S): the answer.

    Both are contiguous. A row that sees no key stays zeros and +inf.
    """
    import torch

    batch, seq_len, heads, head_dim = out.shape
    num_tiles = triton.cdiv(seq_len, BLOCK_ROWS)
    shared_lse = torch.empty_like(lse)
    with torch.cuda.device_of(out):
        share_with_sink[(batch * heads * num_tiles,)](
            out, lse, shared_lse, sink.contiguous(), heads, seq_len, num_tiles, head_dim,
            BLOCK_ROWS=BLOCK_ROWS, BLOCK_DIM=triton.next_power_of_2(head_dim), **SINK_OPTIONS,
        )  # fmt: skip
    return shared_lse


def sink_gradient(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, sink: Tensor
) -> Tensor:
    """The sink's gradient (H,) in its dtype, added in a fixed order.

    ``dout`` and ``out`` are (B, S, H, D) with a contiguous last dimension, ``lse`` and ``dlse`` (B, H, S) contiguous
    float32, out and lse with the sink's share taken. Rows whose lse is +inf do not count, whatever they hold.
    """
    import torch

    batch, seq_len, heads, head_dim = out.shape
    num_tiles = triton.cdiv(seq_len, BLOCK_ROWS)
    parts = torch.empty((heads, batch * num_tiles), dtype=torch.float32, device=out.device)
    with torch.cuda.device_of(out):
        sink_parts[(batch * heads * num_tiles,)](
            dout, out, lse, lse if dlse is None else dlse, sink.contiguous(), parts,
            *dout.stride()[:3], *out.stride()[:3], heads, seq_len, num_tiles, head_dim,
            WITH_DLSE=dlse is not None, BLOCK_ROWS=BLOCK_ROWS, BLOCK_DIM=triton.next_power_of_2(head_dim),
            **SINK_OPTIONS,
        )  # fmt: skip
    return parts.sum(1).to(sink.dtype)
