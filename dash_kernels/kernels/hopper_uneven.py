"""One step of a warpgroup of the Hopper backward for rows of K that are longer than those of V: 192 columns and 128.

It holds dK and dV of half of a KV tile's 128 keys, as up to head_dim 128, which takes 160 registers a thread. So it works
out S and dP of half of the queries at a time, which takes 32, and dQ of 64 columns at a time. Q, K and dQ lie in shared
memory as three tiles of 64 columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dash_kernels.kernels.compat import thread_barrier
from dash_kernels.kernels.hopper_shared import (
    CONSUMER_AND_WARP,
    CONSUMERS,
    CONSUMERS_AND_WARP,
    EXCHANGE_READ,
    MEETING,
    NO_MASK,
    OUT_FULL,
    PIECE,
    Q_EMPTY,
    RING_FULL,
    accumulator_layout,
    arrive,
    arrive_and_wait,
    flatten_half,
)
from dash_kernels.kernels.hopper_step import masked, softcapped


@gluon.jit
def half_rows(tiles, index, half: gl.constexpr, M: gl.constexpr, COLS: gl.constexpr):
    """The first or the second half of the rows of a tile of M."""
    return tiles.index(index).reshape([M, COLS]).slice(M // 2 * half, M // 2)


@gluon.jit
def uneven_step(
    dk, dv, step, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, q_full, do_full, ring_empty,
    scale_log2, cap_log2, span,
    W: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr, M: gl.constexpr, N: gl.constexpr, DV: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One Q tile: ``dk`` are three tensors of 64 columns; ``ds_s`` holds dS, queries by keys."""
    QUERIES: gl.constexpr = M // 2
    S_LAYOUT: gl.constexpr = accumulator_layout(QUERIES)
    DK_LAYOUT: gl.constexpr = accumulator_layout(PIECE)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(DV), 2)
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DK_LAYOUT, 2)
    DTYPE: gl.constexpr = ds_s.dtype
    # Always 0, which the compiler cannot know: it would hoist the descriptors of what does not move out of the loop and
    # spill them.
    only = step >> 30
    stage = step % STAGES + only
    phase = (step // STAGES) & 1
    v = v_s.index(only).reshape([N, DV]).slice(64 * W, 64)
    ds_tile = ds_s.index(only)
    zeros = gl.zeros((64, QUERIES), gl.float32, S_LAYOUT)
    zeros_dq = gl.zeros((M, PIECE), gl.float32, DK_LAYOUT)
    dk0, dk1, dk2 = dk
    # P and dS of the step before have been read by both warpgroups' matmuls once each has come to a step after it.
    arrive(EXCHANGE_READ + W, CONSUMERS)
    mbarrier.wait(q_full.index(stage), phase)
    for half in gl.static_range(2):
        st = zeros
        for piece in gl.static_range(3):
            k = k_s.index(only + piece).reshape([N, PIECE]).slice(64 * W, 64)
            q = half_rows(q_s, stage * 3 + piece, half, M, PIECE)
            st = warpgroup_mma(k, q.permute((1, 0)), st, use_acc=piece > 0, is_async=True)
        if half == 0:
            mbarrier.wait(do_full.index(stage), phase)
        do = half_rows(do_s, stage, half, M, DV)
        dpt = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
        st = warpgroup_mma_wait(1, deps=[st])
        if SOFTCAP:
            st, slope = softcapped(st, scale_log2)
        if MASK != NO_MASK:
            st = masked(st, words, stage, span, 64 * W, QUERIES * half, MASK, QUERIES, S_LAYOUT)
        lse = lse_s.index(stage).slice(QUERIES * half, QUERIES).load(gl.SliceLayout(0, S_LAYOUT))
        p = gl.exp2(st * (cap_log2 if SOFTCAP else scale_log2) - lse[None, :])
        p16 = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
        if SOFTCAP:
            p *= slope
        dpt = warpgroup_mma_wait(0, deps=[dpt])
        delta = (
            delta_s.index(stage).slice(QUERIES * half, QUERIES).load(gl.SliceLayout(0, S_LAYOUT))
        )
        ds = (p * (dpt - delta[None, :])).to(DTYPE)
        ds16 = gl.convert_layout(ds, DS_LAYOUT)
        if half == 0:
            arrive_and_wait(EXCHANGE_READ + (1 - W), CONSUMERS)
        mine = ds_tile.slice(QUERIES * half, QUERIES).slice(64 * W, 64, dim=1)
        mine.permute((1, 0)).store(ds)
        dv = warpgroup_mma(p16, do, dv, is_async=True)
        dk0 = warpgroup_mma(ds16, half_rows(q_s, stage * 3, half, M, PIECE), dk0, is_async=True)
        dk1 = warpgroup_mma(ds16, half_rows(q_s, stage * 3 + 1, half, M, PIECE), dk1, is_async=True)
        dk2 = warpgroup_mma(ds16, half_rows(q_s, stage * 3 + 2, half, M, PIECE), dk2, is_async=True)
        # Overlapped with the next half's S they would take more registers than there are.
        if half == 0:
            dk0, dk1, dk2, dv, p16, ds16 = warpgroup_mma_wait(
                0, deps=[dk0, dk1, dk2, dv, p16, ds16]
            )
    fence_async_shared()
    arrive_and_wait(MEETING, CONSUMERS)
    dk0, dk1, dk2, dv, p16, ds16 = warpgroup_mma_wait(0, deps=[dk0, dk1, dk2, dv, p16, ds16])
    arrive(Q_EMPTY + stage, CONSUMERS_AND_WARP)
    mbarrier.wait(ring_empty.index(W), (step & 1) ^ 1)
    # Two pieces of dQ for the first warpgroup and one for the second. A loop, so that the registers are the same ones.
    for piece in range(only + 2 * W, only + 2 + W):
        k_piece = k_s.index(piece).reshape([N, PIECE])
        dq = warpgroup_mma(ds_tile, k_piece, zeros_dq, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        dq_s.index(piece).store(flatten_half(dq, PIECE))
    fence_async_shared()
    arrive(RING_FULL + W, CONSUMER_AND_WARP)
    return (dk0, dk1, dk2), dv


@gluon.jit
def uneven_out(
    dk, dv, scale, k_s, v_s, bars, W: gl.constexpr, N: gl.constexpr, DV: gl.constexpr
):  # fmt: skip
    """Hand this warpgroup's keys of dK and dV to the carrier, in place of K and V."""
    arrive_and_wait(MEETING, CONSUMERS)  # the other warpgroup has read K for its last dQ
    v_s.index(0).reshape([N, DV]).slice(64 * W, 64).store(dv.to(v_s.dtype))
    for piece in gl.static_range(3):
        k_s.index(piece).reshape([N, PIECE]).slice(64 * W, 64).store(
            (dk[piece] * scale).to(k_s.dtype)
        )
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(bars.index(OUT_FULL))
    mbarrier.arrive(bars.index(OUT_FULL + 1))
