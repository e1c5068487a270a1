"""Packed sequences: which tiles there are, worked out on the device from cu_seqlens, without a host sync.

Arrays of a schedule need the lengths on the host; here only monotone kinds with a closed form run: a KV tile visits
``q_tiles(n)`` in ascending order, and its turn on a Q tile counts from the first (ascending) or from the last
(shortest_first) KV tile that adds to it. dash_kernels.schedules.closed_form has the same arithmetic in Python.

Triton's ``//`` rounds towards zero, so every dividend here is made non-negative first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

KV_TILE_WORDS = 12
Q_TILE_WORDS = 6
# A program reads lengths and writes tiles this many at a time.
PLAN_OPTIONS = {"num_warps": 4, "num_stages": 1}
CHUNK = 512
WIDEST_WINDOW = 1 << 29


class Sequences(NamedTuple):
    """Where packed sequences begin and end: ``cu_seqlens_*`` int32 (batch + 1) on the device, lengths' maxima known."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class SequencePlan(NamedTuple):
    """The tiles of packed sequences, int32 on the device; rows from ``counts`` on are not written.

    ``kv_tiles`` (max_kv_tiles, 12), in launch order (sequences one after another): q_start, k_start, seq_len,
    seq_len_kv, q_tile_base (Q tiles of earlier sequences), n_block, m_first, count (visits m_first .. m_first +
    count - 1), b0, b1 (the steps between which masks change, see TileGrid.mask_ranges), sequence, 0.
    ``q_tiles`` (max_q_tiles, 6): q_start, seq_len, m_block, seq_len_kv, sequence, contributions (KV tiles that add).
    ``counts`` (4): number of KV tiles, number of Q tiles, 0, 0. The maxima bound both from lengths known on the host.
    """

    kv_tiles: Tensor
    q_tiles: Tensor
    counts: Tensor
    max_kv_tiles: int
    max_q_tiles: int


def reach(side: int) -> int:
    """A side of a window as kernels take it: -1, unlimited, is a number wider than any sequence."""
    return WIDEST_WINDOW if side < 0 else min(side, WIDEST_WINDOW)


def reaches(causal: bool, window: tuple[int, int]) -> tuple[int, int]:
    """(left, right) of a mask, both as :func:`reach` says; causal is right = 0."""
    return reach(window[0]), 0 if causal else reach(window[1])


def is_windowed(causal: bool, window: tuple[int, int]) -> bool:
    """Whether a mask has an edge that full and causal masks lack."""
    return window[0] >= 0 or (window[1] >= 0 and not causal)


@triton.jit
def visited_rows(n_block, seq_len, seq_len_kv, left, right, BLOCK_N: tl.constexpr):
    """First and last row that see a key of KV tile ``n_block``; the first is beyond the last for none."""
    offset = seq_len_kv - seq_len
    first_key = n_block * BLOCK_N
    last_key = tl.minimum(first_key + BLOCK_N, seq_len_kv) - 1
    return (
        tl.maximum(first_key - right - offset, 0),
        tl.minimum(last_key + left - offset, seq_len - 1),
    )


@triton.jit
def visit_of(
    n_block, seq_len, seq_len_kv, left, right,
    WINDOWED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The visit of a KV tile: first Q tile, number of Q tiles, and the bounds b0, b1 of its masked steps.

    Without a window: plain [0, b0), masked [b0, b1), plain [b1, count); with one: masked, plain, masked.
    """
    offset = seq_len_kv - seq_len
    first_key = n_block * BLOCK_N
    first_row, last_row = visited_rows(n_block, seq_len, seq_len_kv, left, right, BLOCK_N)
    some = first_row <= last_row
    m_first = tl.where(some, first_row // BLOCK_M, 0)
    count = tl.where(some, tl.maximum(last_row, 0) // BLOCK_M + 1 - m_first, 0)
    # All rows of a Q tile from here on see the tile's last key.
    plain_from = tl.maximum(first_key + BLOCK_N - 1 - right - offset + BLOCK_M - 1, 0) // BLOCK_M
    cut = first_key + BLOCK_N > seq_len_kv
    head = tl.where(cut, count, tl.minimum(tl.maximum(plain_from - m_first, 0), count))
    if WINDOWED:
        # All rows of a Q tile before this one see the tile's first key.
        last_to_see = first_key + left - offset
        plain_to = tl.maximum(last_to_see + 1, 0) // BLOCK_M
        tail = tl.where(last_to_see >= seq_len - 1, count, plain_to - m_first)
        return m_first, count, head, tl.minimum(tl.maximum(tail, head), count)
    return m_first, count, tl.zeros_like(head), head


@triton.jit
def contributors(
    m_block, seq_len, seq_len_kv, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """First and last KV tile that add to a Q tile; the first is beyond the last when its rows see no key."""
    offset = seq_len_kv - seq_len
    first_row = m_block * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, seq_len) - 1
    first_key = tl.maximum(first_row + offset - left, 0)
    last_key = tl.minimum(last_row + offset + right, seq_len_kv - 1)
    some = first_key <= last_key
    first = tl.where(some, first_key // BLOCK_N, 0)
    return first, tl.where(some, tl.maximum(last_key, 0) // BLOCK_N, -1)


@triton.jit
def kv_bounds(
    m_block, seq_len, seq_len_kv, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The KV tiles of a Q tile: masked from the first value, plain from the second, masked from the third, up to the
    fourth. Plain ones are those of which every row sees every key; without a window's left edge none comes before."""
    begin, last = contributors(m_block, seq_len, seq_len_kv, left, right, BLOCK_M, BLOCK_N)
    end = last + 1
    offset = seq_len_kv - seq_len
    first_row = m_block * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, seq_len) - 1
    keys_of_all = tl.minimum(tl.maximum(first_row + offset + right + 1, 0), seq_len_kv)
    plain_from = (tl.maximum(last_row + offset - left, 0) + BLOCK_N - 1) // BLOCK_N
    plain_from = tl.minimum(tl.maximum(plain_from, begin), end)
    return begin, plain_from, tl.minimum(tl.maximum(keys_of_all // BLOCK_N, plain_from), end), end


@triton.jit
def turn_of(
    n_block, m_block, seq_len, seq_len_kv, left, right,
    DESCENDING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """How many KV tiles add to Q tile ``m_block`` before ``n_block``, which does: ascending, or shortest_first."""
    first, last = contributors(m_block, seq_len, seq_len_kv, left, right, BLOCK_M, BLOCK_N)
    if DESCENDING:
        return last - n_block
    return n_block - first


@triton.jit
def tiles_before(cu_seqlens, sequences, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Tiles of the first ``sequences`` sequences."""
    total = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, sequences, CHUNK):
        at = first + tl.arange(0, CHUNK)
        inside = at < sequences
        start = tl.load(cu_seqlens + at, mask=inside, other=0)
        end = tl.load(cu_seqlens + at + 1, mask=inside, other=0)
        total += (tl.maximum(end - start, 0) + BLOCK - 1) // BLOCK
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["batch", "max_kv_tiles", "max_q_tiles", "left", "right"])
def plan_tiles(
    cu_seqlens_q, cu_seqlens_k, kv_tiles, q_tiles, counts, batch, max_kv_tiles, max_q_tiles, left, right,
    WINDOWED: tl.constexpr, DESCENDING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    KV_WORDS: tl.constexpr, Q_WORDS: tl.constexpr,
):  # fmt: skip
    """One sequence a program; the one after the last writes the totals."""
    sequence = tl.program_id(0)
    kv_base = tiles_before(cu_seqlens_k, sequence, BLOCK_N, CHUNK)
    q_base = tiles_before(cu_seqlens_q, sequence, BLOCK_M, CHUNK)
    if sequence == batch:
        at = tl.arange(0, 4)
        tl.store(counts + at, tl.where(at == 0, kv_base, tl.where(at == 1, q_base, 0)))
    else:
        q_start = tl.load(cu_seqlens_q + sequence)
        k_start = tl.load(cu_seqlens_k + sequence)
        seq_len = tl.maximum(tl.load(cu_seqlens_q + sequence + 1) - q_start, 0)
        seq_len_kv = tl.maximum(tl.load(cu_seqlens_k + sequence + 1) - k_start, 0)
        num_n = (seq_len_kv + BLOCK_N - 1) // BLOCK_N
        for first in range(0, num_n, CHUNK):
            place = first + tl.arange(0, CHUNK)
            n_block = num_n - 1 - place if DESCENDING else place
            m_first, count, b0, b1 = visit_of(
                n_block, seq_len, seq_len_kv, left, right, WINDOWED, BLOCK_M, BLOCK_N
            )
            row = kv_tiles + (kv_base + place).to(tl.int64) * KV_WORDS
            inside = (place < num_n) & (kv_base + place < max_kv_tiles)
            words = (
                q_start, k_start, seq_len, seq_len_kv, q_base, n_block, m_first, count, b0, b1, sequence, 0
            )  # fmt: skip
            for word in tl.static_range(KV_WORDS):
                tl.store(row + word, words[word], mask=inside)
        num_m = (seq_len + BLOCK_M - 1) // BLOCK_M
        for first in range(0, num_m, CHUNK):
            m_block = first + tl.arange(0, CHUNK)
            first_n, last_n = contributors(
                m_block, seq_len, seq_len_kv, left, right, BLOCK_M, BLOCK_N
            )
            row = q_tiles + (q_base + m_block).to(tl.int64) * Q_WORDS
            inside = (m_block < num_m) & (q_base + m_block < max_q_tiles)
            words = (q_start, seq_len, m_block, seq_len_kv, sequence, last_n + 1 - first_n)
            for word in tl.static_range(Q_WORDS):
                tl.store(row + word, words[word], mask=inside)


def plan_sequences(
    sequences: Sequences, total_q: int, total_k: int,
    *, block_m: int, block_n: int, causal: bool, window: tuple[int, int] = (-1, -1), descending: bool,
) -> SequencePlan:  # fmt: skip
    """The tiles of packed sequences, by one kernel on the current stream; nothing waits for the device.

    ``total_q`` and ``total_k`` are the rows of q and of k and v. ``window`` is (left, right), -1 meaning unlimited;
    causal is right = 0. ``descending`` launches each sequence's KV tiles from the last (shortest_first).
    """
    import torch

    device = sequences.cu_seqlens_q.device
    batch = sequences.cu_seqlens_q.shape[0] - 1
    max_kv_tiles = total_k // block_n + batch
    max_q_tiles = total_q // block_m + batch
    kv_words = max_kv_tiles * KV_TILE_WORDS
    q_words = max_q_tiles * Q_TILE_WORDS
    words = torch.empty(4 + kv_words + q_words, dtype=torch.int32, device=device)
    counts, kv_tiles, q_tiles = words.split([4, kv_words, q_words])
    plan_tiles[(batch + 1,)](
        sequences.cu_seqlens_q, sequences.cu_seqlens_k, kv_tiles, q_tiles, counts, batch, max_kv_tiles, max_q_tiles,
        *reaches(causal, window), WINDOWED=is_windowed(causal, window), DESCENDING=descending,
        BLOCK_M=block_m, BLOCK_N=block_n, CHUNK=CHUNK, KV_WORDS=KV_TILE_WORDS, Q_WORDS=Q_TILE_WORDS, **PLAN_OPTIONS,
    )  # fmt: skip
    return SequencePlan(
        kv_tiles.view(max_kv_tiles, KV_TILE_WORDS),
        q_tiles.view(max_q_tiles, Q_TILE_WORDS),
        counts,
        max_kv_tiles,
        max_q_tiles,
    )
