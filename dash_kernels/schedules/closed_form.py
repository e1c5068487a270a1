"""Schedules as arithmetic, for packed sequences, whose lengths only the device knows.

What a kernel evaluates instead of reading arrays, in integers that never round a negative number: a device's ``//`` may
round towards zero. Tests hold it to ``pack(build(kind, grid), launch)`` for every length above 0.
"""

from __future__ import annotations

from dataclasses import dataclass

CLOSED_FORMS = ("ascending", "shortest_first")
"""The kinds that have one: both walk ``m_first .. m_first + count - 1`` upwards."""

UNLIMITED = 1 << 29
"""A side of a window that sees every key of sequences up to this long; its sum with two such lengths fits in 32 bits."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """One sequence, its tiles, and how many keys a query sees to the left and right of its position."""

    seq_len: int
    seq_len_kv: int
    block_m: int
    block_n: int
    left: int = UNLIMITED
    right: int = UNLIMITED
    windowed: bool = False


@dataclass(frozen=True, slots=True)
class Visit:
    """The Q tiles ``m_first .. m_first + count - 1`` of a KV tile; ``b0`` and ``b1`` as in ``schedules.pack``."""

    m_first: int
    count: int
    b0: int
    b1: int


def lengths_of(
    seq_len: int, seq_len_kv: int, block_m: int, block_n: int, causal: bool, window: tuple[int, int]
) -> Lengths:
    """Lengths under a mask as users give it: ``window`` is (left, right), -1 for all, and causal is right = 0."""
    left, right = window
    windowed = left >= 0 or (right >= 0 and not causal)
    if causal:
        right = 0
    left, right = (UNLIMITED if side < 0 else min(side, UNLIMITED) for side in (left, right))
    return Lengths(seq_len, seq_len_kv, block_m, block_n, left, right, windowed)


def visit_of(n_block: int, of: Lengths) -> Visit:
    """The visit of KV tile ``n_block``; a sequence without queries has KV tiles with nothing to visit."""
    offset = of.seq_len_kv - of.seq_len
    first_key, past_key = n_block * of.block_n, (n_block + 1) * of.block_n
    first_row = max(first_key - of.right - offset, 0)
    last_row = min(min(past_key, of.seq_len_kv) - 1 + of.left - offset, of.seq_len - 1)
    if first_row > last_row:
        return Visit(0, 0, 0, 0)
    m_first = first_row // of.block_m
    count = last_row // of.block_m + 1 - m_first
    # Rows of the Q tiles from plain_from on see the last key; those of the Q tiles before plain_to see the first.
    plain_from = max(past_key - 1 - of.right - offset + of.block_m - 1, 0) // of.block_m
    cut = past_key > of.seq_len_kv
    head = count if cut else min(max(plain_from - m_first, 0), count)
    if not of.windowed:
        return Visit(m_first, count, 0, head)
    last_to_see = first_key + of.left - offset
    plain_to = max(last_to_see + 1, 0) // of.block_m
    tail = count if last_to_see >= of.seq_len - 1 else plain_to - m_first
    return Visit(m_first, count, head, min(max(tail, head), count))


def contributors(m_block: int, of: Lengths) -> tuple[int, int]:
    """First and last KV tile that add to Q tile ``m_block``; (0, -1) when its rows see no key."""
    offset = of.seq_len_kv - of.seq_len
    first_row = m_block * of.block_m
    last_row = min(first_row + of.block_m, of.seq_len) - 1
    first_key = max(first_row + offset - of.left, 0)
    last_key = min(last_row + offset + of.right, of.seq_len_kv - 1)
    if first_key > last_key:
        return 0, -1
    return first_key // of.block_n, last_key // of.block_n


def turn_of(kind: str, n_block: int, m_block: int, of: Lengths) -> int:
    """How many KV tiles add to Q tile ``m_block`` before ``n_block``, which is one of its contributors."""
    first, last = contributors(m_block, of)
    return n_block - first if kind == "ascending" else last - n_block
