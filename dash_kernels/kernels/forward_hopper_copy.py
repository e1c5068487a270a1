"""The warp of the Hopper forward that moves data, and a Q tile's record, through which it tells the consumers what to do.

Packed sequences: Q tile number ``slot`` belongs to the last sequence with cu_seqlens[i] // M + i <= slot, which leaves
every sequence at least as many slots as it has Q tiles; no table has to be made first. Triton's ``//`` rounds towards
zero, so every dividend here is made non-negative first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dash_kernels.kernels.hopper_copy import load_pieces, load_rows
from dash_kernels.kernels.hopper_shared import (
    CAUSAL_MASK,
    WINDOW_MASK,
    arrive_and_wait,
    read_scalar,
    write_scalar,
)

# Words of a Q tile's record in shared memory; two records take turns. KV tiles to walk (-1 ends the stream); how many of
# them, at the start, need a mask; the place in the walk from which a window's left edge needs one; batch, or the row at
# which a packed sequence ends; head; first row; keys of the walk's first KV tile that row 0 (or every row) sees, with no
# regard to how many keys there are; how many there are; rows of the sequence; the first row's place in LSE.
COUNT, MASKED, PLAIN_END, BATCH, HEAD, ROW, REACH, LIMIT, ROWS, LSE_ROW = (
    gl.constexpr(word) for word in range(10)
)
RECORD_WORDS = gl.constexpr(10)
# First barrier of each group.
TILE_FULL, TILE_EMPTY, Q_FULL, Q_EMPTY, NUM_BARRIERS = (
    gl.constexpr(first) for first in (0, 2, 4, 7, 10)
)
# Hardware barriers, as in hopper_shared: one a stage of K and of V.
K_EMPTY, V_EMPTY = gl.constexpr(5), gl.constexpr(9)
BAND = gl.constexpr(64)  # query rows of a consumer
PROBES = gl.constexpr(128)  # sequences that a search looks at together


@gluon.jit
def read_word(words, tile, word: gl.constexpr):
    """A word of the record of the ``tile``-th Q tile of this CTA, the same in every thread."""
    return read_scalar(words, (tile & 1) * RECORD_WORDS + word)


@gluon.jit
def write_word(words, tile, word: gl.constexpr, value):
    write_scalar(words, (tile & 1) * RECORD_WORDS + word, value)


@gluon.jit
def begin_draw(counter):
    """Ask for the next number; the answer is in lane 0 once :func:`end_draw` wants it."""
    return gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .u32 lane, t;
        mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.u32 t, 0;
        @p atom.relaxed.gpu.global.add.u32 t, [$1], 1;
        mov.u32 $0, t; }""",
        "=r,l,~{memory}",
        [counter],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def end_draw(drawn):
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
        "=r,r",
        [drawn],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def sequence_of(slot, cu_seqlens_q, sequences, M: gl.constexpr):
    """The sequence that Q tile number ``slot`` belongs to."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([PROBES // 32], [32], [1], [0])
    first = 0
    count = sequences
    while count > 1:
        stride = (count + PROBES - 1) // PROBES
        place = gl.arange(0, PROBES, LAYOUT) * stride
        probe = first + gl.minimum(place, count - 1)
        begins = gl.load(cu_seqlens_q + probe) // M + probe
        passed = gl.sum(((place < count) & (begins <= slot)).to(gl.int32), axis=0)
        skipped = gl.maximum(passed - 1, 0) * stride
        first += skipped
        count = gl.minimum(stride, count - skipped)
    return first


@gluon.jit
def send_tile(
    q_desc, k_desc, v_desc, q_s, k_s, v_s, words, bars, k_full, v_full, tile, step, b, h, h_kv, row, rows, keys, q_end, k_end,
    lse_row, left, right,
    MASK: gl.constexpr, PACKED: gl.constexpr, CONSUMERS: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A Q tile's record, its rows of Q, and its KV tiles; the number of the stream's next KV tile.

    A tile whose rows see no key walks one KV tile, all of it masked, so that no consumer has to ask.
    """
    M: gl.constexpr = CONSUMERS * BAND
    last_row = gl.minimum(row + M, rows) - 1
    offset = keys - rows
    begin = 0
    end = (keys + N - 1) // N
    plain = keys // N  # KV tiles up to there are seen in whole by every row, but for a left edge
    if (MASK == CAUSAL_MASK) | (MASK == WINDOW_MASK):
        end = (gl.minimum(gl.maximum(last_row + offset + right + 1, 0), keys) + N - 1) // N
        plain = gl.minimum(plain, gl.maximum(row + offset + right + 1, 0) // N)
    if MASK == WINDOW_MASK:
        begin = gl.maximum(row + offset - left, 0) // N
    end = gl.maximum(end, begin + 1)
    key = (end - 1) * N
    masked = gl.minimum(end - plain, end - begin)
    mbarrier.wait(bars.index(TILE_EMPTY + (tile & 1)), ((tile >> 1) & 1) ^ 1)
    write_word(words, tile, COUNT, end - begin)
    write_word(words, tile, MASKED, masked)
    write_word(words, tile, BATCH, q_end if PACKED else b)
    write_word(words, tile, HEAD, h)
    write_word(words, tile, ROW, row)
    if (MASK == CAUSAL_MASK) | (MASK == WINDOW_MASK):
        write_word(words, tile, REACH, row + offset + right + 1 - key)
    else:
        write_word(words, tile, REACH, keys - key)
    if MASK == WINDOW_MASK:
        plain_from = (gl.maximum(last_row + offset - left, 0) + N - 1) // N
        write_word(words, tile, PLAIN_END, gl.maximum(gl.maximum(end - plain_from, masked), 1))
        write_word(words, tile, LIMIT, keys - key)
    write_word(words, tile, ROWS, rows)
    write_word(words, tile, LSE_ROW, lse_row)
    mbarrier.arrive(bars.index(TILE_FULL + (tile & 1)))
    stage = step % STAGES
    if step >= STAGES:
        arrive_and_wait(K_EMPTY + stage, CONSUMERS * 128 + 32)
    mbarrier.expect(k_full.index(stage), N * D * 2)
    load_pieces(k_desc, b, h_kv, key, keys, k_end, k_full.index(stage), k_s, stage, PACKED, D)  # fmt: skip
    for w in gl.static_range(CONSUMERS):
        mbarrier.wait(bars.index(Q_EMPTY + w), (tile & 1) ^ 1)
        mbarrier.expect(bars.index(Q_FULL + w), BAND * D * 2)
        load_pieces(q_desc, b, h, row + w * BAND, rows, q_end, bars.index(Q_FULL + w), q_s, w, PACKED, D)  # fmt: skip
    for place in range(end - begin):
        if place < end - begin - 1:
            stage = (step + 1) % STAGES
            if step + 1 >= STAGES:
                arrive_and_wait(K_EMPTY + stage, CONSUMERS * 128 + 32)
            mbarrier.expect(k_full.index(stage), N * D * 2)
            load_pieces(k_desc, b, h_kv, key - N, keys, k_end, k_full.index(stage), k_s, stage, PACKED, D)  # fmt: skip
        stage = step % STAGES
        if step >= STAGES:
            arrive_and_wait(V_EMPTY + stage, CONSUMERS * 128 + 32)
        mbarrier.expect(v_full.index(stage), N * DV * 2)
        load_rows(v_desc, b, h_kv, key, keys, k_end, v_full.index(stage), v_s.index(stage), PACKED)  # fmt: skip
        step += 1
        key -= N
    return step


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, q_s, k_s, v_s, words, bars, k_full, v_full, counter, cu_seqlens_q, cu_seqlens_k, sequences,
    num_tiles, num_m, total_heads, heads, group, section, left, right, seq_len, seq_len_kv,
    MASK: gl.constexpr, PACKED: gl.constexpr, CONSUMERS: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = CONSUMERS * BAND
    step = 0
    tile = 0
    ctas = gl.num_programs(0)
    ticket = gl.program_id(0)
    while ticket < num_tiles:
        drawing = begin_draw(counter)
        first = ticket // (num_m * section) * section
        width = gl.minimum(section, total_heads - first)
        rest = ticket - first * num_m
        head = first + rest % width
        slot = num_m - 1 - rest // width
        h = head % heads
        if PACKED:
            sequence = sequence_of(slot, cu_seqlens_q, sequences, M)
            begin = gl.load(cu_seqlens_q + sequence)
            q_end = gl.load(cu_seqlens_q + sequence + 1)
            k_begin = gl.load(cu_seqlens_k + sequence)
            k_end = gl.load(cu_seqlens_k + sequence + 1)
            row = (slot - begin // M - sequence) * M
            if row < q_end - begin:
                step = send_tile(
                    q_desc, k_desc, v_desc, q_s, k_s, v_s, words, bars, k_full, v_full, tile, step, 0, h, h // group, row,
                    q_end - begin, k_end - k_begin, q_end, k_end, h * seq_len + begin + row, left, right,
                    MASK, PACKED, CONSUMERS, N, D, DV, STAGES,
                )  # fmt: skip
                tile += 1
        else:
            step = send_tile(
                q_desc, k_desc, v_desc, q_s, k_s, v_s, words, bars, k_full, v_full, tile, step, head // heads, h,
                h // group, slot * M, seq_len, seq_len_kv, 0, 0, head * seq_len + slot * M, left, right,
                MASK, PACKED, CONSUMERS, N, D, DV, STAGES,
            )  # fmt: skip
            tile += 1
        drawn = end_draw(drawing)
        # The launch's last drawing leaves a zero for the stream's next launch.
        if drawn == num_tiles - 1:
            gl.store(counter, 0)
        ticket = drawn + ctas
    # A barrier must not be left half full.
    for last in range(gl.maximum(step - STAGES, 0), step):
        arrive_and_wait(K_EMPTY + last % STAGES, CONSUMERS * 128 + 32)
        arrive_and_wait(V_EMPTY + last % STAGES, CONSUMERS * 128 + 32)
    mbarrier.wait(bars.index(TILE_EMPTY + (tile & 1)), ((tile >> 1) & 1) ^ 1)
    write_word(words, tile, COUNT, -1)
    mbarrier.arrive(bars.index(TILE_FULL + (tile & 1)))
