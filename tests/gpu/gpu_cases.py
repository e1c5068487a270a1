"""What the GPU tests share: configs of each kind on this chip, direct calls of the backward, a kernel that holds SMs."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dash_kernels import reference  # noqa: E402
from dash_kernels.device import current_gpu  # noqa: E402
from dash_kernels.problem import (  # noqa: E402
    HOPPER_TILES,
    Config,
    Problem,
    hopper_dims,
    padded_head_dim,
    supports,
)
from dash_kernels.schedules import SCHEDULES, Launch, TileGrid, build, check, default_launch  # noqa: E402
from dash_kernels.testing import Error, budgets_of, make_inputs  # noqa: E402

KINDS = tuple(SCHEDULES)
BACKENDS = ("hopper", "portable")
MASKS = ("full", "causal")
# (Sq, Sk): whole tiles, ragged, Sq < Sk, Sq > Sk
LENGTHS = ((512, 512), (333, 333), (127, 300), (700, 129))
NAN_WORD = 0x7FC07FC0  # NaN as bf16, fp16 and fp32 alike
# (head_dim, head_dim of V) of the Hopper backward's kernels above 128, and of tensors narrower than its tiles
WIDE = ((256, 256), (192, 128))
NARROWER = ((96, 96), (160, 96), (40, 136))
# Of the Hopper forward: mask, window, softcap, packed, head_dim: each value of one with most of each other, few kernels
FORWARD_FORMS = (
    ("causal", (100, -1), 0.0, False, 64),
    ("full", (70, 40), 9.0, True, 64),
    ("causal", (-1, -1), 0.0, True, 64),
    ("full", (-1, -1), 9.0, False, 64),
    ("full", (130, 33), 0.0, False, 128),
    ("causal", (257, -1), 9.0, True, 128),
    ("full", (-1, -1), 0.0, True, 128),
    ("causal", (-1, -1), 9.0, False, 128),
    ("full", (-1, 33), 0.0, True, 128),
    ("full", (300, -1), 0.0, True, 64),
)


def config_for(
    kind: str, backend: str, head_dim: int, policy: str = "ordered", head_dim_v: int = 0
) -> Config:
    """A config of this kind with the launch that fits it and tiles that this chip runs; ``head_dim_v`` 0: the same."""
    dim = padded_head_dim(max(head_dim, head_dim_v))
    launch = default_launch(kind)
    group = 3 if SCHEDULES[kind].takes_group else 1
    common: dict[str, Any] = {
        "schedule": kind,
        "group": group,
        "policy": policy,
        "launch_order": launch.order,
        "heads_interleaved": launch.heads,
    }
    if backend == "hopper":
        columns, _ = hopper_dims(head_dim, head_dim_v or head_dim)
        block_m, block_n = HOPPER_TILES[columns][0]
        stages = 1 if columns == 256 else 2
        return Config(
            backend="hopper", block_m=block_m, block_n=block_n, num_stages=stages, **common
        )
    if dim == 256:
        return Config(
            backend="portable", num_warps=8, num_stages=2, block_m=32, block_n=64, **common
        )
    tile = {"block_m": 64, "block_n": 64} if dim == 128 else {"block_m": 64, "block_n": 128}
    return Config(backend="portable", num_warps=8, num_stages=3, **tile, **common)


def skip_unless_supported(config: Config, problem: Problem) -> None:
    support = supports(config, problem, current_gpu().capability)
    if not support:
        pytest.skip(support.reason)


def min_resident(config: Config, problem: Problem) -> int:
    """Fewest resident CTAs with which this launch always ends."""
    schedule = build(config.schedule, TileGrid.for_config(problem, config), config.group)
    heads = problem.batch * problem.heads
    return check(schedule, Launch.for_config(config), heads).min_resident


LEFT_OUT: tuple[dict[str, Any], ...] = (
    {"launch_order": "ascending"},
    {"launch_order": "descending"},
    {"heads_interleaved": 2},
    {"heads_interleaved": 0},
    {"num_stages": 1},
    {"num_stages": 2},
    {"num_stages": 3},
)
NUMERICS_CASES = (
    ("shortest_first", "causal", 128),
    ("ascending", "full", 64),
)  # (kind, mask, head_dim)


def numerics_case(kind: str, mask: str, head_dim: int, backend: str) -> tuple[Problem, Config]:
    return Problem(mask, head_dim, 777, batch=2, heads=3), config_for(kind, backend, head_dim)


def same_key_configs(config: Config, problem: Problem) -> list[Config]:
    """Configs that differ from ``config`` only in what a numerics key leaves out, and that this chip runs."""
    gpu = current_gpu()
    others = [config.with_(**change) for change in LEFT_OUT]
    runnable = [other for other in others if supports(other, problem, gpu.capability)]
    return [other for other in runnable if min_resident(other, problem) <= gpu.sms // 2]


def backward_call(problem: Problem, config: Config, seed: int = 0) -> Any:
    """A function without arguments that runs one backward of ``problem`` and returns (dq, dk, dv)."""
    from dash_kernels.kernels.forward import forward
    from dash_kernels.kernels.launch import backward

    dout, q, k, v = (x.detach() for x in make_inputs(problem, seed))
    scale = problem.head_dim**-0.5
    out, lse = forward(q, k, v, causal=problem.causal, scale=scale)
    return functools.partial(
        backward, dout, q, k, v, out, lse,
        config=config, causal=problem.causal, scale=scale, allow_resident=True,
    )  # fmt: skip


@functools.cache
def exact_and_budgets(problem: Problem) -> tuple[dict[str, Any], dict[str, Error]]:
    """Float64 gradients of ``make_inputs(problem)`` and their error budgets, computed once a session."""
    dout, q, k, v = (x.detach() for x in make_inputs(problem))
    return budgets_of(dout, q, k, v, causal=problem.causal, scale=problem.head_dim**-0.5)


def exact_gradients(dout: Any, q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, ...]:
    args = [x.detach() for x in (dout, q, k, v)]
    return reference.attention_backward(*args, causal=causal, scale=q.shape[-1] ** -0.5)


class SmHolder:
    """Holds ``count`` SMs with CTAs of 1024 threads that spin until :meth:`release`, or until ``seconds`` pass.

    Beside 1024 threads no CTA of the Hopper kernel fits on an SM. ``release`` is ordered on the current stream, so
    that what was launched there before has ended; :meth:`verdict` then says whether the release came in time.
    """

    def __init__(self, count: int, seconds: float = 20.0) -> None:
        from holder_kernel import hold

        self.flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.started = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.timed_out = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.flag.fill_(1).fill_(0)  # loaded now: loading a kernel can wait for every running one
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            hold[(count,)](
                self.flag, self.started, self.timed_out, int(seconds * 1e9), num_warps=32
            )
        while int(self.started) < count:
            pass

    def release(self) -> None:
        self.flag.fill_(1)

    def verdict(self) -> bool:
        """Whether every CTA was still holding its SM when it was released."""
        self.stream.synchronize()
        return int(self.timed_out) == 0
