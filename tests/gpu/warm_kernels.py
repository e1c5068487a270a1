"""Compiles what the tests of this folder launch, in several processes at once, into Triton's cache on disk.

``python warm_kernels.py INDEX COUNT`` runs every COUNT-th backward; conftest.py starts COUNT of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).resolve().parent.parent.parent),
    str(Path(__file__).resolve().parent),
]

from gpu_cases import BACKENDS, MASKS, backward_call, config_for, torch  # noqa: E402

from dash_kernels.device import current_gpu  # noqa: E402
from dash_kernels.problem import Config, Problem, supports  # noqa: E402


def launches() -> list[tuple[Problem, Config]]:
    """One launch for each kernel: whole and ragged lengths, plain and cooperative launches, all policies."""
    wanted = []
    for backend in BACKENDS:
        for head_dim in (64, 128):
            for mask in MASKS:
                for dtype in ("bfloat16", "float16"):
                    for seq_len in (512, 333):
                        problem = Problem(mask, head_dim, seq_len, dtype, batch=2, heads=3)
                        kinds = ["ascending", "shift" if mask == "full" else "symmetric_shift"]
                        wanted += [(problem, config_for(kind, backend, head_dim)) for kind in kinds]
                        if dtype == "bfloat16":
                            wanted += [
                                (problem, config_for("ascending", backend, head_dim, policy))
                                for policy in ("two_pass", "unordered")
                            ]
    return [pair for pair in wanted if supports(pair[1], pair[0], current_gpu().capability)]


if __name__ == "__main__":
    index, count = int(sys.argv[1]), int(sys.argv[2])
    for problem, config in launches()[index::count]:
        backward_call(problem, config)()
    torch.cuda.synchronize()
