"""Problem, its FLOP counts (worked by hand, and against the mask counted pair by pair), and what a config supports."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_kernels.problem import (
    OPTION_FIELDS,
    SHAPE_FIELDS,
    Config,
    Problem,
    hopper_dims,
    hopper_shared_bytes,
    kernel_dims,
    supports,
    unmasked_pairs,
)


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


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.booleans(),
    st.tuples(st.integers(-1, 14), st.integers(-1, 14)),
)
def test_pairs_are_those_of_the_mask(
    seq_len: int, seq_len_kv: int, causal: bool, window: tuple[int, int]
) -> None:
    left, right = window[0], 0 if causal else window[1]

    def seen(row: int, key: int) -> bool:
        ahead = key - (row + seq_len_kv - seq_len)
        return (right < 0 or ahead <= right) and (left < 0 or -ahead <= left)

    pairs = itertools.product(range(seq_len), range(seq_len_kv))
    assert unmasked_pairs(seq_len, seq_len_kv, causal, window) == sum(seen(*pair) for pair in pairs)


def test_pairs_of_a_million_tokens_take_no_loop() -> None:
    million = 1 << 20
    assert unmasked_pairs(million, million, causal=True) == million * (million + 1) // 2
    assert unmasked_pairs(1 << 60, 1 << 60, window=(0, 0)) == 1 << 60


class TestProblem:
    def test_options_at_their_defaults_leave_rows_and_hashes_as_they_were(self) -> None:
        problem = Problem("causal", 128, 4096, batch=4, heads=16, heads_kv=4)
        assert tuple(problem.to_dict()) == SHAPE_FIELDS
        assert problem.options() == {}
        assert Problem.from_dict(problem.to_dict()) == problem
        assert Problem("causal", 128, 4096, window_right=7, head_dim_v=128) == Problem(
            "causal", 128, 4096
        )

    @given(
        st.sampled_from(["full", "causal"]),
        st.integers(-1, 300),
        st.integers(1, 300),
        st.sampled_from([0, 64, 128]),
        st.booleans(),
        st.booleans(),
    )
    def test_options_survive_a_round_trip(
        self, mask: str, left: int, right: int, head_dim_v: int, softcap: bool, varlen: bool
    ) -> None:
        problem = Problem(
            mask, 128, 512, window_left=left, window_right=right, head_dim_v=head_dim_v,
            softcap=softcap, varlen=varlen,
        )  # fmt: skip
        assert Problem.from_dict(json.loads(json.dumps(problem.to_dict()))) == problem
        assert set(problem.options()) <= set(OPTION_FIELDS)
        assert problem.windowed == (left >= 0 or mask == "full")
        assert problem.window == (left, 0 if mask == "causal" else right)

    def test_a_window_that_ends_at_the_query_is_causal(self) -> None:
        problem = Problem("full", 64, 512, window_left=127, window_right=0)
        assert problem == Problem("causal", 64, 512, window_left=127)
        with pytest.raises(ValueError, match="window_right is 0 with mask full: choose mask caus"):
            Problem("full", 64, 512, window_right=0)

    @pytest.mark.parametrize(
        ("field", "value", "wanted"),
        [
            ("window_left", -2, "a number of keys, or -1"),
            ("window_right", 1.0, "a number of keys, or -1"),
            ("head_dim_v", -64, "a positive integer"),
            ("softcap", 30.0, "True or False"),
            ("varlen", 1, "True or False"),
            ("mask", "window", "choose one of full, causal"),
        ],
    )
    def test_bad_values_are_named(self, field: str, value: object, wanted: str) -> None:
        values = {"mask": "full", "head_dim": 64, "seq_len": 512, field: value}
        with pytest.raises(ValueError, match=f"{field} is {value!r};.* {wanted}"):
            Problem(**values)  # type: ignore[arg-type]

    def test_label_says_the_options(self) -> None:
        assert Problem("causal", 128, 4096).label() == "causal d=128 seq_len=4096 bfloat16"
        told = Problem("causal", 192, 64, window_left=9, head_dim_v=128, softcap=True, varlen=True)
        assert told.label() == "causal d=192/128 seq_len=64 bfloat16 window=9,0 softcap varlen"

    def test_flops_of_options(self) -> None:
        """Three matmuls run over head_dim, two over head_dim_v; windows are counted pair by pair."""
        assert Problem("full", 192, 10, head_dim_v=128).flops() == 2 * (3 * 192 + 2 * 128) * 100
        windowed = Problem("causal", 128, 32768, window_left=1023)
        assert windowed.flops() == windowed.flops("pairs") == 10 * 128 * 33030656


class TestSupports:
    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({}, ""),
            ({"head_dim": 96}, ""),
            ({"head_dim": 128, "head_dim_v": 64}, ""),
            ({"window_left": 100, "softcap": True, "heads": 8, "heads_kv": 2}, ""),
            ({"varlen": True}, ""),
            ({"head_dim": 192, "head_dim_v": 128}, ""),
            ({"head_dim": 136, "head_dim_v": 8, "heads": 8, "heads_kv": 2, "varlen": True}, ""),
            ({"head_dim": 192}, "tile 64x128 is not built for head_dim 256: 64x64"),
            ({"head_dim_v": 256}, "tile 64x128 is not built for head_dim 256: 64x64"),
            ({"head_dim": 257}, "head_dim 257 is above 256, the largest of backend hopper"),
            ({"head_dim_v": 264}, "head_dim_v 264 is above 256, the largest of backend hopper"),
        ],
    )
    def test_hopper(self, changes: dict[str, Any], reason: str) -> None:
        problem = Problem(**{"mask": "causal", "head_dim": 128, "seq_len": 1000} | changes)
        answer = supports(Config(), problem)
        assert (answer.ok, answer.reason) == (not reason, reason)

    @pytest.mark.parametrize(
        ("dims", "config", "reason"),
        [
            ((256, 256), {"block_n": 64, "num_stages": 1}, ""),
            ((128, 136), {"block_n": 64, "num_stages": 1}, ""),
            ((256, 256), {"block_n": 64}, "needs 280576 bytes of shared memory; the limit is 232448"),
            ((192, 128), {"num_stages": 3}, "needs 272896 bytes of shared memory; the limit is 232448"),
            ((256, 256), {"block_n": 64, "num_stages": 1, "dq_stages": 3},
             "backend hopper has two dQ stages, one a writer; dq_stages is 3"),
            ((64, 64), {"block_m": 128, "dq_stages": 3},
             "backend hopper has two dQ stages, one a writer; dq_stages is 3"),
            ((192, 128), {"dq_stages": 1}, "backend hopper has two dQ stages"),
            ((192, 128), {"block_n": 64}, "tile 64x64 is not built for head_dim 192: 64x128"),
            ((192, 128), {"policy": "two_pass"}, "two_pass runs on backend portable"),
        ],
    )  # fmt: skip
    def test_hopper_above_128(
        self, dims: tuple[int, int], config: dict[str, Any], reason: str
    ) -> None:
        problem = Problem("causal", dims[0], 1000, head_dim_v=dims[1])
        answer = supports(Config(**config), problem)
        assert answer.ok == (not reason)
        assert answer.reason.startswith(reason)

    @pytest.mark.parametrize(
        ("dims", "columns", "rows", "padded"),
        [
            ((8, 64), (64, 64), (16, 64), (64, 64)),
            ((96, 40), (128, 128), (96, 48), (128, 64)),
            ((128, 136), (256, 256), (128, 144), (128, 256)),
            ((136, 8), (192, 128), (144, 16), (256, 64)),
            ((192, 128), (192, 128), (192, 128), (256, 128)),
            ((192, 136), (256, 256), (192, 144), (256, 256)),
            ((193, 128), (256, 256), (208, 128), (256, 128)),
            ((256, 256), (256, 256), (256, 256), (256, 256)),
        ],
    )
    def test_head_dims_of_tiles_and_tensors(
        self, dims: tuple[int, int], columns: tuple[int, int], rows: tuple[int, int], padded: tuple[int, int]
    ) -> None:  # fmt: skip
        problem = Problem("full", dims[0], 1000, head_dim_v=dims[1])
        assert hopper_dims(*dims) == columns
        assert kernel_dims(problem, "hopper") == rows
        assert kernel_dims(problem, "portable") == padded

    def test_shared_memory_of_the_hopper_kernel(self) -> None:
        """K and V, stages of Q, dO, LSE and delta, dS, dQ, and a KiB; the same bytes for all dims of one tile."""
        kv, stage, ds, dq = 64 * 512 * 2, 64 * (512 * 2 + 8), 2 * 64 * 64 * 2, 64 * 256 * 4
        wide = Config(block_m=64, block_n=64, num_stages=1)
        assert hopper_shared_bytes(wide, 256) == kv + stage + ds + dq + 1024
        assert hopper_shared_bytes(wide, 136, 256) == hopper_shared_bytes(wide, 256)
        kv, stage, ds, dq = 128 * 320 * 2, 64 * (320 * 2 + 8), 64 * 128 * 2, 64 * 192 * 4
        assert hopper_shared_bytes(Config(), 192, 128) == kv + 2 * stage + ds + dq + 1024
        assert hopper_shared_bytes(Config(), 144, 16) == hopper_shared_bytes(Config(), 192, 128)
        two, three = (hopper_shared_bytes(Config(dq_stages=n), 128) for n in (2, 3))
        assert three - two == 64 * 128 * 4

    @pytest.mark.parametrize(
        ("head_dim", "head_dim_v", "tile", "stages", "capability", "required"),
        [
            (256, 0, (64, 64), 2, (9, 0), 196608),
            (192, 128, (64, 64), 2, (9, 0), 147456),
            (256, 0, (32, 32), 2, (8, 6), 98304),
            (256, 0, (64, 64), 2, (8, 0), None),
        ],
    )
    def test_portable_up_to_256(
        self, head_dim: int, head_dim_v: int, tile: tuple[int, int], stages: int,
        capability: tuple[int, int], required: int | None,
    ) -> None:  # fmt: skip
        problem = Problem("causal", head_dim, 1000, head_dim_v=head_dim_v, window_left=64)
        config = Config(
            "portable", block_m=tile[0], block_n=tile[1], num_stages=stages, signal="plain"
        )
        answer = supports(config, problem, capability)
        assert answer.ok == (required is not None)
        if required is None:
            assert "needs 196608 bytes of shared memory; the limit is 166912" in answer.reason
        else:
            assert answer.required_bytes == required
        assert "above 256" in supports(config, Problem("full", 257, 64), capability).reason

    def test_the_dq_pass_needs_shared_memory_too(self) -> None:
        """What the compiler gives it on 8.0 (benchmarks/results/portable-triton-3.6.0.json): 167936 bytes."""
        config = Config("portable", block_m=32, block_n=64, num_stages=3, signal="plain")
        problem = Problem("causal", 256, 1000)
        assert supports(config, problem, (8, 0)).required_bytes == 163840
        two_pass = supports(config.with_(policy="two_pass"), problem, (8, 0))
        assert (two_pass.ok, two_pass.required_bytes) == (False, 167936)
        assert supports(config.with_(policy="two_pass"), problem, (9, 0))

    @pytest.mark.parametrize(
        ("changes", "problem", "reason"),
        [
            ({"schedule": "descending", "launch_order": "ascending"}, {"varlen": True},
             "packed sequences need a kind with a closed form, ascending or shortest_first"),
            ({"launch_order": "ascending"}, {"varlen": True},
             "packed sequences run shortest_first launched descending"),
            ({"schedule": "grouped_shift", "group": 2}, {"window_left": 9},
             "schedule grouped_shift is for mask full, causal; the mask is window: choose ascending"),
            ({"group": 2}, {}, "group is for grouped_shift"),
            ({"schedule": "sideways"}, {}, "schedule 'sideways' is not one of"),
        ],
    )  # fmt: skip
    def test_schedules_that_do_not_fit(
        self, changes: dict[str, Any], problem: dict[str, Any], reason: str
    ) -> None:
        answer = supports(Config(**changes), Problem("causal", 128, 1000, **problem))
        assert not answer
        assert reason in answer.reason
