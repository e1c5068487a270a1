"""The grid of (KV, Q) tiles of one head: which tiles have work, and which of them need a mask."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dash_kernels.problem import Config, Problem


@dataclass(frozen=True, slots=True)
class TileGrid:
    """One head cut into Q tiles of ``block_m`` rows and KV tiles of ``block_n`` rows.

    Masks are aligned bottom-right: query ``row`` stands at key position ``row + seq_len_kv - seq_len`` and sees the
    keys from ``window_left`` before it to ``window_right`` after it, -1 meaning all; ``causal`` is a right side of 0,
    whatever ``window_right`` says. So the last query of a causal head sees every key that its window reaches, while
    the first Q tiles of a head with more queries than keys, and the KV tiles before the first query's window, may
    have no work. Raises ValueError naming the field for a size that is not a positive integer, or a wrong window.
    """

    seq_len: int
    seq_len_kv: int
    block_m: int
    block_n: int
    causal: bool = False
    window_left: int = -1
    window_right: int = -1

    def __post_init__(self) -> None:
        for field in fields(self)[:4]:
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} is {value!r}; it must be a positive integer")
        for name in ("window_left", "window_right"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < -1:
                raise ValueError(f"{name} is {value!r}; it must be a number of keys, or -1 for all")
        if self.causal:
            object.__setattr__(self, "window_right", -1)

    @classmethod
    def for_config(cls, problem: Problem, config: Config) -> TileGrid:
        """The grid on which ``config`` runs one head of ``problem``."""
        return cls(
            problem.seq_len,
            problem.seq_len_kv,
            config.block_m,
            config.block_n,
            problem.causal,
            problem.window_left,
            problem.window_right,
        )

    @property
    def num_m(self) -> int:
        """Number of Q tiles, the last one perhaps partly past ``seq_len``."""
        return -(-self.seq_len // self.block_m)

    @property
    def num_n(self) -> int:
        """Number of KV tiles, the last one perhaps partly past ``seq_len_kv``."""
        return -(-self.seq_len_kv // self.block_n)

    @property
    def windowed(self) -> bool:
        """Whether the mask has an edge beside the causal diagonal: kernels then mask both ends of a visit."""
        return self.window_left >= 0 or self.window_right >= 0

    @property
    def _reach(self) -> tuple[int, int]:
        """Keys seen to the left and to the right of a position; without a limit, as many as there are positions."""
        unlimited = self.seq_len + self.seq_len_kv
        right = 0 if self.causal else self.window_right
        return (
            self.window_left if self.window_left >= 0 else unlimited,
            right if right >= 0 else unlimited,
        )

    def q_tiles(self, n_block: int) -> range:
        """The Q tiles with at least one unmasked pair in KV tile ``n_block``; none before the first query's window."""
        left, right = self._reach
        offset = self.seq_len_kv - self.seq_len
        first_key = n_block * self.block_n
        last_key = min(first_key + self.block_n, self.seq_len_kv) - 1
        first_row = max(first_key - right - offset, 0)
        last_row = min(last_key + left - offset, self.seq_len - 1)
        if first_row > last_row:
            return range(0)
        return range(first_row // self.block_m, last_row // self.block_m + 1)

    def kv_tiles(self, m_block: int) -> range:
        """The KV tiles that contribute to Q tile ``m_block``; empty when its rows see no key."""
        left, right = self._reach
        offset = self.seq_len_kv - self.seq_len
        first_row = m_block * self.block_m
        last_row = min(first_row + self.block_m, self.seq_len) - 1
        first_key = max(first_row + offset - left, 0)
        last_key = min(last_row + offset + right, self.seq_len_kv - 1)
        if first_key > last_key:
            return range(0)
        return range(first_key // self.block_n, last_key // self.block_n + 1)

    def mask_ranges(self, n_block: int) -> tuple[range, range]:
        """The first and the last of ``q_tiles(n_block)`` that need a mask: right edge or end of the keys, and left edge.

        Either may be empty. A KV tile that the end of the keys cuts needs a mask for all its Q tiles: they are in the
        first range.
        """
        tiles = self.q_tiles(n_block)
        left, right = self._reach
        offset = self.seq_len_kv - self.seq_len
        first_key, past_key = n_block * self.block_n, (n_block + 1) * self.block_n
        if past_key > self.seq_len_kv:
            return tiles, tiles[len(tiles) :]
        seen_from = -(-(past_key - 1 - right - offset) // self.block_m)  # all rows see the last key
        middle = min(max(seen_from, tiles.start), tiles.stop)
        last_to_see = first_key + left - offset  # the last row that sees the tile's first key
        seen_to = (
            (last_to_see + 1) // self.block_m if last_to_see < self.seq_len - 1 else tiles.stop
        )
        return (
            range(tiles.start, middle),
            range(min(max(seen_to, middle), tiles.stop), tiles.stop),
        )

    def needs_mask(self, n_block: int, m_block: int) -> bool:
        """Whether an edge of the mask or the end of the keys crosses this tile.

        Query rows past ``seq_len`` need none: their LSE of +inf makes P zero.
        """
        head, tail = self.mask_ranges(n_block)
        return m_block in head or m_block in tail
