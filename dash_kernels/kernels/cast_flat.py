"""The cast pass of the Hopper kernel: undoes the flat layout of dQ, scales it and rounds it to the output's dtype."""

from __future__ import annotations

import triton
import triton.language as tl

from dash_kernels.kernels.compat import permute_axes
from dash_kernels.kernels.hopper_shared import HEADER_WORDS, ORDERED, bits, flat_order, half_order
from dash_kernels.kernels.sequences import Q_TILE_WORDS

HEADER = tl.constexpr(HEADER_WORDS.value)
TURNS_COUNTED = tl.constexpr(ORDERED.value)
TABLE_WORDS = tl.constexpr(Q_TILE_WORDS)


@triton.constexpr_function
def row_major_order(block_m, head_dim, pieces):
    """The permutation that undoes :func:`flat_order`, or :func:`half_order` of a piece."""
    order = flat_order(block_m, head_dim) if pieces == 1 else half_order(head_dim)
    return [order.index(axis) for axis in range(len(order))]


@triton.jit(do_not_specialize=["heads", "num_m", "seq_len"])
def cast_flat(
    accumulated, dq, workspace, tiles, counts, heads, num_m, seq_len, scale,
    POLICY: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
    SEMAPHORES: tl.constexpr,
):  # fmt: skip
    """One Q tile a program: dQ (B, Sq, H, WIDTH) contiguous from the flat accumulator (heads, num_m,
    PIECES, BLOCK_M * HEAD_DIM).

    Packed sequences: ``tiles`` and ``counts`` of a SequencePlan, ``num_m`` its max_q_tiles. Zero where nothing was
    added, whatever the accumulator held. NaN everywhere once a turn has not come.
    """
    BITS: tl.constexpr = (BLOCK_M * HEAD_DIM).bit_length() - 1
    ORDER: tl.constexpr = row_major_order(BLOCK_M, HEAD_DIM, PIECES)
    # Backwards: what the main kernel added last still lies in the L2 cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head = program // num_m
    m_block = program % num_m
    first = 0
    length = seq_len
    if tiles is not None:
        if m_block >= tl.load(counts + 1):
            return
        tile = tiles + m_block.to(tl.int64) * TABLE_WORDS
        first = tl.load(tile)
        length = tl.load(tile + 1)
        m_block = tl.load(tile + 2)
    b = (head // heads).to(tl.int64)
    h = head % heads
    rows = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    target = dq + ((b * seq_len + first + rows[:, None]) * heads + h) * WIDTH
    offsets = tl.arange(0, BLOCK_M * HEAD_DIM)
    missed = False
    if POLICY == TURNS_COUNTED:
        contributions = tl.load(workspace + HEADER + program * SEMAPHORES)
        missed = tl.load(workspace + 1) != 0
    for piece in tl.static_range(PIECES):
        source = (
            accumulated + (program.to(tl.int64) * PIECES + piece) * (BLOCK_M * HEAD_DIM) + offsets
        )
        if POLICY == TURNS_COUNTED:
            flat = tl.load(source, mask=contributions != 0, other=0.0)
            flat = tl.where(missed, float("nan"), flat)
        else:
            flat = tl.load(source)
        values = permute_axes(tl.reshape(flat * scale, bits(BITS)), ORDER)
        values = tl.reshape(values, [BLOCK_M, HEAD_DIM]).to(dq.dtype.element_ty)
        cols = piece * HEAD_DIM + tl.arange(0, HEAD_DIM)
        tl.store(
            target + cols[None, :], values, mask=(rows < length)[:, None] & (cols < WIDTH)[None, :]
        )
