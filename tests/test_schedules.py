"""Schedules over random shapes, what check() has to catch, and the arrays the kernels read."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_kernels.problem import Config, Problem
from dash_kernels.schedules import (
    SCHEDULES,
    Launch,
    Schedule,
    ScheduleError,
    TileGrid,
    build,
    check,
    default_launch,
    pack,
    registry,
)
from dash_kernels.schedules.schedule import for_group

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


def edited(
    schedule: Schedule, item: int, visit: list[tuple[int, int]], turn: list[int]
) -> Schedule:
    visits, turns = list(schedule.visit), list(schedule.turn)
    visits[item], turns[item] = tuple(visit), tuple(turn)
    return replace(schedule, visit=tuple(visits), turn=tuple(turns))


def rests_with(
    schedule: Schedule, launch: Launch, heads: int, slots: int, head_group: int = 1
) -> bool:
    """Whether all items end on so many slots: tickets one by one, every head apart, nothing closed-form."""
    order = launch.item_order(schedule)
    arrived = [[0] * (head_group * schedule.grid.num_m) for _ in range(heads)]
    at = [[0] * len(order) for _ in range(heads)]
    resident: list[tuple[int, int]] = []
    ticket = 0
    while True:
        while len(resident) < slots and ticket < heads * len(order):
            head, position = launch.head_and_item(ticket, heads, len(order))
            resident.append((head, order[position]))
            ticket += 1
        moved = False
        for head, item in resident:
            tiles, turns = schedule.visit[item], schedule.turn[item]
            while at[head][item] < len(tiles):
                m_block = tiles[at[head][item]][1]
                if arrived[head][m_block] != turns[at[head][item]]:
                    break
                arrived[head][m_block] += 1
                at[head][item] += 1
                moved = True
        left = [(h, i) for h, i in resident if at[h][i] < len(schedule.visit[i])]
        if not left and ticket == heads * len(order):
            return True
        if not moved and len(left) == len(resident) == slots:
            return False
        resident = left


class TestGrid:
    @settings(max_examples=200)
    @given(grids | windowed_grids)
    def test_work_and_masks_are_those_of_the_single_pairs(self, grid: TileGrid) -> None:
        offset = grid.seq_len_kv - grid.seq_len
        left, right = grid.window_left, 0 if grid.causal else grid.window_right

        def sees(row: int, key: int) -> bool:
            ahead = key - row - offset
            return (left < 0 or -ahead <= left) and (right < 0 or ahead <= right)

        for n_block in range(grid.num_n):
            for m_block in range(grid.num_m):
                rows = range(m_block * grid.block_m, (m_block + 1) * grid.block_m)
                keys = range(n_block * grid.block_n, (n_block + 1) * grid.block_n)
                allowed = [
                    key < grid.seq_len_kv and sees(row, key)
                    for row in rows
                    if row < grid.seq_len
                    for key in keys
                ]
                assert (m_block in grid.q_tiles(n_block)) == any(allowed)
                assert (n_block in grid.kv_tiles(m_block)) == any(allowed)
                assert grid.needs_mask(n_block, m_block) == (any(allowed) and not all(allowed))

    def test_of_a_config(self) -> None:
        problem = Problem("causal", 128, 1000, seq_len_kv=1500)
        assert TileGrid.for_config(problem, Config(block_m=64, block_n=128)) == TileGrid(
            1000, 1500, 64, 128, True
        )
        problem = Problem("full", 128, 1000, window_left=255, window_right=17)
        assert TileGrid.for_config(problem, Config(block_m=64, block_n=128)) == TileGrid(
            1000, 1000, 64, 128, False, 255, 17
        )

    def test_a_causal_mask_has_its_right_side(self) -> None:
        assert TileGrid(9, 9, 2, 2, True, 3, 5) == TileGrid(9, 9, 2, 2, True, 3)
        assert not TileGrid(9, 9, 2, 2, True, -1, 5).windowed
        assert TileGrid(9, 9, 2, 2, False, -1, 5).windowed

    @pytest.mark.parametrize("field", ["window_left", "window_right"])
    @pytest.mark.parametrize("value", [-2, 1.5, True])
    def test_bad_window_is_named(self, field: str, value: object) -> None:
        with pytest.raises(ValueError, match=f"{field} is {value}; it must be a number of keys"):
            TileGrid(4, 4, 2, 2, **{field: value})  # type: ignore[arg-type]

    @pytest.mark.parametrize("field", range(4))
    @pytest.mark.parametrize("value", [0, -1, 1.5, True])
    def test_bad_size_is_named(self, field: int, value: object) -> None:
        names = ("seq_len", "seq_len_kv", "block_m", "block_n")
        with pytest.raises(ValueError, match=f"{names[field]} is {value}; it must be a positive"):
            TileGrid(*(value if i == field else 4 for i in range(4)))  # type: ignore[arg-type]


class TestKinds:
    @settings(max_examples=400)
    @given(schedules())
    def test_every_kind_holds_on_any_shape(self, schedule: Schedule) -> None:
        report = check(schedule)
        assert 1 <= report.min_resident <= len(schedule.items)
        assert report.monotone == (report.early_wait is None)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(
        "sizes", [(200, 200, 1, 1), (64, 150, 2, 1), (150, 64, 1, 1), (1, 1, 8, 8)]
    )
    def test_every_kind_on_long_heads(
        self, kind: str, causal: bool, sizes: tuple[int, int, int, int]
    ) -> None:
        """More KV tiles than a GPU has slots, fewer Q than KV tiles and the reverse, and a single tile."""
        check(build(kind, TileGrid(*sizes, causal), 8 if SCHEDULES[kind].takes_group else 1))

    @given(schedules(MONOTONE), st.integers(0, 5))
    def test_monotone_kinds_need_one_slot(self, schedule: Schedule, heads: int) -> None:
        report = check(schedule, default_launch(schedule.kind, heads))
        assert report.monotone
        report.require_monotone()

    @given(st.integers(1, 40))
    def test_slots_that_the_shifts_need(self, n: int) -> None:
        assert check(build("shift", square(n, False))).min_resident == n
        assert check(build("symmetric_shift", square(n, False))).min_resident == -(-n // 2)
        assert check(build("symmetric_shift", square(n, True))).min_resident == -(-n // 2)

    @given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 9))
    def test_grouped_shift_needs_its_group_in_every_interleaved_head(
        self, n: int, group: int, heads: int
    ) -> None:
        schedule = build("grouped_shift", square(n, False), group)
        report = check(schedule, default_launch("grouped_shift", heads))
        assert report.min_resident == heads * (min(group, n) - 1) + 1

    def test_square_causal_walks(self) -> None:
        def walks(kind: str) -> list[list[int]]:
            return [[m for _, m in tiles] for tiles in build(kind, square(4, True)).visit]

        assert walks("ascending") == [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3]]
        assert walks("descending") == [[3, 2, 1, 0], [3, 2, 1], [3, 2], [3]]
        assert walks("shortest_first") == walks("ascending") == walks("shift")
        assert walks("symmetric_shift") == [[2, 3, 0, 1, 3], [3, 2, 1, 3, 2]]

    def test_square_full_walks(self) -> None:
        assert [[m for _, m in tiles] for tiles in build("shift", square(3, False)).visit] == [
            [0, 1, 2],
            [1, 2, 0],
            [2, 0, 1],
        ]
        grouped = build("grouped_shift", square(4, False), 2)
        assert [[m for _, m in tiles] for tiles in grouped.visit] == [
            [2, 3, 0, 1],
            [0, 1, 2, 3],
            [2, 3, 0, 1],
            [0, 1, 2, 3],
        ]

    @given(st.integers(1, 30), st.integers(0, 12))
    def test_shift_never_meets_itself(self, n: int, more: int) -> None:
        schedule = build("shift", TileGrid(n + more, n, 1, 1))
        for together in zip(*schedule.visit, strict=True):
            assert len({m_block for _, m_block in together}) == n

    @given(st.integers(1, 20))
    def test_symmetric_shift_never_meets_itself(self, half: int) -> None:
        schedule = build("symmetric_shift", square(2 * half, True))
        for together in zip(*schedule.visit, strict=True):
            assert len({m_block for _, m_block in together}) == half

    @given(schedules())
    def test_walks_depend_on_the_head_alone(self, schedule: Schedule) -> None:
        assert build(schedule.kind, replace(schedule.grid), schedule.group) == schedule


class TestCheckCatches:
    def test_gap(self) -> None:
        schedule = build("descending", square(5, True))
        with pytest.raises(ScheduleError, match="KV tile 1 never visits Q tile 3") as caught:
            check(edited(schedule, 1, [(1, 4), (1, 2), (1, 1)], [1, 1, 1]))
        assert caught.value.tiles == ((1, 3),)

    def test_duplicate(self) -> None:
        schedule = build("ascending", square(3, False))
        with pytest.raises(ScheduleError, match=r"tile \(KV 2, Q 1\) is visited twice") as caught:
            check(edited(schedule, 2, [(2, 0), (2, 1), (2, 1)], [2, 2, 2]))
        assert caught.value.tiles == ((2, 1),)

    def test_masked_out_tile(self) -> None:
        schedule = build("ascending", square(3, True))
        with pytest.raises(ScheduleError, match="no unmasked pair") as caught:
            check(edited(schedule, 2, [(2, 1), (2, 2)], [1, 2]))
        assert caught.value.tiles == ((2, 1),)

    def test_kv_tile_left_and_taken_up_again(self) -> None:
        schedule = build("symmetric_shift", square(2, False))
        with pytest.raises(ScheduleError, match="comes back to KV tile 0 at Q tile 1") as caught:
            check(edited(schedule, 0, [(0, 0), (1, 0), (0, 1), (1, 1)], [0, 1, 0, 1]))
        assert caught.value.tiles == ((0, 1),)

    def test_foreign_kv_tile(self) -> None:
        schedule = build("ascending", square(2, False))
        with pytest.raises(ScheduleError, match="item 1 visits KV tile 0") as caught:
            check(edited(schedule, 1, [(0, 0), (0, 1)], [1, 1]))
        assert caught.value.tiles == ((0, 0),)

    @pytest.mark.parametrize(
        ("items", "message"),
        [
            (((0,), (1,), (1,)), "KV tile 1 is in items 1 and 2"),
            (((0,), (1,), (3,)), "item 2 has KV tile 3; there are 3"),
            (((0,), (), (1, 2)), "item 1 has no KV tile"),
            (((0,), (1,)), "2 items, but 3 visits and 3 lists"),
        ],
    )
    def test_items_that_are_no_division(
        self, items: tuple[tuple[int, ...], ...], message: str
    ) -> None:
        with pytest.raises(ScheduleError, match=message):
            check(replace(build("ascending", square(3, False)), items=items))

    def test_missing_kv_tile(self) -> None:
        schedule = build("ascending", square(3, False))
        lost = replace(
            schedule, items=((0,), (1,)), visit=schedule.visit[:2], turn=schedule.turn[:2]
        )
        with pytest.raises(ScheduleError, match="KV tiles 2 are in no item"):
            check(lost)

    def test_walk_against_items(self) -> None:
        schedule = build("symmetric_shift", square(4, False))
        with pytest.raises(ScheduleError, match=r"walks KV tiles \[0, 3\], but lists \[3, 0\]"):
            check(replace(schedule, items=((3, 0), schedule.items[1])))

    @given(schedules(), st.data())
    def test_turn_taken_twice_or_out_of_range(
        self, schedule: Schedule, data: st.DataObject
    ) -> None:
        item = data.draw(st.sampled_from([i for i, tiles in enumerate(schedule.visit) if tiles]))
        step = data.draw(st.integers(0, len(schedule.visit[item]) - 1))
        turns = list(schedule.turn[item])
        others = set(range(-1, len(schedule.grid.kv_tiles(schedule.visit[item][step][1])) + 1))
        turns[step] = data.draw(st.sampled_from(sorted(others - {turns[step]})))
        with pytest.raises(ScheduleError, match="turn") as caught:
            check(edited(schedule, item, list(schedule.visit[item]), turns))
        assert schedule.visit[item][step] in caught.value.tiles

    def test_turns_missing(self) -> None:
        schedule = build("ascending", square(3, False))
        with pytest.raises(ScheduleError, match="item 1 visits 3 tiles, but has 2 turns"):
            check(edited(schedule, 1, list(schedule.visit[1]), [1, 1]))

    @given(st.integers(2, 12), st.integers(2, 12), st.data())
    def test_planted_cycle(self, nq: int, nk: int, data: st.DataObject) -> None:
        """b walks backwards and adds before a at x, after a at y > x: each waits for what the other does later."""
        schedule = build("ascending", TileGrid(nq, nk, 1, 1))
        a = data.draw(st.integers(0, nk - 2))
        b = data.draw(st.integers(a + 1, nk - 1))
        x = data.draw(st.integers(0, nq - 2))
        b_turns = [a if m_block == x else b for m_block in reversed(range(nq))]
        a_turns = [b if m_block == x else a for m_block in range(nq)]
        planted = edited(schedule, b, list(schedule.visit[b])[::-1], b_turns)
        planted = edited(planted, a, list(schedule.visit[a]), a_turns)
        with pytest.raises(ScheduleError, match="form a cycle") as caught:
            check(planted)
        assert (a, x) in caught.value.tiles
        assert any(n_block == b for n_block, _ in caught.value.tiles)

    def test_cycle_inside_one_item(self) -> None:
        schedule = build("symmetric_shift", square(2, False))
        with pytest.raises(
            ScheduleError, match=r"cycle.*: \(KV 0, Q 0\) waits for the turn of \(KV 1, Q 0\)"
        ):
            check(edited(schedule, 0, list(schedule.visit[0]), [1, 0, 0, 1]))

    def test_long_cycle_is_cut_in_words_not_in_tiles(self) -> None:
        """Every tile waits at its first Q tile for the next KV tile, which has come to it last."""
        n = 9
        visit = tuple(tuple((i, (i + s) % n) for s in range(n)) for i in range(n))
        turn = tuple(tuple((s - 1) % n for s in range(n)) for _ in range(n))
        ring = Schedule("ring", square(n, False), 1, tuple((i,) for i in range(n)), visit, turn)
        with pytest.raises(ScheduleError, match=r"\.\. 3 more \.\.") as caught:
            check(ring)
        assert len(caught.value.tiles) == n

    @given(st.integers(2, 30), st.booleans())
    def test_launch_that_breaks_a_monotone_kind(self, n: int, causal: bool) -> None:
        for kind in MONOTONE:
            wrong = {"ascending": "descending", "descending": "ascending"}[
                default_launch(kind).order
            ]
            report = check(build(kind, square(n, causal)), Launch(wrong))
            assert report.min_resident > 1
            assert not report.monotone
            assert report.early_wait is not None
            (waits, at), (awaited, same) = report.early_wait
            assert at == same
            assert (awaited < waits) == (wrong == "descending")
            with pytest.raises(
                ScheduleError, match=f"KV tile {waits} waits at Q tile {at} for"
            ) as caught:
                report.require_monotone()
            assert caught.value.tiles == ((waits, at), (awaited, at))

    def test_masked_tiles_apart(self) -> None:
        schedule = build("ascending", TileGrid(9, 9, 1, 3, True))
        walk = [(1, m_block) for m_block in (3, 5, 4, 6, 7, 8)]
        parted = edited(schedule, 1, walk, [1] * 6)
        for use in (check, lambda s: pack(s, Launch())):
            with pytest.raises(
                ScheduleError, match="KV tile 1 visits Q tile 5, which needs no mask"
            ) as caught:
                use(parted)
            assert caught.value.tiles == ((1, 3), (1, 5), (1, 4))

    def test_plain_tiles_of_a_window_apart(self) -> None:
        """KV tile 3 of a window of 16 keys: masked at Q tiles 3 and 7, plain at 4, 5 and 6."""
        schedule = build("ascending", TileGrid(32, 32, 4, 4, True, 15))
        assert [m_block for _, m_block in schedule.visit[3]] == [3, 4, 5, 6, 7]
        rotated = [(3, m_block) for m_block in (5, 6, 7, 3, 4)]
        with pytest.raises(
            ScheduleError, match="KV tile 3 visits Q tile 7, which needs a mask"
        ) as caught:
            check(edited(schedule, 3, rotated, [schedule.turn[3][0]] * 5))
        assert caught.value.tiles == ((3, 5), (3, 7), (3, 4))


class TestMinResident:
    @settings(max_examples=300)
    @given(schedules(), launches, st.integers(1, 5))
    def test_is_the_fewest_slots_that_end(
        self, schedule: Schedule, launch: Launch, total: int
    ) -> None:
        needed = check(schedule, launch, total).min_resident
        assert rests_with(schedule, launch, total, needed)
        assert needed == 1 or not rests_with(schedule, launch, total, needed - 1)

    @settings(max_examples=200)
    @given(schedules(), launches, st.integers(1, 4), st.integers(2, 4))
    def test_of_repeated_visits(
        self, schedule: Schedule, launch: Launch, total: int, head_group: int
    ) -> None:
        """Groups of query heads: each visit once for each. Monotone kinds do not notice; others may need more slots."""
        alone = check(schedule, launch, total).min_resident
        needed = check(schedule, launch, total, head_group).min_resident
        assert (needed == 1) == (alone == 1)
        assert needed >= alone
        walked = for_group(schedule, head_group)
        assert rests_with(walked, launch, total, needed, head_group)
        assert needed == 1 or not rests_with(walked, launch, total, needed - 1, head_group)

    def test_a_kind_that_waits_may_need_more_slots_for_groups(self) -> None:
        schedule = build("grouped_shift", TileGrid(3, 6, 1, 1), 6)
        assert check(schedule).min_resident == 5
        assert check(schedule, head_group=3).min_resident == 6

    def test_a_cycle_that_only_repeated_visits_form(self) -> None:
        """Q tile 0 adds 2, 3, 0, 1 and Q tile 1 adds 2, 0, 1, 3.

        Of the second head, KV tile 0 waits at Q tile 0 for KV tile 3, whose CTA waits at Q tile 1 of the first head for
        KV tile 1, which comes after KV tile 0 of both.
        """
        visit = tuple(tuple((n, m) for n in item for m in range(2)) for item in ((0, 1), (2, 3)))
        turn = ((2, 1, 3, 2), (0, 0, 1, 3))
        schedule = Schedule("planted", TileGrid(2, 4, 1, 1), 1, ((0, 1), (2, 3)), visit, turn)
        check(schedule)
        with pytest.raises(ScheduleError, match="form a cycle") as caught:
            check(schedule, head_group=2)
        assert set(caught.value.tiles) == {(0, 0), (3, 1)}

    def test_bad_group_is_named(self) -> None:
        with pytest.raises(ScheduleError, match="head_group is 0; it must be a positive integer"):
            check(build("shift", square(4, False)), head_group=0)

    @given(schedules(), st.sampled_from(["ascending", "descending"]), st.integers(1, 5))
    def test_all_heads_interleaved(self, schedule: Schedule, order: str, total: int) -> None:
        assert (
            check(schedule, Launch(order, 0), total).min_resident
            == check(schedule, Launch(order, total)).min_resident
        )

    def test_all_heads_of_a_kind_that_waits_needs_their_number(self) -> None:
        schedule = build("shift", square(4, False))
        with pytest.raises(ValueError, match="pass total_heads"):
            check(schedule, Launch("ascending", 0))
        assert check(schedule, Launch("ascending", 0), 10).min_resident == 31


class TestLaunch:
    @given(st.integers(0, 9), st.integers(1, 12), st.integers(1, 12))
    def test_tickets_and_pairs_are_one_to_one(self, heads: int, total: int, items: int) -> None:
        launch = Launch("ascending", heads)
        pairs = [launch.head_and_item(t, total, items) for t in range(total * items)]
        assert sorted(pairs) == [(head, item) for head in range(total) for item in range(items)]
        for head in range(total):
            assert [item for h, item in pairs if h == head] == list(range(items))

    def test_heads_in_turn_interleaved_and_all(self) -> None:
        def tickets(heads: int) -> list[tuple[int, int]]:
            return [Launch("ascending", heads).head_and_item(t, 3, 2) for t in range(6)]

        assert tickets(1) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
        assert tickets(2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
        assert tickets(0) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]

    @given(schedules())
    def test_order_is_by_first_kv_tile(self, schedule: Schedule) -> None:
        up = Launch("ascending").item_order(schedule)
        assert [schedule.items[i][0] for i in up] == sorted(tiles[0] for tiles in schedule.items)
        assert Launch("descending").item_order(schedule) == up[::-1]

    def test_of_a_config(self) -> None:
        config = Config(launch_order="ascending", heads_interleaved=4)
        assert Launch.for_config(config) == Launch("ascending", 4)

    def test_bad_values_are_named(self) -> None:
        with pytest.raises(
            ValueError, match="launch order is 'up'; choose one of ascending, descending"
        ):
            Launch("up")
        with pytest.raises(ValueError, match="interleaved heads is -1"):
            Launch("ascending", -1)
        with pytest.raises(ValueError, match="ticket is 6; it must be below 3 heads x 2 items"):
            Launch().head_and_item(6, 3, 2)


class TestPack:
    @settings(max_examples=200)
    @given(schedules(), launches)
    def test_round_trip(self, schedule: Schedule, launch: Launch) -> None:
        arrays = pack(schedule, launch)
        visit, turn = [], []
        for item, kv_tiles in enumerate(schedule.items):
            entries = range(arrays.item_begin[item], arrays.item_begin[item + 1])
            assert tuple(arrays.kv_tile[j] for j in entries) == kv_tiles
            steps = [
                (arrays.kv_tile[j], arrays.visit_begin[j] + step)
                for j in entries
                for step in range(arrays.visit_count[j])
            ]
            visit.append(tuple((n_block, arrays.visit[at]) for n_block, at in steps))
            turn.append(tuple(arrays.turn[at] for _, at in steps))
        assert (tuple(visit), tuple(turn)) == (schedule.visit, schedule.turn)
        assert arrays.item_order == launch.item_order(schedule)
        assert len(arrays.visit) == len(arrays.turn) == schedule.num_steps

    @given(schedules())
    def test_three_loops_mask_what_needs_it(self, schedule: Schedule) -> None:
        arrays = pack(schedule, Launch())
        grid = schedule.grid
        for j, n_block in enumerate(arrays.kv_tile):
            begin, end, count = arrays.mask_begin[j], arrays.mask_end[j], arrays.visit_count[j]
            assert 0 <= begin <= end <= count
            for step in range(count):
                m_block = arrays.visit[arrays.visit_begin[j] + step]
                inside = begin <= step < end
                assert grid.needs_mask(n_block, m_block) == (inside != grid.windowed)

    @given(schedules())
    def test_contributions(self, schedule: Schedule) -> None:
        arrays = pack(schedule, Launch())
        assert arrays.contributions == tuple(
            len(schedule.grid.kv_tiles(m_block)) for m_block in range(schedule.grid.num_m)
        )

    def test_tail_of_the_keys_masks_the_whole_last_kv_tile(self) -> None:
        arrays = pack(build("descending", TileGrid(8, 7, 2, 4)), Launch())
        assert (arrays.mask_begin, arrays.mask_end) == ((0, 0), (0, 4))

    def test_both_edges_of_a_window_are_masked(self) -> None:
        grid = TileGrid(32, 32, 4, 4, True, 15)
        up, down = (pack(build(kind, grid), Launch()) for kind in ("ascending", "descending"))
        assert (up.mask_begin, up.mask_end) == ((1,) * 8, (4, 4, 4, 4, 4, 3, 2, 1))
        assert (down.mask_begin, down.mask_end) == (
            (1, 1, 1, 1, 0, 0, 0, 1),
            (4, 4, 4, 4, 3, 2, 1, 1),
        )

    def test_walk_against_items(self) -> None:
        schedule = build("symmetric_shift", square(4, False))
        with pytest.raises(
            ScheduleError, match=r"item 0 owns KV tiles \[3, 0\] but walks \[0, 3\]"
        ):
            pack(replace(schedule, items=((3, 0), schedule.items[1])), Launch())


class TestRegistry:
    def test_the_kinds(self) -> None:
        assert set(KINDS) >= {*MONOTONE, "shift", "symmetric_shift", "grouped_shift"}
        assert [name for name in KINDS if SCHEDULES[name].takes_group] == ["grouped_shift"]
        for name, kind in SCHEDULES.items():
            assert kind.name == name
            assert kind.masks == (
                ("full", "causal") if "shift" in name else ("full", "causal", "window")
            )
            assert default_launch(name, 3) == Launch(kind.default_launch.order, 3)

    @pytest.mark.parametrize(
        ("kind", "group", "message"),
        [
            ("sideways", 1, "'sideways' is not one of ascending, descending, shortest_first"),
            (
                "shift",
                2,
                "group is 2, but schedule shift takes none; kinds with a group: grouped_shift",
            ),
            ("grouped_shift", 0, "group is 0; it must be a positive integer"),
        ],
    )
    def test_bad_requests_are_named(self, kind: str, group: int, message: str) -> None:
        with pytest.raises(ScheduleError, match=message):
            build(kind, square(4, False), group)

    def test_the_documented_example_adds_a_kind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "SCHEDULES", dict(SCHEDULES))
        assert registry.__doc__ is not None
        lines = registry.__doc__.split("::\n\n", 1)[1].split("\n\nImport the file", 1)[0]
        exec(textwrap.dedent(lines), {})
        for mask in ((False,), (True,), (True, 4), (False, 2, 3)):
            schedule = registry.build("zigzag", TileGrid(9, 11, 2, 3, *mask))
            assert check(schedule, registry.default_launch("zigzag")).monotone
        assert "zigzag" not in SCHEDULES

    def test_a_name_is_taken_once(self) -> None:
        with pytest.raises(ScheduleError, match="'shift' is registered twice"):
            registry.register("shift", launch="ascending", summary="another")(
                lambda grid, group: None
            )  # type: ignore[arg-type,return-value]

    def test_a_kind_for_one_mask_refuses_the_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        only = replace(SCHEDULES["shift"], name="only", masks=("full",))
        monkeypatch.setitem(SCHEDULES, "only", only)
        with pytest.raises(
            ScheduleError,
            match="schedule only is for mask full; the mask is causal: choose ascending, descending, shor",
        ):
            build("only", square(4, True))

    @pytest.mark.parametrize("kind", ["shift", "symmetric_shift", "grouped_shift"])
    def test_kinds_that_go_round_refuse_windows(self, kind: str) -> None:
        message = f"schedule {kind} is for mask full, causal; the mask is window: choose ascending, descending"
        with pytest.raises(ScheduleError, match=message):
            build(kind, TileGrid(64, 64, 4, 4, True, 16))
