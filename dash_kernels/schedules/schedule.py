"""A schedule of one head as data, and the helper with which every kind builds one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from dash_kernels.schedules.grid import TileGrid

Tile = tuple[int, int]
"""(n_block, m_block): a KV tile and a Q tile."""


class ScheduleError(ValueError):
    """A schedule or launch that is not what it has to be; ``tiles`` are the (n_block, m_block) at fault."""

    def __init__(self, message: str, tiles: Iterable[Tile] = ()) -> None:
        super().__init__(message)
        self.tiles = tuple(tiles)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who computes what, in which order, and in which order each Q tile is added up, for one head.

    ``items[i]`` are the KV tiles of one CTA's work, ``visit[i]`` the (n_block, m_block) tiles in the order in which
    it walks them (each KV tile in one piece), and ``turn[i][j]`` how many contributions to that Q tile come before
    the one of ``visit[i][j]``. An item without a tile to visit still exists: its dK and dV are zeros.

    Nothing here is proven; :func:`dash_kernels.schedules.check` does that.
    """

    kind: str
    grid: TileGrid
    group: int
    items: tuple[tuple[int, ...], ...]
    visit: tuple[tuple[Tile, ...], ...]
    turn: tuple[tuple[int, ...], ...]

    @property
    def num_steps(self) -> int:
        """Number of (KV, Q) tiles of the head."""
        return sum(len(tiles) for tiles in self.visit)


def for_group(schedule: Schedule, head_group: int) -> Schedule:
    """What a CTA walks when a KV head serves ``head_group`` query heads: each KV tile's visit once for each, in order.

    dK and dV stay where they are meanwhile. Every query head has Q tiles of its own: those of member ``g`` are
    numbered from ``g * num_m``, so ``m_block % num_m`` is the Q tile. Raises ScheduleError for a group below 1.
    """
    if not isinstance(head_group, int) or isinstance(head_group, bool) or head_group < 1:
        raise ScheduleError(f"head_group is {head_group!r}; it must be a positive integer")
    if head_group == 1:
        return schedule
    num_m = schedule.grid.num_m
    visits: list[tuple[Tile, ...]] = []
    turns: list[tuple[int, ...]] = []
    for tiles, of_tiles in zip(schedule.visit, schedule.turn, strict=True):
        walk: list[Tile] = []
        order: list[int] = []
        for n_block, run in groupby(zip(tiles, of_tiles, strict=True), key=lambda step: step[0][0]):
            steps = [(m_block, turn) for (_, m_block), turn in run]
            for member in range(head_group):
                walk += [(n_block, member * num_m + m_block) for m_block, _ in steps]
                order += [turn for _, turn in steps]
        visits.append(tuple(walk))
        turns.append(tuple(order))
    return replace(schedule, visit=tuple(visits), turn=tuple(turns))


def one_tile_an_item(grid: TileGrid) -> tuple[tuple[int, ...], ...]:
    """The plain division of work: item ``n`` is KV tile ``n``."""
    return tuple((n_block,) for n_block in range(grid.num_n))


def from_rules(
    kind: str,
    grid: TileGrid,
    *,
    visit: Callable[[int], Iterable[int]],
    turn_key: Callable[[int, int, int], Any],
    items: Sequence[tuple[int, ...]] | None = None,
    group: int = 1,
) -> Schedule:
    """Build a schedule from two rules.

    ``visit(n_block)`` gives the Q tiles of a KV tile in walking order; an item walks its KV tiles one after another.
    ``turn_key(n_block, m_block, step)`` gives the value by which the contributions to a Q tile are sorted; ``step``
    counts the tiles that the item walked before. Equal keys fall back on item order. ``items`` defaults to one KV
    tile each.
    """
    if items is None:
        items = one_tile_an_item(grid)
    visits: list[tuple[Tile, ...]] = []
    turns: list[list[int]] = []
    arrivals: list[list[tuple[Any, int, int]]] = [[] for _ in range(grid.num_m)]
    for item, kv_tiles in enumerate(items):
        tiles = tuple((n_block, m_block) for n_block in kv_tiles for m_block in visit(n_block))
        for step, (n_block, m_block) in enumerate(tiles):
            arrivals[m_block].append((turn_key(n_block, m_block, step), item, step))
        visits.append(tiles)
        turns.append([0] * len(tiles))
    for contributions in arrivals:
        contributions.sort()
        for turn, (_, item, step) in enumerate(contributions):
            turns[item][step] = turn
    return Schedule(kind, grid, group, tuple(items), tuple(visits), tuple(map(tuple, turns)))


def rotated(tiles: range, start: int) -> list[int]:
    """``tiles`` from the one at position ``start`` to the last, then from the first up to it."""
    return [*tiles[start:], *tiles[:start]]


def shortened(words: Sequence[str]) -> str:
    """``words`` with commas, the middle of more than six left out: for error messages."""
    if len(words) > 6:
        words = [*words[:3], f".. {len(words) - 6} more ..", *words[-3:]]
    return ", ".join(words)
