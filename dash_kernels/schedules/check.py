"""Proof that a schedule computes every tile once, adds in one order, ends, and with how many slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from dash_kernels.schedules.launch import Launch
from dash_kernels.schedules.pack import mask_bounds
from dash_kernels.schedules.registry import fitting_launch
from dash_kernels.schedules.schedule import (
    Schedule,
    ScheduleError,
    Tile,
    for_group,
    shortened,
)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What :func:`check` proved of a schedule under a launch.

    ``min_resident`` is the fewest slots with which it always ends when CTAs start in launch order. ``early_wait`` is
    an example of what makes it more than 1: a tile, and the tile of a later item whose turn comes before it.
    """

    launch: Launch
    min_resident: int
    early_wait: tuple[Tile, Tile] | None

    @property
    def monotone(self) -> bool:
        """Every turn waits only for items launched earlier: any number of free slots will do."""
        return self.min_resident == 1

    def require_monotone(self) -> None:
        """Raise ScheduleError naming two tiles unless one free slot is enough."""
        if self.early_wait is not None:
            (n_block, m_block), (awaited, _) = self.early_wait
            raise ScheduleError(
                f"launched {self.launch.order}, KV tile {n_block} waits at Q tile {m_block} for KV tile {awaited}, "
                f"which starts later: it needs {self.min_resident} resident CTAs, not 1",
                self.early_wait,
            )


def check(
    schedule: Schedule,
    launch: Launch | None = None,
    total_heads: int | None = None,
    head_group: int = 1,
) -> CheckReport:
    """Prove a schedule and find ``min_resident`` under ``launch`` (by default the one that fits its kind).

    Proven: every KV tile belongs to one item; every (KV, Q) tile with an unmasked pair is visited exactly once and
    no other is; an item walks its KV tiles one after another, and of each the tiles that need a mask (with a window:
    those that need none) are contiguous; the turns of a Q tile are 0..k-1; program order and turns form no cycle. Raises
    ScheduleError naming the tiles at fault.

    ``head_group`` query heads share a KV head: its CTAs walk each visit once for each (``for_group``), which a monotone
    kind does not notice, while others may need more slots. ``total_heads`` (batch x KV heads) is needed only where a
    launch interleaves all heads of a kind that is not monotone, because there min_resident grows with them; without it
    that case raises ValueError.
    """
    if launch is None:
        launch = fitting_launch(schedule)
    _check_items(schedule)
    _check_visits(schedule)
    owners = turn_owners(schedule)
    order = launch.item_order(schedule)
    unfinished = _unfinished_after(schedule, order, owners)
    if not any(unfinished):
        return CheckReport(
            launch, 1, None
        )  # with groups too: whoever starts finds every earlier turn given
    early_wait = _early_wait(schedule, order, owners)
    if head_group != 1:
        walked = for_group(schedule, head_group)
        unfinished = _unfinished_after(walked, order, turn_owners(walked, head_group))
    if launch.heads == 0 and total_heads is None:
        raise ValueError(
            f"schedule {schedule.kind} launched {launch.order} with all heads interleaved needs more slots the more "
            f"heads there are: pass total_heads"
        )
    heads = launch.interleaved(total_heads) if total_heads is not None else launch.heads
    return CheckReport(launch, _min_resident(unfinished, heads), early_wait)


def _check_items(schedule: Schedule) -> None:
    if not len(schedule.items) == len(schedule.visit) == len(schedule.turn):
        raise ScheduleError(
            f"{len(schedule.items)} items, but {len(schedule.visit)} visits and {len(schedule.turn)} lists of turns"
        )
    owner: dict[int, int] = {}
    for item, kv_tiles in enumerate(schedule.items):
        if not kv_tiles:
            raise ScheduleError(f"item {item} has no KV tile")
        for n_block in kv_tiles:
            if not 0 <= n_block < schedule.grid.num_n:
                raise ScheduleError(
                    f"item {item} has KV tile {n_block}; there are {schedule.grid.num_n}"
                )
            if n_block in owner:
                raise ScheduleError(f"KV tile {n_block} is in items {owner[n_block]} and {item}")
            owner[n_block] = item
    missing = [n_block for n_block in range(schedule.grid.num_n) if n_block not in owner]
    if missing:
        raise ScheduleError(f"KV tiles {shortened(list(map(str, missing)))} are in no item")


def _check_visits(schedule: Schedule) -> None:
    """Every tile exactly once, each KV tile in one piece, in the order of ``items``; three loops suffice for the mask."""
    for item, (kv_tiles, tiles) in enumerate(zip(schedule.items, schedule.visit, strict=True)):
        runs: dict[int, tuple[int, ...]] = {}
        for n_block, run in groupby(tiles, key=lambda tile: tile[0]):
            m_blocks = tuple(m_block for _, m_block in run)
            if n_block not in kv_tiles:
                raise ScheduleError(
                    f"item {item} visits KV tile {n_block}, which it does not own",
                    [(n_block, m_blocks[0])],
                )
            if n_block in runs:
                raise ScheduleError(
                    f"item {item} comes back to KV tile {n_block} at Q tile {m_blocks[0]} after leaving it: dK and dV "
                    f"of one KV tile are kept at a time",
                    [(n_block, m_blocks[0])],
                )
            runs[n_block] = m_blocks
        if list(runs) != [n_block for n_block in kv_tiles if n_block in runs]:
            raise ScheduleError(
                f"item {item} walks KV tiles {list(runs)}, but lists {list(kv_tiles)}", tiles
            )
        for n_block in kv_tiles:
            m_blocks = runs.get(n_block, ())
            _check_q_tiles(schedule, n_block, m_blocks)
            mask_bounds(schedule, n_block, m_blocks)


def _check_q_tiles(schedule: Schedule, n_block: int, m_blocks: tuple[int, ...]) -> None:
    wanted = schedule.grid.q_tiles(n_block)
    seen: set[int] = set()
    for m_block in m_blocks:
        if m_block in seen:
            raise ScheduleError(
                f"tile (KV {n_block}, Q {m_block}) is visited twice", [(n_block, m_block)]
            )
        if m_block not in wanted:
            raise ScheduleError(
                f"tile (KV {n_block}, Q {m_block}) is visited but has no unmasked pair",
                [(n_block, m_block)],
            )
        seen.add(m_block)
    if len(seen) < len(wanted):
        missing = [m_block for m_block in wanted if m_block not in seen]
        raise ScheduleError(
            f"KV tile {n_block} never visits Q tile {shortened(list(map(str, missing)))}",
            [(n_block, m_block) for m_block in missing],
        )


def turn_owners(schedule: Schedule, head_group: int = 1) -> list[list[tuple[int, int]]]:
    """For each Q tile, the (item, step) of each turn; raises ScheduleError unless its turns are 0..k-1.

    A schedule that :func:`for_group` made has the Q tiles of ``head_group`` heads.
    """
    nobody = (-1, -1)
    owners: list[list[tuple[int, int]]] = [
        [nobody] * len(schedule.grid.kv_tiles(m_block))
        for _ in range(head_group)
        for m_block in range(schedule.grid.num_m)
    ]
    for item, (tiles, turns) in enumerate(zip(schedule.visit, schedule.turn, strict=True)):
        if len(tiles) != len(turns):
            raise ScheduleError(
                f"item {item} visits {len(tiles)} tiles, but has {len(turns)} turns", tiles
            )
        for step, ((n_block, m_block), turn) in enumerate(zip(tiles, turns, strict=True)):
            of_tile = owners[m_block]
            if not 0 <= turn < len(of_tile):
                raise ScheduleError(
                    f"tile (KV {n_block}, Q {m_block}) has turn {turn}; Q tile {m_block} has turns 0 to "
                    f"{len(of_tile) - 1}",
                    [(n_block, m_block)],
                )
            if of_tile[turn] != nobody:
                other_item, other_step = of_tile[turn]
                other = schedule.visit[other_item][other_step]
                raise ScheduleError(
                    f"tiles (KV {other[0]}, Q {m_block}) and (KV {n_block}, Q {m_block}) both have turn {turn}",
                    [other, (n_block, m_block)],
                )
            of_tile[turn] = (item, step)
    return owners


def _unfinished_after(
    schedule: Schedule, order: Sequence[int], owners: Sequence[Sequence[tuple[int, int]]]
) -> list[int]:
    """How many of the first 1, 2, .. launched items cannot end before a later one starts.

    Advancing is confluent: whatever the timing, the items started so far come to rest at the same steps. So one pass
    that starts items in launch order, and lets each advance while its turns have come, answers for every number of
    slots. Raises ScheduleError naming a cycle if some item never ends.
    """
    arrived = [0] * len(owners)
    at = [0] * len(schedule.items)
    waiting: dict[tuple[int, int], int] = {}
    unfinished = []
    resting = 0
    for launched in order:
        resting += 1
        ready = [launched]
        while ready:
            item = ready.pop()
            tiles, turns = schedule.visit[item], schedule.turn[item]
            step = at[item]
            while step < len(tiles):
                m_block = tiles[step][1]
                if arrived[m_block] != turns[step]:
                    waiting[m_block, turns[step]] = item
                    break
                arrived[m_block] += 1
                step += 1
                woken = waiting.pop((m_block, arrived[m_block]), None)
                if woken is not None:
                    ready.append(woken)
            else:
                resting -= 1
            at[item] = step
        unfinished.append(resting)
    if resting:
        raise _cycle_error(schedule, owners, arrived, at)
    return unfinished


def _cycle_error(
    schedule: Schedule,
    owners: Sequence[Sequence[tuple[int, int]]],
    arrived: Sequence[int],
    at: Sequence[int],
) -> ScheduleError:
    """Follow waits from an item that never ends until one comes round again."""
    item = next(i for i, tiles in enumerate(schedule.visit) if at[i] < len(tiles))
    path: list[int] = []
    while item not in path:
        path.append(item)
        m_block = schedule.visit[item][at[item]][1]
        item = owners[m_block][arrived[m_block]][0]
    cycle = path[path.index(item) :]
    num_m = schedule.grid.num_m
    tiles, awaited = [], []
    for n_block, m_block in (schedule.visit[i][at[i]] for i in cycle):
        owner, step = owners[m_block][arrived[m_block]]
        tiles.append((n_block, m_block % num_m))
        awaited.append((schedule.visit[owner][step][0], m_block % num_m))
    hops = [
        f"(KV {n_block}, Q {m_block}) waits for the turn of (KV {after[0]}, Q {after[1]})"
        for (n_block, m_block), after in zip(tiles, awaited, strict=True)
    ]
    return ScheduleError(
        f"program order and turns form a cycle, each CTA waiting before the tile that the one before it awaits: "
        f"{shortened(hops)}",
        tiles,
    )


def _min_resident(unfinished: Sequence[int], heads: int) -> int:
    """Most items at rest just before a launch, plus that launch, with ``heads`` equal heads taking turns.

    When the heads have launched a items each, and b of them one more, b * u(a + 1) + (heads - b) * u(a) rest; that
    is linear in b, so its ends, b = 0 and b = heads - 1, are enough.
    """
    resting = [0, *unfinished]
    return 1 + max(max(heads * now, now + (heads - 1) * after) for now, after in pairwise(resting))


def _early_wait(
    schedule: Schedule, order: Sequence[int], owners: Sequence[Sequence[tuple[int, int]]]
) -> tuple[Tile, Tile] | None:
    """The first turn, by Q tile, whose predecessor belongs to an item launched later."""
    position = {item: index for index, item in enumerate(order)}
    for of_tile in owners:
        for (before, before_step), (item, step) in pairwise(of_tile):
            if position[before] > position[item]:
                return schedule.visit[item][step], schedule.visit[before][before_step]
    return None
