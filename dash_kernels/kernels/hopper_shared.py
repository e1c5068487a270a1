"""What the warp roles of the Hopper backward share: layouts, barriers, and a KV tile's record in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dash_kernels.kernels.compat import permute_axes

# The workspace: a header (the ticket, then what turnstile.report_timeout writes) and a semaphore a head and Q tile.
HEADER_WORDS = gl.constexpr(32)
UNORDERED, ORDERED = (gl.constexpr(policy) for policy in range(2))
NO_MASK, CAUSAL_MASK, TAIL_MASK, WINDOW_MASK = (gl.constexpr(mask) for mask in range(4))

# First barrier of each group in ``bars``. Those of a step (``q_full``, ``do_full`` and ``ring_empty``, one a stage) are
# allocations of their own: between two uses of one allocation the compiler puts a barrier of the whole warpgroup.
TILE_FULL, TILE_EMPTY, OUT_FULL = (gl.constexpr(2 * i) for i in range(3))
KV_EMPTY, OUT_EMPTY, DONE = (gl.constexpr(6 + i) for i in range(3))
NUM_BARRIERS = gl.constexpr(9)
# Hardware barriers, for what the warpgroups tell others every step: arriving there needs no barrier of their own first,
# as one thread's arrival in shared memory does. Triton numbers its own from 0, one a partition; there are 16.
# Q_EMPTY has one a stage; RING_FULL one a stage too, or one a warpgroup; EXCHANGE_READ one a warpgroup.
Q_EMPTY, RING_FULL, MEETING, EXCHANGE_READ = (gl.constexpr(number) for number in (5, 9, 13, 14))
CONSUMERS, CONSUMERS_AND_WARP, CONSUMER_AND_WARP = (gl.constexpr(n) for n in (256, 288, 160))

# Words of a KV tile's record; two records take turns. What the producer works out once costs the other roles no
# registers. Steps count over all query heads of the group; STEPS of -1 ends the stream.
(
    STEPS, COUNT, BATCH, HEAD, Q_TILES, KEY, FIRST, MASK_BEGIN, MASK_END, STEP, Q_ROWS, KEYS, SHIFT,
) = (gl.constexpr(word) for word in range(13))  # fmt: skip
RECORD_WORDS = gl.constexpr(13)
# In packed sequences BATCH is the row of K at which the sequence ends, FIRST the first Q tile of the visit.
# After the records: a stage's REACH (keys of the tile that the Q tile's first row sees), LIMIT (keys there are), and a 0.
REACH = gl.constexpr(26)
LIMIT = gl.constexpr(30)
ZERO = gl.constexpr(34)
NUM_WORDS = gl.constexpr(35)

# A tensor of packed sequences is described so that rows past a sequence's end are out of bounds: the row coordinate ends
# at ROWS_END, and two more axes take that much off the address again, modulo 2**64.
ROWS_END = gl.constexpr(1 << 30)


PIECE = gl.constexpr(64)  # columns of a tile of Q, K or dQ where those of a row are no power of two


@gluon.constexpr_function
def is_wide(head_dim):
    """Whether dK and dV of a KV tile are split between the warpgroups by columns (hopper_wide) and not by keys."""
    return head_dim == 256


@gluon.constexpr_function
def is_uneven(head_dim):
    """Whether rows of Q and K are longer than those of V and dO (hopper_uneven)."""
    return head_dim == 192


@gluon.constexpr_function
def pieces(head_dim):
    """Tiles in shared memory that the columns of Q, K and dQ are cut into."""
    return 3 if head_dim == 192 else 1


@gluon.constexpr_function
def shares(head_dim):
    """Parts of a dQ tile that are added on their own, one by each writer in turns of its own, or the whole of it."""
    return 2 if head_dim > 128 else 1


@gluon.constexpr_function
def dq_boxes(head_dim):
    """Equal pieces of a dQ tile that the copy engine moves one by one."""
    return 3 if head_dim == 192 else shares(head_dim)


@gluon.constexpr_function
def first_boxes(head_dim):
    """How many of them are writer 0's."""
    return 2 if head_dim == 192 else 1


@gluon.constexpr_function
def half_cols(block_m, head_dim):
    """Columns of a dQ tile that one warpgroup holds: all of its half of 128 rows, or half of the columns of 64 rows."""
    return head_dim if block_m == 128 else head_dim // 2


@gluon.constexpr_function
def flat_order(block_m, head_dim):
    """Permutation of the index bits of a dQ tile, rows then columns from the high bit, into the flat layout.

    The warpgroup first, then what :func:`half_order` says: a warpgroup's half is one piece.
    """
    rows, cols = block_m.bit_length() - 1, head_dim.bit_length() - 1
    r = lambda bit: rows - 1 - bit  # noqa: E731
    c = lambda bit: rows + cols - 1 - bit  # noqa: E731
    warpgroup = r(6) if block_m == 128 else c(cols - 1)
    high = half_cols(block_m, head_dim).bit_length() - 2
    registers = [c(bit) for bit in range(high, 2, -1)]
    return [warpgroup, r(5), r(4), *registers, r(2), r(1), r(0), c(2), c(1), r(3), c(0)]


@gluon.constexpr_function
def half_order(cols):
    """:func:`flat_order` of one warpgroup's 64 rows: no bank conflicts when an accumulator is stored in it."""
    bits = cols.bit_length() - 1
    r = lambda bit: 5 - bit  # noqa: E731
    c = lambda bit: 5 + bits - bit  # noqa: E731
    registers = [c(bit) for bit in range(bits - 1, 2, -1)]
    return [r(5), r(4), *registers, r(2), r(1), r(0), c(2), c(1), r(3), c(0)]


@gluon.constexpr_function
def half_layout(cols):
    """Register layout of a flat half that equals, register for register, the accumulator's."""
    high = (cols // 4).bit_length() - 1  # bits of the flat half's row index
    registers = [[0, 1], [0, 2], [0, 128]] + [[1 << bit, 0] for bit in range(high - 2)]
    lanes = [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]
    warps = [[1 << (high - 2 + bit), 0] for bit in range(2)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [cols // 4, 256])


@gluon.constexpr_function
def accumulator_layout(cols):
    """Accumulator of one warpgroup: 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cols, 16])


@gluon.constexpr_function
def is_folded(head_dim, mask, softcap):
    """Whether LSE and delta of a Q tile lie in memory so that a thread loads those of four of its columns at once.

    Masked kernels at head_dim 64 gain 4 to 5 % by it (half as many loads, beside matmuls that wait for shared memory);
    without masks, with softcap, or at 128, its groups of four registers cost more than that.
    """
    return head_dim == 64 and mask != 0 and not softcap


@gluon.constexpr_function
def folded_layout(cols):
    """Register layout of ``cols`` folded values: the accumulator's column bits 0, 3, 1, 2, 4, ... in the order of memory."""
    high = [[1 << bit] for bit in range(4, cols.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[1], [2], *high], [[4], [8], [0], [0], [0]], [[0], [0]], [], [cols]
    )


@gluon.constexpr_function
def unfolded_order(cols):
    """Permutation of the index bits of folded values, from the high bit, that puts columns in their order again."""
    count = cols.bit_length() - 1
    memory = [0, 3, 1, 2, *range(4, count)]
    return [count - 1 - memory.index(bit) for bit in range(count - 1, -1, -1)]


@gluon.constexpr_function
def bits(count):
    return [2] * count


@gluon.constexpr_function
def several(count, tile):
    """Shape of ``count`` buffers for one tile each."""
    return [count, *tile]


@gluon.constexpr_function
def barrier_asm(how, threads):
    return f"bar.{how} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def flatten_half(dq, COLS: gl.constexpr):
    """A warpgroup's 64 x COLS half of dQ in the flat layout, without moving a register."""
    tile = permute_axes(dq.reshape(bits(5 + COLS.bit_length())), half_order(COLS))
    return gl.convert_layout(tile.reshape([COLS // 4, 256]), half_layout(COLS), assert_trivial=True)


@gluon.jit
def load_rows_of(source, COLS: gl.constexpr, FOLDED: gl.constexpr):
    """LSE or delta of a Q tile's COLS rows, which are the columns of an accumulator."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, accumulator_layout(COLS))
    if FOLDED:
        values = source.load(folded_layout(COLS)).reshape(bits(COLS.bit_length() - 1))
        values = permute_axes(values, unfolded_order(COLS)).reshape([COLS])
        return gl.convert_layout(values, LAYOUT, assert_trivial=True)
    return source.load(LAYOUT)


@gluon.jit
def arrive(barrier, threads: gl.constexpr):
    """Arrive at a hardware barrier of ``threads`` threads, and go on."""
    ASM: gl.constexpr = barrier_asm("arrive", threads)
    gl.inline_asm_elementwise(
        ASM, "=r,r,~{memory}", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrive_and_wait(barrier, threads: gl.constexpr):
    """Arrive at a hardware barrier of ``threads`` threads, and wait until all have."""
    ASM: gl.constexpr = barrier_asm("sync", threads)
    gl.inline_asm_elementwise(
        ASM, "=r,r,~{memory}", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def read_scalar(words, word):
    """A word of shared memory as a scalar, the same in every thread."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(words.index(word).load(layout), axis=0)


@gluon.jit
def write_scalar(words, word, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words.index(word).store(gl.full([1], 0, gl.int32, layout) + value)


@gluon.jit
def read_word(words, tile, word: gl.constexpr):
    """A word of the record of the ``tile``-th KV tile of this CTA, the same in every thread."""
    return read_scalar(words, (tile & 1) * RECORD_WORDS + word)


@gluon.jit
def write_word(words, tile, word: gl.constexpr, value):
    write_scalar(words, (tile & 1) * RECORD_WORDS + word, value)
