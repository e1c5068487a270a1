"""The float64 reference against autograd, and what a schedule's order does to bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Softmax attention in one matrix, differentiable, the mask written pair by pair; rows without a key give zeros.

    Their log-sum-exp is 0 here, so that no gradient comes from it.
    """
    group, offset = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    left, right = window[0], 0 if causal else window[1]
    seen = torch.tensor(
        [
            [
                (left < 0 or row + offset - key <= left)
                and (right < 0 or key - row - offset <= right)
                for key in range(k.shape[1])
            ]
            for row in range(q.shape[1])
        ]
    )
    empty = ~seen.any(-1)
    scores = scores.masked_fill(~seen, -math.inf).masked_fill(empty[:, None], 0.0)
    logits = scores
    if sink is not None:
        logits = torch.cat([scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = logits.softmax(-1)[..., : k.shape[1]].masked_fill(empty[:, None], 0.0)
    lse = logits.logsumexp(-1).masked_fill(empty, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from([(33, 33), (40, 9), (9, 40), (1, 5), (7, 1), (20, 31)]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([3, 8]),
    st.booleans(),
    st.just((-1, -1)) | st.tuples(st.integers(-1, 12), st.integers(-1, 12)),
    st.sampled_from([0.0, 1.5]),
    st.booleans(),
    st.booleans(),
)
def test_reference_agrees_with_autograd(
    lengths: tuple[int, int], heads_kv: int, head_dim_v: int, causal: bool, window: tuple[int, int], softcap: float,
    with_sink: bool, with_dlse: bool,
) -> None:  # fmt: skip
    seq_len, seq_len_kv = lengths
    args = tensors(
        (2, seq_len, 4, 8), (2, seq_len_kv, heads_kv, 8), (2, seq_len_kv, heads_kv, head_dim_v), (4,)
    )  # fmt: skip
    dout, dlse = tensors((2, seq_len, 4, head_dim_v), (2, 4, seq_len), seed=1)
    leaves = [x.requires_grad_() for x in args[: 3 + with_sink]]
    options = {"causal": causal, "scale": 0.3, "window": window, "softcap": softcap}
    sink = args[3] if with_sink else None
    out, lse = naive(*args[:3], sink=sink, **options)
    through_lse = (lse * dlse).sum() if with_dlse else 0.0
    expected = torch.autograd.grad((out * dout).sum() + through_lse, leaves)

    args = [x.detach() for x in args]
    sink = args[3] if with_sink else None
    chunk = 4 * 2 * seq_len_kv * 7  # several chunks of rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "SCORES_AT_ONCE", chunk)
        got, got_lse = reference.attention_forward(*args[:3], sink=sink, **options)
        grads = reference.attention_gradients(
            dout, *args[:3], sink=sink, dlse=dlse if with_dlse else None, **options
        )
    torch.testing.assert_close(got, out)
    seen = got_lse < math.inf
    torch.testing.assert_close(got_lse[seen], lse[seen])
    assert (lse[~seen] == 0).all()
    assert (got[~seen.transpose(1, 2)] == 0).all()
    for mine, theirs in zip(grads, expected, strict=False):
        torch.testing.assert_close(mine, theirs)
    assert (grads.dsink is None) != with_sink


def test_packed_sequences_are_each_on_its_own() -> None:
    starts_q, starts_k = (
        torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 6, 17], [0, 9, 12, 12, 30])
    )
    q, k, v, dout = tensors((20, 4, 8), (33, 2, 8), (33, 2, 3), (20, 4, 3))
    sink, dlse = tensors((4,), (4, 20), seed=1)
    options = {"causal": True, "scale": 0.3, "window": (6, -1), "sink": sink}
    out, lse = reference.packed_forward(q, k, v, starts_q, starts_k, **options)
    grads = reference.packed_gradients(dout, q, k, v, starts_q, starts_k, dlse=dlse, **options)
    dsink = torch.zeros(4, dtype=torch.float64)
    for rows, keys in ((slice(0, 5), slice(0, 9)), (slice(6, 17), slice(12, 30))):
        one = [x[None] for x in (dout[rows], q[rows], k[keys], v[keys])]
        alone, alone_lse = reference.attention_forward(*one[1:], **options)
        torch.testing.assert_close(out[rows], alone[0], rtol=0, atol=0)
        torch.testing.assert_close(lse[:, rows], alone_lse[0], rtol=0, atol=0)
        expected = reference.attention_gradients(*one, dlse=dlse[None, :, rows], **options)
        for mine, theirs in zip(
            (grads.dq[rows], grads.dk[keys], grads.dv[keys]), expected, strict=False
        ):
            torch.testing.assert_close(mine, theirs[0], rtol=0, atol=0)
        dsink += expected.dsink
    torch.testing.assert_close(grads.dsink, dsink)
    for rows in (slice(5, 6), slice(17, 20)):  # one sees no key, three belong to no sequence
        assert (out[rows] == 0).all()
        assert (lse[:, rows] == math.inf).all()
        assert (grads.dq[rows] == 0).all()
    for keys in (slice(9, 12), slice(30, 33)):
        assert (grads.dk[keys] == 0).all()
        assert (grads.dv[keys] == 0).all()


def test_rounding_like_flash_costs_what_the_dtype_costs() -> None:
    """Each gradient is off by roundings of its dtype, fewer bits by more, and float64 is the limit."""
    q, k, v, dout = (x.bfloat16() for x in tensors(*[(1, 96, 2, 16)] * 4))
    options = {"causal": True, "scale": 0.25, "softcap": 2.0}
    exact = reference.attention_backward(dout, q, k, v, **options)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = reference.attention_backward(dout, q, k, v, rounded_to=dtype, **options)
        for mine, theirs in zip(rounded, exact, strict=True):
            assert mine.dtype == torch.float32
            share = error_of(mine, theirs).relative / torch.finfo(dtype).eps
            assert 0.05 < share < 2


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


def one_head(grid: TileGrid, head_group: int = 1, head_dim_v: int = 32) -> list[torch.Tensor]:
    """dout, q, k, v of one KV head, bf16."""
    queries, keys = (grid.seq_len, head_group), (grid.seq_len_kv,)
    shapes = (*queries, head_dim_v), (*queries, 32), (*keys, 32), (*keys, head_dim_v)
    return [x.bfloat16() for x in tensors(*shapes, seed=1)]


def run(schedule: Schedule, interleaving: int = 0) -> tuple[torch.Tensor, ...]:
    dout, q, k, v = one_head(schedule.grid)
    return reference.run_schedule(
        schedule, dout[:, 0], q[:, 0], k, v, scale=32**-0.5, interleaving=interleaving
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
    dout, q, k, v = one_head(grid)
    exact = reference.attention_backward(
        dout[None], q[None], k[None, :, None], v[None, :, None], causal=grid.causal, scale=32**-0.5
    )
    for mine, theirs in zip(run(schedule), exact, strict=True):
        assert error_of(mine, theirs[0, :, 0]).relative < 3 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(
    ("grid", "head_group", "head_dim_v", "softcap", "with_dlse"),
    [
        (TileGrid(150, 150, 16, 32, True, 40), 1, 32, 0.0, False),
        (TileGrid(96, 150, 16, 32, False, 20, 7), 2, 16, 0.0, True),
        (TileGrid(150, 96, 32, 16, False, -1, 30), 3, 48, 3.0, False),
        (TileGrid(130, 130, 16, 16, True), 4, 32, 1.5, True),
        (
            TileGrid(130, 130, 16, 32, True, 0),
            2,
            32,
            0.0,
            False,
        ),  # each query sees its own key alone
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["ascending", "descending", "shortest_first"])
def test_options_are_right_and_give_equal_bits(
    kind: str, grid: TileGrid, head_group: int, head_dim_v: int, softcap: float, with_dlse: bool
) -> None:
    """A tile is masked only where the grid says so: a wrong step among the plain ones would show in the errors."""
    schedule = build(kind, grid)
    dout, q, k, v = one_head(grid, head_group, head_dim_v)
    dlse = tensors((head_group, grid.seq_len), seed=2)[0].float() if with_dlse else None
    runs = [
        reference.run_schedule(
            schedule, dout, q, k, v, scale=0.2, softcap=softcap, dlse=dlse, interleaving=interleaving
        )
        for interleaving in (0, 1)
    ]  # fmt: skip
    exact = reference.attention_gradients(
        dout[None], q[None], k[None, :, None], v[None, :, None],
        causal=grid.causal, scale=0.2, window=(grid.window_left, grid.window_right), softcap=softcap,
        dlse=None if dlse is None else dlse[None],
    )  # fmt: skip
    for name, once, again, theirs in zip(("dq", "dk", "dv"), *runs, exact, strict=False):
        assert_bits_equal(again, once, f"{kind} {name}")
        theirs = theirs[0] if name == "dq" else theirs[0, :, 0]
        if theirs.abs().max() > 1e-9:
            assert error_of(once, theirs).relative < 3 * torch.finfo(torch.bfloat16).eps
        else:
            assert once.abs().max() < torch.finfo(torch.bfloat16).eps


def test_heads_of_a_group_are_added_in_order() -> None:
    """Two heads beside each other give the dK of the second added to that of the first, and their own dQ each."""
    schedule = build("ascending", TileGrid(64, 48, 16, 16, True))
    dout, q, k, v = one_head(schedule.grid, head_group=2)
    both = reference.run_schedule(schedule, dout, q, k, v, scale=0.2)
    alone = [
        reference.run_schedule(schedule, dout[:, g], q[:, g], k, v, scale=0.2) for g in range(2)
    ]
    for g in range(2):
        assert_bits_equal(both[0][:, g], alone[g][0], "dq")
    for i in (1, 2):
        torch.testing.assert_close(both[i], alone[0][i] + alone[1][i])


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
