"""The two warpgroups of the Hopper backward that do the matmuls, each on half of the keys of a KV tile.

Each is a partition of its own, so that one can be in its exponentials while the other keeps the tensor cores busy; they
meet once a step, where dQ needs dS of both.
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
    CAUSAL_MASK,
    CONSUMERS,
    CONSUMERS_AND_WARP,
    COUNT,
    KV_EMPTY,
    KV_FULL,
    LIMIT,
    MASK_BEGIN,
    MASK_END,
    MEETING,
    NO_DQ,
    NO_MASK,
    OUT_EMPTY,
    OUT_FULL,
    Q_EMPTY,
    REACH,
    RING_FULL,
    STEP,
    STEPS,
    TAIL_MASK,
    TILE_EMPTY,
    TILE_FULL,
    WINDOW_MASK,
    ZERO,
    accumulator_layout,
    arrive,
    arrive_and_wait,
    flatten_half,
    half_cols,
    read_scalar,
    read_word,
)


@gluon.jit
def masked(
    st, words, stage, span,
    W: gl.constexpr, MASK: gl.constexpr, M: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores with -inf where a query must not see a key.

    Row and column numbers start from a zero in shared memory: as arithmetic on the thread index alone they would be
    hoisted out of every loop and spill.
    """
    zero = read_scalar(words, ZERO)
    # How many keys of the KV tile the Q tile's first row sees (may be negative), or all its rows see.
    reach = read_scalar(words, REACH + stage)
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)) + (zero + 64 * W)
    key = row - reach
    if MASK == TAIL_MASK:
        return gl.where(key[:, None] < 0, st, float("-inf"))
    query = gl.arange(0, M, gl.SliceLayout(0, LAYOUT)) + zero
    if MASK == CAUSAL_MASK:
        return gl.where(query[None, :] > key[:, None], st, float("-inf"))
    # Keys past the end are put out of every window's reach. Unsigned, one comparison holds both edges.
    key = gl.where(row < read_scalar(words, LIMIT + stage), key + 1, 1 << 30)
    ahead = (query[None, :] - key[:, None]).to(gl.uint32)
    return gl.where(ahead < span.to(gl.uint32), st, float("-inf"))


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
    STAGES: gl.constexpr, DQ_STAGES: gl.constexpr, POLICY: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """One Q tile. ``LATE`` hands dQ to a writer in the next step, where the matmul of S hides the wait for its stores."""
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
    st = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if LATE:
        if step != first:
            hand_over(step - 1, DQ_STAGES)
    # LSE of 128 rows and delta are loaded after the waits for their products: earlier they stay live across them and spill.
    if M == 64:
        lse = lse_s.index(stage).load(gl.SliceLayout(0, S_LAYOUT))
    mbarrier.wait(do_full.index(stage), phase)
    dpt = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    st = warpgroup_mma_wait(1, deps=[st])
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)), exact enough for gradients where tanh.approx is not; scale_log2 holds 2 / cap.
        capped = 1.0 - 2.0 / (1.0 + gl.exp2(st * scale_log2))
        slope = 1.0 - capped * capped
        st = capped
    if MASK != NO_MASK:
        st = masked(st, words, stage, span, W, MASK, M, S_LAYOUT)
    if M == 128:
        lse = lse_s.index(stage).load(gl.SliceLayout(0, S_LAYOUT))
    p = gl.exp2(st * (cap_log2 if SOFTCAP else scale_log2) - lse[None, :])
    p16 = gl.convert_layout(p.to(DTYPE), A_LAYOUT)
    if SOFTCAP:
        p *= slope
    dpt = warpgroup_mma_wait(0, deps=[dpt])
    delta = delta_s.index(stage).load(gl.SliceLayout(0, S_LAYOUT))
    ds = (p * (dpt - delta[None, :])).to(DTYPE)
    ds16 = gl.convert_layout(ds, A_LAYOUT)
    if POLICY == NO_DQ:
        dv = warpgroup_mma(p16, do, dv, is_async=True)
        dk = warpgroup_mma(ds16, q, dk, is_async=True)
        dk, dv, p16, ds16 = warpgroup_mma_wait(0, deps=[dk, dv, p16, ds16])
    else:
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
def stage_out(
    value, use, desc, dq_s, bars, ring_empty, which: gl.constexpr,
    W: gl.constexpr, N: gl.constexpr, D: gl.constexpr, DQ_STAGES: gl.constexpr, POLICY: gl.constexpr,
):  # fmt: skip
    """Hand half of dK or dV to its writer in the dQ stage that use number ``use`` of the ring would take."""
    stage = use % DQ_STAGES
    if POLICY != NO_DQ:
        mbarrier.wait(ring_empty.index(stage), ((use // DQ_STAGES) & 1) ^ 1)
    out = reinterpret(dq_s.index(stage), desc.dtype, desc.block_type.shape, desc.layout)
    out.reshape([N, D]).slice(64 * W, 64).store(value.to(desc.dtype))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(bars.index(OUT_FULL + which))


@gluon.jit
def consumer(
    dk_desc, dv_desc, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, bars, q_full, do_full, ring_empty,
    scale_log2, cap_log2, scale, span, group,
    W: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr, GROUPED: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, DQ_STAGES: gl.constexpr, POLICY: gl.constexpr,
):  # fmt: skip
    KV_LAYOUT: gl.constexpr = accumulator_layout(D)
    # With a window both ends of a visit need a mask and the middle does not; without one it is the other way round.
    ENDS: gl.constexpr = MASK if MASK == WINDOW_MASK else NO_MASK
    MIDDLE: gl.constexpr = NO_MASK if MASK == WINDOW_MASK else MASK
    # Without masks at head_dim 128 the matmul of dK hides that wait well enough.
    LATE: gl.constexpr = POLICY != NO_DQ and (D == 64 or MASK != NO_MASK)
    tile = 0
    mbarrier.wait(bars.index(TILE_FULL), 0)
    while read_word(words, tile, STEPS) >= 0:
        dk = gl.zeros((64, D), gl.float32, KV_LAYOUT)
        dv = gl.zeros((64, D), gl.float32, KV_LAYOUT)
        mbarrier.wait(bars.index(KV_FULL), tile & 1)
        mbarrier.wait(bars.index(OUT_EMPTY), (tile & 1) ^ 1)
        first = read_word(words, tile, STEP)
        if MASK == NO_MASK:
            for step in range(first, first + read_word(words, tile, STEPS)):
                dk, dv = one_step(
                    dk, dv, step, first, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, q_full, do_full, ring_empty,
                    scale_log2, cap_log2, span, W, NO_MASK, SOFTCAP, M, N, D, STAGES, DQ_STAGES, POLICY, LATE,
                )  # fmt: skip
        else:
            # The bounds of the three loops are read where they are needed, which costs less than registers across a loop.
            for head in range(group if GROUPED else 1):
                # Not carried from head to head: Triton 3.6 and 3.7 drop what is carried and only bounds inner loops.
                begin = first + head * read_word(words, tile, COUNT) if GROUPED else first
                for step in range(begin, begin + read_word(words, tile, MASK_BEGIN)):
                    dk, dv = one_step(
                        dk, dv, step, first, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, q_full, do_full,
                        ring_empty, scale_log2, cap_log2, span, W, ENDS, SOFTCAP, M, N, D, STAGES, DQ_STAGES, POLICY, LATE,
                    )  # fmt: skip
                for step in range(
                    begin + read_word(words, tile, MASK_BEGIN),
                    begin + read_word(words, tile, MASK_END),
                ):
                    dk, dv = one_step(
                        dk, dv, step, first, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, q_full, do_full,
                        ring_empty, scale_log2, cap_log2, span, W, MIDDLE, SOFTCAP, M, N, D, STAGES, DQ_STAGES, POLICY, LATE,
                    )  # fmt: skip
                for step in range(
                    begin + read_word(words, tile, MASK_END), begin + read_word(words, tile, COUNT)
                ):
                    dk, dv = one_step(
                        dk, dv, step, first, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, q_full, do_full,
                        ring_empty, scale_log2, cap_log2, span, W, ENDS, SOFTCAP, M, N, D, STAGES, DQ_STAGES, POLICY, LATE,
                    )  # fmt: skip
        end = read_word(words, tile, STEP) + read_word(words, tile, STEPS)
        if LATE:
            if end != first:
                hand_over(end - 1, DQ_STAGES)
        thread_barrier()
        mbarrier.arrive(bars.index(KV_EMPTY))
        mbarrier.arrive(bars.index(TILE_EMPTY + (tile & 1)))
        stage_out(dv, end, dv_desc, dq_s, bars, ring_empty, 0, W, N, D, DQ_STAGES, POLICY)
        stage_out(
            dk * scale, end + 1, dk_desc, dq_s, bars, ring_empty, 1, W, N, D, DQ_STAGES, POLICY
        )
        tile += 1
        mbarrier.wait(bars.index(TILE_FULL + (tile & 1)), (tile >> 1) & 1)
