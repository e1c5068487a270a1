"""Problem and its FLOP counts: worked by hand, and against the mask counted pair by pair."""

from __future__ import annotations

import itertools

import pytest

from dash_kernels.problem import Problem, unmasked_pairs


@pytest.mark.parametrize(
    ("milliseconds", "square", "pairs"), [(2.391, 574.8, 574.9), (2.900, 473.9, 474.0)]
)
def test_tflops_by_both_conventions(milliseconds: float, square: float, pairs: float) -> None:
    problem = Problem("causal", 128, 8192, batch=2, heads=16)
    assert problem.tflops(milliseconds) == pytest.approx(square, abs=0.05)
    assert problem.tflops(milliseconds, "pairs") == pytest.approx(pairs, abs=0.05)
    with pytest.raises(ValueError, match="convention is 'cubic'; choose square or pairs"):
        problem.flops("cubic")


def test_pairs_are_counted_bottom_right() -> None:
    assert unmasked_pairs(1024, 256, causal=True) == 256 * 257 // 2 == 32896
    assert unmasked_pairs(256, 1024, causal=True) == 256 * 768 + 256 * 257 // 2 == 229504
    assert unmasked_pairs(32768, 32768, window=(1023, 0)) == 33030656
    assert unmasked_pairs(32768, 32768, window=(1024, 0)) == 33062400


@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (0, 2), (5, -1), (2, 2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_len", "seq_len_kv"), [(7, 7), (5, 9), (9, 5)])
def test_pairs_are_those_of_the_mask(
    seq_len: int, seq_len_kv: int, causal: bool, window: tuple[int, int]
) -> None:
    left, right = window[0], 0 if causal else window[1]

    def seen(row: int, key: int) -> bool:
        ahead = key - (row + seq_len_kv - seq_len)
        return (right < 0 or ahead <= right) and (left < 0 or -ahead <= left)

    pairs = itertools.product(range(seq_len), range(seq_len_kv))
    assert unmasked_pairs(seq_len, seq_len_kv, causal, window) == sum(seen(*pair) for pair in pairs)
