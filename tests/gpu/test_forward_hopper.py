"""The Gluon forward: error budget, alignment, bits that no rerun, batch or stale memory changes, and what it refuses."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
from gpu_cases import FORWARD_FORMS, LENGTHS, MASKS, NAN_WORD, torch

from dash_kernels import reference
from dash_kernels.device import current_gpu
from dash_kernels.problem import Problem
from dash_kernels.testing import (
    assert_bits_equal,
    error_budget,
    error_of,
    make_inputs,
    poison_free_memory,
    poisoned_outputs,
)

HEAD_DIMS = (64, 128)


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    if current_gpu().capability[0] != 9:
        pytest.skip("forward_hopper runs on compute capability 9.x")


def run(q: Any, k: Any, v: Any, causal: bool, **options: Any) -> tuple[Any, Any]:
    from dash_kernels.kernels.forward_hopper import forward_hopper

    return forward_hopper(q, k, v, causal=causal, scale=q.shape[-1] ** -0.5, **options)


def inputs_of(problem: Problem, seed: int = 0) -> tuple[Any, Any, Any]:
    _, q, k, v = (x.detach() for x in make_inputs(problem, seed))
    return q, k, v


def torch_flash(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """PyTorch's own flash attention, the peer of the error budget where it runs a call, bottom-right aligned."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0].transpose(
        1, 2
    )


def assert_attention(q: Any, k: Any, v: Any, causal: bool, **options: Any) -> None:
    """Output within its budget, log-sum-exp near the exact one, zeros and +inf exactly where a row sees no key."""
    poison_free_memory(64 << 20, NAN_WORD)
    with poisoned_outputs():
        out, lse = run(q, k, v, causal, **options)
    how = {"causal": causal, "scale": q.shape[-1] ** -0.5, **options}
    exact, exact_lse = reference.attention_forward(q, k, v, **how)
    assert (out.shape, out.dtype, lse.dtype) == (exact.shape, q.dtype, torch.float32)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    blind = exact_lse == math.inf
    assert torch.equal(lse == math.inf, blind)
    assert not out.transpose(1, 2)[blind].any()
    if options or v.shape[3] != q.shape[3]:
        peer = reference.attention_forward(q, k, v, rounded_to=q.dtype, **how)[0].to(q.dtype)
    else:
        peer = torch_flash(q, k, v, causal)
    budget = error_budget(exact, peer)
    assert error_of(out, exact).within(budget), (error_of(out, exact), budget)
    torch.testing.assert_close(lse[~blind].double(), exact_lse[~blind], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("seq_len", "seq_len_kv"), [*LENGTHS, (1, 1), (2500, 2500), (65, 1000)])
def test_output_and_lse_are_attention(
    seq_len: int, seq_len_kv: int, head_dim: int, mask: str, dtype: str
) -> None:
    problem = Problem(
        mask, head_dim, seq_len, dtype, batch=2, heads=4, heads_kv=2, seq_len_kv=seq_len_kv
    )
    assert_attention(*inputs_of(problem), problem.causal)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_more_tiles_than_sms_and_heads_in_sections(head_dim: int, mask: str) -> None:
    """Every tile is drawn once: more heads than one section holds, the last section smaller, several rounds of CTAs."""
    problem = Problem(mask, head_dim, 1500, batch=5, heads=21, heads_kv=7)
    assert_attention(*inputs_of(problem), problem.causal)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_large_scores_and_late_maxima(head_dim: int, mask: str) -> None:
    """Scores of hundreds, the largest at the first keys, which are walked last: every rescale counts."""
    q, k, v = inputs_of(Problem(mask, head_dim, 700, heads=3))
    k = k * torch.linspace(40, 1, 700, device="cuda", dtype=k.dtype)[:, None, None]
    assert_attention(q, k, v, mask == "causal")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_neither_rerun_nor_batch_nor_heads_change_a_bit(head_dim: int, mask: str) -> None:
    causal = mask == "causal"
    q, k, v = inputs_of(Problem(mask, head_dim, 1111, batch=9, heads=16))
    out, lse = run(q, k, v, causal)
    for _ in range(50):
        again, lse_again = run(q, k, v, causal)
        assert_bits_equal(again, out, "out")
        assert_bits_equal(lse_again, lse, "lse")
    alone, lse_alone = run(*(x[4:5, :, 3:4] for x in (q, k, v)), causal)
    assert_bits_equal(alone, out[4:5, :, 3:4], "out")
    assert_bits_equal(lse_alone, lse[4:5, 3:4], "lse")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_nothing_past_a_tensor_is_read(head_dim: int) -> None:
    """Q, K and V end where a NaN begins, in every dimension, and lie in memory in another order."""
    shape = (2, 300, 3, head_dim)
    q, k, v = inputs_of(Problem("full", head_dim, 300, batch=2, heads=3))
    views = []
    for x in (q, k, v):
        room = torch.full((3, 4, 300 + 128, head_dim), math.nan, device="cuda", dtype=x.dtype)
        view = room.transpose(1, 2)[:2, :300, :3]
        view.copy_(x)
        views.append(view)
    for causal in (False, True):
        expected = run(q, k, v, causal)
        for mine, theirs in zip(run(*views, causal), expected, strict=True):
            assert_bits_equal(mine, theirs)
        assert expected[0].shape == shape


def starts_of(lengths: list[int]) -> Any:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")


def assert_packed(
    q: Any, k: Any, v: Any, lengths: list[int], keys: list[int], **options: Any
) -> None:
    """A pack against the reference, and each sequence's bits against a pack of it alone."""
    from dash_kernels.kernels.sequences import Sequences

    starts = starts_of(lengths), starts_of(keys)
    causal, scale = options.pop("causal"), q.shape[-1] ** -0.5
    sequences = Sequences(*starts, max(lengths), max(keys))
    poison_free_memory(64 << 20, NAN_WORD)
    with poisoned_outputs():
        out, lse = run(q[None], k[None], v[None], causal, sequences=sequences, **options)
    how = {"causal": causal, "scale": scale, **options}
    exact, exact_lse = reference.packed_forward(q, k, v, *starts, **how)
    peer, _ = reference.packed_forward(q, k, v, *starts, rounded_to=q.dtype, **how)
    budget = error_budget(exact, peer.to(q.dtype))
    assert error_of(out[0], exact).within(budget), (error_of(out[0], exact), budget)
    blind = exact_lse == math.inf
    assert torch.equal(lse[0] == math.inf, blind)
    assert not out[0].transpose(0, 1)[blind].any()
    torch.testing.assert_close(lse[0][~blind].double(), exact_lse[~blind], atol=1e-4, rtol=1e-5)
    at, key = 0, 0
    for length, length_kv in list(zip(lengths, keys, strict=True))[:6]:
        if length and length_kv:
            alone = Sequences(starts_of([length]), starts_of([length_kv]), length, length_kv)
            mine, my_lse = run(
                q[None, at : at + length], k[None, key : key + length_kv], v[None, key : key + length_kv], causal,
                sequences=alone, **options,
            )  # fmt: skip
            assert_bits_equal(mine[0], out[0, at : at + length], "out")
            assert_bits_equal(my_lse[0], lse[0, :, at : at + length], "lse")
        at, key = at + length, key + length_kv


@pytest.mark.parametrize(("mask", "window", "softcap", "packed", "head_dim"), FORWARD_FORMS)
def test_windows_softcap_and_packed_sequences(
    mask: str, window: tuple[int, int], softcap: float, packed: bool, head_dim: int
) -> None:
    causal = mask == "causal"
    options: dict[str, Any] = {"window": window, "softcap": softcap}
    if packed:
        lengths, keys = [300, 0, 1, 127, 700, 64, 1000, 5], [300, 9, 77, 300, 129, 0, 1000, 5]
        _, q, k, v = make_inputs(Problem("full", head_dim, sum(lengths), heads=4, heads_kv=2))
        k, v = (x[:, : sum(keys)] for x in (k, v))
        q, k, v = (x.detach()[0] * 2 for x in (q, k, v))
        assert_packed(q, k, v, lengths, keys, causal=causal, **options)
        return
    for seq_len, seq_len_kv in (*LENGTHS, (1, 1), (65, 1000), (1500, 1500)):
        problem = Problem(
            "full", head_dim, seq_len, batch=2, heads=4, heads_kv=2, seq_len_kv=seq_len_kv
        )
        assert_attention(*(x * 2 for x in inputs_of(problem)), causal, **options)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_more_sequences_than_a_search_looks_at_together(head_dim: int) -> None:
    lengths = [(i * 37) % 41 for i in range(300)]
    _, q, k, v = (
        x.detach()[0] for x in make_inputs(Problem("full", head_dim, sum(lengths), heads=2))
    )
    assert_packed(q, k, v, lengths, lengths, causal=True, window=(-1, -1), softcap=0.0)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [
        (40, 40),
        (96, 96),
        (128, 64),
        (72, 8),
        (8, 128),
        (160, 96),
        (192, 128),
        (136, 200),
        (256, 256),
    ],
)
def test_narrower_rows_are_read_as_if_zeros_followed(head_dim: int, head_dim_v: int) -> None:
    problem = Problem("causal", head_dim, 333, batch=2, heads=4, heads_kv=2, head_dim_v=head_dim_v)
    assert_attention(*inputs_of(problem), True)


def test_streams_draw_from_counters_of_their_own() -> None:
    q, k, v = inputs_of(Problem("causal", 128, 2048, batch=4, heads=16))
    expected, _ = run(q, k, v, True)
    streams = [torch.cuda.Stream() for _ in range(4)]
    found: list[Any] = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for i in range(24):
        with torch.cuda.stream(streams[i % 4]):
            found.append(run(q, k, v, True)[0])
    torch.cuda.synchronize()
    for out in found:
        assert_bits_equal(out, expected)


def test_a_captured_graph_replays_beside_eager_calls() -> None:
    q, k, v = inputs_of(Problem("causal", 64, 1024, batch=8, heads=16))
    expected, _ = run(q, k, v, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = run(q, k, v, True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        with torch.cuda.stream(side):
            eager = run(q, k, v, True)[0]
        graph.replay()
    torch.cuda.synchronize()
    assert_bits_equal(out, expected)
    assert_bits_equal(eager, expected)


def test_what_it_does_not_run_is_refused_by_name() -> None:
    q, k, v = inputs_of(Problem("full", 64, 128))
    with pytest.raises(ValueError, match="k has strides"):
        run(q, k.transpose(1, 3).contiguous().transpose(1, 3), v, False)
    with pytest.raises(ValueError, match="dtype"):
        run(q.float(), k.float(), v.float(), False)
    with pytest.raises(ValueError, match="head_dim 264"):
        run(*inputs_of(Problem("full", 264, 128)), False)
