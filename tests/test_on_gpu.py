"""The CUDA path without a GPU: stand-ins that compute with the reference show what the kernels are handed."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from dash_kernels import Config, kernels, on_cpu, on_gpu, reference
from dash_kernels.device import GPUS, Gpu
from dash_kernels.execute import Options, encode_config
from dash_kernels.testing import assert_bits_equal

PORTABLE = Config(backend="portable", block_m=64, block_n=64, num_stages=2, signal="plain",
                  schedule="ascending", launch_order="ascending")  # fmt: skip


class Sequences(NamedTuple):
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int
    max_seqlen_k: int


class Stub:
    """Forward and backward kernels by the float64 reference, and the arguments of their last calls."""

    def __init__(self) -> None:
        self.forward_call: dict[str, Any] = {}
        self.backward_call: dict[str, Any] = {}

    def forward(self, q: Any, k: Any, v: Any, *, sequences: Any = None, **how: Any) -> Any:
        self.forward_call = {"q": q, "k": k, "v": v, "sequences": sequences, **how}
        if sequences is None:
            out, lse = reference.attention_forward(q, k, v, **how)
        else:
            out, lse = reference.packed_forward(q[0], k[0], v[0], *sequences[:2], **how)
            out, lse = out[None], lse[None]
        return out.to(q.dtype).contiguous(), lse.float()

    def backward(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, config: Config, allow_resident: bool = False,
        sm_margin: int = 0, sequences: Any = None, dlse: Any = None, **how: Any,
    ) -> Any:  # fmt: skip
        self.backward_call = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "config": config,
                              "sm_margin": sm_margin, "sequences": sequences, "dlse": dlse, **how}  # fmt: skip
        if sequences is None:
            grads = reference.attention_gradients(dout, q, k, v, dlse=dlse, **how)
        else:
            less = None if dlse is None else dlse[0]
            grads = reference.packed_gradients(
                dout[0], q[0], k[0], v[0], *sequences[:2], dlse=less, **how
            )
        dq, dk, dv = (x.to(q.dtype) for x in grads[:3])
        return (dq, dk, dv) if sequences is None else (dq[None], dk[None], dv[None])


def nothing(*_: Any) -> None:
    """Clears no tail: the reference has."""


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    made = Stub()
    for name, module in (
        ("forward", types.SimpleNamespace(forward=made.forward)),
        ("launch", types.SimpleNamespace(backward=made.backward)),
        ("sequences", types.SimpleNamespace(Sequences=Sequences)),
        ("tails", types.SimpleNamespace(clear_output_tail=nothing, clear_gradient_tails=nothing)),
    ):
        monkeypatch.setattr(kernels, name, module, raising=False)
        monkeypatch.setitem(sys.modules, f"dash_kernels.kernels.{name}", module)
    h200 = GPUS["h200"]
    gpu = Gpu("h200", h200.aliases[0], h200.sms, h200.capability, h200.l2_bytes, 0, h200)
    monkeypatch.setattr("dash_kernels.device.current_gpu", lambda index=None: gpu)
    monkeypatch.setattr(on_gpu, "_require_triton", lambda: None)
    on_gpu.resolve.cache_clear()
    yield made
    on_gpu.resolve.cache_clear()


def options(config: Config | None = None, **changes: Any) -> Options:
    names, numbers = encode_config(config)
    plain = Options(0, 0, True, -1, -1, 0.2, 0.0, names, numbers, True, False, 0)
    return plain._replace(**changes)


def tensors(
    heads_kv: int = 2, dim: int = 40, dim_v: int = 24, packed: bool = False
) -> tuple[torch.Tensor, ...]:
    """dout, q, k, v: two samples of 30 and 40 rows, or as many rows in one pack."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((30, 4, dim_v), (30, 4, dim), (40, heads_kv, dim), (40, heads_kv, dim_v))
    return tuple(
        torch.randn(shape if packed else (2, *shape), generator=generator).to(torch.bfloat16)
        for shape in shapes
    )


def run(how: Options, dlse: bool, packed: bool, *inputs: torch.Tensor) -> tuple[Any, Any]:
    """(out, lse, dq, dk, dv) by the CUDA path and by the CPU path."""
    dout, *qkv = inputs
    starts = (
        (torch.tensor([0, 11, 11, 30], dtype=torch.int32), torch.tensor([0, 20, 31, 40], dtype=torch.int32))
        if packed else (None, None)
    )  # fmt: skip
    answers = []
    for path in (on_gpu, on_cpu):
        out, lse = path.forward(how, *qkv, None, *starts)
        more = torch.linspace(-1, 1, lse.numel()).view_as(lse) if dlse else None
        rest = (out, lse) if path is on_gpu else ()
        answers.append((out, lse, *path.backward(how, dout, more, *qkv, None, *starts, *rest)[:3]))
    return answers[0], answers[1]


@pytest.mark.parametrize("config", [None, PORTABLE])
@pytest.mark.parametrize(
    ("how", "dlse", "packed"),
    [
        (options(), False, False),
        (options(causal=False, window_left=9, window_right=4, softcap=2.0), True, False),
        (options(causal=False, max_seqlen_q=19, max_seqlen_k=20), False, True),
        (options(window_left=6, softcap=3.0, max_seqlen_q=19, max_seqlen_k=20), True, True),
    ],
)  # fmt: skip
def test_both_paths_mean_the_same(
    stub: Stub, how: Options, dlse: bool, packed: bool, config: Config | None
) -> None:
    names, numbers = encode_config(config)
    how = how._replace(names=names, numbers=numbers)
    for mine, theirs in zip(*run(how, dlse, packed, *tensors(packed=packed)), strict=True):
        assert_bits_equal(mine, theirs)
    call = stub.backward_call
    assert call["config"] == config or config is None
    assert (call["sequences"] is not None) == packed
    assert (call["dlse"] is not None) == dlse
    assert call["q"].ndim == 4


@pytest.mark.parametrize(
    ("config", "dims", "padded"),
    [
        (None, (40, 24), (48, 32)),
        (None, (128, 64), (128, 64)),
        (None, (192, 128), (192, 128)),
        (None, (136, 8), (144, 16)),
        (PORTABLE, (128, 64), (128, 64)),
        (PORTABLE.with_(block_m=32, block_n=32), (136, 8), (256, 64)),
    ],
)
def test_head_dims_are_padded_to_the_backends_own(
    stub: Stub, config: Config | None, dims: tuple[int, int], padded: tuple[int, int]
) -> None:
    """Hopper's kernels read multiples of 16 in place, the portable ones 64, 128 and 256."""
    mine, theirs = run(options(config), False, False, *tensors(dim=dims[0], dim_v=dims[1]))
    for x, y in zip(mine, theirs, strict=True):
        assert_bits_equal(x, y)
    call = stub.backward_call
    assert [call[name].shape[3] for name in ("q", "k", "v", "out", "dout")] == [
        padded[0], padded[0], padded[1], padded[1], padded[1],
    ]  # fmt: skip


def test_grouped_heads_are_not_expanded(stub: Stub) -> None:
    dout, q, k, v = tensors(heads_kv=1, dim=64, dim_v=64)
    run(options(), False, False, dout, q, k, v)
    assert stub.backward_call["k"] is k
    assert stub.backward_call["v"] is v


@pytest.mark.parametrize(
    ("window", "causal", "kept"),
    [((39, -1), False, (-1, -1)), ((38, -1), False, (38, -1)), ((-1, 29), False, (-1, -1)),
     ((39, 28), False, (-1, 28)), ((39, -1), True, (-1, -1)), ((5, -1), True, (5, -1))],
)  # fmt: skip
def test_a_side_that_hides_nothing_is_dropped(
    stub: Stub, window: tuple[int, int], causal: bool, kept: tuple[int, int]
) -> None:
    how = options(causal=causal, window_left=window[0], window_right=window[1])
    mine, theirs = run(how, False, False, *tensors())
    for x, y in zip(mine, theirs, strict=True):
        assert_bits_equal(x, y)
    assert stub.forward_call["window"] == kept
    assert stub.backward_call["window"] == kept


def test_the_looked_up_config_is_of_the_problem(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dash_kernels import dispatch

    asked: list[Any] = []
    right = dispatch.choose

    def spy(problem: Any, device: Any = None, **more: Any) -> Any:
        asked.append((problem, more))
        return right(problem, "h200", **more)

    monkeypatch.setattr(dispatch, "choose", spy)
    how = options(window_left=6, softcap=3.0, max_seqlen_q=19, max_seqlen_k=20, deterministic=False)
    run(how, False, True, *tensors(packed=True))
    ((problem, more),) = asked  # once for the forward and the backward
    assert (problem.batch, problem.seq_len, problem.seq_len_kv) == (3, 19, 20)
    assert (problem.head_dim, problem.head_dim_v, problem.heads, problem.heads_kv) == (40, 24, 4, 2)
    assert (problem.window, problem.softcap, problem.varlen) == ((6, 0), True, True)
    assert more == {"deterministic": False}
    assert stub.backward_call["config"].policy == "unordered"


def test_a_pinned_config_that_cannot_run_is_refused_in_the_forward(stub: Stub) -> None:
    _, q, k, v = tensors(dim=192, dim_v=192)
    with pytest.raises(
        ValueError,
        match="config cannot run this problem: tile 64x128 is not built for head_dim 256",
    ):
        on_gpu.forward(options(Config()), q, k, v, None, None, None)
    assert not stub.forward_call


def test_the_scale_and_the_margin_arrive(stub: Stub) -> None:
    run(options(sm_margin=8, scale=0.7), False, False, *tensors())
    assert stub.backward_call["sm_margin"] == 8
    assert stub.backward_call["scale"] == stub.forward_call["scale"] == 0.7
    assert math.isfinite(stub.backward_call["lse"].max())
