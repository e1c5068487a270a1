"""The warps of the Hopper backward that move data: a producer, two writers that take turns, and a carrier."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dash_kernels.kernels.compat import (
    reinterpret,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
)
from dash_kernels.kernels.hopper_shared import (
    BATCH,
    CONSUMER_AND_WARP,
    CONSUMERS_AND_WARP,
    COUNT,
    DONE,
    FIRST,
    HEAD,
    HEADER_WORDS,
    KEY,
    KEYS,
    KV_EMPTY,
    LIMIT,
    MASK_BEGIN,
    MASK_END,
    NO_MASK,
    OUT_EMPTY,
    OUT_FULL,
    PIECE,
    Q_EMPTY,
    Q_ROWS,
    Q_TILES,
    REACH,
    RING_FULL,
    ROWS_END,
    SHIFT,
    STEP,
    STEPS,
    TAIL_MASK,
    TILE_EMPTY,
    TILE_FULL,
    UNORDERED,
    WINDOW_MASK,
    arrive_and_wait,
    first_boxes,
    is_uneven,
    is_wide,
    pieces,
    read_word,
    shares,
    write_scalar,
    write_word,
)
from dash_kernels.kernels.hopper_step import dk_place, dv_place
from dash_kernels.kernels.hopper_wide import dk_half
from dash_kernels.kernels.sequences import KV_TILE_WORDS
from dash_kernels.kernels.turnstile import (
    await_turn,
    draw_ticket,
    fence_acquired,
    report_timeout,
    signal_turn,
    wait_reduced,
)

TABLE_WORDS = gl.constexpr(KV_TILE_WORDS)


@gluon.jit
def load_rows(desc, b, h, row, rows, end, barrier, target, PACKED: gl.constexpr, col=0):
    """Rows ``row ..`` of head ``h``, from column ``col``: of batch ``b``, or of the packed sequence of ``rows`` rows that
    ends at ``end``."""
    if PACKED:
        tma_load(desc, [ROWS_END, end, h, row + (ROWS_END - rows), col], barrier, target)
    else:
        tma_load(desc, [b, h, row, col], barrier, target)


@gluon.jit
def load_pieces(desc, b, h, row, rows, end, barrier, tiles, tile, PACKED: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """As :func:`load_rows`, of Q or K: tile number ``tile``, in as many pieces as its columns take."""
    for piece in gl.static_range(pieces(D)):
        target = tiles.index(tile * pieces(D) + piece)
        load_rows(desc, b, h, row, rows, end, barrier, target, PACKED, piece * PIECE)


@gluon.jit
def store_rows(desc, b, h, row, rows, source, PACKED: gl.constexpr, col=0):
    """As :func:`load_rows`; for packed sequences ``b`` is the row at which the sequence ends."""
    tile = reinterpret(source, desc.dtype, desc.block_type.shape, desc.layout)
    if PACKED:
        tma_store(desc, [ROWS_END, b, h, row + (ROWS_END - rows), col], tile)
    else:
        tma_store(desc, [b, h, row, col], tile)


@gluon.jit
def producer(
    q_desc, do_desc, lse_desc, delta_desc, k_desc, v_desc, k_s, v_s, q_s, do_s, lse_s, delta_s, words, bars,
    q_full, do_full, workspace, arrays, counts, num_items, num_tiles, num_heads, heads_kv, splits, group, interleave, num_m,
    left, right, seq_len, seq_len_kv,
    MASK: gl.constexpr, GROUPED: gl.constexpr, PACKED: gl.constexpr, DESCENDING: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    tile = 0
    if PACKED:
        num_items = gl.load(counts)
    tickets = num_items * num_heads
    ticket = draw_ticket(workspace)
    while ticket < tickets:
        block = ticket // (interleave * num_items)
        first_head = block * interleave
        width = gl.minimum(interleave, num_heads - first_head)
        rest = ticket - first_head * num_items
        head = first_head + rest % width
        if PACKED:
            j_begin = rest // width
            j_end = j_begin + 1
        else:
            item = gl.load(arrays + rest // width)
            j_begin = gl.load(arrays + num_items + item)
            j_end = gl.load(arrays + num_items + item + 1)
        b = head // heads_kv
        h_kv = head % heads_kv
        h_load = h_kv // splits
        for j in range(j_begin, j_end):
            mbarrier.wait(bars.index(TILE_EMPTY + (tile & 1)), ((tile >> 1) & 1) ^ 1)
            write_word(words, tile, HEAD, h_kv)
            write_word(words, tile, STEP, step)
            if PACKED:
                row = arrays + j * TABLE_WORDS
                q_rows = gl.load(row + 2)
                keys = gl.load(row + 3)
                q_end = gl.load(row) + q_rows
                k_end = gl.load(row + 1) + keys
                q_tiles = h_kv * group * num_m + gl.load(row + 4)
                key = gl.load(row + 5) * N
                first = gl.load(row + 6)
                count = gl.load(row + 7)
                write_word(words, tile, BATCH, k_end)
                write_word(words, tile, FIRST, first)
                write_word(words, tile, MASK_BEGIN, gl.load(row + 8))
                write_word(words, tile, MASK_END, gl.load(row + 9))
                write_word(words, tile, Q_ROWS, q_rows)
                write_word(words, tile, KEYS, keys)
                # turn_of in sequences.py: the tile of the last key that a Q tile's last row sees, or of its first's first.
                write_word(words, tile, SHIFT, keys - q_rows + (right if DESCENDING else -left))
            else:
                q_rows = seq_len
                keys = seq_len_kv
                q_end = 0
                k_end = 0
                q_tiles = head * group * num_m
                kv_tile = arrays + num_items * 2 + 1
                key = gl.load(kv_tile + j) * N
                first = num_items * 2 + 1 + num_tiles * 5 + gl.load(kv_tile + num_tiles + j)
                count = gl.load(kv_tile + num_tiles * 2 + j)
                write_word(words, tile, BATCH, b)
                write_word(words, tile, FIRST, first)
                write_word(words, tile, MASK_BEGIN, gl.load(kv_tile + num_tiles * 3 + j))
                write_word(words, tile, MASK_END, gl.load(kv_tile + num_tiles * 4 + j))
            write_word(words, tile, KEY, key)
            write_word(words, tile, Q_TILES, q_tiles)
            write_word(words, tile, COUNT, count)
            write_word(words, tile, STEPS, count * group)
            # A tile without a step is over as soon as its record is there: handed over before this wait it could complete
            # KV_EMPTY once more and make the wait miss a phase. Others are handed over first, so that writers poll early.
            if count == 0:
                mbarrier.wait(bars.index(KV_EMPTY), (tile & 1) ^ 1)
            mbarrier.arrive(bars.index(TILE_FULL + (tile & 1)))
            if count != 0:
                mbarrier.wait(bars.index(KV_EMPTY), (tile & 1) ^ 1)
            # The key that the first row of Q tile 0 sees last, counted from this tile's first, plus 1.
            reach = keys - q_rows + right + 1 - key
            for g in range(group if GROUPED else 1):
                if PACKED:
                    m_block = first
                else:
                    m_block = gl.load(arrays + first)
                for i in range(count):
                    stage = step % STAGES
                    if step >= STAGES:
                        arrive_and_wait(Q_EMPTY + stage, CONSUMERS_AND_WARP)
                    if MASK == TAIL_MASK:
                        write_scalar(words, REACH + stage, keys - key)
                    elif MASK != NO_MASK:
                        write_scalar(words, REACH + stage, m_block * M + reach)
                    if MASK == WINDOW_MASK:
                        write_scalar(words, LIMIT + stage, keys - key)
                    q_loaded = q_full.index(stage)
                    do_loaded = do_full.index(stage)
                    q_row = m_block * M
                    padded = (q_tiles + g * num_m + m_block) * M
                    h = h_kv * group + g
                    # K comes with a tile's first Q, and V with its first dO: no step has another barrier to wait for.
                    begins = g + i == 0
                    if not begins:
                        mbarrier.expect(q_loaded, M * (D * 2 + 4))
                    else:
                        mbarrier.expect(q_loaded, M * (D * 2 + 4) + N * D * 2)
                        load_pieces(
                            k_desc, b, h_load, key, keys, k_end, q_loaded, k_s, 0, PACKED, D
                        )
                    load_pieces(q_desc, b, h, q_row, q_rows, q_end, q_loaded, q_s, stage, PACKED, D)
                    tma_load(lse_desc, [padded], q_loaded, lse_s.index(stage))
                    if not begins:
                        mbarrier.expect(do_loaded, M * (DV * 2 + 4))
                    else:
                        mbarrier.expect(do_loaded, M * (DV * 2 + 4) + N * DV * 2)
                        load_rows(
                            v_desc, b, h_load, key, keys, k_end, do_loaded, v_s.index(0), PACKED
                        )
                    load_rows(
                        do_desc, b, h, q_row, q_rows, q_end, do_loaded, do_s.index(stage), PACKED
                    )
                    tma_load(delta_desc, [padded], do_loaded, delta_s.index(stage))
                    step += 1
                    if PACKED:
                        m_block += 1
                    else:
                        m_block = gl.load(arrays + first + i + 1)
            mbarrier.wait(bars.index(DONE), tile & 1)
            tile += 1
        ticket = draw_ticket(workspace)
    # A hardware barrier must not be left half full.
    for last in range(gl.maximum(step - STAGES, 0), step):
        arrive_and_wait(Q_EMPTY + last % STAGES, CONSUMERS_AND_WARP)
    mbarrier.wait(bars.index(TILE_EMPTY + (tile & 1)), ((tile >> 1) & 1) ^ 1)
    write_word(words, tile, STEPS, -1)
    mbarrier.arrive(bars.index(TILE_FULL + (tile & 1)))


@gluon.jit
def turn_in_sequence(
    words, tile, m_block, DESCENDING: gl.constexpr, M: gl.constexpr, N: gl.constexpr
):
    """``turn_of`` of sequences.py from a KV tile's record; the tile is one of the Q tile's contributors."""
    shift = read_word(words, tile, SHIFT)
    n_block = read_word(words, tile, KEY) // N
    if DESCENDING:
        row = gl.minimum((m_block + 1) * M, read_word(words, tile, Q_ROWS)) - 1
        return gl.minimum(row + shift, read_word(words, tile, KEYS) - 1) // N - n_block
    return n_block - gl.maximum(m_block * M + shift, 0) // N


@gluon.jit
def writer(
    dq_desc, dq_s, words, bars, ring_empty, workspace, record, bound_us, arrays, num_steps, num_m,
    W: gl.constexpr, GROUPED: gl.constexpr, PACKED: gl.constexpr, DESCENDING: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, DQ_STAGES: gl.constexpr, POLICY: gl.constexpr, ORDER_OF_START: gl.constexpr,
):  # fmt: skip
    """Adds dQ of every second step to global memory in its turn, or, above head_dim 128, its share of every step's.

    A turn costs a poll, a reduce and a release, each a trip to L2 and back: in one warp they took as long as a step of
    the matmuls, in two they hide behind them.
    """
    SHARED: gl.constexpr = shares(D) == 2
    STRIDE: gl.constexpr = 1 if SHARED else 2
    BOX: gl.constexpr = dq_desc.block_type.shape[0]
    FIRST_BOX: gl.constexpr = W * first_boxes(D) if SHARED else 0
    BOXES: gl.constexpr = first_boxes(D) if W == 0 else M * D // 256 // BOX - FIRST_BOX
    LISTENERS: gl.constexpr = CONSUMER_AND_WARP if SHARED else CONSUMERS_AND_WARP
    AHEAD: gl.constexpr = (
        2 if SHARED else 3
    )  # how many steps before a tile's end the next ticket may be drawn
    semaphores = workspace + HEADER_WORDS
    tile = 0
    mbarrier.wait(bars.index(TILE_FULL), 0)
    while read_word(words, tile, STEPS) >= 0:
        first = read_word(words, tile, STEP)
        end = first + read_word(words, tile, STEPS)
        ring = first if SHARED else first + ((first + W) & 1)
        # DONE lets the producer draw the next ticket. Drawn earlier it would keep others waiting for that ticket's tile
        # while this one waits for turns; a kind that waits on later CTAs must not hold one it has not started at all.
        if not ORDER_OF_START:
            if ring >= end:
                mbarrier.arrive(bars.index(DONE))
        while ring < end:
            place = ring - first
            q_tile = read_word(words, tile, Q_TILES)
            if GROUPED:
                g = place // read_word(words, tile, COUNT)
                place -= g * read_word(words, tile, COUNT)
                q_tile += g * num_m
            visited = read_word(words, tile, FIRST) + place
            if PACKED:
                turn = turn_in_sequence(words, tile, visited, DESCENDING, M, N)
                q_tile += visited
            else:
                turn = gl.load(arrays + num_steps + visited)
                q_tile += gl.load(arrays + visited)
            stage = W if SHARED else ring % DQ_STAGES
            box = FIRST_BOX if SHARED else stage
            row = q_tile * (M * D // 256) + FIRST_BOX * BOX
            if POLICY != UNORDERED:
                semaphore = semaphores + (q_tile * 2 + W if SHARED else q_tile)
                seen = await_turn(semaphore, turn, workspace, bound_us)
                if seen != turn:
                    report_timeout(workspace, record, q_tile // num_m, q_tile % num_m, turn, seen)
            # This writer's first step among the last of the tile: no turn but those after it can hold the tile up.
            if not ORDER_OF_START:
                if (ring >= end - AHEAD) & (ring - STRIDE < gl.maximum(end - AHEAD, first)):
                    mbarrier.arrive(bars.index(DONE))
            arrive_and_wait(RING_FULL + stage, LISTENERS)
            if POLICY == UNORDERED:
                for i in gl.static_range(BOXES):
                    tma_reduce_add(dq_desc, [row + i * BOX, 0], dq_s.index(box + i))
                tma_store_wait(0)
                mbarrier.arrive(ring_empty.index(stage))
            else:
                fence_acquired()
                for i in gl.static_range(BOXES):
                    if turn == 0:
                        tma_store(dq_desc, [row + i * BOX, 0], dq_s.index(box + i))
                    else:
                        tma_reduce_add(dq_desc, [row + i * BOX, 0], dq_s.index(box + i))
                tma_store_wait(0)
                mbarrier.arrive(ring_empty.index(stage))
                wait_reduced()
                signal_turn(semaphore)
            ring += STRIDE
        if ORDER_OF_START:
            mbarrier.arrive(bars.index(DONE))
        mbarrier.arrive(bars.index(TILE_EMPTY + (tile & 1)))
        tile += 1
        mbarrier.wait(bars.index(TILE_FULL + (tile & 1)), (tile >> 1) & 1)
    wait_reduced()


@gluon.jit
def carrier(
    dk_desc, dv_desc, k_s, v_s, ds_s, dq_s, words, bars,
    PACKED: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, DQ_STAGES: gl.constexpr,
):  # fmt: skip
    """Stores dK and dV at a tile's end. A warp of its own: a writer still waits then for the turns of its last steps."""
    tile = 0
    mbarrier.wait(bars.index(TILE_FULL), 0)
    while read_word(words, tile, STEPS) >= 0:
        end = read_word(words, tile, STEP) + read_word(words, tile, STEPS)
        b = read_word(words, tile, BATCH)
        h = read_word(words, tile, HEAD)
        row = read_word(words, tile, KEY)
        keys = read_word(words, tile, KEYS) if PACKED else 0
        mbarrier.wait(bars.index(OUT_FULL), tile & 1)
        if is_wide(D):
            for half in gl.static_range(2):
                if half == 1:
                    mbarrier.wait(bars.index(OUT_FULL + 1), tile & 1)
                tiles = dq_s.index(half)
                store_rows(dv_desc, b, h, row, keys, tiles, PACKED, DV // 2 * half)
                store_rows(dk_desc, b, h, row, keys, dk_half(tiles, dk_desc), PACKED, D // 2 * half)
        elif is_uneven(D):
            store_rows(dv_desc, b, h, row, keys, v_s.index(0), PACKED)
            mbarrier.wait(bars.index(OUT_FULL + 1), tile & 1)
            for piece in gl.static_range(pieces(D)):
                store_rows(dk_desc, b, h, row, keys, k_s.index(piece), PACKED, piece * PIECE)
        else:
            store_rows(dk_desc, b, h, row, keys, dk_place(ds_s, dk_desc, D), PACKED)
            mbarrier.wait(bars.index(OUT_FULL + 1), tile & 1)
            store_rows(
                dv_desc, b, h, row, keys, dv_place(ds_s, dq_s, end, dv_desc, D, DQ_STAGES), PACKED
            )
        tma_store_wait(0)
        if is_uneven(D):
            mbarrier.arrive(bars.index(KV_EMPTY))
        mbarrier.arrive(bars.index(OUT_EMPTY))
        mbarrier.arrive(bars.index(TILE_EMPTY + (tile & 1)))
        tile += 1
        mbarrier.wait(bars.index(TILE_FULL + (tile & 1)), (tile >> 1) & 1)
