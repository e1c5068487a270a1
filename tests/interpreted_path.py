"""The CUDA path on the CPU, in Triton's interpreter: kernels of sinks and tails, then attention whole, portable kernels in it.

A program of its own, since TRITON_INTERPRET counts only at import. Prints one JSON line a case.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from types import SimpleNamespace
from typing import Any

import portable_interpreter as interpreter
import torch

from dash_kernels import Config, on_cpu, on_gpu
from dash_kernels.execute import Options, encode_config
from dash_kernels.kernels import forward, forward_portable, launch
from dash_kernels.kernels.sinks import apply_sink, sink_gradient
from dash_kernels.kernels.tails import clear_gradient_tails, clear_output_tail

CONFIG = Config(
    backend="portable",
    signal="plain",
    block_m=32,
    block_n=32,
    num_stages=1,
    schedule="shortest_first",
)
PLAIN = Options(0, 0, True, -1, -1, 0.2, 0.0, *encode_config(CONFIG), True, False, 0)
CASES = {
    "window, softcap, sink, dLSE, groups": (PLAIN._replace(window_left=20, softcap=2.0), False),
    "packed, window, sink, dLSE, groups": (PLAIN._replace(causal=False, window_left=17, window_right=9, max_seqlen_q=40,
                                                          max_seqlen_k=50), True),
}  # fmt: skip


def largest(x: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error over the finite entries; infinite where infinities or NaNs part."""
    finite = exact.isfinite()
    if not torch.equal(x[~finite].double(), exact[~finite]):
        return float("inf")
    return float((x[finite].double() - exact[finite]).abs().max())


def sink_case(batch: int, seq_len: int, heads: int, dim: int, with_dlse: bool) -> dict[str, Any]:
    out = torch.randn(batch, seq_len, heads, dim).half()
    lse = torch.randn(batch, heads, seq_len) * 3
    out[0, :2, 0], lse[0, 0, :2] = 0, float("inf")  # rows that see no key
    sink = torch.randn(heads)
    share = torch.sigmoid(sink[:, None].double() - lse.double())
    exact_out = out.double() * (1 - share).transpose(1, 2)[..., None]
    exact_lse = torch.logaddexp(lse.double(), sink[:, None].double())
    lse = apply_sink(out, lse, sink)
    dout = torch.randn(batch, heads, seq_len, dim).half().transpose(1, 2)  # strided
    dlse = torch.randn(batch, heads, seq_len) if with_dlse else None
    dout[0, :2, 0] = float("nan")  # of no consequence there
    delta = (dout.double().nan_to_num() * out.double()).sum(-1).transpose(1, 2)
    delta = delta - (0 if dlse is None else dlse.double())
    dsink = sink_gradient(dout, out, lse, dlse, sink)
    return {
        "out": largest(out, exact_out),
        "lse": largest(lse, exact_lse),
        "dsink": largest(dsink, -(share * delta).sum((0, 2))),
    }


def tails(end_q: int, end_k: int) -> dict[str, Any]:
    """Whether exactly the rows past the last sequences were cleared."""
    starts = [torch.tensor([0, 1, end], dtype=torch.int32) for end in (end_q, end_k)]
    out, dq = torch.ones(70, 3, 200).half(), torch.ones(70, 3, 200).half()
    lse, dk, dv = torch.ones(3, 70), torch.ones(90, 2, 8).half(), torch.ones(90, 2, 16).half()
    clear_output_tail(starts[0], out, lse)
    clear_gradient_tails(*starts, dq, dk, dv)
    right = all(
        bool((x[:end] == 1).all() and (x[end:] == value).all())
        for x, end, value in (
            (out, end_q, 0), (lse.T, end_q, float("inf")), (dq, end_q, 0), (dk, end_k, 0), (dv, end_k, 0),
        )
    )  # fmt: skip
    return {"cleared": right}


def stand_in_for_a_gpu() -> None:
    chip = SimpleNamespace(
        name="x", major=9, minor=0, multi_processor_count=4, L2_cache_size=1 << 20
    )
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: chip
    cuda.device = lambda *_: contextlib.nullcontext()
    gpu = SimpleNamespace(capability=(9, 0), sms=4)
    import dash_kernels.device

    dash_kernels.device.current_gpu = lambda *_: gpu  # type: ignore[assignment]
    launch.hold_arrays = lambda *_: None
    launch.current_stream = lambda *_: 0
    launch.on_device = lambda *_: contextlib.nullcontext()
    forward.pick_kernel = lambda *_: "portable"  # type: ignore[assignment]
    forward_portable.forward_tiles = lambda *_: forward_portable.ForwardTiles(32, 32, 4, 1)
    interpreter.replace_turnstile()
    torch.empty = interpreter.poisoned


def whole(options: Options, packed: bool) -> dict[str, float]:
    """Error of each result against the float64 path of CPU tensors, over the largest value there."""
    rows = (70,) if packed else (2, 40)
    keys = (80,) if packed else (2, 50)
    dout, q = torch.randn(*rows, 4, 24), torch.randn(*rows, 4, 40)
    k, v = torch.randn(*keys, 2, 40), torch.randn(*keys, 2, 24)
    tensors = [x.half() for x in (dout, q, k, v)]
    sink = torch.randn(4)
    starts: Any = (None, None)
    if packed:
        lengths = (40, 0, 1, 26), (50, 3, 20, 2)
        starts = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in lengths]
    answers = []
    for path in (on_gpu, on_cpu):
        out, lse = path.forward(options, *tensors[1:], sink, *starts)
        dlse = torch.linspace(-1, 1, lse.numel()).view_as(lse)
        rest = (out, lse) if path is on_gpu else ()
        grads = path.backward(options, tensors[0], dlse, *tensors[1:], sink, *starts, *rest)
        answers.append((out, lse.nan_to_num(posinf=0.0), *(x for x in grads if x is not None)))
    names = ("out", "lse", "dq", "dk", "dv", "dsink")
    return {
        name: float((x.double() - y.double()).abs().max() / y.double().abs().max())
        for name, x, y in zip(names, *answers, strict=False)
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    for shape in ((2, 50, 3, 64, True), (1, 33, 2, 40, False), (2, 1, 1, 256, True)):
        print(json.dumps(sink_case(*shape)))
    for ends in ((70, 90), (30, 90), (69, 2)):
        print(json.dumps(tails(*ends)))
    stand_in_for_a_gpu()
    for options, packed in CASES.values():
        print(json.dumps(whole(options, packed)))
