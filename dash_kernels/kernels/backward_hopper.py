"""The backward main kernel for Hopper: one persistent CTA per SM, driven by schedule arrays.

Warp roles (one file each: hopper_compute, hopper_copy). Two warpgroups hold dK and dV of one KV tile in registers and
run the five matmuls; one producer warp draws tickets, decodes them and keeps the copy engine busy; two writer warps add
dQ tiles to global memory in their turn, every second step each; one warp carries dK and dV out. A KV tile passes through
the roles as a small record in shared memory, so a CTA can be at the next tile while a writer still waits for the turns of
the last one.

Per step (one Q tile; hopper_step up to head_dim 128): S^T = K Q^T and dP^T = V dO^T, P = exp2(S * scale - LSE),
dS = P * (dP - delta), then dV += P^T dO, dQ = dS K (through shared memory, both warpgroups' halves), dK += dS^T Q. dQ
leaves in a flat permuted fp32 layout in which its store to shared memory has no bank conflicts; the cast pass undoes it.
dK and dV leave from buffers of dS and, at 128, a stage of dQ, so the epilogue needs none of its own.

Above head_dim 128 registers are too few for that, and hopper_wide (256 columns) and hopper_uneven (192, of V 128) cut
the step otherwise. dQ then takes turns by parts, one for each writer, which adds its part in every step.

Grouped query heads: a KV tile walks its visit once for each query head of its group, in order, and dK and dV stay in
registers; or several CTAs share the group, and shares.add_shares adds up. Packed sequences: ``arrays`` and ``counts``
are those of a SequencePlan and turns are worked out in closed form.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dash_kernels.kernels.hopper_compute import consumer
from dash_kernels.kernels.hopper_copy import carrier, producer, writer
from dash_kernels.kernels.hopper_shared import (
    DONE,
    KV_EMPTY,
    NUM_BARRIERS,
    NUM_WORDS,
    OUT_EMPTY,
    OUT_FULL,
    TILE_EMPTY,
    TILE_FULL,
    ZERO,
    dq_boxes,
    is_uneven,
    is_wide,
    pieces,
    several,
    write_scalar,
)


@gluon.jit(
    do_not_specialize=[
        "num_items", "num_tiles", "num_steps", "num_heads", "heads_kv", "splits", "group", "interleave", "num_m", "left", "right",
        "seq_len", "seq_len_kv", "bound_us",
    ]
)  # fmt: skip
def backward_hopper(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc, workspace, arrays, counts, record,
    num_items, num_tiles, num_steps, num_heads, heads_kv, splits, group, interleave, num_m, left, right, seq_len, seq_len_kv,
    bound_us, scale_log2, cap_log2, scale,
    MASK: gl.constexpr, SOFTCAP: gl.constexpr, GROUPED: gl.constexpr, PACKED: gl.constexpr, DESCENDING: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, DQ_STAGES: gl.constexpr,
    POLICY: gl.constexpr, ORDER_OF_START: gl.constexpr,
):  # fmt: skip
    """``num_heads`` counts (batch, KV head) pairs; of ``splits`` neighbours among the ``heads_kv`` KV heads, which have
    ``group`` query heads each, K and V are the same and dK and dV are not. ``left`` and ``right`` the keys on each side of a query's position.

    Without softcap ``scale_log2`` turns scores into base 2; with one it holds 2 log2(e) scale / cap, and ``cap_log2``
    cap log2(e).
    """
    DTYPE: gl.constexpr = q_desc.dtype
    KV_TILE: gl.constexpr = k_desc.block_type.shape
    V_TILE: gl.constexpr = v_desc.block_type.shape
    Q_TILE: gl.constexpr = q_desc.block_type.shape
    DO_TILE: gl.constexpr = do_desc.block_type.shape
    DQ_TILE: gl.constexpr = dq_desc.block_type.shape
    DS_TILE: gl.constexpr = [M, N] if is_uneven(D) else [N, M]
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(DS_TILE, DTYPE)
    WORD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_s = gl.allocate_shared_memory(DTYPE, several(pieces(D), KV_TILE), k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, several(1, V_TILE), v_desc.layout)
    q_s = gl.allocate_shared_memory(DTYPE, several(STAGES * pieces(D), Q_TILE), q_desc.layout)
    do_s = gl.allocate_shared_memory(DTYPE, several(STAGES, DO_TILE), do_desc.layout)
    dq_s = gl.allocate_shared_memory(
        gl.float32, several(dq_boxes(D) if D > 128 else DQ_STAGES, DQ_TILE), dq_desc.layout
    )
    ds_s = gl.allocate_shared_memory(DTYPE, several(1 if is_uneven(D) else 2, DS_TILE), DS_LAYOUT)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, M], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, M], delta_desc.layout)
    words = gl.allocate_shared_memory(gl.int32, [NUM_WORDS, 1], WORD)
    write_scalar(words, ZERO, 0)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    bars = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ring_empty = gl.allocate_shared_memory(gl.int64, [DQ_STAGES, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(bars.index(TILE_FULL + i), count=1)
        mbarrier.init(
            bars.index(TILE_EMPTY + i), count=5
        )  # two warpgroups, two writers, the carrier
        mbarrier.init(bars.index(OUT_FULL + i), count=1 if is_wide(D) else 2)
    mbarrier.init(bars.index(KV_EMPTY), count=1 if is_uneven(D) else 2)
    mbarrier.init(bars.index(OUT_EMPTY), count=1)
    mbarrier.init(bars.index(DONE), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
    for i in gl.static_range(DQ_STAGES):
        mbarrier.init(ring_empty.index(i), count=1)
    fence_async_shared()
    span = left + right + 1
    gl.warp_specialize(
        [
            (consumer, (
                dk_desc, dv_desc, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, bars, q_full, do_full,
                ring_empty, scale_log2, cap_log2, scale, span, group, 0, MASK, SOFTCAP, GROUPED, M, N, D, DV,
                STAGES, DQ_STAGES)),
            (consumer, (
                dk_desc, dv_desc, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, bars, q_full, do_full,
                ring_empty, scale_log2, cap_log2, scale, span, group, 1, MASK, SOFTCAP, GROUPED, M, N, D, DV,
                STAGES, DQ_STAGES)),
            (producer, (
                q_desc, do_desc, lse_desc, delta_desc, k_desc, v_desc, k_s, v_s, q_s, do_s, lse_s, delta_s, words, bars,
                q_full, do_full, workspace, arrays, counts, num_items, num_tiles, num_heads, heads_kv, splits, group, interleave,
                num_m, left, right, seq_len, seq_len_kv, MASK, GROUPED, PACKED, DESCENDING, M, N, D, DV, STAGES)),
            (writer, (
                dq_desc, dq_s, words, bars, ring_empty, workspace, record, bound_us, arrays, num_steps,
                num_m, 0, GROUPED, PACKED, DESCENDING, M, N, D, DV, DQ_STAGES, POLICY, ORDER_OF_START)),
            (writer, (
                dq_desc, dq_s, words, bars, ring_empty, workspace, record, bound_us, arrays, num_steps,
                num_m, 1, GROUPED, PACKED, DESCENDING, M, N, D, DV, DQ_STAGES, POLICY, ORDER_OF_START)),
            (carrier, (dk_desc, dv_desc, k_s, v_s, ds_s, dq_s, words, bars, PACKED, D, DV, DQ_STAGES)),
        ],
        [4, 1, 1, 1, 1],
        [232, 40, 40, 40, 40],
    )  # fmt: skip
