"""The options of attention, combined pairwise: few kernels, each run with many of what no kernel is compiled for.

``python option_cases.py INDEX`` compiles what one of WARM launches, into Triton's cache on disk.

A *variant* fixes what a kernel is compiled for (mask, head_dims, softcap, packed sequences, dtype). A *combination* adds
lengths, head group, sink, the gradient of LSE and, for windows, which sides they have.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from gpu_cases import torch

from dash_kernels import Config, Problem, attention
from dash_kernels.default_rule import default_config
from dash_kernels.device import current_gpu
from dash_kernels.testing import (
    Error,
    budgets_of,
    error_budget,
    make_inputs,
    problem_options,
)

# mask, (head_dim, head_dim of V), softcap, packed, dtype: each value of one with each of another
VARIANTS = (
    ("full", (64, 64), False, False, "bfloat16"),
    ("full", (128, 128), True, False, "float16"),
    ("full", (192, 128), False, True, "float16"),
    ("full", (256, 256), True, True, "bfloat16"),
    ("causal", (64, 64), True, True, "float16"),
    ("causal", (128, 128), False, True, "bfloat16"),
    ("causal", (192, 128), True, False, "bfloat16"),
    ("causal", (256, 256), False, False, "float16"),
    ("left", (64, 64), False, True, "float16"),
    ("left", (128, 128), True, True, "bfloat16"),
    ("left", (192, 128), False, False, "bfloat16"),
    ("left", (256, 256), True, False, "float16"),
    ("both", (64, 64), True, False, "bfloat16"),
    ("both", (128, 128), False, False, "float16"),
    ("both", (192, 128), True, True, "float16"),
    ("both", (256, 256), False, True, "bfloat16"),
)
WINDOWS = {
    "full": ((-1, -1),) * 3,
    "causal": ((-1, -1),) * 3,
    "left": ((100, -1), (31, -1), (7, -1)),
    "both": ((70, 40), (-1, 33), (90, -1)),
}
# (Sq, Sk), (heads, heads_kv), sink, gradient of LSE, which window
COMBINATIONS = (
    ((300, 300), (4, 4), False, False, 0),
    ((300, 300), (6, 2), True, True, 1),
    ((300, 300), (3, 1), True, False, 2),
    ((127, 301), (4, 4), True, True, 2),
    ((127, 301), (6, 2), False, False, 2),
    ((127, 301), (3, 1), False, True, 0),
    ((333, 129), (4, 4), True, False, 1),
    ((333, 129), (6, 2), False, True, 0),
    ((333, 129), (3, 1), True, True, 0),
)
BACKENDS = ("served", "portable")


@dataclass(frozen=True)
class OptionCase:
    """One call of attention, forward and backward: ``run()`` answers its output, log-sum-exp and gradients by name."""

    problem: Problem
    config: Config | None
    inputs: tuple[torch.Tensor, ...]  # dout, q, k, v
    sink: torch.Tensor | None
    dlse: torch.Tensor | None
    ours: dict[str, Any]
    exact: dict[str, Any]

    def run(self, *inputs: torch.Tensor, **more: Any) -> dict[str, torch.Tensor]:
        dout, *qkv = inputs or self.inputs
        qkv = [x.detach().requires_grad_() for x in qkv]
        wanted = dict(zip(("dq", "dk", "dv"), qkv, strict=True))
        if self.sink is not None:
            more["sink"] = wanted["dsink"] = self.sink.detach().requires_grad_()
        options = {"config": self.config, **self.ours, **more}
        out, lse = attention(*qkv, return_lse=True, **options)
        roots, gradients = (
            ((out,), (dout,)) if self.dlse is None else ((out, lse), (dout, self.dlse))
        )
        grads = torch.autograd.grad(roots, list(wanted.values()), gradients)
        return {"out": out.detach(), "lse": lse.detach(), **dict(zip(wanted, grads, strict=True))}

    def budgets(self) -> tuple[dict[str, torch.Tensor], dict[str, Error]]:
        """Float64 results and their budgets by name: out and the gradients; lse has none."""
        from dash_kernels import reference

        how = {**self.exact, "sink": self.sink}
        truth, budgets = budgets_of(*(x.detach() for x in self.inputs), dlse=self.dlse, **how)
        starts = how.pop("cu_seqlens", None)
        _, *qkv = (x.detach() for x in self.inputs)
        forward = reference.attention_forward
        if starts is not None:
            qkv, forward = [*qkv, *starts], reference.packed_forward
        truth["out"], truth["lse"] = forward(*qkv, **how)
        peer = forward(*qkv, **how, rounded_to=qkv[0].dtype)[0].to(qkv[0].dtype)
        budgets["out"] = error_budget(truth["out"], peer)
        return truth, budgets


def option_case(variant: tuple[Any, ...], combination: tuple[Any, ...], backend: str) -> OptionCase:
    mask, (dim, dim_v), softcap, packed, dtype = variant
    (seq_len, seq_len_kv), (heads, heads_kv), with_sink, with_dlse, window = combination
    left, right = WINDOWS[mask][window]
    problem = Problem(
        "causal" if mask in ("causal", "left") else "full", dim, seq_len, dtype, batch=3 if packed else 2, heads=heads,
        heads_kv=heads_kv, seq_len_kv=seq_len_kv, window_left=left, window_right=right, head_dim_v=dim_v,
        softcap=softcap, varlen=packed,
    )  # fmt: skip
    inputs = make_inputs(problem)
    ours, exact = problem_options(problem)
    rows = inputs[0].shape[:-2]
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (heads, *rows) if packed else (rows[0], heads, rows[1])
    return OptionCase(
        problem,
        default_config(problem, current_gpu().capability, "portable")
        if backend == "portable"
        else None,
        inputs,
        torch.randn(heads, device="cuda", generator=generator) if with_sink else None,
        torch.randn(shape, device="cuda", generator=generator) if with_dlse else None,
        ours,
        exact,
    )


def warm(variant: tuple[Any, ...], backend: str) -> None:
    """Compile what the combinations of a variant launch; not again what the served backend is already."""
    for combination in COMBINATIONS[:2]:
        case = option_case(variant, combination, backend)
        if backend == "served" or not served_by_portable(case.problem):
            case.run()
    torch.cuda.synchronize()


def served_by_portable(problem: Problem) -> bool:
    """Whether the default rule takes the portable backend on this chip, so that both backends are one."""
    return default_config(problem, current_gpu().capability).backend == "portable"


WARM = tuple((variant, backend) for variant in VARIANTS for backend in BACKENDS)

if __name__ == "__main__":
    warm(*WARM[int(sys.argv[1])])
