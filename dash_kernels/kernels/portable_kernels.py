"""Attention backward in plain Triton, for compute capability 8.0 and up: one kernel for every schedule kind.

A CTA takes one item of one head: it keeps a KV tile (K, V, dK, dV), walks the Q tiles that the schedule's arrays
name, and adds its part of dQ to an fp32 buffer when the turnstile says that its turn has come.

How the order of addition is kept (policy ordered), hazard by hazard:

- *A predecessor's sum before mine.* Each CTA ends a contribution with ``release_turn``: its ``bar.sync`` puts the
  additions of all threads before thread 0, whose ``fence.acq_rel.gpu`` and ``red`` (a release) publish them.
  ``wait_for_turn`` polls with thread 0 (``ld.acquire.gpu``); its ``bar.sync`` hands what thread 0 has acquired on to
  the other threads. So every addition of this CTA follows every addition of its predecessors.
- *Turn 0 and the uninitialised buffer.* Turn 0 stores and the others add, so the buffer needs no zeroing; the store
  comes before the additions by the same chain. A Q tile without any contribution is known by its semaphore's 0.
- *Stale caches.* Additions are atomics, performed in L2: no thread reads dQ through its L1 cache.
- *The software pipeliner.* The Q loop loads nothing that another CTA writes, so a load hoisted over a wait is
  harmless, and the wait and the release are one opaque operation each, so that the loop stays pipelined. (A branch
  around the store or the add fails to compile for Hopper: both are predicated instead.)

What keeps a 64 x 128 tile of head_dim 128 out of local memory and Q and dO a step ahead, each seen in the compiler's
output for sm_90: dQ leaves in the order of the accumulator's registers (``flatten``), with no trip through shared
memory and in four-wide additions; addresses of Q and dO are computed from the row in each step, since offsets kept
across the loop cost 16 registers; the next Q tile's index is loaded a step early, since an index loaded in the step
itself would take the pipeline stage of the tile that it names; num_stages is 3, since with 2 the copies are issued
at a step's end and awaited at the start of the next.

Policies: ordered as above; unordered adds with no turnstile, so its bits change from run to run; two_pass leaves dQ
to ``dq_tiles``, in which a CTA owns a Q tile and walks its KV tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dash_kernels.kernels import runtime, sequences

UNORDERED, ORDERED, NO_DQ = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Words of the workspace before the semaphores: ticket, abort flag, late tile, its turn, what it saw, then room.
HEADER_WORDS = tl.constexpr(32)
# SECTIONS has a bit each for loops over plain, masked and plain steps (1, 2, 4); this value masks all steps in one.
ALL_MASKED = tl.constexpr(runtime.ALL_MASKED)
LOG2E = tl.constexpr(1.4426950408889634)
Q_TILE_WORDS = tl.constexpr(sequences.Q_TILE_WORDS)

WAIT_FOR_TURN = tl.constexpr("""{
    .reg .pred p; .reg .b32 tid, seen, flag; .reg .b64 start, now;
    mov.u32 $0, 0;
    mov.u32 tid, %tid.x;
    setp.ne.u32 p, tid, 0;
    @p bra DONE;
    ld.acquire.gpu.global.b32 seen, [$1];
    setp.eq.u32 p, seen, $2;
    @p bra DONE;
    mov.u64 start, %globaltimer;
    POLL:
    ld.acquire.gpu.global.b32 seen, [$1];
    setp.eq.u32 p, seen, $2;
    @p bra DONE;
    ld.relaxed.gpu.global.b32 flag, [$3+4];
    setp.ne.u32 p, flag, 0;
    @p bra DONE;
    mov.u64 now, %globaltimer;
    sub.u64 now, now, start;
    setp.lt.u64 p, now, $4;
    @p bra POLL;
    atom.relaxed.gpu.global.cas.b32 flag, [$3+4], 0, 1;
    setp.ne.u32 p, flag, 0;
    @p bra DONE;
    sub.u64 now, $1, $3;
    shr.u64 now, now, 2;
    cvt.u32.u64 flag, now;
    sub.u32 flag, flag, 32;
    st.global.b32 [$3+8], flag;
    st.global.b32 [$3+12], $2;
    st.global.b32 [$3+16], seen;
    DONE:
    bar.sync 0; }""")

RELEASE_TURN = tl.constexpr("""{
    .reg .pred p; .reg .b32 tid;
    mov.u32 $0, 0;
    mov.u32 tid, %tid.x;
    setp.eq.u32 p, tid, 0;
    bar.sync 0;
    @p fence.acq_rel.gpu;
    @p red.relaxed.gpu.global.add.u32 [$1], 1; }""")


@triton.jit
def wait_for_turn(semaphore, turn, workspace, bound_ns):
    """Return once ``semaphore`` reads ``turn``; give up once the launch is aborted or ``bound_ns`` nanoseconds passed.

    The first wait to give up by its bound aborts the launch and leaves in the header which tile was late (head *
    num_m + m_block), the turn that it waited for and the contributions that it saw.
    """
    tl.inline_asm_elementwise(
        WAIT_FOR_TURN,
        "=r,l,r,l,l,~{memory}",
        [semaphore, turn, workspace, tl.cast(bound_ns, tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def release_turn(semaphore):
    """Let the next contribution through, after the additions of all threads of this CTA."""
    tl.inline_asm_elementwise(
        RELEASE_TURN, "=r,l,~{memory}", [semaphore], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def tile_offsets(row, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Offsets of the elements of a tile that starts at ``row``; 64 bits, since a tensor may have more than 2^31."""
    rows = (row + tl.arange(0, ROWS)).to(tl.int64)
    return rows[:, None] * stride + tl.arange(0, COLS)[None, :]


@triton.jit
def load_tile(
    head, stride, row, limit, RAGGED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """The tile of a head that starts at ``row``; rows from ``limit`` on are not read and are zeros."""
    pointers = head + tile_offsets(row, stride, ROWS, COLS)
    if RAGGED:
        return tl.load(pointers, mask=(row + tl.arange(0, ROWS) < limit)[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def store_tile(head, stride, row, limit, tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Store a tile in the head's dtype, but for rows from ``limit`` on."""
    inside = (row + tl.arange(0, ROWS) < limit)[:, None]
    tl.store(
        head + tile_offsets(row, stride, ROWS, COLS), tile.to(head.dtype.element_ty), mask=inside
    )


@triton.jit
def flatten(tile, NUM_WARPS: tl.constexpr):
    """A tile as a vector in which each thread's elements lie as the matmul left them in its registers.

    Groups of its index bits, of the rows (repeat, warp, 8, lane) and of the columns (warp, repeat, lane, pair), in the
    order repeats, warps, lanes, the four elements a thread stores at once. Where a GPU's accumulators lie otherwise,
    it is only a permutation. ``unflatten`` undoes it.
    """
    WARP_ROWS: tl.constexpr = min(tile.shape[0] // 16, NUM_WARPS)
    WARP_COLS: tl.constexpr = NUM_WARPS // WARP_ROWS
    split = tl.reshape(
        tile,
        (
            tile.shape[0] // (16 * WARP_ROWS),
            WARP_ROWS,
            2,
            8,
            WARP_COLS,
            tile.shape[1] // (8 * WARP_COLS),
            4,
            2,
        ),
    )
    return tl.reshape(tl.permute(split, (0, 5, 4, 1, 3, 6, 2, 7)), (tile.shape[0] * tile.shape[1],))


@triton.jit
def unflatten(vector, ROWS: tl.constexpr, COLS: tl.constexpr, NUM_WARPS: tl.constexpr):
    """The (ROWS, COLS) tile that ``flatten`` made a vector of."""
    WARP_ROWS: tl.constexpr = min(ROWS // 16, NUM_WARPS)
    WARP_COLS: tl.constexpr = NUM_WARPS // WARP_ROWS
    split = tl.reshape(
        vector,
        (ROWS // (16 * WARP_ROWS), COLS // (8 * WARP_COLS), WARP_COLS, WARP_ROWS, 8, 4, 2, 2),
    )
    return tl.reshape(tl.permute(split, (0, 3, 6, 4, 2, 1, 5, 7)), (ROWS, COLS))


@triton.jit
def first_rows(col, row, seq_len, seq_len_kv, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """For each key from ``col`` on, the first row of the Q tile at ``row`` that sees it: beyond any tile for no row.

    A causal mask is aligned bottom-right. One value a key, and none a query, keeps the masked loop's registers down.
    """
    cols = col + tl.arange(0, BLOCK_N)
    if CAUSAL:
        first = tl.where(cols < seq_len_kv, cols - (seq_len_kv - seq_len), 2147483647)
        return first - row
    return tl.where(cols < seq_len_kv, 0, 2147483647)


@triton.jit(do_not_specialize=["heads", "num_m", "seq_len"])
def prepare_tiles(
    out, dout, lse, lse2, delta, dq, workspace, stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh,
    heads, num_m, seq_len,
    ZERO_DQ: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr = None,
    dlse=None, tiles=None, counts=None,
):  # fmt: skip
    """Row sums of out * dout less dlse, LSE in base 2, and a cleared workspace: one Q tile of one head a program.

    ``lse`` and ``dlse`` are (batch, heads, seq_len), contiguous. ``lse2`` and ``delta`` have BLOCK_M rows a tile, tile
    ``head * num_m + m_block``; LSE is +inf for rows past the end, so that P is 0 there. HEAD_DIM is that of ``dq``,
    HEAD_DIM_V that of ``out`` and ``dout`` (None: the same). Packed sequences: ``tiles`` and ``counts`` of a
    SequencePlan, ``num_m`` its max_q_tiles, ``seq_len`` the rows of all of them, batch 1.
    """
    program = tl.program_id(0)
    head = program // num_m
    m_block = program % num_m
    # Predicated: a branch here keeps the compiler from issuing all the loads below at once.
    tl.store(workspace + tl.arange(0, HEADER_WORDS), 0, mask=program == 0)
    first = 0
    length = seq_len
    if tiles is not None:
        if m_block >= tl.load(counts + 1):
            return
        tile = tiles + m_block.to(tl.int64) * Q_TILE_WORDS
        first = tl.load(tile)
        length = tl.load(tile + 1)
        m_block = tl.load(tile + 2)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    row = m_block * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    out += b * stride_ob + h * stride_oh
    dout += b * stride_gb + h * stride_gh
    if tiles is not None:
        out += first.to(tl.int64) * stride_os
        dout += first.to(tl.int64) * stride_gs
    VALUE_DIM: tl.constexpr = HEAD_DIM if HEAD_DIM_V is None else HEAD_DIM_V
    o = load_tile(out, stride_os, row, length, True, BLOCK_M, VALUE_DIM)
    g = load_tile(dout, stride_gs, row, length, True, BLOCK_M, VALUE_DIM)
    inside = row + rows < length
    at = head.to(tl.int64) * seq_len + first + row + rows
    row_lse = tl.load(lse + at, mask=inside, other=float("inf"))
    sees_keys = tl.abs(row_lse) < float("inf")
    padded = program.to(tl.int64) * BLOCK_M
    tl.store(lse2 + padded + rows, tl.where(sees_keys, row_lse * LOG2E, float("inf")))
    row_delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    if dlse is not None:
        row_delta -= tl.load(dlse + at, mask=inside, other=0.0)
    tl.store(delta + padded + rows, tl.where(sees_keys, row_delta, 0.0))
    if ZERO_DQ:
        zeros = tl.zeros((BLOCK_M * HEAD_DIM,), tl.float32)
        tl.store(dq + padded * HEAD_DIM + tl.arange(0, BLOCK_M * HEAD_DIM), zeros)
    tl.store(workspace + HEADER_WORDS + program, 0)


@triton.jit
def walk(
    dk, dv, k, v, first, last, visit, turns,
    q, dout, stride_qs, stride_gs, lse2, delta, dq, workspace, semaphores, bound_ns,
    n_block, seq_len, seq_len_kv, scale_log2,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, RAGGED: tl.constexpr, POLICY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Steps ``first .. last - 1`` of one KV tile's visit: adds to its dK and dV, and to dQ in turn."""
    next_block = tl.load(visit + first)
    for step in range(first, last):
        m_block = next_block
        next_block = tl.load(visit + step + 1)  # at the end: a word of what follows, unused
        if POLICY == ORDERED:
            turn = tl.load(turns + step)
        row = m_block * BLOCK_M
        rows = row + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q, stride_qs, row, seq_len, RAGGED, BLOCK_M, HEAD_DIM)
        scores = tl.dot(k, tl.trans(q_tile))
        p = tl.math.exp2(scores * scale_log2 - tl.load(lse2 + rows)[None, :])
        if MASK:
            first_row = first_rows(n_block * BLOCK_N, row, seq_len, seq_len_kv, CAUSAL, BLOCK_N)
            p = tl.where(first_row[:, None] <= tl.arange(0, BLOCK_M)[None, :], p, 0.0)
        dout_tile = load_tile(dout, stride_gs, row, seq_len, RAGGED, BLOCK_M, HEAD_DIM)
        dv = tl.dot(p.to(k.dtype), dout_tile, dv)
        dp = tl.dot(v, tl.trans(dout_tile))
        ds = (p * (dp - tl.load(delta + rows)[None, :])).to(k.dtype)
        dk = tl.dot(ds, q_tile, dk)
        if POLICY != NO_DQ:
            part = flatten(tl.dot(tl.trans(ds), k), NUM_WARPS)
            dq_tile = dq + row.to(tl.int64) * HEAD_DIM + tl.arange(0, BLOCK_M * HEAD_DIM)
            if POLICY == ORDERED:
                wait_for_turn(semaphores + m_block, turn, workspace, bound_ns)
                tl.store(dq_tile, part, mask=turn == 0)
                tl.atomic_add(dq_tile, part, mask=turn != 0, sem="relaxed")
                release_turn(semaphores + m_block)
            else:
                tl.atomic_add(dq_tile, part, sem="relaxed")
    return dk, dv


@triton.jit
def run_item(
    ticket, arrays, num_items, num_tiles, num_steps, interleaved, total_heads, heads, num_m,
    q, k, v, dout, lse2, delta, dq, dk, dv, workspace, bound_ns,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_gb, stride_gs, stride_gh, seq_len, seq_len_kv, scale, scale_log2,
    CAUSAL: tl.constexpr, SECTIONS: tl.constexpr, RAGGED: tl.constexpr, POLICY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """All KV tiles of the item that ``ticket`` names (schedules.Launch.head_and_item)."""
    item_begin = arrays + num_items
    kv_tile = item_begin + num_items + 1
    visit_begin = kv_tile + num_tiles
    visit_count = visit_begin + num_tiles
    mask_begin = visit_count + num_tiles
    mask_end = mask_begin + num_tiles
    visit = mask_end + num_tiles
    turns = visit + num_steps

    first_head = ticket // (interleaved * num_items) * interleaved
    width = tl.minimum(interleaved, total_heads - first_head)
    rest = ticket - first_head * num_items
    head = first_head + rest % width
    item = tl.load(arrays + rest // width)

    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    q += b * stride_qb + h * stride_qh
    k += b * stride_kb + h * stride_kh
    v += b * stride_vb + h * stride_vh
    dout += b * stride_gb + h * stride_gh
    dk += (b * seq_len_kv * heads + h) * HEAD_DIM
    dv += (b * seq_len_kv * heads + h) * HEAD_DIM
    first_m = head.to(tl.int64) * num_m
    lse2 += first_m * BLOCK_M
    delta += first_m * BLOCK_M
    dq += first_m * BLOCK_M * HEAD_DIM
    semaphores = workspace + HEADER_WORDS + first_m

    for tile in range(tl.load(item_begin + item), tl.load(item_begin + item + 1)):
        n_block = tl.load(kv_tile + tile)
        begin = tl.load(visit_begin + tile)
        count = tl.load(visit_count + tile)
        bounds = (0, tl.load(mask_begin + tile), tl.load(mask_end + tile), count)
        if SECTIONS == ALL_MASKED:
            bounds = (0, 0, count, count)
        row = n_block * BLOCK_N
        k_tile = load_tile(k, stride_ks, row, seq_len_kv, True, BLOCK_N, HEAD_DIM)
        v_tile = load_tile(v, stride_vs, row, seq_len_kv, True, BLOCK_N, HEAD_DIM)
        dk_tile = tl.zeros((BLOCK_N, HEAD_DIM), tl.float32)
        dv_tile = tl.zeros((BLOCK_N, HEAD_DIM), tl.float32)
        for section in tl.static_range(3):  # plain, masked, plain
            if (SECTIONS >> section) % 2 == 1:
                dk_tile, dv_tile = walk(
                    dk_tile, dv_tile, k_tile, v_tile, bounds[section], bounds[section + 1], visit + begin, turns + begin,
                    q, dout, stride_qs, stride_gs, lse2, delta, dq, workspace, semaphores, bound_ns,
                    n_block, seq_len, seq_len_kv, scale_log2,
                    CAUSAL, section == 1, RAGGED, POLICY, BLOCK_M, BLOCK_N, HEAD_DIM, NUM_WARPS,
                )  # fmt: skip
        store_tile(dk, heads * HEAD_DIM, row, seq_len_kv, dk_tile * scale, BLOCK_N, HEAD_DIM)
        store_tile(dv, heads * HEAD_DIM, row, seq_len_kv, dv_tile, BLOCK_N, HEAD_DIM)


@triton.jit(
    do_not_specialize=[
        "num_items", "num_tiles", "num_steps", "interleaved", "total_heads", "heads", "num_m", "seq_len", "seq_len_kv"
    ]
)  # fmt: skip
def kv_tiles(
    q, k, v, dout, lse2, delta, dq, dk, dv, workspace, arrays,
    num_items, num_tiles, num_steps, interleaved, total_heads, heads, num_m,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_gb, stride_gs, stride_gh, seq_len, seq_len_kv, scale, scale_log2, bound_ns,
    CAUSAL: tl.constexpr, SECTIONS: tl.constexpr, RAGGED: tl.constexpr, POLICY: tl.constexpr, PERSISTENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """The main kernel: dK, dV and (but for two_pass) dQ. One item a CTA, or items until the tickets are used up."""
    tickets = num_items * total_heads
    ticket = tl.atomic_add(workspace, 1, sem="relaxed")
    while ticket < tickets:
        run_item(
            ticket, arrays, num_items, num_tiles, num_steps, interleaved, total_heads, heads, num_m,
            q, k, v, dout, lse2, delta, dq, dk, dv, workspace, bound_ns,
            stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
            stride_gb, stride_gs, stride_gh, seq_len, seq_len_kv, scale, scale_log2,
            CAUSAL, SECTIONS, RAGGED, POLICY, BLOCK_M, BLOCK_N, HEAD_DIM, NUM_WARPS,
        )  # fmt: skip
        if PERSISTENT:
            ticket = tl.atomic_add(workspace, 1, sem="relaxed")
        else:
            ticket = tickets


@triton.jit
def add_kv_tiles(
    dq, q, dout, lse2, delta, first, last, k, v, stride_ks, stride_vs, row, seq_len, seq_len_kv, scale_log2,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    for n_block in range(first, last):
        col = n_block * BLOCK_N
        k_tile = load_tile(k, stride_ks, col, seq_len_kv, MASK, BLOCK_N, HEAD_DIM)
        v_tile = load_tile(v, stride_vs, col, seq_len_kv, MASK, BLOCK_N, HEAD_DIM)
        p = tl.math.exp2(tl.dot(q, tl.trans(k_tile)) * scale_log2 - lse2[:, None])
        if MASK:
            first_row = first_rows(col, row, seq_len, seq_len_kv, CAUSAL, BLOCK_N)
            p = tl.where(first_row[None, :] <= tl.arange(0, BLOCK_M)[:, None], p, 0.0)
        ds = (p * (tl.dot(dout, tl.trans(v_tile)) - delta[:, None])).to(q.dtype)
        dq = tl.dot(ds, k_tile, dq)
    return dq


@triton.jit(do_not_specialize=["heads", "num_m", "seq_len", "seq_len_kv"])
def dq_tiles(
    q, k, v, dout, lse2, delta, dq, heads, num_m,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_gb, stride_gs, stride_gh, seq_len, seq_len_kv, scale, scale_log2,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """The dQ pass of two_pass: a CTA owns one Q tile and adds its KV tiles in ascending order (longest first)."""
    head = tl.program_id(0) // num_m
    m_block = num_m - 1 - tl.program_id(0) % num_m
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    row = m_block * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    q += b * stride_qb + h * stride_qh
    dout += b * stride_gb + h * stride_gh
    q_tile = load_tile(q, stride_qs, row, seq_len, True, BLOCK_M, HEAD_DIM)
    dout_tile = load_tile(dout, stride_gs, row, seq_len, True, BLOCK_M, HEAD_DIM)
    padded = (head.to(tl.int64) * num_m + m_block) * BLOCK_M
    lse2_rows = tl.load(lse2 + padded + rows)
    delta_rows = tl.load(delta + padded + rows)
    k += b * stride_kb + h * stride_kh
    v += b * stride_vb + h * stride_vh
    keys = seq_len_kv  # that the tile's last row sees, and those that all its rows see
    keys_of_all = seq_len_kv
    if CAUSAL:
        keys = tl.maximum(tl.minimum(row + BLOCK_M, seq_len) + seq_len_kv - seq_len, 0)
        keys_of_all = tl.minimum(tl.maximum(row + 1 + seq_len_kv - seq_len, 0), seq_len_kv)
    bounds = (0, keys_of_all // BLOCK_N, (keys + BLOCK_N - 1) // BLOCK_N)
    dq_tile = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for section in tl.static_range(2):  # plain, masked
        dq_tile = add_kv_tiles(
            dq_tile, q_tile, dout_tile, lse2_rows, delta_rows, bounds[section], bounds[section + 1],
            k, v, stride_ks, stride_vs, row, seq_len, seq_len_kv, scale_log2,
            CAUSAL, section == 1, BLOCK_M, BLOCK_N, HEAD_DIM,
        )  # fmt: skip
    dq += (b * seq_len * heads + h) * HEAD_DIM
    store_tile(dq, heads * HEAD_DIM, row, seq_len, dq_tile * scale, BLOCK_M, HEAD_DIM)


@triton.jit(do_not_specialize=["heads", "num_m", "seq_len"])
def cast_tiles(
    accumulated, dq, workspace, record, heads, num_m, seq_len, scale,
    POLICY: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """dQ in the output's dtype: scaled; 0 where nothing was added; NaN everywhere once a turn has not come.

    In that case the first program copies what the header says of it to ``record`` (host memory): 1, head, Q tile,
    turn, contributions seen. NUM_WARPS is that of the main kernel.
    """
    program = tl.program_id(0)
    head = program // num_m
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    source = (
        accumulated + program.to(tl.int64) * (BLOCK_M * HEAD_DIM) + tl.arange(0, BLOCK_M * HEAD_DIM)
    )
    if POLICY == ORDERED:
        contributions = tl.load(workspace + HEADER_WORDS + program)
        vector = tl.load(source, mask=contributions != 0, other=0.0)
        aborted = tl.load(workspace + 1) != 0
        vector = tl.where(aborted, float("nan"), vector)
        if aborted & (program == 0):
            late = tl.load(workspace + 2)
            tl.store(record + 1, late // num_m)
            tl.store(record + 2, late % num_m)
            tl.store(record + 3, tl.load(workspace + 3))
            tl.store(record + 4, tl.load(workspace + 4))
            tl.store(record, 1)
    else:
        vector = tl.load(source)
    tile = unflatten(vector * scale, BLOCK_M, HEAD_DIM, NUM_WARPS)
    dq += (b * seq_len * heads + h) * HEAD_DIM
    store_tile(dq, heads * HEAD_DIM, program % num_m * BLOCK_M, seq_len, tile, BLOCK_M, HEAD_DIM)
