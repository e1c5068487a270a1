"""The forward kernel for Hopper: persistent CTAs whose consumer warpgroups take turns at the tensor cores.

Warp roles. Each consumer warpgroup holds a band of 64 query rows; one producer warp draws tiles and keeps the copy
engine busy. A consumer's step on KV tile j issues S = Q K^T of tile j+1 and O += P V of tile j back to back, then passes
the turn: while it works on its softmax, the next warpgroup's matmuls fill the tensor cores.

KV tiles are walked from the last that the Q tile sees down to the first, so that tiles that need a mask come first. Q
tiles with the longest walk start first, in sections of heads whose keys and values fit in L2 together; CTAs draw them
from a counter. A row's bits depend on its own walk only: not on batch, heads, SMs, or the order of drawing.
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

from dash_kernels.kernels.compat import thread_barrier, tma_load, tma_store, tma_store_wait
from dash_kernels.kernels.turnstile import draw_ticket

NO_MASK, CAUSAL_MASK, TAIL_MASK = (gl.constexpr(mask) for mask in range(3))
# Words of a Q tile's record in shared memory: KV tiles to walk (-1 ends the stream); how many of them, at the start,
# need a mask; batch; head; first row; keys of the first KV tile that row 0 (causal), or every row (tail), sees.
COUNT, MASKED, BATCH, HEAD, ROW, REACH = (gl.constexpr(word) for word in range(6))
RECORD_WORDS = gl.constexpr(6)
BAND = gl.constexpr(64)  # query rows of a consumer
# A row's maximum before it saw a key: finite, so that no difference of maxima is NaN.
LOWEST = gl.constexpr(-1e30)
LN2 = gl.constexpr(0.6931471805599453)
# Hardware barriers from here on are the turns'; Triton numbers its own from 0.
FIRST_TURN_BARRIER = 8


@gluon.constexpr_function
def turn_asm(what, consumer):
    return f"bar.{what} {FIRST_TURN_BARRIER + consumer}, 256; mov.u32 $0, 0;"


@gluon.jit
def await_turn(CONSUMER: gl.constexpr):
    ASM: gl.constexpr = turn_asm("sync", CONSUMER)
    gl.inline_asm_elementwise(ASM, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(CONSUMER: gl.constexpr):
    """Give the turn to a consumer; every thread of the caller arrives at its barrier and goes on."""
    ASM: gl.constexpr = turn_asm("arrive", CONSUMER)
    gl.inline_asm_elementwise(ASM, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def read_word(tile_s, tile, word: gl.constexpr):
    """A word of the record of the ``tile``-th Q tile of this CTA, the same in every thread."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(tile_s.index((tile & 1) * RECORD_WORDS + word).load(layout), axis=0)


@gluon.jit
def write_word(tile_s, tile, word: gl.constexpr, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    word_s = tile_s.index((tile & 1) * RECORD_WORDS + word)
    word_s.store(gl.full([1], 0, gl.int32, layout) + value)


@gluon.jit
def load_rows(desc, memory, full, empty, step, b, h, row, STAGES: gl.constexpr):
    """Load a KV tile into the ring once its stage is free."""
    SHAPE: gl.constexpr = desc.block_type.shape
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), SHAPE[2] * SHAPE[3] * 2)
    tma_load(desc, [b, h, row, 0], full.index(stage), memory.index(stage))


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_s, tile_full, tile_empty,
    counter, num_tiles, num_m, total_heads, heads, group, section, seq_len, seq_len_kv,
    MASK: gl.constexpr, CONSUMERS: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = CONSUMERS * BAND
    step = 0
    tile = 0
    ctas = gl.num_programs(0)
    ticket = gl.program_id(0)
    while ticket < num_tiles:
        first = ticket // (num_m * section) * section
        width = gl.minimum(section, total_heads - first)
        rest = ticket - first * num_m
        head = first + rest % width
        row = (num_m - 1 - rest // width) * M
        b = head // heads
        h = head % heads
        keys = seq_len_kv  # that the tile's last row sees
        plain = seq_len_kv // N  # KV tiles that every row sees in whole
        if MASK == CAUSAL_MASK:
            offset = seq_len_kv - seq_len
            keys = gl.maximum(gl.minimum(row + M, seq_len) + offset, 0)
            plain = gl.minimum(plain, gl.maximum(row + 1 + offset, 0) // N)
        count = (keys + N - 1) // N
        key = (count - 1) * N
        mbarrier.wait(tile_empty.index(tile & 1), ((tile >> 1) & 1) ^ 1)
        write_word(tile_s, tile, COUNT, count)
        write_word(tile_s, tile, MASKED, count - plain)
        write_word(tile_s, tile, BATCH, b)
        write_word(tile_s, tile, HEAD, h)
        write_word(tile_s, tile, ROW, row)
        if MASK == CAUSAL_MASK:
            write_word(tile_s, tile, REACH, row + 1 + offset - key)
        else:
            write_word(tile_s, tile, REACH, seq_len_kv - key)
        mbarrier.arrive(tile_full.index(tile & 1))
        h_kv = h // group
        if count > 0:
            load_rows(k_desc, k_s, k_full, k_empty, step, b, h_kv, key, STAGES)
        for w in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(w), (tile & 1) ^ 1)
            mbarrier.expect(q_full.index(w), BAND * D * 2)
            tma_load(q_desc, [b, h, row + w * BAND, 0], q_full.index(w), q_s.index(w))
        if count > 0:
            for _ in range(count - 1):
                load_rows(k_desc, k_s, k_full, k_empty, step + 1, b, h_kv, key - N, STAGES)
                load_rows(v_desc, v_s, v_full, v_empty, step, b, h_kv, key, STAGES)
                step += 1
                key -= N
            load_rows(v_desc, v_s, v_full, v_empty, step, b, h_kv, key, STAGES)
            step += 1
        tile += 1
        drawn = draw_ticket(counter)
        # The launch's last drawing leaves a zero for the stream's next launch.
        if drawn == num_tiles - 1:
            gl.store(counter, 0)
        ticket = drawn + ctas
    mbarrier.wait(tile_empty.index(tile & 1), ((tile >> 1) & 1) ^ 1)
    write_word(tile_s, tile, COUNT, -1)
    mbarrier.arrive(tile_full.index(tile & 1))


@gluon.jit
def apply_mask(s, reach, CONSUMER: gl.constexpr, MASK: gl.constexpr, N: gl.constexpr):
    """-inf where a key is past what its row sees."""
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
    if MASK == CAUSAL_MASK:
        reach = (gl.arange(0, BAND, ROW_LAYOUT) + (reach + CONSUMER * BAND))[:, None, None, None]
    s4 = gl.where(eights < reach - place, s4, float("-inf"))
    return gl.convert_layout(s4.reshape([BAND, N]), S_LAYOUT, assert_trivial=True)


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
def one_step(
    o, p2, shift, total, step, reach, q, k_s, v_s, k_full, k_empty, v_full, v_empty, scale_log2,
    CONSUMER: gl.constexpr, MASK: gl.constexpr, CONSUMERS: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """O += P V of one KV tile, and the next KV tile's P from its S."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = o.type.layout
    DTYPE: gl.constexpr = v_s.dtype
    stage = step % STAGES
    next_stage = (step + 1) % STAGES
    next_phase = ((step + 1) // STAGES) & 1
    k = k_s.index(next_stage).reshape([N, D])
    v = v_s.index(stage).reshape([N, DV])
    zeros = gl.zeros((BAND, N), gl.float32, S_LAYOUT)
    p16 = unpack(p2, DTYPE, gl.DotOperandLayout(0, O_LAYOUT, 2))
    mbarrier.wait(k_full.index(next_stage), next_phase)
    if TURNS:
        await_turn(CONSUMER)
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    o = warpgroup_mma(p16, v, o, is_async=True)
    if TURNS:
        pass_turn((CONSUMER + 1) % CONSUMERS)
    s = warpgroup_mma_wait(1, deps=[s])
    if MASK != NO_MASK:
        s = apply_mask(s, reach, CONSUMER, MASK, N)
    new_shift = gl.maximum(shift, gl.max(s, axis=1) * scale_log2)
    alpha = gl.exp2(shift - new_shift)
    p = gl.exp2(s * scale_log2 - new_shift[:, None])
    kept = gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout), assert_trivial=True)
    total = total * kept[:, None] + partial_sums(p, N)
    # The next step's V is awaited here, not there: the wait's loop keeps the compiler from moving the exponentials
    # below the wait for O, where no matmul of this warpgroup would run beside them.
    mbarrier.wait(v_full.index(next_stage), next_phase)
    o, p16, p = warpgroup_mma_wait(0, deps=[o, p16, p])
    mbarrier.arrive(k_empty.index(next_stage))
    mbarrier.arrive(v_empty.index(stage))
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)[:, None]
    return o, pack(p, DTYPE), new_shift, total


@gluon.jit
def consumer(
    out_desc, lse, q_s, k_s, v_s, out_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_s, tile_full, tile_empty,
    heads, seq_len, scale_log2,
    CONSUMER: gl.constexpr, MASK: gl.constexpr, CONSUMERS: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    DTYPE: gl.constexpr = v_s.dtype
    q = q_s.index(CONSUMER).reshape([BAND, D])
    out = out_s.index(CONSUMER).reshape([BAND, DV])
    step = 0
    tile = 0
    if TURNS and CONSUMER == CONSUMERS - 1:
        pass_turn(0)
    mbarrier.wait(tile_full.index(0), 0)
    count = read_word(tile_s, tile, COUNT)
    while count >= 0:
        o = gl.zeros((BAND, DV), gl.float32, O_LAYOUT)
        s = gl.zeros((BAND, N), gl.float32, S_LAYOUT)
        shift = gl.max(s, axis=1)
        total = partial_sums(s, N)
        mbarrier.wait(q_full.index(CONSUMER), tile & 1)
        if count > 0:
            reach = read_word(tile_s, tile, REACH)
            stage = step % STAGES
            phase = (step // STAGES) & 1
            k = k_s.index(stage).reshape([N, D])
            mbarrier.wait(k_full.index(stage), phase)
            s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(stage))
            if MASK != NO_MASK:
                s = apply_mask(s, reach, CONSUMER, MASK, N)
            shift = gl.maximum(gl.max(s, axis=1) * scale_log2, LOWEST)
            p = gl.exp2(s * scale_log2 - shift[:, None])
            total = partial_sums(p, N)
            p2 = pack(p, DTYPE)
            mbarrier.wait(v_full.index(stage), phase)
            last = step + count - 1
            if MASK == CAUSAL_MASK:
                for _ in range(1, read_word(tile_s, tile, MASKED)):
                    reach += N
                    o, p2, shift, total = one_step(
                        o, p2, shift, total, step, reach, q, k_s, v_s, k_full, k_empty, v_full, v_empty, scale_log2,
                        CONSUMER, MASK, CONSUMERS, N, D, DV, STAGES, TURNS,
                    )  # fmt: skip
                    step += 1
            for plain_step in range(step, last):
                o, p2, shift, total = one_step(
                    o, p2, shift, total, plain_step, 0, q, k_s, v_s, k_full, k_empty, v_full, v_empty, scale_log2,
                    CONSUMER, 0, CONSUMERS, N, D, DV, STAGES, TURNS,
                )  # fmt: skip
            step = last + 1
            mbarrier.arrive(q_empty.index(CONSUMER))
            stage = last % STAGES
            p16 = unpack(p2, DTYPE, gl.DotOperandLayout(0, O_LAYOUT, 2))
            o = warpgroup_mma(p16, v_s.index(stage).reshape([N, DV]), o, is_async=True)
            o, p16 = warpgroup_mma_wait(0, deps=[o, p16])
            mbarrier.arrive(v_empty.index(stage))
        else:
            mbarrier.arrive(q_empty.index(CONSUMER))
        shift = gl.convert_layout(shift, ROWS, assert_trivial=True)
        total = gl.convert_layout(gl.sum(total, axis=1), ROWS, assert_trivial=True)
        b = read_word(tile_s, tile, BATCH)
        h = read_word(tile_s, tile, HEAD)
        first_row = read_word(tile_s, tile, ROW) + CONSUMER * BAND
        mbarrier.arrive(tile_empty.index(tile & 1))
        seen = total > 0
        row = gl.arange(0, BAND, ROWS)
        natural = gl.where(seen, (shift + gl.log2(total)) * LN2, float("inf"))
        lse_rows = lse + (b * heads + h).to(gl.int64) * seq_len + first_row
        gl.store(lse_rows + row, natural, mask=row < seq_len - first_row)
        o = o * gl.where(seen, 1.0 / total, 0.0)[:, None]
        tma_store_wait(0)
        thread_barrier()  # the last tile's output has left
        out.store(o.to(DTYPE))
        fence_async_shared()
        thread_barrier()
        tma_store(out_desc, [b, h, first_row, 0], out_s.index(CONSUMER))
        tile += 1
        mbarrier.wait(tile_full.index(tile & 1), (tile >> 1) & 1)
        count = read_word(tile_s, tile, COUNT)
    if TURNS and CONSUMER == 0:
        await_turn(0)
    tma_store_wait(0)


@gluon.jit(
    do_not_specialize=["num_tiles", "num_m", "total_heads", "heads", "group", "section", "seq_len", "seq_len_kv"]
)  # fmt: skip
def forward_main(
    q_desc, k_desc, v_desc, out_desc, lse, counter,
    num_tiles, num_m, total_heads, heads, group, section, seq_len, seq_len_kv, scale_log2,
    MASK: gl.constexpr, CONSUMERS: gl.constexpr, N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, BAND, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, N, DV], v_desc.layout)
    out_s = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, BAND, DV], out_desc.layout)
    tile_s = gl.allocate_shared_memory(
        gl.int32, [2 * RECORD_WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(tile_full.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    # Each consumer is a partition of its own, so that no barrier of one stops another.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (
                    out_desc, lse, q_s, k_s, v_s, out_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_s, tile_full,
                    tile_empty, heads, seq_len, scale_log2, 0, MASK, CONSUMERS, N, D, DV, STAGES, TURNS)),
                (consumer, (
                    out_desc, lse, q_s, k_s, v_s, out_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_s, tile_full,
                    tile_empty, heads, seq_len, scale_log2, 1, MASK, CONSUMERS, N, D, DV, STAGES, TURNS)),
                (producer, (
                    q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_s, tile_full,
                    tile_empty, counter, num_tiles, num_m, total_heads, heads, group, section, seq_len, seq_len_kv,
                    MASK, CONSUMERS, N, D, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (
                    out_desc, lse, q_s, k_s, v_s, out_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_s, tile_full,
                    tile_empty, heads, seq_len, scale_log2, 0, MASK, CONSUMERS, N, D, DV, STAGES, TURNS)),
                (consumer, (
                    out_desc, lse, q_s, k_s, v_s, out_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_s, tile_full,
                    tile_empty, heads, seq_len, scale_log2, 1, MASK, CONSUMERS, N, D, DV, STAGES, TURNS)),
                (consumer, (
                    out_desc, lse, q_s, k_s, v_s, out_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_s, tile_full,
                    tile_empty, heads, seq_len, scale_log2, 2, MASK, CONSUMERS, N, D, DV, STAGES, TURNS)),
                (producer, (
                    q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_s, tile_full,
                    tile_empty, counter, num_tiles, num_m, total_heads, heads, group, section, seq_len, seq_len_kv,
                    MASK, CONSUMERS, N, D, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip
