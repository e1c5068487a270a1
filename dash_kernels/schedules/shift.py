"""shift and grouped_shift: CTAs of one head start a part of the row apart and go round it."""

from __future__ import annotations

from dash_kernels.schedules.grid import TileGrid
from dash_kernels.schedules.registry import register
from dash_kernels.schedules.schedule import Schedule, from_rules, rotated


@register(
    "shift",
    launch="ascending",
    masks=("full", "causal"),
    summary="all KV tiles of a head at once, spread over the row (DASH)",
)
def shift(grid: TileGrid, group: int) -> Schedule:
    """DASH's shift: KV tile i walks i, i+1, .., and round, scaled by num_m / num_n; turns by step.

    On a full mask with num_m >= num_n no two KV tiles are ever at the same Q tile, if all are resident. On a causal
    mask what is left of that walk are the arrays of shortest_first, here launched long tiles first.
    """
    if grid.causal:
        return from_rules(
            "shift", grid, visit=grid.q_tiles, turn_key=lambda n_block, m_block, step: -n_block
        )
    return from_rules(
        "shift",
        grid,
        visit=lambda n_block: rotated(grid.q_tiles(n_block), n_block * grid.num_m // grid.num_n),
        turn_key=lambda n_block, m_block, step: (step, n_block),
    )


@register(
    "grouped_shift",
    launch="descending",
    masks=("full", "causal"),
    takes_group=True,
    summary="shift among `group` neighbouring KV tiles; meant for slots // group interleaved heads",
)
def grouped_shift(grid: TileGrid, group: int) -> Schedule:
    """``group`` CTAs share a head, 1/group of the row apart; each group adds after the groups launched before it.

    Groups of one head follow each other, so the other slots should work on other heads: launch it with slots // group
    heads interleaved. With k heads it needs k x (group - 1) + 1 slots where shift needs all num_n; group 1 is
    shortest_first. On a causal mask a start that would part the masked tiles moves to the nearer end of them.
    """

    def place(n_block: int) -> tuple[int, int, int]:
        """Wave, position in it, and its number of members: the first KV tiles may make a smaller wave."""
        wave, member = divmod(grid.num_n - 1 - n_block, group)
        return wave, member, min(group, grid.num_n - wave * group)

    def visit(n_block: int) -> list[int]:
        tiles = grid.q_tiles(n_block)
        _, member, members = place(n_block)
        start = member * len(tiles) // members
        masked = len(grid.mask_ranges(n_block)[0])
        if start < masked < len(tiles):
            start = 0 if 2 * start < masked else masked
        return rotated(tiles, start)

    def turn_key(n_block: int, m_block: int, step: int) -> tuple[int, int, int]:
        wave, member, _ = place(n_block)
        return wave, step, member

    return from_rules("grouped_shift", grid, visit=visit, turn_key=turn_key, group=group)
