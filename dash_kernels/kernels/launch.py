"""One backward: arguments checked, workspace allocated, three kernels launched on the current stream.

prepare (delta, LSE in base 2, cleared workspace) -> main (dK, dV, and dQ in turn) -> cast (dQ in the output's dtype).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dash_kernels.kernels.backward_hopper import (
    CAUSAL_MASK,
    HEADER_WORDS,
    NO_DQ,
    NO_MASK,
    ORDERED,
    TAIL_MASK,
    UNORDERED,
    backward_hopper,
)
from dash_kernels.kernels.backward_portable import (
    SMALL_OPTIONS,
    TURN_BOUND_NS,
    DeviceArrays,
    TurnTimeout,
    _held_by_graphs,
    backward_portable,
    cooperative_grid,
    device_arrays,
    min_resident,
    raise_if_turn_missed,
    turn_record,
)
from dash_kernels.kernels.cast_flat import cast_flat
from dash_kernels.kernels.portable_kernels import prepare_tiles
from dash_kernels.problem import Config, Problem, supports
from dash_kernels.schedules import Launch, TileGrid

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TurnTimeout", "backward", "raise_if_turn_missed"]

LOG2E = 1.4426950408889634
POLICIES = {"unordered": UNORDERED.value, "ordered": ORDERED.value, "two_pass": NO_DQ.value}
GLUON_DTYPES = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, config: Config, causal: bool, scale: float, allow_resident: bool = False, sm_margin: int = 0,
    watchdog_seconds: float = TURN_BOUND_NS / 1e9,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV of attention, each (B, S, H, D) contiguous, by the backend that ``config`` names.

    ``dout``, ``q``, ``out`` are (B, Sq, H, D), ``k`` and ``v`` (B, Sk, H, D), bf16 or fp16, D 64 or 128, last dimension
    contiguous, 16-byte aligned rows; ``lse`` is (B, H, Sq) fp32, natural log, +inf for rows that see no key (their
    gradients are zeros). ``scale`` must be positive. ``sm_margin`` SMs are left free; results do not depend on it.

    Raises ValueError for what cannot run, before anything is launched. A turn that does not come within
    ``watchdog_seconds`` makes that launch's dQ NaN, and the next call on the device raises TurnTimeout naming it.
    """
    if config.backend == "portable":
        return backward_portable(
            dout, q, k, v, out, lse, config=config, causal=causal, scale=scale, allow_resident=allow_resident,
            sm_margin=sm_margin, watchdog_seconds=watchdog_seconds,
        )  # fmt: skip
    import torch

    plan = _plan(
        config, causal, tuple(q.shape), k.shape[1], q.dtype, q.device, sm_margin, allow_resident
    )
    _check_tensors(plan, dout, q, k, v, out, lse)
    raise_if_turn_missed(q.device)
    with torch.cuda.device(q.device):
        if torch.cuda.is_current_stream_capturing():
            _held_by_graphs.add(plan.arrays.tensor)
        else:
            plan.arrays.tensor.record_stream(torch.cuda.current_stream())
        return _launch_hopper(plan, dout, q, k, v, out, lse, scale, int(watchdog_seconds * 1e6))


@dataclass(frozen=True)
class Plan:
    """All of a launch that does not depend on the tensors' contents or addresses."""

    config: Config
    grid: TileGrid
    shapes: tuple[Any, ...]  # of q (also dout and out), k and v, lse
    arrays: DeviceArrays
    interleaved: int
    ctas: int
    cooperative: bool
    mask: int
    layouts: tuple[Any, ...]


@functools.lru_cache(maxsize=4096)
def _plan(
    config: Config, causal: bool, q_shape: tuple[int, ...], seq_len_kv: int, dtype: Any, device: Any, sm_margin: int,
    allow_resident: bool,
) -> Plan:  # fmt: skip
    """Check that ``config`` can run this shape and work out its launch; ValueError naming what cannot run."""
    import torch

    batch, seq_len, heads, head_dim = q_shape
    if head_dim not in (64, 128):
        raise ValueError(f"head_dim is {head_dim}; the kernels run 64 and 128: pad it with zeros")
    problem = Problem(
        "causal" if causal else "full", head_dim, seq_len, str(dtype).removeprefix("torch."), batch, heads, heads,
        seq_len_kv,
    )  # fmt: skip
    support = supports(config, problem, torch.cuda.get_device_capability(device))
    if not support:
        raise ValueError(f"config cannot run this problem: {support.reason}")
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if not 0 <= sm_margin < sms:
        raise ValueError(f"sm_margin is {sm_margin}; it must leave at least one of the {sms} SMs")
    grid, launch = TileGrid.for_config(problem, config), Launch.for_config(config)
    total_heads = batch * heads
    arrays = device_arrays(config.schedule, config.group, grid, launch, device)
    needed = 1
    if config.policy == "ordered":
        needed = min_resident(config.schedule, config.group, grid, launch, total_heads)
    tickets = total_heads * arrays.num_items
    ctas = min(tickets, sms - sm_margin)
    if needed > 1:
        ctas = cooperative_grid(config, needed, tickets, sms, sm_margin, allow_resident)
    mask = CAUSAL_MASK if causal else TAIL_MASK if seq_len_kv % config.block_n else NO_MASK
    return Plan(
        config, grid, (q_shape, (batch, seq_len_kv, heads, head_dim), (batch, heads, seq_len)), arrays,
        launch.interleaved(total_heads), ctas, needed > 1, mask.value,
        tile_layouts(config.block_m, config.block_n, head_dim, GLUON_DTYPES[str(dtype)]),
    )  # fmt: skip


def _check_tensors(
    plan: Plan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> None:
    """ValueError naming the first tensor that the copy engine could not read or that does not fit the others."""
    q_shape, kv_shape, lse_shape = plan.shapes
    for name, tensor, shape in (
        ("q", q, q_shape), ("dout", dout, q_shape), ("out", out, q_shape), ("k", k, kv_shape), ("v", v, kv_shape),
    ):  # fmt: skip
        if tensor.shape != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; it must be {shape}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}; q is {q.dtype} on {q.device}"
            )
        batch, row, head, col = tensor.stride()
        if col != 1 or batch % 8 or row % 8 or head % 8 or tensor.data_ptr() % 16:
            raise ValueError(
                f"{name} has strides {tensor.stride()} or a base that is not 16-byte aligned: copy it"
            )
    if lse.shape != lse_shape or not lse.is_contiguous() or lse.element_size() != 4:
        raise ValueError(f"lse must be a contiguous float32 tensor of {lse_shape}")


@functools.cache
def tile_layouts(block_m: int, block_n: int, head_dim: int, dtype: Any) -> tuple[Any, ...]:
    swizzled = gl.NVMMASharedLayout.get_default_for
    return (
        swizzled([1, 1, block_m, head_dim], dtype),
        swizzled([1, 1, block_n, head_dim], dtype),
        gl.NVMMASharedLayout(0, 32, 1),
        gl.NVMMASharedLayout(0, 32, 2),
    )


def _rows(tensor: Tensor, block: int, layout: Any) -> Any:
    """Descriptor of a (B, S, H, D) tensor in tiles of ``block`` rows of one head; rows past S read as zeros."""
    batch, seq_len, heads, head_dim = tensor.shape
    # A dimension of one entry may have any stride in torch; the copy engine wants a multiple of 16 bytes.
    strides = [tensor.stride(axis) if tensor.shape[axis] > 1 else head_dim for axis in (0, 2, 1)]
    return TensorDescriptor(
        tensor, [batch, heads, seq_len, head_dim], [*strides, 1], [1, 1, block, head_dim], layout
    )


def _launch_hopper(
    plan: Plan,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    bound_us: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three launches on checked arguments.

    The workspace is allocated here and cleared by the first of them, so every call and every replay of a captured
    graph starts from zeros, and no two streams share one.
    """
    import torch

    config, grid, arrays = plan.config, plan.grid, plan.arrays
    batch, seq_len, heads, head_dim = q.shape
    block_m, block_n = config.block_m, config.block_n
    total_heads, num_m = batch * heads, grid.num_m
    q_tiles = total_heads * num_m
    policy = POLICIES[config.policy]
    q_layout, kv_layout, vector_layout, flat_layout = plan.layouts
    rows, flat_rows = q_tiles * block_m, block_m * head_dim // 256

    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    lse2, delta = torch.empty((2, rows), dtype=torch.float32, device=q.device)
    accumulated = torch.empty((q_tiles * flat_rows, 256), dtype=torch.float32, device=q.device)
    workspace = torch.empty(HEADER_WORDS.value + q_tiles, dtype=torch.int32, device=q.device)

    prepare_tiles[(q_tiles,)](
        out, dout, lse, lse2, delta, accumulated, workspace, *(x.stride(axis) for x in (out, dout) for axis in range(3)),
        heads, num_m, seq_len, ZERO_DQ=config.policy == "unordered", BLOCK_M=block_m, HEAD_DIM=head_dim, **SMALL_OPTIONS,
    )  # fmt: skip
    backward_hopper[(plan.ctas,)](
        _rows(q, block_m, q_layout), _rows(k, block_n, kv_layout), _rows(v, block_n, kv_layout),
        _rows(dout, block_m, q_layout),
        TensorDescriptor(lse2, [rows], [1], [block_m], vector_layout),
        TensorDescriptor(delta, [rows], [1], [block_m], vector_layout),
        TensorDescriptor(accumulated, [q_tiles * flat_rows, 256], [256, 1], [flat_rows, 256], flat_layout),
        _rows(dk, block_n, kv_layout), _rows(dv, block_n, kv_layout),
        workspace, arrays.tensor, arrays.num_items, arrays.num_tiles, arrays.num_steps, total_heads, heads,
        plan.interleaved, num_m, grid.seq_len_kv - seq_len, grid.seq_len_kv, bound_us, scale * LOG2E, scale,
        MASK=plan.mask, M=block_m, N=block_n, D=head_dim, STAGES=config.num_stages, DQ_STAGES=config.dq_stages,
        POLICY=policy, DEFERRED=config.signal == "deferred", ORDER_OF_START=plan.cooperative,
        num_warps=config.num_warps, enable_fp_fusion=True, launch_cooperative_grid=plan.cooperative,
    )  # fmt: skip
    cast_flat[(q_tiles,)](
        accumulated, dq, workspace, turn_record(q.device), heads, num_m, seq_len, scale,
        POLICY=policy, BLOCK_M=block_m, HEAD_DIM=head_dim, **SMALL_OPTIONS,
    )  # fmt: skip
    return dq, dk, dv
