"""Schedules drawn at random, for tests of what builds, checks and packs them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from dash_kernels.schedules import (
    SCHEDULES,
    Launch,
    Schedule,
    TileGrid,
    build,
)

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

MONOTONE = ("ascending", "descending", "shortest_first")
KINDS = tuple(SCHEDULES)

sizes = st.integers(1, 48)
blocks = st.integers(1, 9)
sides = st.integers(-1, 20)
grids = st.builds(TileGrid, sizes, sizes, blocks, blocks, st.booleans())
windowed_grids = st.builds(TileGrid, sizes, sizes, blocks, blocks, st.booleans(), sides, sides)
launches = st.builds(Launch, st.sampled_from(["ascending", "descending"]), st.integers(1, 4))


@st.composite
def schedules(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS) -> Schedule:
    kind = draw(st.sampled_from(kinds))
    group = draw(st.integers(1, 7)) if SCHEDULES[kind].takes_group else 1
    on = windowed_grids if "window" in SCHEDULES[kind].masks and draw(st.booleans()) else grids
    return build(kind, draw(on), group)


def square(n: int, causal: bool) -> TileGrid:
    return TileGrid(n, n, 1, 1, causal)
