"""What check() has to catch, and how many CTAs it says must be resident."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_strategies import (
    MONOTONE,
    launches,
    schedules,
    square,
)

from dash_kernels.schedules import (
    Launch,
    Schedule,
    ScheduleError,
    TileGrid,
    build,
    check,
    default_launch,
    pack,
)
from dash_kernels.schedules.schedule import for_group


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
