"""Tiles of the portable kernels: loads and stores, the register order of dQ, masks, and scores to probabilities."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(2147483647)  # a row beyond any tile


@triton.jit
def tile_offsets(row, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Offsets of the elements of a tile that starts at ``row``; 64 bits, since a tensor may have more than 2^31."""
    rows = (row + tl.arange(0, ROWS)).to(tl.int64)
    return rows[:, None] * stride + tl.arange(0, COLS)[None, :]


@triton.jit
def load_tile(
    head, stride, row, limit, RAGGED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    WIDTH: tl.constexpr = None,
):  # fmt: skip
    """The tile of a head that starts at ``row``; rows from ``limit`` on are not read and are zeros.

    So are columns from WIDTH on, where it is given.
    """
    pointers = head + tile_offsets(row, stride, ROWS, COLS)
    if WIDTH is not None and WIDTH != COLS:
        inside = (tl.arange(0, COLS) < WIDTH)[None, :]
        if RAGGED:
            inside &= (row + tl.arange(0, ROWS) < limit)[:, None]
        return tl.load(pointers, mask=inside, other=0.0)
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
def first_rows(
    col, row, seq_len, seq_len_kv, right,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """For each key from ``col`` on, the first row, counted from ``row``, that sees it; NEVER past the last key.

    Masks are aligned bottom-right. One value a key, and none a query, keeps the masked loop's registers down: a window
    ends ``left + right`` rows after it began, which ``sees`` tests with the same one comparison.
    """
    cols = col + tl.arange(0, BLOCK_N)
    if CAUSAL or WINDOWED:
        return tl.where(cols < seq_len_kv, cols - (seq_len_kv - seq_len + right + row), NEVER)
    return tl.where(cols < seq_len_kv, 0, NEVER)


@triton.jit
def sees(rows, first, left, right, WINDOWED: tl.constexpr):
    """Whether each of ``rows`` sees the key whose first row is ``first``; the two broadcast."""
    if WINDOWED:
        return (rows - first).to(tl.uint32, bitcast=True) <= (left + right).to(tl.uint32)
    return first <= rows


@triton.jit
def tanh(x2_log2):
    """tanh of x, given 2 * x * log2(e): right to an ulp of 1, which is what a cap's sum with other logits needs."""
    return 1.0 - 2.0 / (1.0 + tl.math.exp2(x2_log2))


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """What kernels multiply q . k by, and tanh of that by, to have scores in base 2; the second is unused without a cap."""
    if softcap:
        return 2.0 * LOG2E.value * scale / softcap, softcap * LOG2E.value
    return LOG2E.value * scale, 1.0
