"""Simulated schedules for the page: the strips beside the answer and the Gantt chart with its figures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dash_kernels.critical_path import DeadlockError, Simulation, simulate
from dash_kernels.schedules import SCHEDULES, Launch, TileGrid, build
from dashboard.filters import MAX_STEPS, Filters, kind_and_group
from dashboard.gantt import Strip, strip
from dashboard.points import schedule_of

TILE = 64
STRIP_TILES, STRIP_HEADS, STRIP_SLOTS, STRIP_REDUCE = 8, 4, 8, 0.3


@dataclass(frozen=True)
class Chart:
    """A simulated schedule, or the one line that says why there is none."""

    kind: str
    mask: str
    simulation: Simulation | None
    error: str = ""


def simulated(
    kind: str, mask: str, tiles: int, heads: int, slots: int, r: float, launch: Launch | None = None
) -> Simulation:
    """A square grid of ``tiles`` x ``tiles`` tiles, compute cost 1. Raises ValueError or DeadlockError."""
    name, group = kind_and_group(kind)
    grid = TileGrid(tiles * TILE, tiles * TILE, TILE, TILE, mask == "causal")
    schedule = build(name, grid, group)
    if schedule.num_steps * heads > MAX_STEPS:
        raise ValueError(
            f"{schedule.num_steps * heads} tiles are more than the {MAX_STEPS} one chart draws; use fewer tiles or heads"
        )
    return simulate(schedule, slots=slots, c=1.0, r=r, heads=heads, launch=launch)


def chart(filters: Filters, fallback_kind: str, fallback_mask: str) -> Chart:
    """The Gantt chart that the filters ask for; the winner's kind and mask where they do not say."""
    kind, mask = filters.kind or fallback_kind, filters.gantt_mask or fallback_mask
    if filters.kind is None and mask not in SCHEDULES[kind_and_group(kind)[0]].masks:
        kind = "descending"
    try:
        if mask not in ("causal", "full"):
            raise ValueError(f"gantt_mask is {mask[:40]!r}; choose one of full, causal")
        return Chart(
            kind,
            mask,
            simulated(kind, mask, filters.tiles, filters.heads, filters.slots, filters.r),
        )
    except (ValueError, DeadlockError) as error:
        return Chart(kind, mask, None, str(error))


@lru_cache(maxsize=64)
def strips(
    kind: str, mask: str, order: str | None = None, interleaved: int = 1
) -> tuple[Strip, ...]:
    """Plain ascending order over ``kind`` as the winner launches it, at one scale: the longer one is seen to be longer."""
    wanted: list[tuple[str, str, Launch | None]] = [("ascending", "ascending", None)]
    if kind != "ascending":
        heads = {0: ", all heads interleaved", 1: ""}.get(
            interleaved, f", {interleaved} heads interleaved"
        )
        launch = Launch(order, interleaved) if order else None
        wanted.append((kind, schedule_of(kind) + heads, launch))
    drawn: list[tuple[str, str, Simulation]] = []
    for name, label, launch in wanted:
        try:
            simulation = simulated(
                schedule_of(name), mask, STRIP_TILES, STRIP_HEADS, STRIP_SLOTS, STRIP_REDUCE, launch
            )
        except (ValueError, DeadlockError):
            continue  # a policy has no order to draw
        drawn.append((name, label, simulation))
    span = max((s.makespan for *_, s in drawn), default=1.0)
    return tuple(
        strip(name, label, s, 1.0, span, f"{s.utilisation:.0%} busy, ends at {s.makespan:g}")
        for name, label, s in drawn
    )
