"""The model: how long a schedule takes on a number of slots, where it stalls, and what it looks like.

Each (KV, Q) tile is a compute phase, then a reduce phase in which the CTA adds to the Q tile's dQ (DASH, arXiv
2601.21824, section 2). A CTA does one after the other; a reduce starts no earlier than the signal of the turn before
it. Items go to slots as these come free, in ticket order. Times are in the unit of ``c`` and ``r``; with integers, or
fractions that floats hold exactly, so are the results.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dash_kernels.schedules.check import turn_owners
from dash_kernels.schedules.launch import Launch
from dash_kernels.schedules.registry import fitting_launch
from dash_kernels.schedules.schedule import Schedule, Tile, for_group, shortened


class DeadlockError(RuntimeError):
    """A schedule that does not end on these slots; ``tiles`` are the (n_block, m_block) that wait, in a chain."""

    def __init__(self, message: str, tiles: Sequence[Tile]) -> None:
        super().__init__(message)
        self.tiles = tuple(tiles)


class GanttRow(NamedTuple):
    """One tile: it computes for ``c`` from ``start``, waits for its turn, reduces until ``end``. ``head`` is a query head."""

    slot: int
    head: int
    n_block: int
    m_block: int
    start: float
    reduce_start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """``utilisation`` is work over slots x makespan; ``stalls[slot]`` the time spent waiting for turns.

    ``busy[slot]`` is the time spent computing and reducing; what is left of ``makespan`` a slot stood empty. ``rows``
    are the Gantt chart, by slot, then by time; empty if they were not asked for.
    """

    makespan: float
    utilisation: float
    stalls: tuple[float, ...]
    busy: tuple[float, ...]
    rows: tuple[GanttRow, ...]


def simulate(
    schedule: Schedule,
    slots: int = 132,
    c: float = 1.0,
    r: float = 0.3,
    l: float = 0.0,  # noqa: E741  (the paper's letter)
    heads: int = 1,
    launch: Launch | None = None,
    *,
    head_group: int = 1,
    gantt: bool = True,
) -> Simulation:
    """Run ``heads`` heads of a schedule on ``slots`` slots.

    With a ``head_group`` they are KV heads of so many query heads each, and a CTA walks each of its visits once for
    every one of these. ``c`` is a tile's compute cost, ``r`` its reduce cost, ``l`` the time from the end of a reduce
    until the next turn sees its signal. ``launch`` defaults to the one that fits the kind; ``gantt=False`` leaves out the
    rows. Raises ValueError for a cost, count or schedule that makes no sense, DeadlockError naming the chain of waits if
    the schedule does not end on so few slots.
    """
    for name, count in (("slots", slots), ("heads", heads)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name} is {count!r}; it must be a positive integer")
    for name, cost in (("c", c), ("r", r), ("l", l)):
        if not 0 <= cost < float("inf"):
            raise ValueError(f"{name} is {cost!r}; it must be a finite cost of 0 or more")
    if launch is None:
        launch = fitting_launch(schedule)
    walked = for_group(schedule, head_group)
    turn_owners(walked, head_group)
    return _Run(walked, launch, slots, heads, head_group, (c, r, l), gantt).to_end()


class _Run:
    """State of one simulation.

    An item advances on its own until a turn has not been given yet; only the assignment of items to slots follows the
    clock. That is safe: an item still waiting then waits for one that has no slot, which starts no earlier than the
    earliest known end, so that end is the next slot to come free.
    """

    def __init__(
        self,
        schedule: Schedule,
        launch: Launch,
        slots: int,
        heads: int,
        head_group: int,
        costs: tuple[float, float, float],
        gantt: bool,
    ) -> None:
        self.schedule, self.launch, self.slots, self.heads = schedule, launch, slots, heads
        self.costs, self.gantt = costs, gantt
        self.head_group, self.num_m = head_group, schedule.grid.num_m
        num_cells = heads * head_group * self.num_m
        self.arrived = [0] * num_cells
        self.signal: list[float] = [0] * num_cells
        self.waiting: dict[tuple[int, int], _Item] = {}
        self.ended: list[tuple[float, int]] = [(0, slot) for slot in range(slots)]
        self.stalls: list[float] = [0] * slots
        self.busy: list[float] = [0] * slots
        self.rows: list[GanttRow] = []

    def to_end(self) -> Simulation:
        order = self.launch.item_order(self.schedule)
        for ticket in range(self.heads * len(order)):
            if not self.ended:
                raise self._deadlock()
            start, slot = heapq.heappop(self.ended)
            head, position = self.launch.head_and_item(ticket, self.heads, len(order))
            self._advance(_Item(head, order[position], slot, start))
        if self.waiting:
            raise self._deadlock()
        makespan = max(end for end, _ in self.ended)
        work = sum(self.busy)
        self.rows.sort(key=lambda row: (row.slot, row.start))
        return Simulation(
            makespan,
            work / (self.slots * makespan) if makespan else 1.0,
            tuple(self.stalls),
            tuple(self.busy),
            tuple(self.rows),
        )

    def _advance(self, started: _Item) -> None:
        """Take ``started``, and every item that its reduces let go on, as far as they get."""
        num_m, cells_of_head = self.num_m, self.head_group * self.num_m
        c, r, latency = self.costs
        arrived, signal = self.arrived, self.signal
        ready = [started]
        while ready:
            item = ready.pop()
            tiles, turns = self.schedule.visit[item.index], self.schedule.turn[item.index]
            base, step, now = item.head * cells_of_head, item.step, item.now
            while step < len(tiles):
                n_block, m_block = tiles[step]
                cell = base + m_block
                turn = turns[step]
                if arrived[cell] != turn:
                    self.waiting[cell, turn] = item
                    break
                computed = now + c
                reduce_start = max(computed, signal[cell])
                end = reduce_start + r
                self.stalls[item.slot] += reduce_start - computed
                if self.gantt:
                    tile = (cell // num_m, n_block, m_block % num_m)
                    self.rows.append(GanttRow(item.slot, *tile, now, reduce_start, end))
                now = end
                step += 1
                signal[cell] = end + latency
                arrived[cell] = turn + 1
                woken = self.waiting.pop((cell, turn + 1), None)
                if woken is not None:
                    ready.append(woken)
            else:
                self.busy[item.slot] += len(tiles) * (c + r)
                heapq.heappush(self.ended, (now, item.slot))
            item.step, item.now = step, now

    def _deadlock(self) -> DeadlockError:
        """Follow waits from the lowest slot until one comes round again or leads to an item without a slot."""
        owners = turn_owners(self.schedule, self.head_group)
        cells_of_head = self.head_group * self.num_m
        held = {(item.head, item.index): item for item in self.waiting.values()}
        item = min(held.values(), key=lambda item: item.slot)
        path: list[tuple[int, int]] = []
        hops: list[str] = []
        tiles: list[Tile] = []
        reason = ""
        while (key := (item.head, item.index)) not in path:
            path.append(key)
            n_block, cell = self.schedule.visit[item.index][item.step]
            owner, owner_step = owners[cell][self.arrived[item.head * cells_of_head + cell]]
            awaited, m_block = self.schedule.visit[owner][owner_step][0], cell % self.num_m
            tiles.append((n_block, m_block))
            hops.append(f"KV tile {n_block} waits at Q tile {m_block} for KV tile {awaited}")
            if (item.head, owner) not in held:
                tiles.append((awaited, m_block))
                reason = f"which has no slot; all {self.slots} are taken by items that wait"
                break
            item = held[item.head, owner]
        else:
            first = path.index(key)
            hops, tiles = hops[first:], tiles[first:]
            reason = "so the waits form a cycle"
        return DeadlockError(
            f"schedule {self.schedule.kind} launched {self.launch.order} on {self.slots} slots never ends: "
            f"head {item.head}, {shortened(hops)}, {reason}",
            tiles,
        )


@dataclass(slots=True)
class _Item:
    """An item of a head on a slot, before the step that it has reached at time ``now``."""

    head: int
    index: int
    slot: int
    now: float
    step: int = 0
