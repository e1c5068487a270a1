"""The arithmetic that devices evaluate for packed sequences, held to the arrays of build() and pack()."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dash_kernels.schedules import CLOSED_FORMS, TileGrid, build, default_launch, pack
from dash_kernels.schedules.closed_form import (
    UNLIMITED,
    Visit,
    contributors,
    lengths_of,
    turn_of,
    visit_of,
)

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

lengths = st.integers(0, 60)
blocks = st.integers(1, 9)
windows = st.just((-1, -1)) | st.tuples(st.integers(-1, 70), st.integers(-1, 70))


@settings(max_examples=300)
@given(st.sampled_from(CLOSED_FORMS), lengths, lengths, blocks, blocks, st.booleans(), windows)
def test_closed_forms_are_the_arrays(
    kind: str, seq_len: int, seq_len_kv: int, block_m: int, block_n: int, causal: bool, window: tuple[int, int],
) -> None:  # fmt: skip
    of = lengths_of(seq_len, seq_len_kv, block_m, block_n, causal, window)
    if not seq_len or not seq_len_kv:
        assert all(visit_of(n, of) == Visit(0, 0, 0, 0) for n in range(-(-seq_len_kv // block_n)))
        assert all(contributors(m, of) == (0, -1) for m in range(-(-seq_len // block_m)))
        return
    grid = TileGrid(seq_len, seq_len_kv, block_m, block_n, causal, *window)
    arrays = pack(build(kind, grid), default_launch(kind))
    assert of.windowed == grid.windowed
    assert arrays.kv_tile == tuple(range(grid.num_n))
    for n_block in range(grid.num_n):
        visit = visit_of(n_block, of)
        begin, count = arrays.visit_begin[n_block], arrays.visit_count[n_block]
        walked = arrays.visit[begin : begin + count]
        assert tuple(range(visit.m_first, visit.m_first + visit.count)) == walked
        assert (visit.b0, visit.b1) == (arrays.mask_begin[n_block], arrays.mask_end[n_block])
        turns = tuple(turn_of(kind, n_block, m_block, of) for m_block in walked)
        assert turns == arrays.turn[begin : begin + count]
    for m_block in range(grid.num_m):
        first, last = contributors(m_block, of)
        assert last + 1 - first == arrays.contributions[m_block]


def test_unlimited_sees_all_of_the_longest_sequences_in_32_bits() -> None:
    longest = UNLIMITED
    of = lengths_of(longest, longest, 128, 128, False, (-1, -1))
    last = longest // 128 - 1
    assert (visit_of(0, of).m_first, visit_of(last, of).m_first) == (0, 0)
    assert visit_of(0, of).count == visit_of(last, of).count == last + 1
    assert contributors(0, of) == contributors(last, of) == (0, last)
    ahead_of_all_keys = lengths_of(longest, 1, 128, 128, False, (-1, -1))
    offset = ahead_of_all_keys.seq_len_kv - ahead_of_all_keys.seq_len
    assert longest - 1 + ahead_of_all_keys.left - offset < 1 << 31
    assert visit_of(0, ahead_of_all_keys).count == last + 1
