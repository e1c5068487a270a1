"""The float64 reference against autograd, and what a schedule's order does to bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from dash_kernels import reference
from dash_kernels.schedules import SCHEDULES, Schedule, TileGrid, build
from dash_kernels.testing import assert_bits_equal, error_of, first_difference

KINDS = sorted(SCHEDULES)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiles this small run fastest, and beside other tests, on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> torch.Tensor:
    """Softmax attention in one matrix, differentiable; a row that sees nothing gives zeros."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if causal:
        seen = torch.ones(scores.shape[-2:]).tril(scores.shape[-1] - scores.shape[-2]).bool()
        scores = scores.masked_fill(~seen, -math.inf)
        empty = ~seen.any(-1)
        weights = (
            scores.masked_fill(empty[:, None], 0.0).softmax(-1).masked_fill(empty[:, None], 0.0)
        )
    else:
        weights = scores.softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_len", "seq_len_kv"), [(33, 33), (40, 9), (9, 40), (1, 5), (7, 1)])
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_reference_agrees_with_autograd(
    seq_len: int, seq_len_kv: int, heads_kv: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        reference, "SCORES_AT_ONCE", 4 * 2 * seq_len_kv * 7
    )  # several chunks of rows
    torch.manual_seed(0)
    q = torch.randn(2, seq_len, 4, 16, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(2, seq_len_kv, heads_kv, 16, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    dout = torch.randn_like(q)
    out = naive(q, k, v, causal, 0.3)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    args = [x.detach() for x in (q, k, v)]
    got, lse = reference.attention_forward(*args, causal=causal, scale=0.3)
    torch.testing.assert_close(got, out)
    assert lse.shape == (2, 4, seq_len)
    for mine, theirs in zip(
        reference.attention_backward(dout, *args, causal=causal, scale=0.3), expected, strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_rows_that_see_no_key_give_zeros_and_infinite_lse() -> None:
    q = torch.randn(1, 76, 1, 32, dtype=torch.float16) * 3
    k, v = (torch.randn(1, 1, 1, 32, dtype=torch.float16) * 3 for _ in range(2))
    out, lse = reference.attention_forward(q, k, v, causal=True, scale=32**-0.5)
    assert (out[:, :75] == 0).all()
    torch.testing.assert_close(out[:, 75], v.double()[:, 0])
    assert (lse[..., :75] == math.inf).all()
    dq, dk, dv = reference.attention_backward(
        torch.ones_like(q), q, k, v, causal=True, scale=32**-0.5
    )
    assert (dq == 0).all()
    assert (dk == 0).all()
    assert (dv == 1).all()


def one_head(grid: TileGrid, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = (grid.seq_len, grid.seq_len, grid.seq_len_kv, grid.seq_len_kv)
    return [torch.randn(n, 32, generator=generator).to(dtype) for n in rows]


def run(schedule: Schedule, interleaving: int = 0) -> tuple[torch.Tensor, ...]:
    return reference.run_schedule(
        schedule, *one_head(schedule.grid), scale=32**-0.5, interleaving=interleaving
    )


GRIDS = [
    TileGrid(256, 256, 32, 32, True),
    TileGrid(256, 256, 32, 32, False),
    TileGrid(150, 230, 16, 32, True),
    TileGrid(150, 90, 32, 16, True),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_gives_equal_bits_however_the_ctas_interleave(kind: str, grid: TileGrid) -> None:
    schedule = build(kind, grid, 2 if SCHEDULES[kind].takes_group else 1)
    first = run(schedule)
    for interleaving in (1, 2):
        for name, again, once in zip(
            ("dq", "dk", "dv"), run(schedule, interleaving), first, strict=True
        ):
            assert_bits_equal(again, once, f"{kind} {name}")


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_right(kind: str, grid: TileGrid) -> None:
    schedule = build(kind, grid, 2 if SCHEDULES[kind].takes_group else 1)
    dout, q, k, v = (x[None, :, None] for x in one_head(grid))
    exact = reference.attention_backward(dout, q, k, v, causal=grid.causal, scale=32**-0.5)
    for mine, theirs in zip(run(schedule), exact, strict=True):
        assert error_of(mine, theirs[0, :, 0]).relative < 3 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(
    ("other", "gradient"),
    [
        ("shortest_first", 0),  # other turns: dQ is added in another order
        ("descending", 1),  # the same turns, another visit order: dK is
    ],
)
def test_two_kinds_give_different_bits(other: str, gradient: int) -> None:
    ascending, theirs = run(build("ascending", GRIDS[0])), run(build(other, GRIDS[0]))
    assert first_difference(ascending[gradient], theirs[gradient])


def test_a_wrong_turn_is_named_and_never_ends_in_silence() -> None:
    good = build("ascending", TileGrid(64, 64, 32, 32, True))
    turns = [list(turn) for turn in good.turn]
    turns[1][0] = 7
    bad = Schedule(good.kind, good.grid, 1, good.items, good.visit, tuple(map(tuple, turns)))
    with pytest.raises(
        RuntimeError,
        match=r"no CTA can go on; \(n_block, m_block, turn\) waited for: \[\(1, 1, 7\)\]",
    ):
        run(bad)
