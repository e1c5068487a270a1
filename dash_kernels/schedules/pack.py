"""A schedule and its launch as flat integer arrays: what the kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from dash_kernels.schedules.launch import Launch
from dash_kernels.schedules.schedule import Schedule, ScheduleError


@dataclass(frozen=True, slots=True)
class Packed:
    """One head's arrays, the same for every head and batch. T KV tiles, I items, V visited tiles.

    ``item_order[position]`` is an item (I); item ``i`` owns entries ``item_begin[i] : item_begin[i + 1]`` (I + 1) of
    ``kv_tile`` (T). KV tile ``kv_tile[j]`` visits ``visit[b : b + visit_count[j]]`` with ``b = visit_begin[j]``, each
    an ``m_block`` (V), with its turn in ``turn`` (V). ``mask_begin[j]`` and ``mask_end[j]`` are the steps, relative to
    ``b``, at which a kernel goes from one of its three loops to the next (:func:`mask_bounds`).
    ``contributions[m_block]`` counts the turns of a Q tile; 0 where its rows see no key.
    """

    item_order: tuple[int, ...]
    item_begin: tuple[int, ...]
    kv_tile: tuple[int, ...]
    visit_begin: tuple[int, ...]
    visit_count: tuple[int, ...]
    mask_begin: tuple[int, ...]
    mask_end: tuple[int, ...]
    visit: tuple[int, ...]
    turn: tuple[int, ...]
    contributions: tuple[int, ...]


def mask_bounds(schedule: Schedule, n_block: int, m_blocks: tuple[int, ...]) -> tuple[int, int]:
    """The steps (b0, b1) that cut a KV tile's visit into three loops.

    Without a window only [b0, b1) is masked, and is (0, 0) where nothing is. With one (``grid.windowed``) only [b0, b1)
    is not: a visit then begins at one edge of the mask and ends at the other. Where a windowed visit is masked all
    over, b0 = b1 = the number of tiles at the right edge. Raises ScheduleError naming the tiles if no two steps do.
    """
    head, tail = schedule.grid.mask_ranges(n_block)
    masked = [m_block in head or m_block in tail for m_block in m_blocks]
    windowed = schedule.grid.windowed
    steps = [step for step, needed in enumerate(masked) if needed != windowed]
    if not steps:
        return (len(head), len(head)) if windowed else (0, 0)
    begin, end = steps[0], steps[-1] + 1
    if end - begin != len(steps):
        alien = next(step for step in range(begin, end) if masked[step] == windowed)
        what, others = ("needs a mask", "need none") if windowed else ("needs no mask", "need one")
        raise ScheduleError(
            f"KV tile {n_block} visits Q tile {m_blocks[alien]}, which {what}, between Q tiles that {others} "
            f"({m_blocks[begin]} and {m_blocks[end - 1]}): their visits must be contiguous",
            [(n_block, m_blocks[step]) for step in (begin, alien, end - 1)],
        )
    return begin, end


def pack(schedule: Schedule, launch: Launch) -> Packed:
    """Flatten ``schedule``; raises ScheduleError for visits that do not follow ``items``."""
    item_begin, kv_tile, visit_begin, visit_count, mask_begin, mask_end = [0], [], [], [], [], []
    visit: list[int] = []
    turn: list[int] = []
    contributions = [0] * schedule.grid.num_m
    for item, kv_tiles in enumerate(schedule.items):
        runs = [
            (n_block, tuple(m_block for _, m_block in tiles))
            for n_block, tiles in groupby(schedule.visit[item], key=lambda tile: tile[0])
        ]
        walked = [n_block for n_block, _ in runs]
        if [n_block for n_block in kv_tiles if n_block in set(walked)] != walked:
            raise ScheduleError(
                f"item {item} owns KV tiles {list(kv_tiles)} but walks {walked}: each in one piece, in that order",
                schedule.visit[item],
            )
        m_blocks_of = dict(runs)
        for n_block in kv_tiles:
            m_blocks = m_blocks_of.get(n_block, ())
            begin, end = mask_bounds(schedule, n_block, m_blocks)
            kv_tile.append(n_block)
            visit_begin.append(len(visit))
            visit_count.append(len(m_blocks))
            mask_begin.append(begin)
            mask_end.append(end)
            visit.extend(m_blocks)
            for m_block in m_blocks:
                contributions[m_block] += 1
        turn.extend(schedule.turn[item])
        item_begin.append(len(kv_tile))
    return Packed(
        launch.item_order(schedule),
        *map(
            tuple,
            (
                item_begin,
                kv_tile,
                visit_begin,
                visit_count,
                mask_begin,
                mask_end,
                visit,
                turn,
                contributions,
            ),
        ),
    )
