"""Attention backward in plain Triton, for compute capability 8.0 and up: one kernel for every schedule kind.

A CTA takes one item of one head: it keeps a KV tile (K, V, dK, dV), walks the Q tiles that the schedule's arrays
name, and adds its part of dQ to an fp32 buffer when the turnstile says that its turn has come.

portable_turnstile.py says how the order of addition is kept.

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
from dash_kernels.kernels.portable_tiles import (
    LOG2E,
    first_rows,
    flatten,
    load_tile,
    sees,
    store_tile,
    tanh,
    unflatten,
)
from dash_kernels.kernels.portable_turnstile import peek_turn, signal_turn, wait_for_turn
from dash_kernels.kernels.sequences import turn_of

UNORDERED, ORDERED, NO_DQ = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Words of the workspace before the semaphores: ticket, abort flag, late tile, its turn, what it saw, then room. The last
# is signalled where there is nothing to signal; nothing reads it.
HEADER_WORDS = tl.constexpr(32)
SPARE_WORD = tl.constexpr(31)
# SECTIONS has a bit each for loops over plain, masked and plain steps (1, 2, 4); this value masks all steps in one.
ALL_MASKED = tl.constexpr(runtime.ALL_MASKED)
KV_TILE_WORDS = tl.constexpr(sequences.KV_TILE_WORDS)
Q_TILE_WORDS = tl.constexpr(sequences.Q_TILE_WORDS)


@triton.jit(do_not_specialize=["heads", "num_m", "seq_len"])
def prepare_tiles(
    out, dout, lse, lse2, delta, dq, workspace, stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh,
    heads, num_m, seq_len,
    ZERO_DQ: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr = None,
    dlse=None, tiles=None, counts=None, WIDTH: tl.constexpr = None, SEMAPHORES: tl.constexpr = 1,
    PIECES: tl.constexpr = 1, FOLDED: tl.constexpr = False,
):  # fmt: skip
    """Row sums of out * dout less dlse, LSE in base 2, and a cleared workspace: one Q tile of one head a program.

    ``lse`` and ``dlse`` are (batch, heads, seq_len), contiguous. ``lse2`` and ``delta`` have BLOCK_M rows a tile, tile
    ``head * num_m + m_block``; LSE is +inf for rows past the end, so that P is 0 there. HEAD_DIM is that of ``dq``,
    HEAD_DIM_V that of ``out`` and ``dout`` (None: the same), of which WIDTH columns are there (None: all). A Q tile has
    so many SEMAPHORES and, of dQ, PIECES of HEAD_DIM columns. FOLDED: rows of a tile in hopper_shared.folded_layout's order. Packed sequences: ``tiles`` and ``counts`` of a
    SequencePlan, ``num_m`` its max_q_tiles, ``seq_len`` the rows of all of them, batch 1.
    """
    # Backwards: what the main kernel reads first is still in the L2 cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
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
    o = load_tile(out, stride_os, row, length, True, BLOCK_M, VALUE_DIM, WIDTH)
    g = load_tile(dout, stride_gs, row, length, True, BLOCK_M, VALUE_DIM, WIDTH)
    inside = row + rows < length
    at = head.to(tl.int64) * seq_len + first + row + rows
    row_lse = tl.load(lse + at, mask=inside, other=float("inf"))
    sees_keys = tl.abs(row_lse) < float("inf")
    padded = program.to(tl.int64) * BLOCK_M
    place = padded + rows
    if FOLDED:
        low = (rows & 1) | ((rows >> 2) & 2) | ((rows << 1) & 12)
        place = padded + ((rows & -16) | low)
    tl.store(lse2 + place, tl.where(sees_keys, row_lse * LOG2E, float("inf")))
    row_delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    if dlse is not None:
        row_delta -= tl.load(dlse + at, mask=inside, other=0.0)
    tl.store(delta + place, tl.where(sees_keys, row_delta, 0.0))
    if ZERO_DQ:
        zeros = tl.zeros((BLOCK_M * HEAD_DIM,), tl.float32)
        target = dq + padded * (HEAD_DIM * PIECES) + tl.arange(0, BLOCK_M * HEAD_DIM)
        for piece in tl.static_range(PIECES):
            tl.store(target + piece * (BLOCK_M * HEAD_DIM), zeros)
    semaphores = workspace + HEADER_WORDS + program * SEMAPHORES
    tl.store(semaphores + tl.arange(0, SEMAPHORES), 0)


@triton.jit
def walk(
    dk, dv, signal, k, v, first, last, n_block, m_first, visit, turns, query_head, lengths, factors, workspace, bound_ns,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr,
    VARLEN: tl.constexpr, DESCENDING: tl.constexpr, RAGGED: tl.constexpr, POLICY: tl.constexpr, DQ_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Steps ``first .. last - 1`` of a KV tile's visit for one query head: adds to dK and dV, and to dQ in turn."""
    q, dout, stride_qs, stride_gs, lse2, delta, dq, semaphores = query_head
    seq_len, seq_len_kv, left, right = lengths
    scale_log2, cap_log2 = factors
    if not VARLEN:
        next_block = tl.load(visit + first)
    for step in range(first, last):
        if VARLEN:
            m_block = m_first + step
            turn = turn_of(
                n_block, m_block, seq_len, seq_len_kv, left, right, DESCENDING, BLOCK_M, BLOCK_N
            )
        else:
            m_block = next_block
            next_block = tl.load(visit + step + 1)  # at the end: a word of what follows, unused
            if POLICY == ORDERED:
                turn = tl.load(turns + step)
        if POLICY == ORDERED:
            peeked = peek_turn(semaphores + m_block)
        row = m_block * BLOCK_M
        rows = row + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q, stride_qs, row, seq_len, RAGGED, BLOCK_M, HEAD_DIM)
        scores = tl.dot(k, tl.trans(q_tile))
        if SOFTCAP:
            capped = tanh(scores * scale_log2)
            p = tl.math.exp2(capped * cap_log2 - tl.load(lse2 + rows)[None, :])
        else:
            p = tl.math.exp2(scores * scale_log2 - tl.load(lse2 + rows)[None, :])
        if MASK:
            first_row = first_rows(
                n_block * BLOCK_N, row, seq_len, seq_len_kv, right, CAUSAL, WINDOWED, BLOCK_N
            )
            seen = sees(tl.arange(0, BLOCK_M)[None, :], first_row[:, None], left, right, WINDOWED)
            p = tl.where(seen, p, 0.0)
        dout_tile = load_tile(dout, stride_gs, row, seq_len, RAGGED, BLOCK_M, HEAD_DIM_V)
        dv = tl.dot(p.to(k.dtype), dout_tile, dv)
        if POLICY == ORDERED:
            came = signal_turn(signal, peeked, turn)
        if SOFTCAP:
            p *= 1.0 - capped * capped
        dp = tl.dot(v, tl.trans(dout_tile))
        ds = (p * (dp - tl.load(delta + rows)[None, :])).to(k.dtype)
        dk = tl.dot(ds, q_tile, dk)
        if POLICY != NO_DQ:
            if DQ_TRANSPOSED:
                part = flatten(tl.dot(tl.trans(k), ds), NUM_WARPS)
            else:
                part = flatten(tl.dot(tl.trans(ds), k), NUM_WARPS)
            dq_tile = dq + row.to(tl.int64) * HEAD_DIM + tl.arange(0, BLOCK_M * HEAD_DIM)
            if POLICY == ORDERED:
                wait_for_turn(came, semaphores + m_block, turn, workspace, bound_ns)
                tl.store(dq_tile, part, mask=turn == 0)
                tl.atomic_add(dq_tile, part, mask=turn != 0, sem="relaxed")
                signal = semaphores + m_block
            else:
                tl.atomic_add(dq_tile, part, sem="relaxed")
    return dk, dv, signal


@triton.jit
def walk_head(
    dk, dv, signal, k, v, member, n_block, bounds, m_first, visit, turns, rows, strides, num_m, lengths, factors, workspace, bound_ns,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, VARLEN: tl.constexpr,
    DESCENDING: tl.constexpr, SECTIONS: tl.constexpr, RAGGED: tl.constexpr, POLICY: tl.constexpr, DQ_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """The whole visit of a KV tile for query head ``member`` of its group, masked steps in a loop of their own."""
    q, dout, lse2, delta, dq, semaphores = rows
    stride_qs, stride_qh, stride_gs, stride_gh = strides
    tiles = member * num_m
    head = (
        q + member * stride_qh, dout + member * stride_gh, stride_qs, stride_gs,
        lse2 + tiles * BLOCK_M, delta + tiles * BLOCK_M, dq + tiles * (BLOCK_M * HEAD_DIM), semaphores + tiles,
    )  # fmt: skip
    for section in tl.static_range(3):  # plain, masked, plain; with a window: masked, plain, masked
        if (SECTIONS >> section) % 2 == 1:
            dk, dv, signal = walk(
                dk, dv, signal, k, v, bounds[section], bounds[section + 1], n_block, m_first, visit, turns,
                head, lengths, factors, workspace, bound_ns,
                SECTIONS == ALL_MASKED or (section == 1) != WINDOWED, CAUSAL, WINDOWED, SOFTCAP,
                VARLEN, DESCENDING, RAGGED, POLICY, DQ_TRANSPOSED, BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V, NUM_WARPS,
            )  # fmt: skip
    return dk, dv, signal


@triton.jit
def run_kv_tile(
    k, v, dk_head, dv_head, heads_kv, group, n_block, bounds, m_first, visit, turns, kv_strides, rows, strides, num_m,
    lengths, factors, scale, workspace, bound_ns,
    GROUPED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, VARLEN: tl.constexpr,
    DESCENDING: tl.constexpr, SECTIONS: tl.constexpr, RAGGED: tl.constexpr, POLICY: tl.constexpr, DQ_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """dK and dV of one KV tile: its visit for the query heads of its group, one after another in head order."""
    seq_len_kv = lengths[1]
    row = n_block * BLOCK_N
    k_tile = load_tile(k, kv_strides[0], row, seq_len_kv, True, BLOCK_N, HEAD_DIM)
    v_tile = load_tile(v, kv_strides[1], row, seq_len_kv, True, BLOCK_N, HEAD_DIM_V)
    dk = tl.zeros((BLOCK_N, HEAD_DIM), tl.float32)
    dv = tl.zeros((BLOCK_N, HEAD_DIM_V), tl.float32)
    signal = workspace + SPARE_WORD  # the contribution that is still to be signalled: none
    if SECTIONS == ALL_MASKED:
        bounds = (0, 0, bounds[3], bounds[3])
    if GROUPED:
        for member in range(group):
            dk, dv, signal = walk_head(
                dk, dv, signal, k_tile, v_tile, tl.cast(member, tl.int64), n_block, bounds, m_first, visit, turns, rows, strides, num_m,
                lengths, factors, workspace, bound_ns, CAUSAL, WINDOWED, SOFTCAP, VARLEN, DESCENDING, SECTIONS, RAGGED,
                POLICY, DQ_TRANSPOSED, BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V, NUM_WARPS,
            )  # fmt: skip
    else:
        dk, dv, signal = walk_head(
            dk, dv, signal, k_tile, v_tile, 0, n_block, bounds, m_first, visit, turns, rows, strides, num_m,
            lengths, factors, workspace, bound_ns, CAUSAL, WINDOWED, SOFTCAP, VARLEN, DESCENDING, SECTIONS, RAGGED,
            POLICY, DQ_TRANSPOSED, BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V, NUM_WARPS,
        )  # fmt: skip
    if POLICY == ORDERED:
        signal_turn(signal, 0, 0)
    store_tile(dk_head, heads_kv * HEAD_DIM, row, seq_len_kv, dk * scale, BLOCK_N, HEAD_DIM)
    store_tile(dv_head, heads_kv * HEAD_DIM_V, row, seq_len_kv, dv, BLOCK_N, HEAD_DIM_V)


@triton.jit
def run_item(
    ticket, arrays, num_items, num_tiles, num_steps, interleaved, total_heads, heads_kv, group, num_m,
    q, k, v, dout, lse2, delta, dq, dk, dv, workspace, bound_ns,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_gb, stride_gs, stride_gh, seq_len, seq_len_kv, left, right, scale, scale_log2, cap_log2,
    GROUPED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, VARLEN: tl.constexpr,
    DESCENDING: tl.constexpr, SECTIONS: tl.constexpr, RAGGED: tl.constexpr, POLICY: tl.constexpr, DQ_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """All KV tiles of the item that ``ticket`` names (schedules.Launch.head_and_item), of one KV head."""
    first_head = ticket // (interleaved * num_items) * interleaved
    width = tl.minimum(interleaved, total_heads - first_head)
    rest = ticket - first_head * num_items
    kv_head = first_head + rest % width
    position = rest // width

    b = (kv_head // heads_kv).to(tl.int64)
    h = (kv_head % heads_kv).to(tl.int64)
    q += b * stride_qb + h * group * stride_qh
    k += b * stride_kb + h * stride_kh
    v += b * stride_vb + h * stride_vh
    dout += b * stride_gb + h * group * stride_gh
    dk += (b * seq_len_kv * heads_kv + h) * HEAD_DIM
    dv += (b * seq_len_kv * heads_kv + h) * HEAD_DIM_V
    first_m = kv_head.to(tl.int64) * group * num_m
    strides = (stride_qs, stride_qh, stride_gs, stride_gh)
    factors = (scale_log2, cap_log2)

    if VARLEN:
        tile = arrays + position.to(tl.int64) * KV_TILE_WORDS
        q_start = tl.load(tile).to(tl.int64)
        k_start = tl.load(tile + 1).to(tl.int64)
        lengths = (tl.load(tile + 2), tl.load(tile + 3), left, right)
        first_m += tl.load(tile + 4)
        bounds = (0, tl.load(tile + 8), tl.load(tile + 9), tl.load(tile + 7))
        rows = (
            q + q_start * stride_qs, dout + q_start * stride_gs, lse2 + first_m * BLOCK_M, delta + first_m * BLOCK_M,
            dq + first_m * (BLOCK_M * HEAD_DIM), workspace + HEADER_WORDS + first_m,
        )  # fmt: skip
        run_kv_tile(
            k + k_start * stride_ks, v + k_start * stride_vs, dk + k_start * heads_kv * HEAD_DIM,
            dv + k_start * heads_kv * HEAD_DIM_V, heads_kv, group, tl.load(tile + 5), bounds, tl.load(tile + 6),
            arrays, arrays, (stride_ks, stride_vs), rows, strides, num_m, lengths, factors, scale, workspace, bound_ns,
            GROUPED, CAUSAL, WINDOWED, SOFTCAP, VARLEN, DESCENDING, SECTIONS, RAGGED, POLICY, DQ_TRANSPOSED,
            BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V, NUM_WARPS,
        )  # fmt: skip
    else:
        item_begin = arrays + num_items
        kv_tile = item_begin + num_items + 1
        visit_begin = kv_tile + num_tiles
        visit_count = visit_begin + num_tiles
        mask_begin = visit_count + num_tiles
        mask_end = mask_begin + num_tiles
        visit = mask_end + num_tiles
        turns = visit + num_steps
        item = tl.load(arrays + position)
        rows = (
            q, dout, lse2 + first_m * BLOCK_M, delta + first_m * BLOCK_M, dq + first_m * (BLOCK_M * HEAD_DIM),
            workspace + HEADER_WORDS + first_m,
        )  # fmt: skip
        for tile in range(tl.load(item_begin + item), tl.load(item_begin + item + 1)):
            begin = tl.load(visit_begin + tile)
            bounds = (
                0, tl.load(mask_begin + tile), tl.load(mask_end + tile), tl.load(visit_count + tile)
            )  # fmt: skip
            run_kv_tile(
                k, v, dk, dv, heads_kv, group, tl.load(kv_tile + tile), bounds, 0, visit + begin, turns + begin,
                (stride_ks, stride_vs), rows, strides, num_m, (seq_len, seq_len_kv, left, right), factors, scale,
                workspace, bound_ns,
                GROUPED, CAUSAL, WINDOWED, SOFTCAP, VARLEN, DESCENDING, SECTIONS, RAGGED, POLICY, DQ_TRANSPOSED,
                BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V, NUM_WARPS,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "num_items", "num_tiles", "num_steps", "interleaved", "total_heads", "heads_kv", "group", "num_m",
        "seq_len", "seq_len_kv", "left", "right",
    ]
)  # fmt: skip
def kv_tiles(
    q, k, v, dout, lse2, delta, dq, dk, dv, workspace, arrays, counts,
    num_items, num_tiles, num_steps, interleaved, total_heads, heads_kv, group, num_m,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_gb, stride_gs, stride_gh, seq_len, seq_len_kv, left, right, scale, scale_log2, cap_log2, bound_ns,
    GROUPED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, VARLEN: tl.constexpr,
    DESCENDING: tl.constexpr, SECTIONS: tl.constexpr, RAGGED: tl.constexpr, POLICY: tl.constexpr, DQ_TRANSPOSED: tl.constexpr,
    PERSISTENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """The main kernel: dK, dV and (but for two_pass) dQ. One item a CTA, or items until the tickets are used up.

    ``arrays`` holds a schedule, of which an item has one KV head; packed sequences: ``kv_tiles`` of a SequencePlan,
    whose tiles are the items, and its ``counts``. ``total_heads`` counts KV heads.
    """
    if VARLEN:
        num_items = tl.load(counts)
    tickets = num_items * total_heads
    ticket = tl.atomic_add(workspace, 1, sem="relaxed")
    while ticket < tickets:
        run_item(
            ticket, arrays, num_items, num_tiles, num_steps, interleaved, total_heads, heads_kv, group, num_m,
            q, k, v, dout, lse2, delta, dq, dk, dv, workspace, bound_ns,
            stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
            stride_gb, stride_gs, stride_gh, seq_len, seq_len_kv, left, right, scale, scale_log2, cap_log2,
            GROUPED, CAUSAL, WINDOWED, SOFTCAP, VARLEN, DESCENDING, SECTIONS, RAGGED, POLICY, DQ_TRANSPOSED,
            BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V, NUM_WARPS,
        )  # fmt: skip
        if PERSISTENT:
            ticket = tl.atomic_add(workspace, 1, sem="relaxed")
        else:
            ticket = tickets


@triton.jit(do_not_specialize=["heads", "num_m", "seq_len"])
def cast_tiles(
    accumulated, dq, workspace, record, tiles, counts, heads, num_m, seq_len, scale,
    POLICY: tl.constexpr, DQ_TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """dQ in the output's dtype: scaled; 0 where nothing was added; NaN everywhere once a turn has not come.

    In that case the first program copies what the header says of it to ``record`` (host memory): 1, head, Q tile,
    turn, contributions seen. NUM_WARPS and DQ_TRANSPOSED are the main kernel's; ``tiles`` and ``counts`` as in ``prepare_tiles``.
    """
    program = tl.program_id(0)
    head = program // num_m
    m_block = program % num_m
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    dq += (b * seq_len * heads + h) * HEAD_DIM
    if POLICY == ORDERED:
        aborted = tl.load(workspace + 1) != 0
        if aborted & (program == 0):
            late = tl.load(workspace + 2)
            tl.store(record + 1, late // num_m)
            tl.store(record + 2, late % num_m)
            tl.store(record + 3, tl.load(workspace + 3))
            tl.store(record + 4, tl.load(workspace + 4))
            tl.store(record, 1)
    if tiles is not None:
        if m_block >= tl.load(counts + 1):
            return
        tile = tiles + m_block.to(tl.int64) * Q_TILE_WORDS
        dq += tl.load(tile).to(tl.int64) * heads * HEAD_DIM
        seq_len = tl.load(tile + 1)
        m_block = tl.load(tile + 2)
    source = (
        accumulated + program.to(tl.int64) * (BLOCK_M * HEAD_DIM) + tl.arange(0, BLOCK_M * HEAD_DIM)
    )
    if POLICY == ORDERED:
        contributions = tl.load(workspace + HEADER_WORDS + program)
        vector = tl.load(source, mask=contributions != 0, other=0.0)
        vector = tl.where(aborted, float("nan"), vector)
    else:
        vector = tl.load(source)
    if DQ_TRANSPOSED:
        tile = tl.trans(unflatten(vector * scale, HEAD_DIM, BLOCK_M, NUM_WARPS))
    else:
        tile = unflatten(vector * scale, BLOCK_M, HEAD_DIM, NUM_WARPS)
    store_tile(dq, heads * HEAD_DIM, m_block * BLOCK_M, seq_len, tile, BLOCK_M, HEAD_DIM)
