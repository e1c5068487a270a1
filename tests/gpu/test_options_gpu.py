"""Every option beside every other: in the error budget, equal bits over reruns, strides, margins, graphs and streams."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gpu_cases import torch
from option_cases import (
    BACKENDS,
    COMBINATIONS,
    VARIANTS,
    WARM,
    OptionCase,
    option_case,
    served_by_portable,
)

from dash_kernels import (
    Config,
    Problem,
    attention,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from dash_kernels.device import current_gpu
from dash_kernels.testing import assert_bits_equal, error_of, make_inputs, poisoned_outputs

CASES = Path(__file__).resolve().with_name("option_cases.py")
ROOT = CASES.parent.parent.parent
WARM_UP_SECONDS = 90  # beside a first test of its own within that test's bound
RUNS = int(os.environ.get("DASH_BIT_RUNS", "1000"))
EVERY = pytest.mark.parametrize("variant", VARIANTS, ids=lambda x: "-".join(map(str, x)))
BOTH = pytest.mark.parametrize("backend", BACKENDS)
# A window, groups, a sink and the gradient of LSE at once, on each kind of tensor
MIXED = (
    (VARIANTS[13], COMBINATIONS[1]),
    (VARIANTS[9], COMBINATIONS[3]),
)
MIXTURES = pytest.mark.parametrize("mixture", MIXED, ids=["batch", "packed"])


@pytest.fixture(scope="module", autouse=True)
def _compiled_in_parallel(request: pytest.FixtureRequest) -> None:
    """Compile the kernels of a long run in several processes; what fails there fails again in its own test."""
    mine = [item for item in request.session.items if item.module is request.module]
    # Under xdist each of the workers would start all of them.
    if len(mine) < 30 or "PYTEST_XDIST_WORKER" in os.environ:
        return
    deadline = time.monotonic() + WARM_UP_SECONDS

    def compile_one(index: int) -> None:
        left = deadline - time.monotonic()
        if left > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [sys.executable, str(CASES), str(index)], env={**os.environ, "PYTHONPATH": str(ROOT)},
                    capture_output=True, timeout=left, check=False,
                )  # fmt: skip

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, range(len(WARM))))


def assert_same(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: str
) -> None:
    for name, x in got.items():
        assert_bits_equal(x, expected[name], f"{where} {name}")


def skip_pair_of_one(case: OptionCase, backend: str) -> None:
    """Where the served config is portable already, both backends are one."""
    if backend == "portable" and served_by_portable(case.problem):
        pytest.skip("served by the portable backend already")


@EVERY
@BOTH
def test_pairwise_in_budget_and_equal_on_rerun(backend: str, variant: tuple[Any, ...]) -> None:
    for combination in COMBINATIONS:
        case = option_case(variant, combination, backend)
        skip_pair_of_one(case, backend)
        truth, budgets = case.budgets()
        with poisoned_outputs():
            got = case.run()
        assert_same(case.run(), got, f"{combination} rerun")
        for name, budget in budgets.items():
            error = error_of(got[name], truth[name])
            assert error.within(budget), f"{combination}: {name} {error}, budget {budget}"
        blind = truth["lse"] == math.inf
        assert torch.equal(got["lse"] == math.inf, blind)
        torch.testing.assert_close(
            got["lse"][~blind].double(), truth["lse"][~blind], atol=1e-4, rtol=1e-5
        )


@EVERY
@BOTH
def test_a_thousand_runs_give_equal_bits(backend: str, variant: tuple[Any, ...]) -> None:
    """DASH_BIT_RUNS runs of forward and backward beside a matmul loop on another stream."""
    case = option_case(variant, COMBINATIONS[1], backend)
    skip_pair_of_one(case, backend)
    first = case.run()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    differ = {name: torch.zeros((), device="cuda", dtype=torch.int64) for name in first}
    for _ in range(RUNS):
        with torch.cuda.stream(side):
            torch.mm(a, a)
        for name, x in case.run().items():
            integer = torch.int32 if x.element_size() == 4 else torch.int16
            differ[name] += (x.view(integer) != first[name].view(integer)).any()
    assert {name: int(count) for name, count in differ.items() if count} == {}


@MIXTURES
@BOTH
def test_strides_change_no_bit(backend: str, mixture: tuple[Any, Any]) -> None:
    case = option_case(*mixture, backend)
    dout, q, k, v = (x.detach() for x in case.inputs)
    heads, columns = q.ndim - 2, q.ndim - 1
    sets: dict[str, tuple[torch.Tensor, ...]] = {
        "dout expanded": (dout[..., :1].expand(dout.shape), q, k, v),
        "dout of another layout": (dout.transpose(0, heads).contiguous().transpose(0, heads), q, k, v),
        "k with its last dimension strided": (dout, q, k.transpose(heads, columns).contiguous().transpose(heads, columns), v),
        "v shown to all heads": (dout, q, k, v[..., :1, :].expand(v.shape)),
        "k and v halves of one": (dout, q, *torch.stack([k, v], -3).unbind(-3)),
        "q a slice of a wider row": (dout, torch.cat([q, q], -1)[..., : q.shape[-1]], k, v),
        "q transposed": (dout, q.transpose(0, heads).contiguous().transpose(0, heads), k, v),
    }  # fmt: skip
    for name, inputs in sets.items():
        contiguous = tuple(x.contiguous() for x in inputs)
        assert_same(case.run(*inputs), case.run(*contiguous), name)


@MIXTURES
@BOTH
def test_the_margin_changes_no_bit(backend: str, mixture: tuple[Any, Any]) -> None:
    case = option_case(*mixture, backend)
    first = case.run()
    for margin in (1, 16, current_gpu().sms - 1):
        assert_same(case.run(sm_margin=margin), first, f"sm_margin {margin}")


@MIXTURES
@BOTH
def test_graphs_replay_with_new_inputs(backend: str, mixture: tuple[Any, Any]) -> None:
    """100 replays; packed sequences with other lengths than were captured: nothing of them is known to the host."""
    case = option_case(*mixture, backend)
    static = [x.detach().clone() for x in case.inputs]
    starts = [case.ours[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if name in case.ours]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            case.run(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.run(*static)
    for seed in range(4):
        for x, y in zip(static, make_inputs(case.problem, seed), strict=True):
            x.copy_(y.detach())
        for start in starts:
            start[1:-1] -= seed  # the first and the last stay
        eager = case.run(*static)
        for _ in range(25):
            graph.replay()
        assert_same(captured, eager, f"seed {seed}")


@BOTH
def test_streams_at_once_share_nothing(backend: str) -> None:
    cases = [option_case(*mixture, backend) for mixture in MIXED] * 2
    firsts = [case.run() for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    last: list[dict[str, torch.Tensor]] = []
    for _ in range(25):
        last = []
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                last.append(case.run())
    torch.cuda.synchronize()
    for number, (got, first) in enumerate(zip(last, firsts, strict=True)):
        assert_same(got, first, f"stream {number}")


@MIXTURES
@BOTH
def test_nothing_waits_for_the_device(backend: str, mixture: tuple[Any, Any]) -> None:
    case = option_case(*mixture, backend)
    first = case.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = case.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(again, first, "rerun")


@BOTH
def test_a_sequence_has_the_same_bits_alone_and_in_a_pack(backend: str) -> None:
    case = option_case(VARIANTS[5], COMBINATIONS[1], backend)
    config = case.config or Config(schedule="shortest_first", launch_order="descending")
    dout, q, k, v = (x.detach() for x in case.inputs)
    options = {**case.ours, "config": config}
    whole = case.run(dout, q, k, v, config=config)
    begin, end = (int(x) for x in options["cu_seqlens_q"][1:3])
    begin_k, end_k = (int(x) for x in options["cu_seqlens_k"][1:3])
    parts = [
        x.detach().clone().requires_grad_()
        for x in (q[begin:end], k[begin_k:end_k], v[begin_k:end_k])
    ]
    sink = case.sink.detach().requires_grad_()
    for name, length in (("cu_seqlens_q", end - begin), ("cu_seqlens_k", end_k - begin_k)):
        options[name] = torch.tensor([0, length], device="cuda", dtype=torch.int32)
    out, lse = attention(*parts, return_lse=True, sink=sink, **options)
    grads = torch.autograd.grad((out, lse), parts, (dout[begin:end], case.dlse[:, begin:end]))
    assert_bits_equal(out, whole["out"][begin:end], "out")
    for name, grad, at in zip(("dq", "dk", "dv"), grads, ((begin, end), (begin_k, end_k), (begin_k, end_k)), strict=True):  # fmt: skip
        assert_bits_equal(grad, whole[name][slice(*at)], name)


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "spare"),
    [((0, 5, 0), (0, 5, 0), 0), ((5, 1, 0, 130), (0, 1, 3, 200), 7), ((0, 0), (4, 4), 3)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_sequences_and_rows_of_no_sequence_are_zeros(
    lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], spare: int, causal: bool
) -> None:
    def start(lengths: tuple[int, ...]) -> torch.Tensor:
        ends = torch.tensor([0, *lengths], device="cuda").cumsum(0)
        return ends.to(torch.int32)

    q, k, v = (
        torch.randn(
            sum(lengths) + spare, 2, 64, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        for lengths in (lengths_q, lengths_k, lengths_k)
    )
    with poisoned_outputs():
        out, lse, _ = flash_attn_varlen_func(
            q, k, v, start(lengths_q), start(lengths_k), max(lengths_q), max(lengths_k), causal=causal,
            return_attn_probs=True,
        )  # fmt: skip
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    on_cpu = [x.detach().cpu().requires_grad_() for x in (q, k, v)]
    exact, exact_lse, _ = flash_attn_varlen_func(
        *on_cpu, start(lengths_q).cpu(), start(lengths_k).cpu(), max(lengths_q), max(lengths_k), causal=causal,
        return_attn_probs=True,
    )  # fmt: skip
    exact_grads = torch.autograd.grad(exact, on_cpu, torch.ones_like(exact))
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), (exact, exact_lse, *exact_grads), strict=True):  # fmt: skip
        x, y = x.detach().cpu(), y.detach()
        assert torch.equal(x == 0, y == 0) or name != "out", name
        torch.testing.assert_close(x, y, atol=0.05, rtol=0.05, msg=name)


def test_one_compiled_graph_takes_every_option() -> None:
    torch._dynamo.reset()
    case = option_case(*MIXED[1], "served")
    options = {name: x for name, x in case.ours.items() if not name.startswith("cu_")}
    starts = [case.ours[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
    compiled = torch.compile(
        lambda q, k, v, sink, a, b: attention(
            q, k, v, sink=sink, cu_seqlens_q=a, cu_seqlens_k=b, return_lse=True, **options
        ),
        fullgraph=True, dynamic=True,
    )  # fmt: skip
    dout, *qkv = case.inputs
    sink = case.sink.detach().requires_grad_()
    out, lse = compiled(*qkv, sink, *starts)
    grads = torch.autograd.grad((out, lse), (*qkv, sink), (dout, case.dlse))
    assert_same({"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv", "dsink"), grads, strict=True))}, case.run(), "compiled")  # fmt: skip


def test_opcheck_with_every_option() -> None:
    case = option_case(*MIXED[1], "served")
    dout, *qkv = (x.detach() for x in case.inputs)
    longest = case.problem.seq_len, case.problem.seq_len_kv
    options = (*longest, True, 31, -1, 0.1, 2.0, "", [], True, False, 0)
    starts = [case.ours[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    ops = torch.ops.dash
    torch.library.opcheck(
        ops.attention.default, (*qkv, case.sink, *starts, *options), test_utils=tests
    )
    out, lse = ops.attention(*qkv, case.sink, *starts, *options)
    torch.library.opcheck(
        ops.attention_backward.default,
        (dout, case.dlse, *qkv, case.sink, *starts, out, lse, *options), test_utils=tests,
    )  # fmt: skip


def test_stacked_tensors_are_read_in_place() -> None:
    qkv = torch.randn(2, 256, 3, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parts = [x.detach().contiguous().requires_grad_() for x in qkv.unbind(2)]
    out = flash_attn_qkvpacked_func(qkv, causal=True)
    assert_bits_equal(out, attention(*parts, causal=True), "out")
    (grad,) = torch.autograd.grad(out.sum(), qkv)
    expected = torch.autograd.grad(attention(*parts, causal=True).sum(), parts)
    assert_bits_equal(grad, torch.stack(expected, 2), "dqkv")


@pytest.mark.parametrize(("batch", "heads"), [(1, 66_000), (66_000, 1), (300, 300)])
def test_more_than_65535_heads_in_all(batch: int, heads: int) -> None:
    inputs = make_inputs(Problem("causal", 64, 20, batch=batch, heads=heads))
    dout, *qkv = inputs
    whole = torch.autograd.grad(attention(*qkv, causal=True), qkv, dout)
    corner = [x[-1:, :, -1:].detach().clone() for x in inputs]
    alone = [x.requires_grad_() for x in corner[1:]]
    for x, y in zip(whole, torch.autograd.grad(attention(*alone, causal=True), alone, corner[0]), strict=True):  # fmt: skip
        assert_bits_equal(x[-1:, :, -1:].contiguous(), y)


@pytest.mark.parametrize("layout", ["batch", "packed"])
def test_more_than_2_31_elements(layout: str) -> None:
    """The last sequence of a tensor of 2.2e9 elements has the bits that it has alone."""
    batch, seq_len, heads, dim = 520, 4096, 8, 128
    free = torch.cuda.mem_get_info()[0]
    if free < 60 << 30:
        pytest.skip(f"needs 60 GiB of GPU memory; {free >> 30} are free")
    shape = (batch, seq_len, heads, dim)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 1 << 31
    k, v = torch.randn(2, *shape[:2], 1, dim, device="cuda", dtype=torch.bfloat16)
    config = Config(schedule="shortest_first", launch_order="descending")
    options: dict[str, Any] = {"causal": True, "window_size": (255, 0), "config": config}
    last = [x[-1:].clone().requires_grad_() for x in (q, k, v)]
    alone_options = dict(options)
    if layout == "packed":
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        last = [x.detach().flatten(0, 1).requires_grad_() for x in last]
        for where, count in ((options, batch), (alone_options, 1)):
            starts = torch.arange(count + 1, device="cuda", dtype=torch.int32) * seq_len
            where |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
            where |= {"max_seqlen_q": seq_len, "max_seqlen_k": seq_len}
    qkv = [x.requires_grad_() for x in (q, k, v)]
    whole = attention(*qkv, **options)
    alone = attention(*last, **alone_options)
    size = alone.shape[0]
    assert_bits_equal(whole[-size:], alone, "out")
    grads = torch.autograd.grad(whole, qkv, q.detach())
    for name, x, y in zip(("dq", "dk", "dv"), grads, torch.autograd.grad(alone, last, last[0].detach()), strict=True):  # fmt: skip
        assert_bits_equal(x[-size:], y, name)
