"""The model against its closed forms, against the rules of its own Gantt chart, and where it has to refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_kernels.critical_path import DeadlockError, GanttRow, Simulation, simulate
from dash_kernels.schedules import (
    SCHEDULES,
    Launch,
    Schedule,
    TileGrid,
    build,
    check,
    default_launch,
)
from dash_kernels.schedules.schedule import for_group

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

COSTS = ((5, 2), (2, 5), (3, 3), (1, 0), (0, 1))


def square(n: int, causal: bool) -> TileGrid:
    return TileGrid(n, n, 1, 1, causal)


def cases() -> Iterator[tuple[int, int, int, int]]:
    """(n, m, c, r): all of them for small n, and for each n up to 64 each m with one of the costs."""
    for n in range(1, 65):
        for i in range(5):
            for c, r in COSTS if n <= 8 else COSTS[(n + i) % 5 :][:1]:
                yield n, i + 1, c, r


def makespan(schedule: Schedule, slots: int, m: int, c: float, r: float, **more: object) -> float:
    return simulate(schedule, slots, c, r, heads=m, gantt=False, **more).makespan  # type: ignore[arg-type]


def ascending(n: int, m: int, c: float, r: float) -> float:
    return m * n * (c + r) + (n - 1) * r


def shift(nq: int, m: int, c: float, r: float) -> float:
    return m * nq * (c + r)


def symmetric_shift(n: int, m: int, c: float, r: float) -> float:
    return -(-m // 2) * (n + 1) * (c + r) if m % 2 else m * (n + 1) * (c + r) / 2


def descending(n: int, m: int, c: float, r: float) -> float:
    return m * (n + 1) * (c + r) / 2 + (n - 1) * r


class TestClosedForms:
    """With W = n, square tiles, l = 0, heads in turn. Integers, so equality is exact."""

    @pytest.mark.parametrize("causal", [False, True])
    def test_ascending(self, causal: bool) -> None:
        built = {n: build("ascending", square(n, causal)) for n in range(1, 65)}
        for n, m, c, r in cases():
            assert makespan(built[n], n, m, c, r) == ascending(n, m, c, r), (n, m, c, r)

    @pytest.mark.parametrize("more_q", [0, 1, 7])
    def test_shift(self, more_q: int) -> None:
        built = {n: build("shift", TileGrid(n + more_q, n, 1, 1)) for n in range(1, 65)}
        for n, m, c, r in cases():
            assert makespan(built[n], n, m, c, r) == shift(n + more_q, m, c, r), (n, m, c, r)

    def test_symmetric_shift(self) -> None:
        built = {n: build("symmetric_shift", square(n, True)) for n in range(2, 65, 2)}
        for n, m, c, r in cases():
            if n % 2 == 0:
                assert makespan(built[n], n, m, c, r) == symmetric_shift(n, m, c, r), (n, m, c, r)

    def test_descending(self) -> None:
        built = {n: build("descending", square(n, True)) for n in range(1, 65)}
        seen_expensive_reduce = False
        for n, m, c, r in cases():
            if m == 2 or (m % 2 == 0 and r <= c):
                assert makespan(built[n], n, m, c, r) == descending(n, m, c, r), (n, m, c, r)
                seen_expensive_reduce |= r > c
        assert seen_expensive_reduce


class TestOutsideTheConditions:
    """Each condition is needed: one case beyond it in which the form is wrong."""

    def test_fewer_slots_than_kv_tiles(self) -> None:
        for kind, causal, form in (
            ("ascending", False, ascending),
            ("ascending", True, ascending),
            ("symmetric_shift", True, symmetric_shift),
            ("descending", True, descending),
        ):
            schedule = build(kind, square(6, causal))
            assert makespan(schedule, 6, 2, 5, 2) == form(6, 2, 5, 2)
            assert makespan(schedule, 4, 2, 5, 2) > form(6, 2, 5, 2)
        with pytest.raises(DeadlockError):
            makespan(build("shift", square(6, False)), 4, 2, 5, 2)

    def test_signals_that_take_time(self) -> None:
        for kind, causal, form in (
            ("ascending", False, ascending),
            ("ascending", True, ascending),
            ("descending", True, descending),
        ):
            assert makespan(build(kind, square(6, causal)), 6, 2, 5, 2, l=3) > form(6, 2, 5, 2)
        # Shifts leave c between a signal and its turn, so that only a signal slower than that shows.
        for kind, causal, form in (
            ("shift", False, shift),
            ("symmetric_shift", True, symmetric_shift),
        ):
            assert makespan(build(kind, square(6, causal)), 6, 2, 5, 2, l=5) == form(6, 2, 5, 2)
            assert makespan(build(kind, square(6, causal)), 6, 2, 5, 2, l=6) > form(6, 2, 5, 2)

    def test_tiles_that_are_not_square(self) -> None:
        grid = TileGrid(12, 12, 1, 2, True)
        assert makespan(build("ascending", grid), 6, 2, 5, 2) not in (
            ascending(6, 2, 5, 2),
            ascending(12, 2, 5, 2),
        )
        assert makespan(build("symmetric_shift", grid), 6, 2, 5, 2) not in (
            symmetric_shift(6, 2, 5, 2),
            symmetric_shift(12, 2, 5, 2),
        )
        assert makespan(build("descending", grid), 6, 2, 5, 2) not in (
            descending(6, 2, 5, 2),
            descending(12, 2, 5, 2),
        )

    def test_shift_with_fewer_q_than_kv_tiles(self) -> None:
        assert makespan(build("shift", TileGrid(5, 6, 1, 1)), 6, 2, 5, 2) > shift(5, 2, 5, 2)

    def test_shift_on_a_causal_mask(self) -> None:
        assert makespan(build("shift", square(6, True)), 6, 2, 5, 2) != shift(6, 2, 5, 2)

    def test_symmetric_shift_on_an_odd_number_of_kv_tiles(self) -> None:
        for m in (1, 2):
            got = makespan(build("symmetric_shift", square(7, True)), 7, m, 5, 2)
            assert got != symmetric_shift(7, m, 5, 2)

    def test_symmetric_shift_on_a_full_mask(self) -> None:
        got = makespan(build("symmetric_shift", square(6, False)), 6, 2, 5, 2)
        assert got != symmetric_shift(6, 2, 5, 2)

    def test_descending_on_an_odd_number_of_heads(self) -> None:
        assert makespan(build("descending", square(6, True)), 6, 3, 5, 2) != descending(6, 3, 5, 2)

    def test_descending_with_a_reduce_dearer_than_its_compute(self) -> None:
        schedule = build("descending", square(6, True))
        assert makespan(schedule, 6, 2, 2, 5) == descending(6, 2, 2, 5)
        assert makespan(schedule, 6, 4, 2, 5) != descending(6, 4, 2, 5)

    def test_descending_out_of_ticket_order(self) -> None:
        got = makespan(
            build("descending", square(6, True)), 6, 2, 5, 2, launch=Launch("descending")
        )
        assert got != descending(6, 2, 5, 2)


def assert_obeys_the_model(
    result: Simulation, schedule: Schedule, launch: Launch, heads: int, head_group: int,
    costs: tuple[int, int, int],
) -> None:  # fmt: skip
    """Every phase starts as soon as the model lets it, and no sooner, and every tile is there once."""
    c, r, latency = costs
    slots, num_m = len(result.stalls), schedule.grid.num_m
    assert len(result.rows) == heads * head_group * schedule.num_steps
    schedule = for_group(schedule, head_group)
    row_of = {
        (row.head // head_group, row.n_block, row.head % head_group * num_m + row.m_block): row
        for row in result.rows
    }
    signals: dict[tuple[int, int, int], int] = {}
    for item, tiles in enumerate(schedule.visit):
        for (n_block, m_block), turn in zip(tiles, schedule.turn[item], strict=True):
            for head in range(heads):
                signals[head, m_block, turn] = row_of[head, n_block, m_block].end + latency  # type: ignore[assignment]
    free = [0] * slots
    busy, stalls = [0] * slots, [0] * slots
    order = launch.item_order(schedule)
    for ticket in range(heads * len(order)):
        head, position = launch.head_and_item(ticket, heads, len(order))
        item = order[position]
        tiles = schedule.visit[item]
        now = min(free)
        slot = row_of[(head, *tiles[0])].slot if tiles else free.index(now)
        assert free[slot] == now
        for (n_block, m_block), turn in zip(tiles, schedule.turn[item], strict=True):
            reduce_start = max(now + c, signals.get((head, m_block, turn - 1), 0))
            query_head = head * head_group + m_block // num_m
            tile = (query_head, n_block, m_block % num_m)
            row = GanttRow(slot, *tile, now, reduce_start, reduce_start + r)
            assert row_of[head, n_block, m_block] == row
            stalls[slot] += reduce_start - now - c
            busy[slot] += c + r
            now = reduce_start + r
        free[slot] = now
    assert result.makespan == max(free)
    assert result.busy == tuple(busy)
    assert result.stalls == tuple(stalls)
    if result.makespan:
        assert result.utilisation == sum(busy) / (slots * max(free))
        assert (0 < result.utilisation <= 1) == (c + r > 0)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Schedule, Launch, int]:
    size, block = st.integers(1, 20), st.integers(1, 4)
    kind = draw(st.sampled_from(list(SCHEDULES)))
    window = (-1, -1)
    if "window" in SCHEDULES[kind].masks:
        window = draw(st.just(window) | st.tuples(st.integers(-1, 20), st.integers(-1, 20)))
    sizes = draw(size), draw(size), draw(block), draw(block)
    grid = TileGrid(*sizes, draw(st.booleans()), *window)
    group = draw(st.integers(1, 4)) if SCHEDULES[kind].takes_group else 1
    order = st.sampled_from(["ascending", "descending"])
    launch = Launch(draw(order), draw(st.integers(0, 3)))
    return build(kind, grid, group), launch, draw(st.integers(1, 4))


class TestModel:
    @settings(max_examples=200)
    @given(runs(), st.integers(1, 3), st.integers(0, 5), st.tuples(*[st.integers(0, 4)] * 3))
    def test_gantt_chart_obeys_the_model(
        self,
        run: tuple[Schedule, Launch, int],
        head_group: int,
        spare: int,
        costs: tuple[int, int, int],
    ) -> None:
        schedule, launch, heads = run
        slots = check(schedule, launch, heads, head_group).min_resident + spare
        how = (schedule, slots, *costs, heads, launch)
        result = simulate(*how, head_group=head_group)
        assert_obeys_the_model(result, schedule, launch, heads, head_group, costs)
        without = simulate(*how, head_group=head_group, gantt=False)
        assert without.rows == ()
        assert (without.makespan, without.stalls, without.busy, without.utilisation) == (
            result.makespan,
            result.stalls,
            result.busy,
            result.utilisation,
        )

    @settings(max_examples=150)
    @given(runs(), st.integers(1, 3))
    def test_one_slot_less_than_min_resident_is_a_deadlock(
        self, run: tuple[Schedule, Launch, int], head_group: int
    ) -> None:
        schedule, launch, heads = run
        needed = check(schedule, launch, heads, head_group).min_resident
        simulate(schedule, needed, heads=heads, launch=launch, head_group=head_group)
        if needed > 1:
            with pytest.raises(DeadlockError, match=f"on {needed - 1} slots never ends") as caught:
                simulate(schedule, needed - 1, heads=heads, launch=launch, head_group=head_group)
            assert len(caught.value.tiles) >= 2
            assert all(m < schedule.grid.num_m for _, m in caught.value.tiles)

    @pytest.mark.parametrize("causal", [False, True])
    def test_ascending_of_a_group_is_as_long_as_of_its_heads_in_turn(self, causal: bool) -> None:
        for n, m, c, r in ((1, 2, 5, 2), (6, 3, 5, 2), (9, 4, 2, 5)):
            schedule = build("ascending", square(n, causal))
            assert makespan(schedule, n, 1, c, r, head_group=m) == ascending(n, m, c, r)
            assert makespan(schedule, n, 2, c, r, head_group=m) == ascending(n, 2 * m, c, r)

    def test_a_window_without_a_bubble(self) -> None:
        """Each KV tile has 4 Q tiles, one later than its neighbour; by descending KV none meets another."""
        grid = TileGrid(64, 64, 1, 1, True, 3)
        assert makespan(build("shortest_first", grid), 64, 1, 5, 2) == 4 * 7
        assert makespan(build("ascending", grid), 64, 1, 5, 2) > 4 * 7

    @pytest.mark.parametrize("kind", list(SCHEDULES))
    @pytest.mark.parametrize("causal", [False, True])
    def test_rows_come_by_slot_then_time(self, kind: str, causal: bool) -> None:
        group = 3 if SCHEDULES[kind].takes_group else 1
        result = simulate(build(kind, TileGrid(9, 12, 1, 2, causal), group), 12, heads=2)
        places = [(row.slot, row.start) for row in result.rows]
        assert places == sorted(places)

    def test_defaults_are_the_gpu_the_costs_and_the_launch_of_the_kind(self) -> None:
        schedule = build("shortest_first", square(8, True))
        assert simulate(schedule) == simulate(
            schedule, 132, 1.0, 0.3, 0.0, 1, default_launch("shortest_first")
        )
        assert len(simulate(schedule).stalls) == 132

    def test_a_gantt_chart_by_hand(self) -> None:
        result = simulate(build("ascending", square(2, True)), 2, 2, 1)
        assert result.rows == (
            GanttRow(0, 0, 0, 0, 0, 2, 3),
            GanttRow(0, 0, 0, 1, 3, 5, 6),
            GanttRow(1, 0, 1, 1, 0, 6, 7),
        )
        assert (result.makespan, result.busy, result.stalls) == (7, (6, 3), (0, 4))
        assert result.utilisation == 9 / 14

    def test_grouped_shift_fills_the_slots_when_slots_over_group_heads_are_interleaved(
        self,
    ) -> None:
        schedule = build("grouped_shift", square(16, False), 4)
        launch = default_launch("grouped_shift", 8)
        assert simulate(schedule, 32, 5, 2, heads=16, launch=launch, gantt=False).utilisation == 1
        assert simulate(schedule, 32, 5, 2, heads=16, gantt=False).utilisation < 0.6

    def test_head_without_work(self) -> None:
        """Sixteen queries before one key: fifteen Q tiles have nothing to do."""
        result = simulate(build("descending", TileGrid(16, 1, 1, 1, True)), 1, 1, 1)
        assert [row[2:4] for row in result.rows] == [(0, 15)]


class TestRefusals:
    def test_cycle_is_named(self) -> None:
        schedule = build("symmetric_shift", square(2, False))
        turned = Schedule(
            "turned", schedule.grid, 1, schedule.items, schedule.visit, ((1, 0, 0, 1),)
        )
        with pytest.raises(
            DeadlockError, match="KV tile 0 waits at Q tile 0 for KV tile 1"
        ) as caught:
            simulate(turned)
        assert "so the waits form a cycle" in str(caught.value)
        assert caught.value.tiles == ((0, 0),)

    def test_launch_without_slots_enough_is_named(self) -> None:
        schedule = build("shortest_first", square(8, True))
        with pytest.raises(
            DeadlockError,
            match="KV tile 0 waits at Q tile 3 for KV tile 3, which has no slot; all 3 ",
        ) as caught:
            simulate(schedule, 3, launch=Launch("ascending"))
        assert caught.value.tiles == ((0, 3), (3, 3))

    def test_long_cycle_is_cut_in_words_not_in_tiles(self) -> None:
        """Every KV tile waits at its first Q tile for the one before it."""
        n = 9
        items = tuple((i,) for i in range(n))
        visit = tuple(tuple((i, (i + s) % n) for s in range(n)) for i in range(n))
        turn = tuple(tuple((s - 1) % n for s in range(n)) for _ in range(n))
        ring = Schedule("ring", square(n, False), 1, items, visit, turn)
        with pytest.raises(DeadlockError, match=r"\.\. \d+ more \.\.") as caught:
            simulate(ring)
        assert len(caught.value.tiles) == n

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"slots": 0}, "slots is 0; it must be a positive integer"),
            ({"heads": 1.5}, "heads is 1.5; it must be a positive integer"),
            ({"c": -1.0}, "c is -1.0; it must be a finite cost of 0 or more"),
            ({"r": float("nan")}, "r is nan; it must be a finite cost"),
            ({"l": float("inf")}, "l is inf; it must be a finite cost"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments: dict[str, float], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            simulate(build("shift", square(2, False)), **arguments)  # type: ignore[arg-type]
