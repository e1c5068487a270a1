"""The public functions on CPU tensors: right gradients, every refusal by name, compile and opcheck."""

from __future__ import annotations

import itertools
import math
import threading
import warnings
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import dash_kernels
from dash_kernels import Config, attention, on_cpu, on_gpu, reference
from dash_kernels.execute import decode_config, encode_config
from dash_kernels.layouts import kernel_ready
from dash_kernels.problem import Problem
from dash_kernels.testing import (
    Error,
    assert_bits_equal,
    error_budget,
    error_of,
    first_difference,
    gradients,
    make_inputs,
    poisoned_outputs,
    verify,
)


def inputs(
    seq_len: int = 33, heads_kv: int = 2, dtype: str = "bfloat16", **fields: Any
) -> tuple[torch.Tensor, ...]:
    problem = Problem("causal", **({"head_dim": 32, "batch": 2, "heads": 4} | fields), seq_len=seq_len,
                      heads_kv=heads_kv, dtype=dtype)  # fmt: skip
    return make_inputs(problem, device="cpu")


def test_gradients_are_one_rounding_from_float64() -> None:
    dout, q, k, v = inputs(seq_len_kv=50)
    exact = reference.attention_backward(
        dout, *(x.detach() for x in (q, k, v)), causal=True, scale=32**-0.5
    )
    for mine, theirs in zip(gradients(dout, q, k, v, causal=True), exact, strict=True):
        assert_bits_equal(mine, theirs.to(torch.bfloat16))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert (out.dtype, lse.dtype, lse.shape) == (torch.bfloat16, torch.float32, (2, 4, 33))
    assert lse.requires_grad


def test_only_what_requires_grad_gets_a_gradient() -> None:
    _, q, k, v = inputs()
    q, v = q.detach(), v.detach()
    attention(q, k, v).sum().backward()
    assert q.grad is None
    assert v.grad is None
    assert k.grad is not None
    assert not attention(q, k.detach(), v).requires_grad


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"q": None}, TypeError, "q is a NoneType"),
        ({"k": lambda k: k[0]}, ValueError, "k has 3 dimensions"),
        (
            {"q": lambda q: q.float()},
            TypeError,
            "q is torch.float32; attention takes bfloat16 or float16",
        ),
        ({"q": lambda q: q.float(), "k": lambda k: k.float()}, TypeError, "q is torch.float32"),
        ({"v": lambda v: v.half()}, TypeError, "v is torch.float16 but q is torch.bfloat16"),
        ({"k": lambda k: k.to("meta")}, ValueError, "k is on meta but q is on cpu"),
        ({"k": lambda k: k[:1]}, ValueError, "k has batch 1 but q has 2"),
        ({"k": lambda k: k[..., :16]}, ValueError, "k has head_dim 16 but q has 32"),
        ({"v": lambda v: v[:, :3]}, ValueError, "v is .* but k is"),
        ({"q": lambda q: q[:, :, :3]}, ValueError, "q has 3 heads and k has 2"),
        ({"scale": math.nan}, ValueError, "scale is nan"),
        ({"scale": -0.5}, ValueError, "scale is -0.5; it must be a positive number"),
        ({"config": "shift"}, TypeError, "config is a str"),
        (
            {"config": Config(schedule="sideways")},
            ValueError,
            "config.schedule is 'sideways'; choose one of",
        ),
        ({"sm_margin": -1}, ValueError, "sm_margin is -1"),
        ({"config": Config(policy="unordered")}, ValueError, "add deterministic=False"),
        ({"config": Config(), "deterministic": False}, ValueError, "config.policy is 'ordered'"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], error: type[Exception], says: str) -> None:
    _, q, k, v = inputs()
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v}
    for name, value in change.items():
        arguments[name] = value(arguments[name]) if callable(value) else value
    with pytest.raises(error, match=says):
        attention(**arguments)


@pytest.mark.parametrize(
    ("head_dim", "says"), [(264, "up to 256"), (20, "multiple of 8"), (0, "multiple of 8")]
)
def test_head_dims_that_do_not_run_are_named(head_dim: int, says: str) -> None:
    q = torch.zeros(1, 4, 1, head_dim, dtype=torch.float16)
    with pytest.raises(ValueError, match=f"head_dim is {head_dim}; .*{says}"):
        attention(q, q, q)


def test_unordered_under_deterministic_algorithms_is_refused() -> None:
    _, q, k, v = inputs()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(
            RuntimeError, match="deterministic=False asks for the unordered backward"
        ):
            attention(q, k, v, deterministic=False)
        attention(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("batch", "seq_len", "seq_len_kv"), [(1, 0, 128), (0, 16, 16), (1, 16, 0)])
def test_empty_sizes_give_zeros_of_the_right_shape(
    batch: int, seq_len: int, seq_len_kv: int
) -> None:
    q = torch.zeros(batch, seq_len, 2, 64, dtype=torch.float16, requires_grad=True)
    k, v = (
        torch.zeros(batch, seq_len_kv, 2, 64, dtype=torch.float16, requires_grad=True)
        for _ in range(2)
    )
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert out.shape == q.shape
    assert lse.shape == (batch, 2, seq_len)
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()
    assert not out.any()
    assert (lse == math.inf).all()


def test_double_backward_is_refused_by_name() -> None:
    _, q, k, v = inputs()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_gives_equal_bits(use_reentrant: bool) -> None:
    dout, q, k, v = inputs()
    plain = gradients(dout, q, k, v, causal=True)
    checkpoint(
        lambda *a: attention(*a, causal=True), q, k, v, use_reentrant=use_reentrant
    ).backward(dout)
    for name, x, grad in zip("qkv", (q, k, v), plain, strict=True):
        assert_bits_equal(x.grad, grad, name)


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_passes(packed: bool) -> None:
    dout, q, k, v = inputs(seq_len=9)
    sink: torch.Tensor | None = None
    starts: tuple[torch.Tensor | None, ...] = (None, None)
    options: tuple[Any, ...] = (0, 0, True, -1, -1, 0.2, 0.0, "", [], True, False, 0)
    if packed:
        dout, q, k, v = (x[0].detach().requires_grad_() for x in (dout, q, k, v))
        sink = torch.randn(4, requires_grad=True)
        starts = (torch.tensor([0, 4, 9], dtype=torch.int32),) * 2
        options = (5, 5, False, 3, 2, 0.2, 2.0, *encode_config(Config()), True, False, 0)
    torch.library.opcheck(torch.ops.dash.attention.default, (q, k, v, sink, *starts, *options))
    out, lse = torch.ops.dash.attention(q, k, v, sink, *starts, *options)
    dout, q, k, v, out, lse = (x.detach() for x in (dout, q, k, v, out, lse))
    sink = None if sink is None else sink.detach()
    torch.library.opcheck(
        torch.ops.dash.attention_backward.default,
        (dout, torch.randn_like(lse) if packed else None, q, k, v, sink, *starts, out, lse, *options),
    )  # fmt: skip


@pytest.mark.parametrize("config", [None, Config(schedule="ascending", launch_order="ascending")])
def test_one_compiled_graph_serves_every_length(config: Config | None) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, causal=True, config=config),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    compiled_at_first = 0
    for seq_len in (9, 16, 31):
        dout, q, k, v = inputs(seq_len=seq_len)
        grads = torch.autograd.grad(compiled(q, k, v), (q, k, v), dout)
        for mine, eager in zip(grads, gradients(dout, q, k, v, causal=True), strict=True):
            assert_bits_equal(mine, eager)
        compiled_at_first = compiled_at_first or counter.frame_count
    assert counter.frame_count == compiled_at_first


def test_functorch_transforms_give_the_gradients_of_autograd() -> None:
    _, q, k, v = inputs(seq_len=9)

    def loss(*qkv: torch.Tensor) -> torch.Tensor:
        return attention(*qkv, causal=True).float().sum()

    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    q, k, v = (x.detach() for x in (q, k, v))
    for mine, theirs in zip(torch.func.grad(loss, (0, 1, 2))(q, k, v), expected, strict=True):
        assert_bits_equal(mine, theirs)
    stacked = [torch.stack([x, x * 2]) for x in (q, k, v)]
    by_vmap = torch.vmap(torch.func.grad(loss))(*stacked)
    for sample, grad in enumerate(by_vmap):
        assert_bits_equal(grad, torch.func.grad(loss)(*(x[sample] for x in stacked)))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x, k, v).float().sum())(q)


def test_forward_mode_is_refused_by_name() -> None:
    _, q, k, v = (x.detach() for x in inputs(seq_len=9))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: attention(x, k, v), (q,), (q,))


def test_autocast_casts_as_scaled_dot_product_attention_does() -> None:
    _, q, k, v = (x.detach() for x in inputs(seq_len=9))
    wide = [x.float().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(*wide, causal=True)
        theirs = torch.nn.functional.scaled_dot_product_attention(wide[0], wide[1], wide[2])
        with pytest.raises(TypeError, match="q is torch.float64"):
            attention(q.double(), k, v)
    assert out.dtype == theirs.dtype == torch.bfloat16
    assert_bits_equal(out, attention(q, k, v, causal=True))
    out.sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in wide)


def test_selective_checkpointing_and_fake_tensors_see_the_op() -> None:
    from torch._subclasses import FakeTensorMode
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    dout, q, k, v = inputs(seq_len=9)
    plain = gradients(dout, q, k, v, causal=True)
    asked = []

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(op)
        return CheckpointPolicy.MUST_SAVE

    out = checkpoint(
        lambda *qkv: attention(*qkv, causal=True),
        *(q, k, v),
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    for mine, theirs in zip(torch.autograd.grad(out, (q, k, v), dout), plain, strict=True):
        assert_bits_equal(mine, theirs)
    assert asked[0] == torch.ops.dash.attention.default
    with FakeTensorMode():
        fake = torch.empty(2, 9, 4, 32, dtype=torch.float16, device="cuda")
        narrow = torch.empty(2, 9, 4, 16, dtype=torch.float16, device="cuda")
        out, lse = attention(fake, fake, narrow, return_lse=True)
    assert (out.shape, out.device.type, lse.shape) == ((2, 9, 4, 16), "cuda", (2, 4, 9))
    out, lse = attention(*(x.detach().to("meta") for x in (q, k, v)), return_lse=True)
    assert (out.shape, lse.dtype, lse.is_meta) == (q.shape, torch.float32, True)


def test_every_option_survives_compilation() -> None:
    torch._dynamo.reset()
    options = {"window_size": (4, 0), "softcap": 3.0, "return_lse": True}
    compiled = torch.compile(
        lambda q, k, v, sink, starts: attention(
            q, k, v, sink=sink, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=9, max_seqlen_k=9, **options
        ),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    for lengths in ((3, 0, 6), (9, 4, 2)):
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        _, q, k, v = (x[0].detach().requires_grad_() for x in inputs(seq_len=sum(lengths)))
        sink = torch.randn(4, requires_grad=True)
        results = []
        for function in (compiled, None):
            out, lse = (
                function(q, k, v, sink, starts)
                if function
                else attention(q, k, v, sink=sink, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=9,
                               max_seqlen_k=9, **options)
            )  # fmt: skip
            results.append(torch.autograd.grad((out.float().sum(), lse.sum()), (q, k, v, sink)))
        for mine, eager in zip(*results, strict=True):
            assert_bits_equal(mine, eager)


def test_a_backward_in_another_thread_gives_equal_bits() -> None:
    dout, q, k, v = inputs(seq_len=9)
    here = gradients(dout, q, k, v, causal=True)
    there: list[tuple[torch.Tensor, ...]] = []
    threads = [
        threading.Thread(target=lambda: there.append(gradients(dout, q, k, v, causal=True)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for grads in there:
        for mine, theirs in zip(grads, here, strict=True):
            assert_bits_equal(mine, theirs)


def test_a_config_survives_the_trip_through_the_op() -> None:
    config = Config(
        backend="portable",
        schedule="grouped_shift",
        group=4,
        policy="two_pass",
        heads_interleaved=0,
    )
    assert decode_config(*encode_config(config)) == config


def test_only_what_the_kernels_cannot_read_is_copied() -> None:
    packed = torch.zeros(2, 5, 3, 4, 64, dtype=torch.float16)
    q = packed[:, :, 1]
    assert kernel_ready(q) is q
    flat = torch.zeros(2 * 5 * 4 * 64 + 1, dtype=torch.float16)
    for bad in (
        flat[1:].view(2, 5, 4, 64),  # base not on 16 bytes
        torch.zeros(2, 5, 4, 68, dtype=torch.float16)[..., :64],  # rows not on 16 bytes
        torch.zeros(2, 5, 64, 4, dtype=torch.float16).transpose(2, 3),  # last dimension strided
        torch.zeros(2, 5, 1, 64, dtype=torch.float16).expand(
            2, 5, 4, 64
        ),  # one head shown four times
        torch.zeros(1, 5, 4, 64, dtype=torch.float16).as_strided(
            (1, 5, 4, 64), (3, 256, 64, 1)
        ),  # size-1 stride
    ):
        ready = kernel_ready(bad)
        assert ready is not bad
        assert ready.stride() == torch.empty(bad.shape).stride()
        assert ready.data_ptr() % 16 == 0


def test_cpu_tensors_on_an_idle_gpu_machine_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, q, k, v = inputs()
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(on_cpu, "nvidia_gpu_present", lambda: True)
    on_cpu._warn_if_a_gpu_stands_idle.cache_clear()
    with pytest.warns(RuntimeWarning, match="reinstall torch with CUDA"):
        attention(q, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v)
    on_cpu._warn_if_a_gpu_stands_idle.cache_clear()


def test_cuda_tensors_without_triton_are_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    on_gpu._require_triton.cache_clear()
    with pytest.raises(
        RuntimeError, match="needs Triton, which is not installed: pip install triton"
    ):
        on_gpu._require_triton()


def test_first_difference_names_index_values_and_bits() -> None:
    a = torch.zeros(2, 3, dtype=torch.bfloat16)
    b = a.clone()
    b[1, 2] = -0.0
    assert first_difference(a, a.clone()) == ""
    assert (
        first_difference(a, b)
        == "1 of 6 elements differ; first at (1, 2): 0.0 (0x0000) against -0.0 (0x8000)"
    )
    nan = torch.full((2,), math.nan)
    assert first_difference(nan, nan.clone()) == ""
    assert "torch.float16" in first_difference(a.half(), a)
    with pytest.raises(AssertionError, match=r"dq: 1 of 6 elements differ"):
        assert_bits_equal(a, b, "dq")


def test_error_budget_is_twice_the_peer_and_one_rounding() -> None:
    exact = torch.tensor([1.0, -2.0], dtype=torch.float64)
    peer = torch.tensor([1.0, -2.0 - 2**-6], dtype=torch.bfloat16)
    budget = error_budget(exact, peer)
    assert budget.max_abs == 2 * 2**-6 + 2 * 2**-8
    assert budget.relative == pytest.approx(2 * 2**-6 / math.sqrt(5) + 2**-8)
    assert error_of(exact + torch.tensor([0.0, 2**-5]), exact).within(budget)
    assert not error_of(exact + torch.tensor([0.0, 2**-4]), exact).within(budget)
    assert not error_of(torch.tensor([1.0, math.nan]), exact).within(budget)
    assert error_of(exact, exact) == Error(0.0, 0.0)


def test_poisoned_outputs_fills_new_memory_and_puts_the_switches_back() -> None:
    with poisoned_outputs():
        assert torch.empty(1000).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_verify_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dash_kernels.device.no_gpu_reason", lambda: "no NVIDIA GPU on this machine"
    )
    with pytest.raises(dash_kernels.device.NoGpuError, match="no NVIDIA GPU"):
        verify(Problem("causal", 64, 128), runs=2)
