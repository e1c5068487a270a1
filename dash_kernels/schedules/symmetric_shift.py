"""symmetric_shift: KV tiles i and num_n - 1 - i on one CTA, so that all items of a causal head are equally long."""

from __future__ import annotations

from dash_kernels.schedules.grid import TileGrid
from dash_kernels.schedules.registry import register
from dash_kernels.schedules.schedule import Schedule, from_rules, rotated


def pairs(num_n: int) -> tuple[tuple[int, ...], ...]:
    """(0, num_n - 1), (1, num_n - 2), ..; with an odd number the middle tile is an item of its own."""
    whole = tuple((n_block, num_n - 1 - n_block) for n_block in range(num_n // 2))
    return (*whole, (num_n // 2,)) if num_n % 2 else whole


@register(
    "symmetric_shift",
    launch="ascending",
    masks=("full", "causal"),
    summary="pairs of a long and a short KV tile, in step (DASH)",
)
def symmetric_shift(grid: TileGrid, group: int) -> Schedule:
    """DASH's symmetric shift, without a bubble on a square causal head with an even number of KV tiles.

    There, with h the first Q tile of the upper half of KV tiles, pair i walks the rectangle of KV tile i (Q tiles h
    and up, shifted by i), then the triangle of KV tile i (from its diagonal up to h), then KV tile num_n - 1 - i
    from the last Q tile down to its diagonal. On a full mask there is no triangle: both tiles of a pair are shifted.
    """
    items = pairs(grid.num_n)

    def visit(n_block: int) -> list[int]:
        tiles = grid.q_tiles(n_block)
        partner = grid.num_n - 1 - n_block
        if grid.causal and n_block > partner:
            return list(reversed(tiles))
        first = grid.q_tiles((grid.num_n + 1) // 2).start if grid.causal and grid.num_n > 1 else 0
        masked, _ = grid.mask_ranges(n_block)
        first = max(first, tiles.start, masked.stop if len(masked) < len(tiles) else 0)
        rectangle = range(first, tiles.stop)
        start = min(n_block, partner) * len(rectangle) // len(items)
        return [*rotated(rectangle, start), *range(tiles.start, first)]

    return from_rules(
        "symmetric_shift",
        grid,
        items=items,
        visit=visit,
        turn_key=lambda n_block, m_block, step: (step, n_block),
    )
