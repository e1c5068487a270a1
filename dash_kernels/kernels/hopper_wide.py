"""One step of a warpgroup of the Hopper backward above head_dim 128: it holds half of the columns of dK and of dV.

The registers hold dK and dV of 64 keys only, and a matmul has at least 64 rows: half of the keys each will not do. So
a warpgroup works out S and dP of all 64 keys for half of the queries, hands its P and dS to the other through shared
memory, and adds to its columns of dV, dK and dQ from both halves.
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

from dash_kernels.kernels.compat import reinterpret, thread_barrier
from dash_kernels.kernels.hopper_shared import (
    CONSUMER_AND_WARP,
    CONSUMERS,
    CONSUMERS_AND_WARP,
    EXCHANGE_READ,
    MEETING,
    NO_MASK,
    OUT_FULL,
    Q_EMPTY,
    RING_FULL,
    accumulator_layout,
    arrive,
    arrive_and_wait,
    flatten_half,
    several,
)
from dash_kernels.kernels.hopper_step import masked, softcapped


@gluon.jit
def wide_step(
    dk, dv, step, k_s, v_s, q_s, do_s, lse_s, delta_s, words, exchange, dq_s, q_full, do_full, ring_empty,
    scale_log2, cap_log2, span,
    W: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One Q tile: ``exchange`` holds P and dS of the tile, queries by keys."""
    QUERIES: gl.constexpr = M // 2
    COLS: gl.constexpr = D // 2
    COLS_V: gl.constexpr = DV // 2
    S_LAYOUT: gl.constexpr = accumulator_layout(QUERIES)
    DQ_LAYOUT: gl.constexpr = accumulator_layout(COLS)
    DTYPE: gl.constexpr = exchange.dtype
    # Always 0, which the compiler cannot know: it would hoist the descriptors of what does not move out of the loop and
    # spill them.
    only = step >> 30
    stage = step % STAGES + only
    phase = (step // STAGES) & 1
    q = q_s.index(stage).reshape([M, D])
    do = do_s.index(stage).reshape([M, DV])
    k = k_s.index(only).reshape([N, D])
    v = v_s.index(only).reshape([N, DV])
    zeros = gl.zeros((N, QUERIES), gl.float32, S_LAYOUT)
    # P and dS of the step before have been read by both warpgroups' matmuls once each has come to a step after it.
    arrive(EXCHANGE_READ + W, CONSUMERS)
    mbarrier.wait(q_full.index(stage), phase)
    mine = q.slice(QUERIES * W, QUERIES)
    st = warpgroup_mma(k, mine.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(stage), phase)
    mine = do.slice(QUERIES * W, QUERIES)
    dpt = warpgroup_mma(v, mine.permute((1, 0)), zeros, use_acc=False, is_async=True)
    st = warpgroup_mma_wait(1, deps=[st])
    if SOFTCAP:
        st, slope = softcapped(st, scale_log2)
    if MASK != NO_MASK:
        st = masked(st, words, stage, span, 0, QUERIES * W, MASK, QUERIES, S_LAYOUT)
    lse = lse_s.index(stage).slice(QUERIES * W, QUERIES).load(gl.SliceLayout(0, S_LAYOUT))
    p = gl.exp2(st * (cap_log2 if SOFTCAP else scale_log2) - lse[None, :])
    p_tile = exchange.index(only)
    ds_tile = exchange.index(only + 1)
    arrive_and_wait(EXCHANGE_READ + (1 - W), CONSUMERS)
    p_tile.slice(QUERIES * W, QUERIES).permute((1, 0)).store(p.to(DTYPE))
    if SOFTCAP:
        p *= slope
    dpt = warpgroup_mma_wait(0, deps=[dpt])
    delta = delta_s.index(stage).slice(QUERIES * W, QUERIES).load(gl.SliceLayout(0, S_LAYOUT))
    ds = (p * (dpt - delta[None, :])).to(DTYPE)
    ds_tile.slice(QUERIES * W, QUERIES).permute((1, 0)).store(ds)
    fence_async_shared()
    arrive_and_wait(MEETING, CONSUMERS)
    dv = warpgroup_mma(
        p_tile.permute((1, 0)), do.slice(COLS_V * W, COLS_V, dim=1), dv, is_async=True
    )
    dk = warpgroup_mma(ds_tile.permute((1, 0)), q.slice(COLS * W, COLS, dim=1), dk, is_async=True)
    zeros_dq = gl.zeros((M, COLS), gl.float32, DQ_LAYOUT)
    dq = warpgroup_mma(
        ds_tile, k.slice(COLS * W, COLS, dim=1), zeros_dq, use_acc=False, is_async=True
    )
    dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
    arrive(Q_EMPTY + stage, CONSUMERS_AND_WARP)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.wait(ring_empty.index(W), (step & 1) ^ 1)
    dq_s.index(W).store(flatten_half(dq, COLS))
    fence_async_shared()
    arrive(RING_FULL + W, CONSUMER_AND_WARP)
    return dk, dv


@gluon.jit
def dk_half(half, desc):
    """Where a warpgroup's columns of dK leave from: the second part of its half of dQ, which is twice their size."""
    return reinterpret(half, desc.dtype, several(2, desc.block_type.shape), desc.layout).index(1)


@gluon.jit
def wide_out(
    dk, dv, end, dk_desc, dv_desc, dq_s, bars, ring_empty,
    W: gl.constexpr, N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Hand this warpgroup's columns of dK and dV to the carrier, in its half of dQ."""
    mbarrier.wait(ring_empty.index(W), (end & 1) ^ 1)
    half = dq_s.index(W)
    dv_tile = reinterpret(half, dv_desc.dtype, dv_desc.block_type.shape, dv_desc.layout)
    dv_tile.reshape([N, DV // 2]).store(dv.to(dv_desc.dtype))
    dk_half(half, dk_desc).reshape([N, D // 2]).store(dk.to(dk_desc.dtype))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(bars.index(OUT_FULL + W))
