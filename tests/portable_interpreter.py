"""The portable kernels under Triton's interpreter, a program of its own: TRITON_INTERPRET counts only at import.

Reads cases as JSON lines, prints one JSON line a case. The interpreter runs one CTA after another and knows no
assembly, so the turnstile is replaced by two functions of the same meaning: here a turn that has not come is an error.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
import triton.language as tl

from dash_kernels.kernels import backward_portable as portable
from dash_kernels.kernels import portable_kernels as kernels
from dash_kernels.kernels import runtime
from dash_kernels.problem import Config
from dash_kernels.schedules import Launch, TileGrid, default_launch

NAN = float("nan")


def wait_for_turn(semaphore: Any, turn: Any, workspace: Any, bound_ns: Any) -> None:
    seen = int(tl.load(semaphore).handle.data.item())
    if seen != int(turn.handle.data.item()):
        raise RuntimeError(
            f"turn {int(turn.handle.data.item())} has not come: {seen} contributions"
        )


def release_turn(semaphore: Any) -> None:
    tl.store(semaphore, tl.load(semaphore) + 1)


def odd_strides(x: torch.Tensor) -> torch.Tensor:
    """``x`` inside a larger tensor whose other elements, those past its last row too, are NaN."""
    batch, length, heads, dim = x.shape
    room = torch.full((batch, length + 3, heads * 2, dim + 16), NAN, dtype=x.dtype)
    view = room[:, :length, ::2, :dim]
    view.copy_(x)
    return view


def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.empty as a hostile allocator fills it."""
    made = torch.zeros(*args, **kwargs)
    return made.fill_(NAN if made.is_floating_point() else 7)


def gradients(q: Any, k: Any, v: Any, dout: Any, causal: bool, dtype: torch.dtype) -> Any:
    """out, LSE and the gradients in float64, with out, P, dS and the results rounded to ``dtype`` on the way."""
    scale = 1 / math.sqrt(q.shape[3])
    q, k, v, dout = (x.double().permute(0, 2, 1, 3) for x in (q, k, v, dout))
    scores = q @ k.mT * scale
    if causal:
        offset = k.shape[2] - q.shape[2]
        keep = torch.arange(k.shape[2])[None] <= torch.arange(q.shape[2])[:, None] + offset
        scores = scores.masked_fill(~keep, -math.inf)
    lse = torch.logsumexp(scores, -1)
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    p = torch.exp(scores - lse[..., None])
    out = p @ v
    delta = (out.to(dtype).double() * dout).sum(-1, keepdim=True)
    ds = p * (dout @ v.mT - delta)
    p16, ds16 = p.to(dtype).double(), ds.to(dtype).double()
    found = (ds16 @ k * scale, ds16.mT @ q * scale, p16.mT @ dout)
    return out.permute(0, 2, 1, 3), lse, [x.permute(0, 2, 1, 3).to(dtype).double() for x in found]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Errors of dQ, dK and dV against float64, their budgets, and the bytes of dQ."""
    torch.manual_seed(0)
    batch, heads, dim, dtype = (
        case.get("batch", 1),
        case.get("heads", 2),
        case.get("dim", 64),
        torch.float16,
    )
    seq_len, seq_len_kv = case["seq_lens"]
    q, dout = (torch.randn(batch, seq_len, heads, dim).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, seq_len_kv, heads, dim).to(dtype) for _ in range(2))
    out, lse, exact = gradients(q, k, v, dout, case["causal"], torch.float64)
    _, _, rounded = gradients(q, k, v, dout, case["causal"], dtype)

    config = Config(
        backend="portable",
        schedule=case["schedule"],
        policy=case["policy"],
        signal="plain",
        block_m=case["tile"][0],
        block_n=case["tile"][1],
    )
    grid = TileGrid(seq_len, seq_len_kv, *case["tile"], case["causal"])
    launch = Launch(default_launch(config.schedule).order, case.get("interleaved", 1))
    arrays = runtime.device_arrays(config.schedule, 1, grid, launch, torch.device("cpu"))
    if case.get("wrong_turn"):
        arrays.tensor[-1] += 1
    tickets = arrays.num_items * batch * heads
    torch.empty = poisoned
    persistent = case.get("persistent", False)
    plan = runtime.Plan(
        config, grid, (), batch * heads, arrays, launch.interleaved(batch * heads),
        min(3, tickets) if persistent else tickets, persistent,
    )  # fmt: skip
    tensors = [odd_strides(x) for x in (dout, q, k, v, out.to(dtype))]
    bound_ns = 10**10
    found = portable.launch_portable(
        plan, *tensors, lse.float().contiguous(), 1 / math.sqrt(dim), bound_ns
    )
    errors, budgets = [], []
    for mine, wanted, reference in zip(found, exact, rounded, strict=True):
        errors.append((mine.double() - wanted).abs().max().item())
        ulp = torch.finfo(dtype).eps * wanted.abs().max().item()
        budgets.append(2 * (reference - wanted).abs().max().item() + ulp)
    return {"errors": errors, "budgets": budgets, "dq": found[0].numpy().tobytes().hex()}


def main() -> None:
    kernels.wait_for_turn, kernels.release_turn = wait_for_turn, release_turn
    for line in sys.stdin:
        try:
            answer = run(json.loads(line))
        except Exception as error:  # whatever the interpreter makes of it, the test reads it
            answer = {"raised": repr(error) + repr(error.__cause__)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
