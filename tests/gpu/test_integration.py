"""torch.compile, opcheck, checkpointing, refusals by name and the watchdog, on CUDA tensors."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_cases import torch

from dash_kernels import Config, Problem, attention
from dash_kernels.testing import GRADIENTS, assert_bits_equal, gradients, make_inputs

PROBLEM = Problem("causal", 128, 300, batch=2, heads=4, heads_kv=2)


def test_case_14_opcheck() -> None:
    dout, q, k, v = make_inputs(PROBLEM)
    options = (0, 0, True, -1, -1, 0.1, 0.0, "", [], True, False, 0)
    torch.library.opcheck(torch.ops.dash.attention.default, (q, k, v, None, None, None, *options))
    out, lse = torch.ops.dash.attention(q, k, v, None, None, None, *options)
    dout, q, k, v, out, lse = (x.detach() for x in (dout, q, k, v, out, lse))
    torch.library.opcheck(
        torch.ops.dash.attention_backward.default,
        (dout, None, q, k, v, None, None, None, out, lse, *options),
    )


def test_case_14_one_compiled_graph_serves_every_length() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True, dynamic=True
    )
    for seq_len in (128, 200, 331):
        dout, q, k, v = make_inputs(Problem("causal", 64, seq_len, batch=2, heads=4, heads_kv=2))
        grads = torch.autograd.grad(compiled(q, k, v), (q, k, v), dout)
        for name, x, y in zip(GRADIENTS, grads, gradients(dout, q, k, v, causal=True), strict=True):
            assert_bits_equal(x, y, f"seq_len {seq_len} {name}")


def test_case_14_checkpoint_gives_equal_bits() -> None:
    from torch.utils.checkpoint import checkpoint

    dout, q, k, v = make_inputs(PROBLEM)
    plain = gradients(dout, q, k, v, causal=True)
    checkpoint(lambda *qkv: attention(*qkv, causal=True), q, k, v, use_reentrant=False).backward(
        dout
    )
    for name, x, y in zip(GRADIENTS, (q.grad, k.grad, v.grad), plain, strict=True):
        assert_bits_equal(x, y, name)


def test_case_14_double_backward_is_refused_and_unneeded_gradients_are_none() -> None:
    _, q, k, v = make_inputs(PROBLEM)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    q, v = q.detach(), v.detach()
    attention(q, k, v, causal=True).sum().backward()
    assert q.grad is None
    assert v.grad is None
    assert k.grad is not None


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"q": lambda x: x[:, :, :3]}, ValueError, "q has 3 heads and k has 2"),
        ({"q": lambda x: x.float(), "k": lambda x: x.float()}, TypeError, "q is torch.float32"),
        ({"v": lambda x: x.half()}, TypeError, "v is torch.float16"),
        ({"k": lambda x: x.cpu()}, ValueError, "k is on cpu but q is on cuda:0"),
    ],
)
def test_case_15_the_argument_is_named_before_launch(
    change: dict[str, Any], error: type[Exception], says: str
) -> None:
    _, *qkv = make_inputs(PROBLEM)
    arguments = {
        name: change.get(name, lambda x: x)(x.detach()) for name, x in zip("qkv", qkv, strict=True)
    }
    with pytest.raises(error, match=says):
        attention(**arguments)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Config(block_m=32, block_n=32), "tile 32x32 is not built"),
        (Config(schedule="sideways"), "schedule 'sideways' is not one of"),
        (
            Config(backend="portable", block_m=128, block_n=128, num_stages=9, signal="plain"),
            "shared memory",
        ),
    ],
)
def test_a_pinned_config_that_cannot_run_says_why(config: Config, says: str) -> None:
    _, q, k, v = make_inputs(PROBLEM)
    with pytest.raises(ValueError, match=says):
        attention(q, k, v, causal=True, config=config)


def test_unordered_is_what_deterministic_false_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from dash_kernels.kernels import launch

    used: list[Config] = []
    right = launch.backward

    def spy(*args: Any, **options: Any) -> Any:
        used.append(options["config"])
        return right(*args, **options)

    monkeypatch.setattr(launch, "backward", spy)
    _, q, k, v = make_inputs(PROBLEM)
    for deterministic in (True, False):
        attention(q, k, v, causal=True, deterministic=deterministic).sum().backward()
    assert [config.deterministic for config in used] == [True, False]
