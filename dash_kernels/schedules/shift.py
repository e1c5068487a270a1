"""shift and grouped_shift: CTAs of one head start a part of the row apart and go round it."""

from __future__ import annotations

from collections.abc import Callable

from dash_kernels.schedules.grid import TileGrid
from dash_kernels.schedules.registry import register
from dash_kernels.schedules.schedule import Schedule, from_rules, rotated


def _staggered(
    kind: str, grid: TileGrid, group: int, place: Callable[[int], tuple[int, int, int]]
) -> Schedule:
    """KV tiles in waves; ``place(n_block)`` gives (wave, member, members), and a member starts that part round.

    Turns follow waves, and inside a wave the step at which its CTAs arrive, if all start together.
    """

    def visit(n_block: int) -> list[int]:
        tiles = grid.q_tiles(n_block)
        _, member, members = place(n_block)
        start = member * len(tiles) // members
        masked = len(grid.masked_q_tiles(n_block))
        if start < masked < len(tiles):
            start = 0 if 2 * start < masked else masked
        return rotated(tiles, start)

    def turn_key(n_block: int, m_block: int, step: int) -> tuple[int, int, int]:
        wave, member, _ = place(n_block)
        return wave, step, member

    return from_rules(kind, grid, visit=visit, turn_key=turn_key, group=group)


@register(
    "shift",
    launch="ascending",
    summary="all KV tiles of a head at once, spread evenly over the row",
)
def shift(grid: TileGrid, group: int) -> Schedule:
    """DASH's shift: KV tile i walks i, i+1, .., and round; scaled when there are more Q tiles than KV tiles.

    On a full mask with num_m >= num_n no two KV tiles are ever at the same Q tile, if all are resident.
    """
    return _staggered("shift", grid, 1, lambda n_block: (0, n_block, grid.num_n))


@register(
    "grouped_shift",
    launch="descending",
    takes_group=True,
    summary="shift among `group` neighbouring KV tiles at a time, the last ones first",
)
def grouped_shift(grid: TileGrid, group: int) -> Schedule:
    """``group`` CTAs share a head, 1/group of the row apart; each group adds after the groups launched before it.

    So it needs ``group`` slots where shift needs num_n; group 1 is shortest_first.
    """

    def place(n_block: int) -> tuple[int, int, int]:
        wave, member = divmod(grid.num_n - 1 - n_block, group)
        return wave, member, min(group, grid.num_n - wave * group)

    return _staggered("grouped_shift", grid, group, place)
