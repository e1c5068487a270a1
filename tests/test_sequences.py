"""The tiles of packed sequences as the device finds them, against the schedules' arrays."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from portable_process import ask, needs_interpreter

from dash_kernels.schedules import Launch, TileGrid, build, pack

pytestmark = needs_interpreter
LENGTH = st.one_of(st.sampled_from([0, 1, 64]), st.integers(0, 150))


def expected(plan: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """kv_tiles and q_tiles of ``plan`` from the arrays of each sequence's own schedule."""
    kind = "shortest_first" if plan["descending"] else "ascending"
    kv_tiles: list[list[int]] = []
    q_tiles: list[list[int]] = []
    starts = [[0, *accumulate(x)] for x in zip(*plan["lengths"], strict=True)]
    for sequence, (rows, keys) in enumerate(plan["lengths"]):
        begin, base = [x[sequence] for x in starts], len(q_tiles)
        block_m, block_n = plan["tile"]
        contributions = [0] * -(-rows // block_m)
        where = [*begin, rows, keys, base]
        if rows and keys:
            grid = TileGrid(rows, keys, block_m, block_n, plan["causal"], *plan["window"])
            packed = pack(
                build(kind, grid), Launch("descending" if plan["descending"] else "ascending")
            )
            contributions = list(packed.contributions)
            for tile in (packed.item_begin[item] for item in packed.item_order):
                visit = packed.visit_begin[tile], packed.visit_count[tile]
                m_first = packed.visit[visit[0]] if visit[1] else 0
                masks = packed.mask_begin[tile], packed.mask_end[tile]
                kv_tiles.append(
                    [*where, packed.kv_tile[tile], m_first, visit[1], *masks, sequence, 0]
                )
        else:
            blocks = list(range(-(-keys // block_n)))
            for n_block in blocks[::-1] if plan["descending"] else blocks:
                kv_tiles.append([*where, n_block, 0, 0, 0, 0, sequence, 0])
        for m_block, count in enumerate(contributions):
            q_tiles.append([begin[0], rows, m_block, keys, sequence, count])
    return kv_tiles, q_tiles


@given(
    lengths=st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=5),
    tile=st.sampled_from([(16, 32), (32, 16), (64, 64)]),
    causal=st.booleans(),
    left=st.integers(-1, 100),
    right=st.integers(-1, 100),
    descending=st.booleans(),
)
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
def test_tiles_are_those_of_the_schedules(
    lengths: Any, tile: Any, causal: bool, left: int, right: int, descending: bool
) -> None:
    right = -1 if causal or (right == 0 and left < 0) else right
    plan = {
        "what": "plan", "lengths": lengths, "tile": tile, "causal": causal, "window": (left, right),
        "descending": descending,
    }  # fmt: skip
    answer = ask(plan)
    assert "raised" not in answer, answer["raised"]
    kv_tiles, q_tiles = expected(plan)
    assert answer["kv_tiles"] == kv_tiles
    assert answer["q_tiles"] == q_tiles
    assert answer["rest"] == [0, 0]
    assert len(kv_tiles) <= answer["bounds"][0]
    assert len(q_tiles) <= answer["bounds"][1]


def test_more_sequences_than_a_program_reads_at_once() -> None:
    plan = {
        "what": "plan", "chunk": 8, "lengths": [(n % 5, n % 7 * 30) for n in range(19)], "tile": (16, 16),
        "causal": False, "window": (-1, -1), "descending": True,
    }  # fmt: skip
    answer = ask(plan)
    assert (answer["kv_tiles"], answer["q_tiles"]) == expected(plan)
