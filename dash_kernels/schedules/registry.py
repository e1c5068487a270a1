"""The kinds of schedule by name, and how to add one.

A kind is one small file: two rules, the launch that fits them, and a name. This one, ``zigzag.py``, lets even KV tiles
walk their Q tiles upwards and odd ones downwards::

    # zigzag: neighbouring KV tiles walk in opposite directions.

    from __future__ import annotations

    from dash_kernels.schedules.grid import TileGrid
    from dash_kernels.schedules.registry import register
    from dash_kernels.schedules.schedule import Schedule, from_rules


    @register("zigzag", launch="ascending", summary="even KV tiles walk up, odd ones down")
    def zigzag(grid: TileGrid, group: int) -> Schedule:
        def visit(n_block: int) -> range:
            tiles = grid.q_tiles(n_block)
            return tiles[::-1] if n_block % 2 else tiles

        return from_rules("zigzag", grid, visit=visit, turn_key=lambda n_block, m_block, step: n_block)

Import the file in ``dash_kernels/schedules/__init__.py`` (or anywhere before the name is used). Nothing else changes:
the kernels read the arrays, ``check`` proves them or names the tiles at fault, the model draws them, and the property
tests and the tuner take every name in ``SCHEDULES``. Keep to three habits: rules look at the grid and the group only
(equal bits alone and in a batch); the tiles of a KV tile that need a mask stay together in its visit (and with a
sliding window, which has two edges, those that need none: a kind that goes round the row says
``masks=("full", "causal")``); and if every turn waits only for items launched earlier (as here: turn and launch both by
ascending KV), the kind is monotone and can be served with any number of free SMs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dash_kernels.schedules.grid import TileGrid
from dash_kernels.schedules.launch import Launch
from dash_kernels.schedules.schedule import Schedule, ScheduleError

Builder = Callable[[TileGrid, int], Schedule]
"""(grid, group) -> schedule of one head."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of schedule: ``builder(grid, group)``, the launch that fits it, and for which masks it was made.

    ``masks`` names full, causal and window (any mask with an edge beside the causal diagonal).
    """

    name: str
    builder: Builder
    default_launch: Launch
    takes_group: bool
    masks: tuple[str, ...]
    summary: str

    def refusal(self, mask: str) -> str:
        """What to say where this kind is asked for a mask that is not among ``masks``."""
        others = [name for name, kind in SCHEDULES.items() if mask in kind.masks]
        return (
            f"schedule {self.name} is for mask {', '.join(self.masks)}; the mask is {mask}: "
            f"choose {', '.join(others)}"
        )


SCHEDULES: dict[str, Kind] = {}
"""Every kind by name, in the order in which they were registered."""


def register(
    name: str,
    *,
    launch: str,
    summary: str,
    takes_group: bool = False,
    masks: tuple[str, ...] = ("full", "causal", "window"),
) -> Callable[[Builder], Builder]:
    """Decorator that adds a builder to ``SCHEDULES``; raises ScheduleError for a name that is taken."""

    def add(builder: Builder) -> Builder:
        if name in SCHEDULES:
            raise ScheduleError(f"schedule {name!r} is registered twice; choose another name")
        SCHEDULES[name] = Kind(name, builder, Launch(launch), takes_group, masks, summary)
        return builder

    return add


def find(kind: str) -> Kind:
    """The kind of this name; raises ScheduleError listing the names there are."""
    if kind not in SCHEDULES:
        raise ScheduleError(f"schedule {kind!r} is not one of {', '.join(SCHEDULES)}")
    return SCHEDULES[kind]


def build(kind: str, grid: TileGrid, group: int = 1) -> Schedule:
    """The schedule of one head; raises ScheduleError for a kind, mask or group that do not go together."""
    entry = find(kind)
    if not isinstance(group, int) or isinstance(group, bool) or group < 1:
        raise ScheduleError(f"group is {group!r}; it must be a positive integer")
    if group > 1 and not entry.takes_group:
        takers = ", ".join(name for name, other in SCHEDULES.items() if other.takes_group)
        raise ScheduleError(
            f"group is {group}, but schedule {kind} takes none; kinds with a group: {takers}"
        )
    mask = "window" if grid.windowed else "causal" if grid.causal else "full"
    if mask not in entry.masks:
        raise ScheduleError(entry.refusal(mask))
    return entry.builder(grid, group)


def default_launch(kind: str, heads: int = 1) -> Launch:
    """The launch order that fits a kind, with ``heads`` heads interleaved."""
    return Launch(find(kind).default_launch.order, heads)


def fitting_launch(schedule: Schedule) -> Launch:
    """The default launch of a schedule's kind; ascending for a kind that is not registered."""
    return SCHEDULES[schedule.kind].default_launch if schedule.kind in SCHEDULES else Launch()
