"""Compiles what the tests of this folder launch, in several processes at once, into Triton's cache on disk.

``python warm_kernels.py INDEX`` does one job of them; conftest.py starts all.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).resolve().parent.parent.parent),
    str(Path(__file__).resolve().parent),
]

from gpu_cases import (  # noqa: E402
    BACKENDS,
    FORWARD_FORMS,
    KINDS,
    LENGTHS,
    MASKS,
    NUMERICS_CASES,
    WIDE,
    backward_call,
    config_for,
    numerics_case,
    same_key_configs,
    torch,
)

from dash_kernels.device import current_gpu  # noqa: E402
from dash_kernels.problem import Problem, supports  # noqa: E402

GROUPS = [
    (backend, mask, (head_dim, head_dim), dtype)
    for backend in BACKENDS
    for mask, head_dim, dtype in (
        ("full", 64, "bfloat16"),
        ("full", 128, "bfloat16"),
        ("causal", 64, "bfloat16"),
        ("causal", 128, "bfloat16"),
        ("full", 64, "float16"),
        ("full", 128, "float16"),
        ("causal", 64, "float16"),
    )
]  # fmt: skip
GROUPS += [("hopper", mask, head_dims, "bfloat16") for mask in MASKS for head_dims in WIDE]


def warm(backend: str, mask: str, head_dims: tuple[int, int], dtype: str) -> None:
    """Run one backward of each kind, policy and length; kernels compiled already cost milliseconds."""
    policies = ("ordered", "two_pass", "unordered") if dtype == "bfloat16" else ("ordered",)
    for seq_len, seq_len_kv in LENGTHS:
        problem = Problem(
            mask, head_dims[0], seq_len, dtype, batch=2, heads=3, seq_len_kv=seq_len_kv, head_dim_v=head_dims[1]
        )  # fmt: skip
        for policy in policies:
            for kind in KINDS if policy == "ordered" else ("ascending",):
                config = config_for(kind, backend, head_dims[0], policy, head_dims[1])
                if supports(config, problem, current_gpu().capability):
                    backward_call(problem, config)()
    torch.cuda.synchronize()


def warm_numerics(kind: str, mask: str, head_dim: int, backend: str) -> None:
    problem, config = numerics_case(kind, mask, head_dim, backend)
    if supports(config, problem, current_gpu().capability):
        for other in same_key_configs(config, problem):
            backward_call(problem, other)()
    torch.cuda.synchronize()


def warm_forward(
    mask: str, window: tuple[int, int], softcap: float, packed: bool, head_dim: int
) -> None:
    from dash_kernels.kernels.forward_hopper import forward_hopper
    from dash_kernels.kernels.sequences import Sequences

    if current_gpu().capability[0] != 9:
        return
    q = torch.zeros(1, 333, 2, head_dim, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, 333], dtype=torch.int32, device="cuda")
    forward_hopper(
        q, q, q, causal=mask == "causal", scale=1.0, window=window, softcap=softcap,
        sequences=Sequences(starts, starts, 333, 333) if packed else None,
    )  # fmt: skip
    torch.cuda.synchronize()


JOBS = [
    *(functools.partial(warm, *group) for group in GROUPS),
    *(
        functools.partial(warm_numerics, *case, backend)
        for case in NUMERICS_CASES
        for backend in BACKENDS
    ),
    *(functools.partial(warm_forward, *form) for form in FORWARD_FORMS),
]

if __name__ == "__main__":
    JOBS[int(sys.argv[1])]()
