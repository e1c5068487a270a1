"""The warpgroups of the Hopper forward that do the matmuls, each on 64 query rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dash_kernels.kernels.compat import reinterpret, thread_barrier, tma_store_wait
from dash_kernels.kernels.forward_hopper_copy import (
    BAND,
    BATCH,
    COUNT,
    HEAD,
    K_EMPTY,
    LIMIT,
    LSE_ROW,
    MASKED,
    PLAIN_END,
    Q_EMPTY,
    Q_FULL,
    REACH,
    ROW,
    ROWS,
    TILE_EMPTY,
    TILE_FULL,
    V_EMPTY,
    read_word,
)
from dash_kernels.kernels.hopper_copy import store_rows
from dash_kernels.kernels.hopper_shared import CAUSAL_MASK, NO_MASK, WINDOW_MASK, arrive, pieces

# A row's maximum before it saw a key: finite, so that no difference of maxima is NaN.
LOWEST = gl.constexpr(-1e30)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def apply_mask(
    s, reach, limit, span,
    CONSUMER: gl.constexpr, MASK: gl.constexpr, FIRST: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """-inf where a key is not seen by its row. Only a walk's first tile can go past the last key."""
    S_LAYOUT: gl.constexpr = s.type.layout
    # A key as eight times a register's number plus a place in a quad of threads: the former is a constant in the code,
    # where column numbers as a tensor would be held in registers across the loops.
    s4 = s.reshape([BAND, N // 8, 4, 2])
    L4: gl.constexpr = s4.type.layout
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L4)))
    EIGHTS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L4)))
    QUAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L4)))
    PAIR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L4)))
    eights = gl.arange(0, N // 8, EIGHTS)[None, :, None, None] * 8
    place = (
        gl.arange(0, 4, QUAD)[None, None, :, None] * 2 + gl.arange(0, 2, PAIR)[None, None, None, :]
    )
    if (MASK == CAUSAL_MASK) | (MASK == WINDOW_MASK):
        reach = (gl.arange(0, BAND, ROW_LAYOUT) + (reach + CONSUMER * BAND))[:, None, None, None]
    begin = reach - span
    if (MASK == WINDOW_MASK) & FIRST:
        reach = gl.minimum(reach, limit)
    seen = eights < reach - place
    if MASK == WINDOW_MASK:
        seen = seen & (eights >= begin - place)
    s4 = gl.where(seen, s4, float("-inf"))
    return gl.convert_layout(s4.reshape([BAND, N]), S_LAYOUT, assert_trivial=True)


@gluon.jit
def capped(s, scale_log2):
    """tanh(x) = 1 - 2 / (1 + exp(2 x)), where tanh.approx is not exact enough; ``scale_log2`` holds 2 log2(e) / cap."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(s * scale_log2))


@gluon.jit
def partial_sums(p, N: gl.constexpr):
    """Sums of a row over the keys that one thread holds, (BAND, 4): a quad adds them up once a tile, not once a step."""
    return gl.sum(gl.sum(p.reshape([BAND, N // 8, 4, 2]), axis=3), axis=1)


@gluon.constexpr_function
def pack_asm(dtype):
    return f"cvt.rn.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def pack(p, DTYPE: gl.constexpr):
    """Two neighbouring columns in one 32-bit word: 16-bit values carried round a loop cost an instruction each."""
    even, odd = p.reshape([BAND, p.shape[1] // 2, 2]).split()
    ASM: gl.constexpr = pack_asm(DTYPE)
    return gl.inline_asm_elementwise(
        ASM, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(p2, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p2], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    p = gl.join(even, odd).to(DTYPE, bitcast=True).reshape([BAND, p2.shape[1] * 2])
    return gl.convert_layout(p, LAYOUT, assert_trivial=True)


@gluon.jit
def begin_scores(q_s, k_s, stage, CONSUMER: gl.constexpr, N: gl.constexpr, D: gl.constexpr):
    """Issue S = Q K^T of this consumer's band, whose columns lie in one tile or in several."""
    COLS: gl.constexpr = D // pieces(D)
    s = gl.zeros((BAND, N), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))
    for piece in gl.static_range(pieces(D)):
        q = q_s.index(CONSUMER * pieces(D) + piece).reshape([BAND, COLS])
        k = k_s.index(stage * pieces(D) + piece).reshape([N, COLS])
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=piece > 0, is_async=True)
    return s


@gluon.jit
def one_step(
    o, p2, shift, total, step, reach, span, q_s, k_s, v_s, k_full, v_full, scale_log2, cap_log2,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr, N: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """O += P V of one KV tile, and the next KV tile's P from its S."""
    O_LAYOUT: gl.constexpr = o.type.layout
    DTYPE: gl.constexpr = v_s.dtype
    stage = step % STAGES
    next_stage = (step + 1) % STAGES
    next_phase = ((step + 1) // STAGES) & 1
    v = v_s.index(stage).reshape([N, DV])
    p16 = unpack(p2, DTYPE, gl.DotOperandLayout(0, O_LAYOUT, 2))
    mbarrier.wait(k_full.index(next_stage), next_phase)
    s = begin_scores(q_s, k_s, next_stage, CONSUMER, N, D)
    o = warpgroup_mma(p16, v, o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    arrive(K_EMPTY + next_stage, CONSUMERS * 128 + 32)
    factor = scale_log2
    if SOFTCAP:
        s = capped(s, scale_log2)
        factor = cap_log2
    if MASK != NO_MASK:
        s = apply_mask(s, reach, 0, span, CONSUMER, MASK, False, N)
    new_shift = gl.maximum(shift, gl.max(s, axis=1) * factor)
    alpha = gl.exp2(shift - new_shift)
    p = gl.exp2(s * factor - new_shift[:, None])
    kept = gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout), assert_trivial=True)
    total = total * kept[:, None] + partial_sums(p, N)
    # The next step's V is awaited here, not there: the wait's loop keeps the compiler from moving the exponentials
    # below the wait for O, where no matmul of this warpgroup would run beside them.
    mbarrier.wait(v_full.index(next_stage), next_phase)
    o, p16, p = warpgroup_mma_wait(0, deps=[o, p16, p])
    arrive(V_EMPTY + stage, CONSUMERS * 128 + 32)
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)[:, None]
    return o, pack(p, DTYPE), new_shift, total


@gluon.jit
def consumer(
    out_desc, lse, q_s, k_s, v_s, out_s, words, bars, k_full, v_full, scale_log2, cap_log2, span,
    CONSUMER: gl.constexpr, MASK: gl.constexpr, SOFTCAP: gl.constexpr, PACKED: gl.constexpr, CONSUMERS: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One band of each of the CTA's Q tiles."""
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    DTYPE: gl.constexpr = v_s.dtype
    # Above head_dim 128 there is room for a band of Q or of the output, not for both.
    IN_Q: gl.constexpr = D > 128
    if IN_Q:
        band = reinterpret(
            q_s.index(CONSUMER * pieces(D)), DTYPE, out_desc.block_type.shape, out_desc.layout
        )
    else:
        band = out_s.index(CONSUMER)
    factor = cap_log2 if SOFTCAP else scale_log2
    step = 0
    tile = 0
    mbarrier.wait(bars.index(TILE_FULL), 0)
    count = read_word(words, tile, COUNT)
    while count >= 0:
        stage = step % STAGES
        mbarrier.wait(bars.index(Q_FULL + CONSUMER), tile & 1)
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        s = begin_scores(q_s, k_s, stage, CONSUMER, N, D)
        s = warpgroup_mma_wait(0, deps=[s])
        arrive(K_EMPTY + stage, CONSUMERS * 128 + 32)
        if SOFTCAP:
            s = capped(s, scale_log2)
        reach = 0
        if MASK != NO_MASK:
            reach = read_word(words, tile, REACH)
            limit = read_word(words, tile, LIMIT) if MASK == WINDOW_MASK else 0
            s = apply_mask(s, reach, limit, span, CONSUMER, MASK, True, N)
        shift = gl.maximum(gl.max(s, axis=1) * factor, LOWEST)
        p = gl.exp2(s * factor - shift[:, None])
        total = partial_sums(p, N)
        p2 = pack(p, DTYPE)
        o = gl.zeros((BAND, DV), gl.float32, O_LAYOUT)
        mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
        last = step + count - 1
        plain_end = last
        if (MASK == CAUSAL_MASK) | (MASK == WINDOW_MASK):
            if MASK == WINDOW_MASK:
                plain_end = step + read_word(words, tile, PLAIN_END) - 1
            for _ in range(1, read_word(words, tile, MASKED)):
                reach += N
                o, p2, shift, total = one_step(
                    o, p2, shift, total, step, reach, span, q_s, k_s, v_s, k_full, v_full, scale_log2, cap_log2,
                    CONSUMER, CONSUMERS, MASK, SOFTCAP, N, D, DV, STAGES,
                )  # fmt: skip
                step += 1
        for plain_step in range(step, plain_end):
            o, p2, shift, total = one_step(
                o, p2, shift, total, plain_step, 0, span, q_s, k_s, v_s, k_full, v_full, scale_log2, cap_log2,
                CONSUMER, CONSUMERS, NO_MASK, SOFTCAP, N, D, DV, STAGES,
            )  # fmt: skip
        if MASK == WINDOW_MASK:
            reach = read_word(words, tile, REACH) + (read_word(words, tile, PLAIN_END) - 1) * N
            for edge_step in range(plain_end, last):
                reach += N
                o, p2, shift, total = one_step(
                    o, p2, shift, total, edge_step, reach, span, q_s, k_s, v_s, k_full, v_full, scale_log2, cap_log2,
                    CONSUMER, CONSUMERS, MASK, SOFTCAP, N, D, DV, STAGES,
                )  # fmt: skip
        step = last + 1
        if not IN_Q:
            mbarrier.arrive(bars.index(Q_EMPTY + CONSUMER))
        stage = last % STAGES
        p16 = unpack(p2, DTYPE, gl.DotOperandLayout(0, O_LAYOUT, 2))
        o = warpgroup_mma(p16, v_s.index(stage).reshape([N, DV]), o, is_async=True)
        o, p16 = warpgroup_mma_wait(0, deps=[o, p16])
        arrive(V_EMPTY + stage, CONSUMERS * 128 + 32)
        shift = gl.convert_layout(shift, O_ROWS, assert_trivial=True)
        total = gl.convert_layout(gl.sum(total, axis=1), O_ROWS, assert_trivial=True)
        b = read_word(words, tile, BATCH)
        h = read_word(words, tile, HEAD)
        first_row = read_word(words, tile, ROW) + CONSUMER * BAND
        rows = read_word(words, tile, ROWS)
        in_lse = read_word(words, tile, LSE_ROW)
        thread_barrier()  # all warps have read the record
        mbarrier.arrive(bars.index(TILE_EMPTY + (tile & 1)))
        seen = total > 0
        row = gl.arange(0, BAND, O_ROWS)
        natural = gl.where(seen, (shift + gl.log2(total)) * LN2, float("inf"))
        first_lse = in_lse.to(gl.uint32).to(gl.uint64) + CONSUMER * BAND
        gl.store(lse + first_lse + row, natural, mask=row < rows - first_row)
        o = o * (1.0 / total)[:, None]
        if MASK != NO_MASK:
            o = gl.where(seen[:, None], o, 0.0)
        tma_store_wait(0)
        thread_barrier()  # the last tile's output has left
        band.reshape([BAND, DV]).store(o.to(DTYPE))
        fence_async_shared()
        thread_barrier()
        store_rows(out_desc, b, h, first_row, rows, band, PACKED)
        if IN_Q:
            tma_store_wait(0)
            thread_barrier()
            mbarrier.arrive(bars.index(Q_EMPTY + CONSUMER))
        tile += 1
        mbarrier.wait(bars.index(TILE_FULL + (tile & 1)), (tile >> 1) & 1)
        count = read_word(words, tile, COUNT)
    tma_store_wait(0)
