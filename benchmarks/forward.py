"""Forwards side by side, forward and backward end to end, host time and peak memory of a call, and what groups cost.

    python benchmarks/forward.py --output benchmarks/results/forward-h200-DATE.json

Ours, PyTorch's flash and cuDNN attention, and flash-attn-4 where it is installed, over the 24 shapes of the peers file (16384
tokens, hidden 2048, bf16), or other head dims: ``--head-dim 192 --head-dim-v 128``. Every kernel of a shape is sampled in turn,
L2 flushed before each sample. A kernel that refuses a shape has no figure.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dash_kernels import attention
from dash_kernels.device import environment
from dash_kernels.kernels.forward import forward

TOKENS, HIDDEN = 16384, 2048
SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384)
HOST_CALLS = 100
Call = Callable[[], Any]


def flash_attn_4() -> Any:
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None
    return flash_attn_func


def inputs(
    batch: int, seq_len: int, heads: int, dims: tuple[int, int], heads_kv: int = 0
) -> list[Any]:
    kv = heads_kv or heads
    shapes = [(batch, seq_len, n, d) for n, d in ((heads, dims[0]), (kv, dims[0]), (kv, dims[1]))]
    return [torch.randn(x, device="cuda", dtype=torch.bfloat16) for x in shapes]


def forwards(q: Any, k: Any, v: Any, causal: bool) -> dict[str, Call]:
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5

    def sdpa(backend: SDPBackend) -> Call:
        def run() -> Any:
            with sdpa_kernel(backend), torch.no_grad():
                return scaled_dot_product_attention(qt, kt, vt, is_causal=causal)

        return run

    calls: dict[str, Call] = {
        "dash": lambda: forward(q, k, v, causal=causal, scale=scale),
        "flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    }
    if peer := flash_attn_4():
        calls["fa4"] = lambda: peer(q, k, v, causal=causal)
    return calls


def output(found: Any) -> Any:
    """The output alone, of what also answers a log-sum-exp."""
    return found[0] if isinstance(found, tuple) else found


def training_steps(q: Any, k: Any, v: Any, causal: bool) -> dict[str, Call]:
    """Forward and backward through autograd."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    dout = torch.randn(*q.shape[:3], v.shape[3], device="cuda", dtype=q.dtype)

    def step(attend: Callable[..., Any]) -> Call:
        def run() -> Any:
            return torch.autograd.grad(output(attend(*leaves)), leaves, dout)

        return run

    calls = {"dash": step(lambda q, k, v: attention(q, k, v, causal=causal))}
    if peer := flash_attn_4():
        calls["fa4_det"] = step(lambda q, k, v: peer(q, k, v, causal=causal, deterministic=True))
        calls["fa4_nondet"] = step(lambda q, k, v: peer(q, k, v, causal=causal))
    return calls


def runs(name: str, call: Call) -> bool:
    try:
        call(), call()
        torch.cuda.synchronize()
    except Exception as error:  # a peer's own refusal is part of the answer
        print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:160]}", flush=True)
        return False
    return True


def tflops(calls: dict[str, Call], flops: float, rounds: int, scratch: Any) -> dict[str, float]:
    """Median of ``rounds`` interleaved samples each, of those that run."""
    calls = {name: call for name, call in calls.items() if runs(name, call)}
    samples: dict[str, list[Any]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda._sleep(600_000)
            scratch.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            samples[name].append((begin, end))
    torch.cuda.synchronize()
    milliseconds = {
        name: statistics.median(a.elapsed_time(b) for a, b in pairs)
        for name, pairs in samples.items()
    }
    return {name: round(flops / ms * 1e-9, 1) for name, ms in milliseconds.items()}


def host_microseconds(call: Call) -> float:
    """Time until the launches are queued, on a shape whose kernels take less."""
    for _ in range(5):
        call()
    spans = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        spans.append(time.perf_counter() - begin)
    return round(statistics.median(spans) * 1e6, 1)


def peak_mebibytes(call: Call) -> float:
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric means of ours over each other column."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        for kind in ("forward", "training_step"):
            for name, value in row[kind].items():
                if name != "dash":
                    ratios.setdefault(f"{kind}: dash / {name}", []).append(
                        row[kind]["dash"] / value
                    )
    return {
        name: round(math.exp(statistics.fmean(map(math.log, x))), 3) for name, x in ratios.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--seq-len", type=lambda x: [int(n) for n in x.split(",")], default=SEQ_LENS
    )
    parser.add_argument(
        "--head-dim", type=lambda x: [int(n) for n in x.split(",")], default=(64, 128)
    )
    parser.add_argument("--head-dim-v", type=int, default=0, help="default: as --head-dim")
    options = parser.parse_args()
    scratch = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    found: dict[str, Any] = {
        "what": __doc__.splitlines()[0],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "environment": environment(),
        "rows": [],
    }
    head_dim = options.head_dim[-1]
    dims = head_dim, options.head_dim_v or head_dim
    q, k, v = inputs(1, 512, 8, dims)
    found["host_us"] = {
        kind: {name: host_microseconds(call) for name, call in calls.items() if runs(name, call)}
        for kind, calls in (
            ("forward", forwards(q, k, v, True)),
            ("training_step", training_steps(q, k, v, True)),
        )
    }
    found["groups"] = []
    for heads_kv in (32, 8, 1):
        q, k, v = inputs(4, 4096, 32, dims, heads_kv)
        flops = (8 * dims[0] + 6 * dims[1]) * 4 * 32 * 4096**2 / 2
        step = training_steps(q, k, v, True)["dash"]
        row = {
            "heads": 32,
            "heads_kv": heads_kv,
            "head_dim": head_dim,
            "head_dim_v": dims[1],
            "mask": "causal",
            "seq_len": 4096,
            "batch": 4,
        }
        found["groups"].append(
            {**row, **tflops({"training_step": step}, flops, options.rounds, scratch)}
        )
    print(json.dumps({name: found[name] for name in ("host_us", "groups")}), flush=True)
    for head_dim in options.head_dim:
        dims = head_dim, options.head_dim_v or head_dim
        for causal in (False, True):
            for seq_len in options.seq_len:
                batch, heads = TOKENS // seq_len, HIDDEN // head_dim
                q, k, v = inputs(batch, seq_len, heads, dims)
                pairs = batch * heads * seq_len**2 / (2 if causal else 1)
                row = {
                    "head_dim": head_dim,
                    "head_dim_v": dims[1],
                    "mask": "causal" if causal else "full",
                    "seq_len": seq_len,
                }
                flops = 2 * pairs * (dims[0] + dims[1])
                row["forward"] = tflops(forwards(q, k, v, causal), flops, options.rounds, scratch)
                steps = training_steps(q, k, v, causal)
                flops = pairs * (8 * dims[0] + 6 * dims[1])
                row["training_step"] = tflops(steps, flops, options.rounds, scratch)
                if seq_len == max(options.seq_len):
                    row["peak_mib"] = {
                        name: peak_mebibytes(steps[name]) for name in row["training_step"]
                    }
                found["rows"].append(row)
                print(json.dumps(row), flush=True)
                options.output.write_text(json.dumps(found, indent=1) + "\n")
    found["summary"] = summary(found["rows"])
    print(json.dumps(found["summary"]))
    options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
