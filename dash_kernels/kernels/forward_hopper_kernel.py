"""The forward kernel for Hopper: persistent CTAs of consumer warpgroups that each own 64 query rows, fed by one warp.

The producer warp draws Q tiles from a counter and keeps the copy engine busy. A consumer's step on KV tile j issues
S = Q K^T of tile j+1 and O += P V of tile j back to back; its softmax of tile j+1 runs beside the latter and beside the
other consumers' matmuls, from which no barrier holds it.

KV tiles are walked from the last that the Q tile sees down to the first, so that tiles that need a mask come first (and
last, with a window). Q tiles with the longest walk start first, in sections of heads whose keys and values fit in L2
together. A row's bits depend on its own walk only: not on batch, heads, SMs, or the order of drawing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dash_kernels.kernels.forward_hopper_compute import consumer
from dash_kernels.kernels.forward_hopper_copy import (
    NUM_BARRIERS,
    Q_EMPTY,
    Q_FULL,
    RECORD_WORDS,
    TILE_EMPTY,
    TILE_FULL,
    producer,
)
from dash_kernels.kernels.hopper_shared import pieces, several


@gluon.jit(
    do_not_specialize=[
        "sequences", "num_tiles", "num_m", "total_heads", "heads", "group", "section", "left", "right", "seq_len",
        "seq_len_kv",
    ]
)  # fmt: skip
def forward_main(
    q_desc, k_desc, v_desc, out_desc, lse, counter, cu_seqlens_q, cu_seqlens_k, sequences,
    num_tiles, num_m, total_heads, heads, group, section, left, right, seq_len, seq_len_kv, scale_log2, cap_log2,
    MASK: gl.constexpr, SOFTCAP: gl.constexpr, PACKED: gl.constexpr, CONSUMERS: gl.constexpr, N: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``left`` and ``right`` are the keys on each side of a query's position.

    Without softcap ``scale_log2`` turns scores into base 2; with one it holds 2 log2(e) scale / cap, and ``cap_log2``
    cap log2(e).
    """
    DTYPE: gl.constexpr = q_desc.dtype
    Q_TILE: gl.constexpr = q_desc.block_type.shape
    KV_TILE: gl.constexpr = k_desc.block_type.shape
    V_TILE: gl.constexpr = v_desc.block_type.shape
    OUT_TILE: gl.constexpr = out_desc.block_type.shape
    q_s = gl.allocate_shared_memory(DTYPE, several(CONSUMERS * pieces(D), Q_TILE), q_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, several(STAGES * pieces(D), KV_TILE), k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, several(STAGES, V_TILE), v_desc.layout)
    # Above head_dim 128 the output leaves in place of Q.
    out_s = q_s
    if D <= 128:
        out_s = gl.allocate_shared_memory(DTYPE, several(CONSUMERS, OUT_TILE), out_desc.layout)
    words = gl.allocate_shared_memory(
        gl.int32, [2 * RECORD_WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    bars = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(bars.index(TILE_FULL + i), count=1)
        mbarrier.init(bars.index(TILE_EMPTY + i), count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(bars.index(Q_FULL + i), count=1)
        mbarrier.init(bars.index(Q_EMPTY + i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    span = left + right + 1
    # Each consumer is a partition of its own, so that no barrier of one stops another.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (
                    out_desc, lse, q_s, k_s, v_s, out_s, words, bars, k_full, v_full, scale_log2, cap_log2, span,
                    0, MASK, SOFTCAP, PACKED, CONSUMERS, N, D, DV, STAGES)),
                (consumer, (
                    out_desc, lse, q_s, k_s, v_s, out_s, words, bars, k_full, v_full, scale_log2, cap_log2, span,
                    1, MASK, SOFTCAP, PACKED, CONSUMERS, N, D, DV, STAGES)),
                (producer, (
                    q_desc, k_desc, v_desc, q_s, k_s, v_s, words, bars, k_full, v_full, counter, cu_seqlens_q,
                    cu_seqlens_k, sequences, num_tiles, num_m, total_heads, heads, group, section,
                    left, right, seq_len, seq_len_kv,
                    MASK, PACKED, CONSUMERS, N, D, DV, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (
                    out_desc, lse, q_s, k_s, v_s, out_s, words, bars, k_full, v_full, scale_log2, cap_log2, span,
                    0, MASK, SOFTCAP, PACKED, CONSUMERS, N, D, DV, STAGES)),
                (consumer, (
                    out_desc, lse, q_s, k_s, v_s, out_s, words, bars, k_full, v_full, scale_log2, cap_log2, span,
                    1, MASK, SOFTCAP, PACKED, CONSUMERS, N, D, DV, STAGES)),
                (consumer, (
                    out_desc, lse, q_s, k_s, v_s, out_s, words, bars, k_full, v_full, scale_log2, cap_log2, span,
                    2, MASK, SOFTCAP, PACKED, CONSUMERS, N, D, DV, STAGES)),
                (producer, (
                    q_desc, k_desc, v_desc, q_s, k_s, v_s, words, bars, k_full, v_full, counter, cu_seqlens_q,
                    cu_seqlens_k, sequences, num_tiles, num_m, total_heads, heads, group, section,
                    left, right, seq_len, seq_len_kv,
                    MASK, PACKED, CONSUMERS, N, D, DV, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip
