"""The kernels of attention sinks and of packed tails under Triton's interpreter, a program of its own: TRITON_INTERPRET counts only at import.

Prints one JSON line a case: the largest errors of out, log-sum-exp and the sink's gradient against float64.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from dash_kernels.kernels.sinks import apply_sink, sink_gradient
from dash_kernels.kernels.tails import clear_gradient_tails, clear_output_tail


def largest(x: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error over the finite entries; infinite where infinities or NaNs part."""
    finite = exact.isfinite()
    if not torch.equal(x[~finite].double(), exact[~finite]):
        return float("inf")
    return float((x[finite].double() - exact[finite]).abs().max())


def case(batch: int, seq_len: int, heads: int, dim: int, with_dlse: bool) -> dict[str, Any]:
    out = torch.randn(batch, seq_len, heads, dim).half()
    lse = torch.randn(batch, heads, seq_len) * 3
    out[0, :2, 0], lse[0, 0, :2] = 0, float("inf")  # rows that see no key
    sink = torch.randn(heads)
    share = torch.sigmoid(sink[:, None].double() - lse.double())
    exact_out = out.double() * (1 - share).transpose(1, 2)[..., None]
    exact_lse = torch.logaddexp(lse.double(), sink[:, None].double())
    apply_sink(out, lse, sink)
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


if __name__ == "__main__":
    torch.manual_seed(0)
    for shape in ((2, 50, 3, 64, True), (1, 33, 2, 40, False), (2, 1, 1, 256, True)):
        print(json.dumps(case(*shape)))
    for ends in ((70, 90), (30, 90), (69, 2)):
        print(json.dumps(tails(*ends)))
