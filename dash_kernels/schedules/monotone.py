"""The kinds in which a turn waits only for items launched earlier, so that any number of free SMs will do.

They differ in when a KV tile reaches the Q tiles that its predecessor in the order of addition has to reach first.
"""

from __future__ import annotations

from dash_kernels.schedules.grid import TileGrid
from dash_kernels.schedules.registry import register
from dash_kernels.schedules.schedule import Schedule, from_rules


@register(
    "ascending",
    launch="ascending",
    summary="FA3's order: every tile walks up, turns by ascending KV",
)
def ascending(grid: TileGrid, group: int) -> Schedule:
    """On a causal mask each KV tile starts one Q tile after its predecessor, and so waits at every step."""
    return from_rules(
        "ascending", grid, visit=grid.q_tiles, turn_key=lambda n_block, m_block, step: n_block
    )


@register(
    "descending",
    launch="ascending",
    summary="every tile walks down to the diagonal, turns by ascending KV",
)
def descending(grid: TileGrid, group: int) -> Schedule:
    """All KV tiles start at the last Q tile: they fall into step once, and short tiles end early (DASH, section 3)."""
    return from_rules(
        "descending",
        grid,
        visit=lambda n_block: grid.q_tiles(n_block)[::-1],
        turn_key=lambda n_block, m_block, step: n_block,
    )


@register(
    "shortest_first",
    launch="descending",
    summary="every tile walks up, the last KV tile goes first",
)
def shortest_first(grid: TileGrid, group: int) -> Schedule:
    """Turns and launch by descending KV: on a causal mask no two tiles started together meet at a Q tile."""
    return from_rules(
        "shortest_first", grid, visit=grid.q_tiles, turn_key=lambda n_block, m_block, step: -n_block
    )
