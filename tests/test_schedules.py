"""Schedules over random shapes, and the arrays the kernels read."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_strategies import (
    KINDS,
    MONOTONE,
    grids,
    launches,
    schedules,
    square,
    windowed_grids,
)

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
