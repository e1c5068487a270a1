"""Bits: 1,000 runs beside another kernel, stale and poisoned memory, batches, streams, graphs, a held half of the chip."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from gpu_cases import (
    BACKENDS,
    KINDS,
    MASKS,
    NAN_WORD,
    WIDE,
    SmHolder,
    backward_call,
    config_for,
    min_resident,
    skip_unless_supported,
    torch,
)

from dash_kernels import Config, Problem, attention
from dash_kernels.device import current_gpu
from dash_kernels.testing import (
    GRADIENTS,
    assert_bits_equal,
    gradients,
    make_inputs,
    poison_free_memory,
    poisoned_outputs,
)

ROOT = Path(__file__).resolve().parent.parent.parent
RUNS = 1000


def differing(grads: tuple[torch.Tensor, ...], first: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Number of elements whose bits differ, counted on the GPU without waiting for it."""
    return sum(
        (x.view(torch.int16) != y.view(torch.int16)).count_nonzero()
        for x, y in zip(grads, first, strict=True)
    )


def count_differing_runs(problem: Problem, config: Config, runs: int) -> int:
    """Runs whose bits differ from the first one's, with a matmul loop on another stream all the while."""
    call = backward_call(problem, config)
    first = call()
    side = torch.cuda.Stream()
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    side.wait_stream(torch.cuda.current_stream())
    bad = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(runs):
        with torch.cuda.stream(side):
            torch.mm(a, a)
        bad += differing(call(), first) > 0
    torch.cuda.synchronize()
    return int(bad)


@pytest.mark.parametrize(
    ("mask", "head_dim", "dtype"), [("full", 64, "float16"), ("causal", 128, "bfloat16")]
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_runs_give_equal_bits(
    kind: str, backend: str, mask: str, head_dim: int, dtype: str
) -> None:
    problem = Problem(mask, head_dim, 1024, dtype, batch=2, heads=4)
    config = config_for(kind, backend, head_dim)
    skip_unless_supported(config, problem)
    assert count_differing_runs(problem, config, RUNS) == 0


@pytest.mark.parametrize("head_dims", WIDE, ids=str)
@pytest.mark.parametrize(
    ("kind", "mask"),
    [
        ("ascending", "full"),
        ("shift", "full"),
        ("shortest_first", "causal"),
        ("symmetric_shift", "causal"),
    ],
)
def test_a_thousand_runs_above_head_dim_128_give_equal_bits(
    kind: str, mask: str, head_dims: tuple[int, int]
) -> None:
    """Both writers add to a Q tile there, each in turns of its own; the shift kinds wait on later CTAs."""
    dim, dim_v = head_dims
    problem = Problem(mask, dim, 1024, batch=2, heads=4, head_dim_v=dim_v)
    config = config_for(kind, "hopper", dim, head_dim_v=dim_v)
    skip_unless_supported(config, problem)
    assert count_differing_runs(problem, config, RUNS) == 0


@pytest.mark.parametrize("head_dims", WIDE, ids=str)
def test_the_margin_changes_no_bit_above_head_dim_128(head_dims: tuple[int, int]) -> None:
    dim, dim_v = head_dims
    problem = Problem("causal", dim, 700, batch=2, heads=4, head_dim_v=dim_v)
    inputs = make_inputs(problem)
    first = gradients(*inputs, causal=True)
    for margin in (1, current_gpu().sms - 1):
        for name, x, y in zip(
            GRADIENTS, gradients(*inputs, causal=True, sm_margin=margin), first, strict=True
        ):
            assert_bits_equal(x, y, f"sm_margin {margin} {name}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_passes_give_equal_bits(backend: str) -> None:
    problem = Problem("causal", 128, 1000, batch=2, heads=4)
    config = config_for("ascending", backend, 128, "two_pass")
    skip_unless_supported(config, problem)
    assert count_differing_runs(problem, config, RUNS) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_comparison_would_see_a_race(backend: str) -> None:
    """The unordered yardstick differs under the same conditions: the tests above can fail."""
    problem = Problem("full", 64, 1024, batch=2, heads=4)
    config = config_for("ascending", backend, 64, "unordered")
    skip_unless_supported(config, problem)
    assert count_differing_runs(problem, config, 200) > 0


def test_case_1_head_dim_256_is_refused_on_a_tile_of_128() -> None:
    if current_gpu().capability[0] != 9:
        pytest.skip("the Hopper backend needs compute capability 9.0")
    q = torch.zeros(1, 128, 1, 256, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="tile 64x128 is not built for head_dim 256: 64x64"):
        attention(q, q, q, causal=True, config=config_for("ascending", "hopper", 128))


GROUPED = Problem("causal", 128, 777, batch=2, heads=16, heads_kv=2)
DIGEST = """
import hashlib, sys
sys.path[:0] = ["tests/gpu"]
from test_determinism import GROUPED, digest
print(digest(GROUPED))
"""


def digest(problem: Problem) -> str:
    grads = gradients(*make_inputs(problem), causal=problem.causal)
    sha = hashlib.sha256()
    for grad in grads:
        sha.update(grad.cpu().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def test_case_2_stale_memory_changes_no_bit() -> None:
    fresh = subprocess.run(
        [sys.executable, "-c", DIGEST],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert fresh.returncode == 0, fresh.stderr
    inputs = make_inputs(GROUPED)
    first: tuple[torch.Tensor, ...] = ()
    for run in range(50):
        if run in (0, 25):
            torch.cuda.empty_cache()
            poison_free_memory(2 << 30, 7 if run == 0 else NAN_WORD)
        grads = gradients(*inputs, causal=True)
        first = first or grads
        for name, x, y in zip(GRADIENTS, grads, first, strict=True):
            assert_bits_equal(x, y, f"run {run} {name}")
    with poisoned_outputs():
        assert digest(GROUPED) == fresh.stdout.strip()


@pytest.mark.parametrize("policy", ["ordered", "two_pass"])
@pytest.mark.parametrize(("mask", "head_dim"), [("full", 128), ("causal", 64)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_poisoned_outputs_and_workspace_change_no_bit(
    backend: str, mask: str, head_dim: int, policy: str
) -> None:
    problem = Problem(mask, head_dim, 500, batch=1, heads=3, seq_len_kv=650)
    config = config_for(
        "shortest_first" if mask == "causal" else "ascending", backend, head_dim, policy
    )
    skip_unless_supported(config, problem)
    inputs = make_inputs(problem)
    clean = gradients(*inputs, causal=problem.causal, config=config)
    with poisoned_outputs():
        for name, x, y in zip(
            GRADIENTS, gradients(*inputs, causal=problem.causal, config=config), clean, strict=True
        ):
            assert_bits_equal(x, y, name)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_key_tiles_that_no_query_sees(head_dim: int, head_dim_v: int) -> None:
    """A CTA meets them between others: a tile without a step must hand nothing over early, or the next one hangs."""
    problem = Problem(
        "causal", head_dim, 300, batch=16, heads=16, heads_kv=8, seq_len_kv=2300, window_left=100, head_dim_v=head_dim_v
    )  # fmt: skip
    inputs = make_inputs(problem)
    first: tuple[torch.Tensor, ...] = ()
    for run in range(200):
        grads = gradients(*inputs, causal=True, window_size=(100, 0))
        first = first or grads
        for name, x, y in zip(GRADIENTS, grads, first, strict=True):
            assert_bits_equal(x, y, f"run {run} {name}")
    seen_from = problem.seq_len_kv - problem.seq_len - 100
    for name, grad in zip(GRADIENTS[1:3], first[1:3], strict=True):
        assert not grad[:, :seen_from].any(), f"{name} of a key that no query sees"
        assert grad[:, seen_from:].any(), name


MONOTONE = [kind for kind in KINDS if kind in ("ascending", "descending", "shortest_first")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", MONOTONE)
def test_case_4_many_programs_and_half_the_sms_held(kind: str, backend: str) -> None:
    problem = Problem("causal", 64, 1024, batch=32, heads=32)
    config = config_for(kind, backend, 64)
    skip_unless_supported(config, problem)
    call = backward_call(problem, config)
    first = call()
    for _ in range(500):
        last = call()
    assert int(differing(last, first)) == 0
    holder = SmHolder(current_gpu().sms // 2)
    held = call()
    holder.release()
    assert holder.verdict(), "the backward did not end while half the SMs were held"
    assert int(differing(held, first)) == 0


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_case_4_what_waits_on_later_ctas_is_refused(kind: str, backend: str, mask: str) -> None:
    problem = Problem(mask, 64, 1024, batch=1, heads=2)
    config = config_for(kind, backend, 64)
    skip_unless_supported(config, problem)
    _, q, k, v = make_inputs(problem)
    needed = min_resident(config, problem)
    assert kind not in MONOTONE or needed == 1
    if needed == 1:
        attention(q, k, v, causal=problem.causal, config=config).sum().backward()
        return
    with pytest.raises(ValueError, match="allow_resident=True"):
        attention(q, k, v, causal=problem.causal, config=config)
    with pytest.raises(ValueError, match="sm_margin"):
        attention(
            q,
            k,
            v,
            causal=problem.causal,
            config=config,
            allow_resident=True,
            sm_margin=current_gpu().sms,
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("mask", "head_dim"), [("causal", 128), ("full", 64)])
def test_case_12_a_sample_has_the_same_bits_alone_and_in_a_batch(
    mask: str, head_dim: int, backend: str
) -> None:
    problem = Problem(mask, head_dim, 640, batch=8, heads=6)
    config = config_for("shortest_first" if mask == "causal" else "ascending", backend, head_dim)
    skip_unless_supported(config, problem)
    dout, *qkv = make_inputs(problem)
    options = {"causal": problem.causal, "config": config}
    batch_out = attention(*qkv, **options)
    in_batch = torch.autograd.grad(batch_out, qkv, dout)
    alone = [x[:1].detach().requires_grad_() for x in qkv]
    alone_out = attention(*alone, **options)
    assert_bits_equal(alone_out, batch_out[:1], "out")
    for name, x, y in zip(
        GRADIENTS, torch.autograd.grad(alone_out, alone, dout[:1]), in_batch, strict=True
    ):
        assert_bits_equal(x, y[:1], name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_13_two_passes_of_65536_rows_fit_in_a_gibibyte(backend: str) -> None:
    problem = Problem("causal", 128, 65536, batch=1, heads=8)
    config = config_for("ascending", backend, 128, "two_pass")
    skip_unless_supported(config, problem)
    call = backward_call(problem, config)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = call()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1 << 30
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_replays_give_the_bits_of_eager_runs(backend: str) -> None:
    problem = Problem("causal", 128, 700, batch=1, heads=4)
    config = config_for("shortest_first", backend, 128)
    skip_unless_supported(config, problem)
    static = [x.detach().clone() for x in make_inputs(problem)]
    for x in static[1:]:
        x.requires_grad_()
    options = {"causal": True, "config": config}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            gradients(*static, **options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(*static, **options)
    for seed in range(4):
        fresh = make_inputs(problem, seed)
        eager = gradients(*fresh, **options)
        with torch.no_grad():
            for x, y in zip(static, fresh, strict=True):
                x.copy_(y)
        for _ in range(5):
            graph.replay()
        for name, x, y in zip(GRADIENTS, captured, eager, strict=True):
            assert_bits_equal(x, y, f"seed {seed} {name}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_streams_at_once_share_nothing(backend: str) -> None:
    problems = [
        Problem("causal", 128, 700, batch=1, heads=4),
        Problem("full", 64, 900, batch=1, heads=6),
    ]
    calls = []
    for problem in problems:
        config = config_for(
            "shortest_first" if problem.causal else "ascending", backend, problem.head_dim
        )
        skip_unless_supported(config, problem)
        calls.append(backward_call(problem, config))
    firsts = [call() for call in calls]
    bad = [torch.zeros((), device="cuda", dtype=torch.int64) for _ in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(50):
        for stream, call, first, count in zip(streams, calls, firsts, bad, strict=True):
            with torch.cuda.stream(stream):
                count += differing(call(), first)
    torch.cuda.synchronize()
    assert [int(count) for count in bad] == [0, 0]


def test_a_backward_from_another_thread_gives_equal_bits() -> None:
    inputs = make_inputs(Problem("causal", 64, 500, batch=1, heads=4))
    here = gradients(*inputs, causal=True)
    there: list[tuple[torch.Tensor, ...]] = []
    thread = threading.Thread(target=lambda: there.append(gradients(*inputs, causal=True)))
    thread.start()
    thread.join()
    for name, x, y in zip(GRADIENTS, there[0], here, strict=True):
        assert_bits_equal(x, y, name)


def test_case_27_the_tensors_device_is_used_and_the_current_one_kept() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = make_inputs(Problem("causal", 128, 400, batch=1, heads=4), device="cuda:1")
    used = torch.cuda.memory_allocated(0)
    out = attention(*inputs[1:], causal=True)
    thread = threading.Thread(target=lambda: out.backward(inputs[0]))
    thread.start()
    thread.join()
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == used
    there = [x.grad for x in inputs[1:]]
    with torch.cuda.device(1):
        for name, x, y in zip(GRADIENTS, there, gradients(*inputs, causal=True), strict=True):
            assert_bits_equal(x, y, name)
