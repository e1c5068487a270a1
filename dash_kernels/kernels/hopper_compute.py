"""The two warpgroups of the Hopper backward that do the matmuls.

Each is a partition of its own, so that one can be in its exponentials while the other keeps the tensor cores busy; they
meet once a step, where dQ needs dS of both. hopper_step and hopper_wide say what a step is.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dash_kernels.kernels.compat import thread_barrier
from dash_kernels.kernels.hopper_shared import (
    COUNT,
    KV_EMPTY,
    MASK_BEGIN,
    MASK_END,
    NO_MASK,
    OUT_EMPTY,
    PIECE,
    STEP,
    STEPS,
    TILE_EMPTY,
    TILE_FULL,
    WINDOW_MASK,
    accumulator_layout,
    is_folded,
    is_uneven,
    is_wide,
    read_word,
)
from dash_kernels.kernels.hopper_step import hand_over, one_step, stage_out
from dash_kernels.kernels.hopper_uneven import uneven_out, uneven_step
from dash_kernels.kernels.hopper_wide import wide_out, wide_step


@gluon.jit
def any_step(
    dk, dv, step, first, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, q_full, do_full, ring_empty,
    scale_log2, cap_log2, span,
    W: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, STAGES: gl.constexpr, DQ_STAGES: gl.constexpr, LATE: gl.constexpr,
    SPREAD: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    if is_wide(D):
        dk, dv = wide_step(
            dk, dv, step, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, q_full, do_full, ring_empty,
            scale_log2, cap_log2, span, W, MASK, SOFTCAP, M, N, D, DV, STAGES,
        )  # fmt: skip
    elif is_uneven(D):
        dk, dv = uneven_step(
            dk, dv, step, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, q_full, do_full, ring_empty,
            scale_log2, cap_log2, span, W, MASK, SOFTCAP, M, N, DV, STAGES,
        )  # fmt: skip
    else:
        dk, dv = one_step(
            dk, dv, step, first, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, q_full, do_full, ring_empty,
            scale_log2, cap_log2, span, W, MASK, SOFTCAP, M, N, D, STAGES, DQ_STAGES, LATE, SPREAD, FOLDED,
        )  # fmt: skip
    return dk, dv


@gluon.jit
def consumer(
    dk_desc, dv_desc, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, bars, q_full, do_full, ring_empty,
    scale_log2, cap_log2, scale, span, group,
    W: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr, GROUPED: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, DQ_STAGES: gl.constexpr,
):  # fmt: skip
    DK_COLS: gl.constexpr = D // 2 if is_wide(D) else PIECE if is_uneven(D) else D
    DV_COLS: gl.constexpr = DV // 2 if is_wide(D) else DV
    # With a window both ends of a visit need a mask and the middle does not; without one it is the other way round.
    ENDS: gl.constexpr = MASK if MASK == WINDOW_MASK else NO_MASK
    MIDDLE: gl.constexpr = NO_MASK if MASK == WINDOW_MASK else MASK
    # Masked kernels lose by it: 2 % at head_dim 64, nothing gained at 128.
    SPREAD: gl.constexpr = MASK == NO_MASK
    FOLDED: gl.constexpr = is_folded(D, MASK, SOFTCAP)
    # Without masks at head_dim 128 the matmul of dK hides that fence well enough.
    LATE: gl.constexpr = (D == 64 or MASK != NO_MASK) and D <= 128
    tile = 0
    mbarrier.wait(bars.index(TILE_FULL), 0)
    while read_word(words, tile, STEPS) >= 0:
        dk = gl.zeros((64, DK_COLS), gl.float32, accumulator_layout(DK_COLS))
        if is_uneven(D):
            dk = dk, dk, dk
        dv = gl.zeros((64, DV_COLS), gl.float32, accumulator_layout(DV_COLS))
        mbarrier.wait(bars.index(OUT_EMPTY), (tile & 1) ^ 1)
        first = read_word(words, tile, STEP)
        if MASK == NO_MASK:
            for step in range(first, first + read_word(words, tile, STEPS)):
                dk, dv = any_step(
                    dk, dv, step, first, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, q_full, do_full, ring_empty,
                    scale_log2, cap_log2, span, W, NO_MASK, SOFTCAP, M, N, D, DV, STAGES, DQ_STAGES, LATE, SPREAD, FOLDED,
                )  # fmt: skip
        else:
            # The bounds of the three loops are read where they are needed, which costs less than registers across a loop.
            for head in range(group if GROUPED else 1):
                # Not carried from head to head: Triton 3.6 and 3.7 drop what is carried and only bounds inner loops.
                begin = first + head * read_word(words, tile, COUNT) if GROUPED else first
                for step in range(begin, begin + read_word(words, tile, MASK_BEGIN)):
                    dk, dv = any_step(
                        dk, dv, step, first, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, q_full, do_full,
                        ring_empty, scale_log2, cap_log2, span, W, ENDS, SOFTCAP, M, N, D, DV, STAGES, DQ_STAGES, LATE, SPREAD, FOLDED,
                    )  # fmt: skip
                for step in range(
                    begin + read_word(words, tile, MASK_BEGIN),
                    begin + read_word(words, tile, MASK_END),
                ):
                    dk, dv = any_step(
                        dk, dv, step, first, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, q_full, do_full,
                        ring_empty, scale_log2, cap_log2, span, W, MIDDLE, SOFTCAP, M, N, D, DV, STAGES, DQ_STAGES, LATE, SPREAD, FOLDED,
                    )  # fmt: skip
                for step in range(
                    begin + read_word(words, tile, MASK_END), begin + read_word(words, tile, COUNT)
                ):
                    dk, dv = any_step(
                        dk, dv, step, first, k_s, v_s, q_s, do_s, lse_s, delta_s, words, ds_s, dq_s, q_full, do_full,
                        ring_empty, scale_log2, cap_log2, span, W, ENDS, SOFTCAP, M, N, D, DV, STAGES, DQ_STAGES, LATE, SPREAD, FOLDED,
                    )  # fmt: skip
        end = read_word(words, tile, STEP) + read_word(words, tile, STEPS)
        thread_barrier()
        if not is_uneven(D):
            mbarrier.arrive(bars.index(KV_EMPTY))
        if LATE:
            if end != first:
                hand_over(end - 1, DQ_STAGES)
        mbarrier.arrive(bars.index(TILE_EMPTY + (tile & 1)))
        if is_wide(D):
            wide_out(dk * scale, dv, end, dk_desc, dv_desc, dq_s, bars, ring_empty, W, N, D, DV)
        elif is_uneven(D):
            uneven_out(dk, dv, scale, k_s, v_s, bars, W, N, DV)
        else:
            stage_out(
                dk * scale, dv, end, dk_desc, dv_desc, ds_s, dq_s, bars, ring_empty, W, N, D, DQ_STAGES
            )  # fmt: skip
        tile += 1
        mbarrier.wait(bars.index(TILE_FULL + (tile & 1)), (tile >> 1) & 1)
