"""The backward main kernel for Hopper: one persistent CTA per SM, driven by schedule arrays.

Warp roles. Eight consumer warps hold dK and dV of one KV tile in registers and run the five matmuls; one producer warp
draws tickets, decodes them and keeps the copy engine busy; one writer warp adds dQ tiles to global memory in their
turn. A KV tile passes through the roles as a small record in shared memory, so a CTA can start loading the next tile
while the writer still waits for the turns of the last one.

Per step (one Q tile): S^T = K Q^T and dP^T = V dO^T, P = exp2(S * scale - LSE), dS = P * (dP - delta), then
dV += P^T dO, dQ = dS K (through shared memory, both warpgroups' halves), dK += dS^T Q. dQ leaves in a flat permuted
fp32 layout in which its store to shared memory has no bank conflicts; the cast pass undoes it.

dK and dV leave through the same ring of stages as dQ, so the epilogue needs no buffer and no wait of its own.
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

from dash_kernels.kernels.compat import (
    permute_axes,
    reinterpret,
    thread_barrier,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
)
from dash_kernels.kernels.turnstile import (
    await_turn,
    draw_ticket,
    fence_acquired,
    poll_turn,
    report_timeout,
    signal_turn,
    wait_reduced,
)

# The workspace: a header (the ticket, then what turnstile.report_timeout writes) and a semaphore a head and Q tile.
HEADER_WORDS = gl.constexpr(32)
UNORDERED, ORDERED, NO_DQ = (gl.constexpr(policy) for policy in range(3))
NO_MASK, CAUSAL_MASK, TAIL_MASK = (gl.constexpr(mask) for mask in range(3))
# Words of a KV tile's record in shared memory: steps; batch and head; first of the head's Q tiles among all; first key;
# where its steps begin in the arrays; masked steps; steps that this CTA did before it. A count of -1 ends the stream.
# What the producer works out once costs the other roles no registers.
COUNT, BATCH, HEAD, Q_TILES, KEY, FIRST, MASK_BEGIN, MASK_END, STEP = (
    gl.constexpr(word) for word in range(9)
)
RECORD_WORDS = gl.constexpr(9)


@gluon.constexpr_function
def flat_order(block_m, head_dim):
    """Permutation of the index bits of a dQ tile, rows then columns from the high bit, into the flat layout."""
    rows, cols = block_m.bit_length() - 1, head_dim.bit_length() - 1
    r = lambda bit: rows - 1 - bit  # noqa: E731
    c = lambda bit: rows + cols - 1 - bit  # noqa: E731
    split = block_m == 64  # eight warps over 64 rows: the top column bit goes to the warps
    warps = [c(cols - 1)] if split else [r(6)]
    registers = [c(bit) for bit in range(cols - 2 if split else cols - 1, 2, -1)]
    return [*warps, r(5), r(4), *registers, r(2), r(1), r(0), c(2), c(1), r(3), c(0)]


@gluon.constexpr_function
def flat_layout(block_m, head_dim):
    """Register layout of the flat dQ tile that equals, register for register, the accumulator's."""
    high = (block_m * head_dim // 256).bit_length() - 1  # bits of the flat tile's row index
    registers = [[0, 1], [0, 2], [0, 128]] + [[1 << bit, 0] for bit in range(high - 3)]
    lanes = [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]
    warps = [[1 << (high - 3 + bit), 0] for bit in range(3)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [block_m * head_dim // 256, 256])


@gluon.constexpr_function
def accumulator_layout(cols, split):
    """Accumulator of eight warps: over 128 rows, or over 64 rows with the columns split in two."""
    warps = [4, 2] if split else [8, 1]
    return gl.NVMMADistributedLayout([3, 0], warps, [16, cols // 2 if split else cols, 16])


@gluon.constexpr_function
def bits(count):
    return [2] * count


@gluon.jit
def flatten_dq(dq, M: gl.constexpr, D: gl.constexpr):
    BITS: gl.constexpr = (M * D).bit_length() - 1
    tile = permute_axes(dq.reshape(bits(BITS)), flat_order(M, D))
    return gl.convert_layout(
        tile.reshape([M * D // 256, 256]), flat_layout(M, D), assert_trivial=True
    )


@gluon.jit
def read_scalar(word):
    """A [1] tile of shared memory as a scalar, the same in every thread."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(word.load(layout), axis=0)


@gluon.jit
def write_scalar(word, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    word.store(gl.full([1], 0, gl.int32, layout) + value)


@gluon.jit
def read_word(tile_s, tile, word: gl.constexpr):
    """A word of the record of the ``tile``-th KV tile of this CTA, the same in every thread."""
    return read_scalar(tile_s.index((tile & 1) * RECORD_WORDS + word))


@gluon.jit
def write_word(tile_s, tile, word: gl.constexpr, value):
    write_scalar(tile_s.index((tile & 1) * RECORD_WORDS + word), value)


@gluon.jit
def producer(
    q_desc, do_desc, lse_desc, delta_desc, k_desc, v_desc, k_s, v_s, q_s, do_s, lse_s, delta_s, reach_s,
    tile_s, tile_full, tile_empty, kv_full, kv_empty, q_full, do_full, q_empty, done, workspace, arrays,
    num_items, num_tiles, num_heads, heads, interleave, num_m, causal_offset, seq_len_kv, MASK: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, ORDER_OF_START: gl.constexpr,
):  # fmt: skip
    KV_BYTES: gl.constexpr = N * D * 2
    Q_BYTES: gl.constexpr = M * D * 2
    item_begin = arrays + num_items
    kv_tile = item_begin + num_items + 1
    visit = kv_tile + num_tiles * 5
    tickets = num_items * num_heads
    step = 0
    tile = 0
    ticket = draw_ticket(workspace)
    while ticket < tickets:
        block = ticket // (interleave * num_items)
        first = block * interleave
        width = gl.minimum(interleave, num_heads - first)
        rest = ticket - first * num_items
        head = first + rest % width
        item = gl.load(arrays + rest // width)
        b = head // heads
        h = head % heads
        for j in range(gl.load(item_begin + item), gl.load(item_begin + item + 1)):
            n_block = gl.load(kv_tile + j)
            first_step = gl.load(kv_tile + num_tiles + j)
            count = gl.load(kv_tile + num_tiles * 2 + j)
            mbarrier.wait(tile_empty.index(tile & 1), ((tile >> 1) & 1) ^ 1)
            write_word(tile_s, tile, COUNT, count)
            write_word(tile_s, tile, BATCH, b)
            write_word(tile_s, tile, HEAD, h)
            write_word(tile_s, tile, Q_TILES, head * num_m)
            write_word(tile_s, tile, KEY, n_block * N)
            write_word(tile_s, tile, FIRST, num_items * 2 + 1 + num_tiles * 5 + first_step)
            write_word(tile_s, tile, MASK_BEGIN, gl.load(kv_tile + num_tiles * 3 + j))
            write_word(tile_s, tile, MASK_END, gl.load(kv_tile + num_tiles * 4 + j))
            write_word(tile_s, tile, STEP, step)
            mbarrier.arrive(tile_full.index(tile & 1))
            m_block = gl.load(visit + first_step)
            mbarrier.wait(kv_empty, (tile & 1) ^ 1)
            mbarrier.expect(kv_full, 2 * KV_BYTES)
            tma_load(k_desc, [b, h, n_block * N, 0], kv_full, k_s)
            tma_load(v_desc, [b, h, n_block * N, 0], kv_full, v_s)
            for i in range(count):
                stage = step % STAGES
                mbarrier.wait(q_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                if MASK == CAUSAL_MASK:
                    write_scalar(
                        reach_s.index(stage), m_block * M + causal_offset + 1 - n_block * N
                    )
                elif MASK == TAIL_MASK:
                    write_scalar(reach_s.index(stage), seq_len_kv - n_block * N)
                row = (head * num_m + m_block) * M
                mbarrier.expect(q_full.index(stage), Q_BYTES + M * 4)
                tma_load(q_desc, [b, h, m_block * M, 0], q_full.index(stage), q_s.index(stage))
                tma_load(lse_desc, [row], q_full.index(stage), lse_s.index(stage))
                mbarrier.expect(do_full.index(stage), Q_BYTES + M * 4)
                tma_load(do_desc, [b, h, m_block * M, 0], do_full.index(stage), do_s.index(stage))
                tma_load(delta_desc, [row], do_full.index(stage), delta_s.index(stage))
                step += 1
                m_block = gl.load(visit + first_step + i + 1)
            # A ticket drawn while this tile still waits for turns would delay everyone who waits for that ticket's item.
            mbarrier.wait(done, tile & 1)
            tile += 1
        ticket = draw_ticket(workspace)
    mbarrier.wait(tile_empty.index(tile & 1), ((tile >> 1) & 1) ^ 1)
    write_word(tile_s, tile, COUNT, -1)
    mbarrier.arrive(tile_full.index(tile & 1))


@gluon.jit
def writer(
    dq_desc, dk_desc, dv_desc, dq_s, ring_full, ring_empty, out_full, out_empty, tile_s, tile_full, tile_empty, done,
    workspace, bound_us, arrays, num_steps,
    M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, DQ_STAGES: gl.constexpr, POLICY: gl.constexpr,
    DEFERRED: gl.constexpr, ORDER_OF_START: gl.constexpr,
):  # fmt: skip
    DQ_ROWS: gl.constexpr = M * D // 256
    semaphores = workspace + HEADER_WORDS
    tile = 0
    mbarrier.wait(tile_full.index(0), 0)
    while read_word(tile_s, tile, COUNT) >= 0:
        q_tiles = read_word(tile_s, tile, Q_TILES)
        first = read_word(tile_s, tile, STEP)
        end = first + read_word(tile_s, tile, COUNT)
        visit = arrays + (read_word(tile_s, tile, FIRST) - first)
        # The producer may draw the next ticket once no turn but the last step's can hold this tile up. A kind that waits
        # on later CTAs must not hold a ticket it has not started at all.
        release = gl.maximum(end - 2, first)
        if POLICY == NO_DQ:
            mbarrier.arrive(done)
        else:
            pending = -1  # Q tile whose reduce is issued and whose signal is still owed
            for ring in range(first, end):
                q_tile = q_tiles + gl.load(visit + ring)
                stage = ring % DQ_STAGES
                row = q_tile * DQ_ROWS
                if POLICY == UNORDERED:
                    mbarrier.wait(ring_full.index(stage), (ring // DQ_STAGES) & 1)
                    tma_reduce_add(dq_desc, [row, 0], dq_s.index(stage))
                    tma_store_wait(0)
                    mbarrier.arrive(ring_empty.index(stage))
                else:
                    turn = gl.load(visit + num_steps + ring)
                    semaphore = semaphores + q_tile
                    mbarrier.wait(ring_full.index(stage), (ring // DQ_STAGES) & 1)
                    if DEFERRED:
                        seen = poll_turn(semaphore)
                        if seen != turn:
                            # Pay the owed signal before waiting, or two CTAs wait for each other.
                            if pending >= 0:
                                wait_reduced(0)
                                mbarrier.arrive(
                                    ring_empty.index((ring + DQ_STAGES - 1) % DQ_STAGES)
                                )
                                signal_turn(semaphores + pending)
                                pending = -1
                            seen = await_turn(semaphore, turn, workspace, bound_us)
                    else:
                        seen = await_turn(semaphore, turn, workspace, bound_us)
                    if seen != turn:
                        report_timeout(workspace, q_tile, turn, seen)
                    fence_acquired()
                    if turn == 0:
                        tma_store(dq_desc, [row, 0], dq_s.index(stage))
                    else:
                        tma_reduce_add(dq_desc, [row, 0], dq_s.index(stage))
                    if DEFERRED:
                        if pending >= 0:
                            wait_reduced(1)
                            mbarrier.arrive(ring_empty.index((ring + DQ_STAGES - 1) % DQ_STAGES))
                            signal_turn(semaphores + pending)
                        pending = q_tile
                    else:
                        tma_store_wait(0)
                        mbarrier.arrive(ring_empty.index(stage))
                        wait_reduced(0)
                        signal_turn(semaphore)
                if not ORDER_OF_START:
                    if ring == release:
                        mbarrier.arrive(done)
            if POLICY == ORDERED and DEFERRED:
                if pending >= 0:
                    wait_reduced(0)
                    mbarrier.arrive(ring_empty.index((end + DQ_STAGES - 1) % DQ_STAGES))
                    signal_turn(semaphores + pending)
            if ORDER_OF_START or first == end:
                mbarrier.arrive(done)
        end = read_word(tile_s, tile, STEP) + read_word(tile_s, tile, COUNT)
        b = read_word(tile_s, tile, BATCH)
        h = read_word(tile_s, tile, HEAD)
        row = read_word(tile_s, tile, KEY)
        SHAPE: gl.constexpr = dk_desc.block_type.shape
        mbarrier.wait(out_full.index(0), tile & 1)
        dv_s = reinterpret(dq_s.index(end % DQ_STAGES), dv_desc.dtype, SHAPE, dv_desc.layout)
        tma_store(dv_desc, [b, h, row, 0], dv_s)
        mbarrier.wait(out_full.index(1), tile & 1)
        dk_s = reinterpret(dq_s.index((end + 1) % DQ_STAGES), dk_desc.dtype, SHAPE, dk_desc.layout)
        tma_store(dk_desc, [b, h, row, 0], dk_s)
        tma_store_wait(0)
        mbarrier.arrive(out_empty)
        mbarrier.arrive(tile_empty.index(tile & 1))
        tile += 1
        mbarrier.wait(tile_full.index(tile & 1), (tile >> 1) & 1)
    wait_reduced(0)


@gluon.jit
def one_step(
    dk, dv, step, k_s, v_s, q_s, do_s, lse_s, delta_s, reach_s, count_s, ds_s, dq_s, q_full, do_full, q_empty,
    ring_full, ring_empty, scale_log2,
    MASK: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    DQ_STAGES: gl.constexpr, POLICY: gl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = accumulator_layout(M, False)
    DQ_LAYOUT: gl.constexpr = accumulator_layout(D, M == 64)
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(D, False), 2)
    DTYPE: gl.constexpr = ds_s.dtype
    stage = step % STAGES
    phase = (step // STAGES) & 1
    q = q_s.index(stage).reshape([M, D])
    do = do_s.index(stage).reshape([M, D])
    k = k_s.reshape([N, D])
    v = v_s.reshape([N, D])
    zeros = gl.zeros((N, M), gl.float32, S_LAYOUT)
    mbarrier.wait(q_full.index(stage), phase)
    st = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(stage), phase)
    dpt = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    st = warpgroup_mma_wait(1, deps=[st])
    if MASK != NO_MASK:
        # How many keys of the KV tile the Q tile's first row sees (causal; may be negative), or all its rows see.
        reach = read_scalar(reach_s.index(stage))
        # Row and column numbers come from shared memory: as arithmetic on the thread index they would be hoisted out of
        # every loop and spill.
        key = count_s.load(gl.SliceLayout(1, S_LAYOUT)) - reach
        if MASK == CAUSAL_MASK:
            query = count_s.slice(0, M).load(gl.SliceLayout(0, S_LAYOUT))
            st = gl.where(query[None, :] > key[:, None], st, float("-inf"))
        else:
            st = gl.where(key[:, None] < 0, st, float("-inf"))
    # LSE and delta are loaded after the waits: earlier they stay live across them and spill.
    lse = lse_s.index(stage).load(gl.SliceLayout(0, S_LAYOUT))
    p = gl.exp2(st * scale_log2 - lse[None, :])
    p16 = gl.convert_layout(p.to(DTYPE), A_LAYOUT)
    dpt = warpgroup_mma_wait(0, deps=[dpt])
    delta = delta_s.index(stage).load(gl.SliceLayout(0, S_LAYOUT))
    ds = (p * (dpt - delta[None, :])).to(DTYPE)
    ds16 = gl.convert_layout(ds, A_LAYOUT)
    if POLICY == NO_DQ:
        dv = warpgroup_mma(p16, do, dv, is_async=True)
        dk = warpgroup_mma(ds16, q, dk, is_async=True)
        dk, dv, p16, ds16 = warpgroup_mma_wait(0, deps=[dk, dv, p16, ds16])
    else:
        ds_s.store(ds)
        dv = warpgroup_mma(p16, do, dv, is_async=True)
        fence_async_shared()
        thread_barrier()  # dS of both warpgroups is in shared memory
        dq = warpgroup_mma(
            ds_s.permute((1, 0)),
            k,
            gl.zeros((M, D), gl.float32, DQ_LAYOUT),
            use_acc=False,
            is_async=True,
        )
        dv, p16 = warpgroup_mma_wait(1, deps=[dv, p16])
        dk = warpgroup_mma(ds16, q, dk, is_async=True)
        dq = warpgroup_mma_wait(1, deps=[dq])
        ring_stage = step % DQ_STAGES
        mbarrier.wait(ring_empty.index(ring_stage), ((step // DQ_STAGES) & 1) ^ 1)
        dq_s.index(ring_stage).store(flatten_dq(dq, M, D))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(ring_full.index(ring_stage))
        dk, ds16 = warpgroup_mma_wait(0, deps=[dk, ds16])
    mbarrier.arrive(q_empty.index(stage))
    return dk, dv


@gluon.jit
def stage_out(
    value, use, desc, dq_s, ring_empty, out_full,
    N: gl.constexpr, D: gl.constexpr, DQ_STAGES: gl.constexpr, POLICY: gl.constexpr,
):  # fmt: skip
    """Hand dK or dV to the writer in the dQ stage that use number ``use`` of the ring would take."""
    stage = use % DQ_STAGES
    if POLICY != NO_DQ:
        mbarrier.wait(ring_empty.index(stage), ((use // DQ_STAGES) & 1) ^ 1)
    out = reinterpret(dq_s.index(stage), desc.dtype, desc.block_type.shape, desc.layout).reshape(
        [N, D]
    )
    out.store(value.to(desc.dtype))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(out_full)


@gluon.jit
def consumer(
    dk_desc, dv_desc, k_s, v_s, q_s, do_s, lse_s, delta_s, reach_s, count_s, ds_s, dq_s, tile_s, tile_full, tile_empty, kv_full, kv_empty,
    q_full, do_full, q_empty, ring_full, ring_empty, out_full, out_empty, scale_log2, scale,
    MASK: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    DQ_STAGES: gl.constexpr, POLICY: gl.constexpr,
):  # fmt: skip
    KV_LAYOUT: gl.constexpr = accumulator_layout(D, False)
    tile = 0
    mbarrier.wait(tile_full.index(0), 0)
    while read_word(tile_s, tile, COUNT) >= 0:
        dk = gl.zeros((N, D), gl.float32, KV_LAYOUT)
        dv = gl.zeros((N, D), gl.float32, KV_LAYOUT)
        mbarrier.wait(kv_full, tile & 1)
        mbarrier.wait(out_empty, (tile & 1) ^ 1)
        first = read_word(tile_s, tile, STEP)
        if MASK == NO_MASK:
            for step in range(first, first + read_word(tile_s, tile, COUNT)):
                dk, dv = one_step(
                    dk, dv, step, k_s, v_s, q_s, do_s, lse_s, delta_s, reach_s, count_s, ds_s, dq_s, q_full, do_full, q_empty,
                    ring_full, ring_empty, scale_log2, 0, M, N, D, STAGES, DQ_STAGES, POLICY,
                )  # fmt: skip
        else:
            # Three loops over the visit: plain, masked, plain. Bounds are read again where they are needed, which
            # costs less than keeping them in registers across a loop.
            for step in range(first, first + read_word(tile_s, tile, MASK_BEGIN)):
                dk, dv = one_step(
                    dk, dv, step, k_s, v_s, q_s, do_s, lse_s, delta_s, reach_s, count_s, ds_s, dq_s, q_full, do_full, q_empty,
                    ring_full, ring_empty, scale_log2, 0, M, N, D, STAGES, DQ_STAGES, POLICY,
                )  # fmt: skip
            first = read_word(tile_s, tile, STEP)
            for step in range(
                first + read_word(tile_s, tile, MASK_BEGIN),
                first + read_word(tile_s, tile, MASK_END),
            ):
                dk, dv = one_step(
                    dk, dv, step, k_s, v_s, q_s, do_s, lse_s, delta_s, reach_s, count_s, ds_s, dq_s, q_full, do_full, q_empty,
                    ring_full, ring_empty, scale_log2, MASK, M, N, D, STAGES, DQ_STAGES, POLICY,
                )  # fmt: skip
            first = read_word(tile_s, tile, STEP)
            for step in range(
                first + read_word(tile_s, tile, MASK_END), first + read_word(tile_s, tile, COUNT)
            ):
                dk, dv = one_step(
                    dk, dv, step, k_s, v_s, q_s, do_s, lse_s, delta_s, reach_s, count_s, ds_s, dq_s, q_full, do_full, q_empty,
                    ring_full, ring_empty, scale_log2, 0, M, N, D, STAGES, DQ_STAGES, POLICY,
                )  # fmt: skip
        end = read_word(tile_s, tile, STEP) + read_word(tile_s, tile, COUNT)
        mbarrier.arrive(kv_empty)
        mbarrier.arrive(tile_empty.index(tile & 1))
        stage_out(dv, end, dv_desc, dq_s, ring_empty, out_full.index(0), N, D, DQ_STAGES, POLICY)
        stage_out(
            dk * scale,
            end + 1,
            dk_desc,
            dq_s,
            ring_empty,
            out_full.index(1),
            N,
            D,
            DQ_STAGES,
            POLICY,
        )
        tile += 1
        mbarrier.wait(tile_full.index(tile & 1), (tile >> 1) & 1)


@gluon.jit(
    do_not_specialize=[
        "num_items", "num_tiles", "num_steps", "num_heads", "heads", "interleave", "num_m", "causal_offset",
        "seq_len_kv", "bound_us",
    ]
)  # fmt: skip
def backward_hopper(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc, workspace, arrays,
    num_items, num_tiles, num_steps, num_heads, heads, interleave, num_m, causal_offset, seq_len_kv, bound_us, scale_log2, scale,
    MASK: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    DQ_STAGES: gl.constexpr, POLICY: gl.constexpr, DEFERRED: gl.constexpr, ORDER_OF_START: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_desc.dtype
    k_s = gl.allocate_shared_memory(DTYPE, [1, 1, N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [1, 1, N, D], v_desc.layout)
    q_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, M, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, M, D], do_desc.layout)
    dq_s = gl.allocate_shared_memory(gl.float32, [DQ_STAGES, M * D // 256, 256], dq_desc.layout)
    ds_s = gl.allocate_shared_memory(
        DTYPE, [N, M], gl.NVMMASharedLayout.get_default_for([N, M], DTYPE)
    )
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, M], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, M], delta_desc.layout)
    reach_s = gl.allocate_shared_memory(
        gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    count_s = gl.allocate_shared_memory(gl.int32, [N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    count_s.store(gl.arange(0, N, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    tile_s = gl.allocate_shared_memory(
        gl.int32, [2 * RECORD_WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    out_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    out_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    done = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ring_full = gl.allocate_shared_memory(gl.int64, [DQ_STAGES, 1], BARRIER)
    ring_empty = gl.allocate_shared_memory(gl.int64, [DQ_STAGES, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(tile_full.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=2)  # consumers and writer
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=1)
    mbarrier.init(done, count=1)
    mbarrier.init(out_full.index(0), count=1)
    mbarrier.init(out_full.index(1), count=1)
    mbarrier.init(out_empty, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(DQ_STAGES):
        mbarrier.init(ring_full.index(i), count=1)
        mbarrier.init(ring_empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer, (
                dk_desc, dv_desc, k_s, v_s, q_s, do_s, lse_s, delta_s, reach_s, count_s, ds_s, dq_s, tile_s, tile_full, tile_empty, kv_full,
                kv_empty, q_full, do_full, q_empty, ring_full, ring_empty, out_full, out_empty, scale_log2, scale,
                MASK, M, N, D, STAGES, DQ_STAGES, POLICY)),
            (producer, (
                q_desc, do_desc, lse_desc, delta_desc, k_desc, v_desc, k_s, v_s, q_s, do_s, lse_s, delta_s, reach_s, tile_s,
                tile_full, tile_empty, kv_full, kv_empty, q_full, do_full, q_empty, done, workspace, arrays,
                num_items, num_tiles, num_heads, heads, interleave, num_m, causal_offset, seq_len_kv, MASK, M, N, D, STAGES, ORDER_OF_START)),
            (writer, (
                dq_desc, dk_desc, dv_desc, dq_s, ring_full, ring_empty, out_full, out_empty, tile_s, tile_full, tile_empty, done, workspace,
                bound_us, arrays, num_steps, M, N, D, DQ_STAGES, POLICY, DEFERRED, ORDER_OF_START)),
        ],
        [1, 1],
        [40, 40],
    )  # fmt: skip
