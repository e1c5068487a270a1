"""One step of a warpgroup of the Hopper backward up to head_dim 128: it holds dK and dV of half of a KV tile's keys."""

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
    CAUSAL_MASK,
    CONSUMERS,
    CONSUMERS_AND_WARP,
    LIMIT,
    MEETING,
    NO_MASK,
    OUT_FULL,
    Q_EMPTY,
    REACH,
    RING_FULL,
    TAIL_MASK,
    ZERO,
    accumulator_layout,
    arrive,
    arrive_and_wait,
    flatten_half,
    half_cols,
    load_rows_of,
    read_scalar,
)
from dash_kernels.kernels.spread_exp2 import spread_exp2


@gluon.jit
def masked(
    st, words, stage, span,
    KEY: gl.constexpr, QUERY: gl.constexpr, MASK: gl.constexpr, COLS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of 64 keys from KEY and COLS queries from QUERY, with -inf where a query must not see a key.

    Row and column numbers start from a zero in shared memory: as arithmetic on the thread index alone they would be
    hoisted out of every loop and spill.
    """
    zero = read_scalar(words, ZERO)
    # How many keys of the KV tile the Q tile's first row sees (may be negative), or all its rows see.
    reach = read_scalar(words, REACH + stage)
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)) + (zero + KEY)
    key = row - reach
    if MASK == TAIL_MASK:
        return gl.where(key[:, None] < 0, st, float("-inf"))
    query = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT)) + (zero + QUERY)
    if MASK == CAUSAL_MASK:
        return gl.where(query[None, :] > key[:, None], st, float("-inf"))
    # Keys past the end are put out of every window's reach. Unsigned, one comparison holds both edges.
    key = gl.where(row < read_scalar(words, LIMIT + stage), key + 1, 1 << 30)
    ahead = (query[None, :] - key[:, None]).to(gl.uint32)
    return gl.where(ahead < span.to(gl.uint32), st, float("-inf"))


@gluon.jit
def softcapped(st, scale_log2):
    """tanh of the scores, and its derivative; ``scale_log2`` holds 2 / cap."""
    # 1 - 2 / (1 + exp(2 x)) is exact enough for gradients where tanh.approx is not.
    capped = 1.0 - 2.0 / (1.0 + gl.exp2(st * scale_log2))
    return capped, 1.0 - capped * capped


@gluon.jit
def hand_over(step, DQ_STAGES: gl.constexpr):
    """Give this warpgroup's half of a step's dQ to its writer."""
    fence_async_shared()
    arrive(RING_FULL + step % DQ_STAGES, CONSUMERS_AND_WARP)


@gluon.jit
def one_step(
    dk, dv, step, first, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, q_full, do_full, ring_empty,
    scale_log2, cap_log2, span,
    W: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, DQ_STAGES: gl.constexpr, LATE: gl.constexpr, SPREAD: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    """One Q tile. ``LATE`` hands dQ to a writer in the next step, where the matmul of S hides the fence after its stores."""
    COLS: gl.constexpr = half_cols(M, D)
    S_LAYOUT: gl.constexpr = accumulator_layout(M)
    DQ_LAYOUT: gl.constexpr = accumulator_layout(COLS)
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(D), 2)
    DTYPE: gl.constexpr = ds_s.dtype
    stage = step % STAGES
    phase = (step // STAGES) & 1
    q = q_s.index(stage).reshape([M, D])
    do = do_s.index(stage).reshape([M, D])
    # Always 0, which the compiler cannot know: it would hoist the descriptors of K and V out of the loop and spill them.
    only = step >> 30
    k_tile = k_s.index(only).reshape([N, D])
    k = k_tile.slice(64 * W, 64)
    v = v_s.index(only).reshape([N, D]).slice(64 * W, 64)
    zeros = gl.zeros((64, M), gl.float32, S_LAYOUT)
    mbarrier.wait(q_full.index(stage), phase)
    # The compiler wants one between dQ's reads of dS and the next store of dS. Here the warps meet for the matmul anyway: 1 to
    # 2 % on masks at head_dim 128; elsewhere it is as fast, or slower, than where the compiler puts it.
    if M == 64 and not SPREAD:
        thread_barrier()
    st = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if LATE:
        if step != first:
            hand_over(step - 1, DQ_STAGES)
    # LSE of 128 rows and delta are loaded after the waits for their products: earlier they stay live across them and spill.
    if M == 64:
        lse = load_rows_of(lse_s.index(stage), M, FOLDED)
    mbarrier.wait(do_full.index(stage), phase)
    dpt = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    st = warpgroup_mma_wait(1, deps=[st])
    if SOFTCAP:
        st, slope = softcapped(st, scale_log2)
    if MASK != NO_MASK:
        st = masked(st, words, stage, span, 64 * W, 0, MASK, M, S_LAYOUT)
    if M == 128:
        lse = load_rows_of(lse_s.index(stage), M, FOLDED)
    exponents = st * (cap_log2 if SOFTCAP else scale_log2) - lse[None, :]
    p = spread_exp2(exponents) if SPREAD else gl.exp2(exponents)
    p16 = gl.convert_layout(p.to(DTYPE), A_LAYOUT)
    if SOFTCAP:
        p *= slope
    dpt = warpgroup_mma_wait(0, deps=[dpt])
    delta = load_rows_of(delta_s.index(stage), M, FOLDED)
    ds = (p * (dpt - delta[None, :])).to(DTYPE)
    ds16 = gl.convert_layout(ds, A_LAYOUT)
    # Of two slots: that the other warpgroup came to the last meeting says that it has read the one before.
    ds_tile = ds_s.index(step & 1)
    ds_tile.slice(64 * W, 64).store(ds)
    dv = warpgroup_mma(p16, do, dv, is_async=True)
    fence_async_shared()
    arrive_and_wait(MEETING, CONSUMERS)
    if M == 64:
        a = ds_tile.permute((1, 0))
        b = k_tile.slice(COLS * W, COLS, dim=1)
    else:
        a = ds_tile.slice(64 * W, 64, dim=1).permute((1, 0))
        b = k_tile
    zeros_dq = gl.zeros((64, COLS), gl.float32, DQ_LAYOUT)
    dq = warpgroup_mma(a, b, zeros_dq, use_acc=False, is_async=True)
    dv, p16 = warpgroup_mma_wait(1, deps=[dv, p16])
    dk = warpgroup_mma(ds16, q, dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    ring = step % DQ_STAGES
    mbarrier.wait(ring_empty.index(ring), ((step // DQ_STAGES) & 1) ^ 1)
    ROWS: gl.constexpr = M * D // 512
    dq_s.index(ring).slice(W * ROWS, ROWS).store(flatten_half(dq, COLS))
    if not LATE:
        hand_over(step, DQ_STAGES)
    dk, ds16 = warpgroup_mma_wait(0, deps=[dk, ds16])
    arrive(Q_EMPTY + stage, CONSUMERS_AND_WARP)
    return dk, dv


@gluon.jit
def dk_place(ds_s, desc, D: gl.constexpr):
    """Where a tile's dK leaves from: both dS buffers, or at head_dim 64 the second."""
    place = ds_s.index(1) if D == 64 else ds_s
    return reinterpret(place, desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def dv_place(ds_s, dq_s, end, desc, D: gl.constexpr, DQ_STAGES: gl.constexpr):
    """Where a tile's dV leaves from: the first dS buffer, or above head_dim 64 the stage that dQ of step ``end`` would take."""
    place = ds_s.index(0) if D == 64 else dq_s.index(end % DQ_STAGES)
    return reinterpret(place, desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def stage_out(
    dk, dv, end, dk_desc, dv_desc, ds_s, dq_s, bars, ring_empty,
    W: gl.constexpr, N: gl.constexpr, D: gl.constexpr, DQ_STAGES: gl.constexpr,
):  # fmt: skip
    """Hand this warpgroup's keys of dK and dV to the carrier."""
    arrive_and_wait(MEETING, CONSUMERS)  # the other warpgroup has read dS for its last dQ
    dk_tile = dk_place(ds_s, dk_desc, D).reshape([N, D])
    dk_tile.slice(64 * W, 64).store(dk.to(dk_desc.dtype))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(bars.index(OUT_FULL))
    if D != 64:
        mbarrier.wait(ring_empty.index(end % DQ_STAGES), ((end // DQ_STAGES) & 1) ^ 1)
    dv_tile = dv_place(ds_s, dq_s, end, dv_desc, D, DQ_STAGES).reshape([N, D])
    dv_tile.slice(64 * W, 64).store(dv.to(dv_desc.dtype))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(bars.index(OUT_FULL + 1))
