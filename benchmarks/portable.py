"""The portable backend's backward beside flex_attention's, and head dims above 128 beside flash-attn-4's.

    python benchmarks/portable.py --output benchmarks/results/portable-h200-DATE.json

Backwards through autograd, bf16, 16384 tokens, hidden 2048 of q; every kernel of a shape is sampled in turn, L2 flushed before
each sample. A peer that cannot run a shape is named with its reason.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from forward import HIDDEN, TOKENS, Call, flash_attn_4, output, tflops
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dash_kernels import attention
from dash_kernels.default_rule import default_config
from dash_kernels.device import environment
from dash_kernels.problem import Problem
from tuner.space import TWO_PASS

SHAPES = (  # head_dim, head_dim_v, mask
    (128, 128, "causal"),
    (128, 128, "full"),
    (64, 64, "causal"),
    (64, 64, "full"),
    (256, 256, "causal"),
    (256, 256, "full"),
    (192, 128, "causal"),
    (192, 128, "full"),
)
SEQ_LEN = 4096


def backward_of(attend: Callable[..., Any], leaves: list[Any], dout: Any) -> Call:
    out = output(attend(*leaves))
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def flex(causal: bool) -> Callable[..., Any]:
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, SEQ_LEN, SEQ_LEN)

    def attend(q: Any, k: Any, v: Any) -> Any:
        qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(qt, kt, vt, block_mask=mask).transpose(1, 2)

    return attend


def peers(head_dim: int, causal: bool) -> dict[str, Callable[..., Any]]:
    if head_dim <= 128:
        return {"flex_attention": flex(causal)}
    if peer := flash_attn_4():
        return {
            "fa4_det": lambda q, k, v: peer(q, k, v, causal=causal, deterministic=True),
            "fa4_nondet": lambda q, k, v: peer(q, k, v, causal=causal),
        }
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    scratch = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    capability = torch.cuda.get_device_capability()
    rows = []
    for head_dim, head_dim_v, mask in SHAPES:
        heads, batch, causal = HIDDEN // head_dim, TOKENS // SEQ_LEN, mask == "causal"
        q, k = (torch.randn(batch, SEQ_LEN, heads, head_dim, device="cuda") for _ in range(2))
        v, dout = (torch.randn(batch, SEQ_LEN, heads, head_dim_v, device="cuda") for _ in range(2))
        q, k, v, dout = (x.bfloat16() for x in (q, k, v, dout))
        problem = Problem(
            mask=mask,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            seq_len=SEQ_LEN,
            batch=batch,
            heads=heads,
        )
        portable = default_config(problem, capability, "portable")
        leaves = [x.requires_grad_() for x in (q, k, v)]
        configs = {"dash_portable": portable}
        if head_dim <= 128:
            configs["dash_portable_two_pass"] = portable.with_(**TWO_PASS)
        calls: dict[str, Call] = {}
        refused: dict[str, str] = {}
        for name, config in configs.items():
            ours = functools.partial(attention, causal=causal, config=config)
            calls[name] = backward_of(ours, leaves, dout)
        if head_dim > 128:
            calls["dash"] = backward_of(functools.partial(attention, causal=causal), leaves, dout)
        for name, attend in peers(head_dim, causal).items():
            try:
                calls[name] = backward_of(attend, leaves, dout)
                calls[name]()
            except Exception as error:  # a peer's own refusal is part of the answer
                calls.pop(name, None)
                refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        pairs = SEQ_LEN**2 / (2 if causal else 1)
        flops = batch * heads * pairs * (6 * head_dim + 4 * head_dim_v)
        row = {
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "mask": mask,
            "seq_len": SEQ_LEN,
            "batch": batch,
            "heads": heads,
            "configs": {name: config.label() for name, config in configs.items()},
            "tflops": tflops(calls, flops, options.rounds, scratch),
            "refused": refused,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        found = {
            "what": __doc__.splitlines()[0],
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "environment": environment(),
            "rows": rows,
        }
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
