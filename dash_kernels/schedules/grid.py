"""The grid of (KV, Q) tiles of one head: which tiles have work, and which of them need a mask."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dash_kernels.problem import Config, Problem


@dataclass(frozen=True, slots=True)
class TileGrid:
    """One head cut into Q tiles of ``block_m`` rows and KV tiles of ``block_n`` rows.

    A causal mask is aligned bottom-right: query ``row`` sees ``key`` when ``key <= row + seq_len_kv - seq_len``. So
    the last query sees every key and every KV tile has work, while the first Q tiles of a head with more queries
    than keys may have none. Raises ValueError naming the field for a size that is not a positive integer.
    """

    seq_len: int
    seq_len_kv: int
    block_m: int
    block_n: int
    causal: bool = False

    def __post_init__(self) -> None:
        for field in fields(self)[:4]:
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} is {value!r}; it must be a positive integer")

    @classmethod
    def for_config(cls, problem: Problem, config: Config) -> TileGrid:
        """The grid on which ``config`` runs one head of ``problem``."""
        return cls(
            problem.seq_len, problem.seq_len_kv, config.block_m, config.block_n, problem.causal
        )

    @property
    def num_m(self) -> int:
        """Number of Q tiles, the last one perhaps partly past ``seq_len``."""
        return -(-self.seq_len // self.block_m)

    @property
    def num_n(self) -> int:
        """Number of KV tiles, the last one perhaps partly past ``seq_len_kv``."""
        return -(-self.seq_len_kv // self.block_n)

    def q_tiles(self, n_block: int) -> range:
        """The Q tiles with at least one unmasked pair in KV tile ``n_block``."""
        if not self.causal:
            return range(self.num_m)
        first_row = n_block * self.block_n - (self.seq_len_kv - self.seq_len)
        return range(max(0, first_row // self.block_m), self.num_m)

    def kv_tiles(self, m_block: int) -> range:
        """The KV tiles that contribute to Q tile ``m_block``; empty when its rows see no key."""
        if not self.causal:
            return range(self.num_n)
        last_row = min((m_block + 1) * self.block_m, self.seq_len) - 1
        last_key = last_row + self.seq_len_kv - self.seq_len
        return range(min(last_key // self.block_n + 1, self.num_n) if last_key >= 0 else 0)

    def masked_q_tiles(self, n_block: int) -> range:
        """The Q tiles of ``n_block`` that need a mask: always the first ones of :meth:`q_tiles`, perhaps all."""
        tiles = self.q_tiles(n_block)
        if (n_block + 1) * self.block_n > self.seq_len_kv:
            return tiles
        if not self.causal:
            return tiles[:0]
        last_key = (n_block + 1) * self.block_n - 1
        plain_from = -(-(last_key - (self.seq_len_kv - self.seq_len)) // self.block_m)
        return range(tiles.start, min(max(plain_from, tiles.start), tiles.stop))

    def needs_mask(self, n_block: int, m_block: int) -> bool:
        """Whether the causal diagonal or the end of the keys crosses this tile.

        Query rows past ``seq_len`` need none: their LSE of +inf makes P zero.
        """
        return m_block in self.masked_q_tiles(n_block)
