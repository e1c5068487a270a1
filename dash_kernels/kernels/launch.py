"""One backward: arguments checked, workspace allocated, three kernels launched on the current stream.

prepare (delta, LSE in base 2, cleared workspace) -> main (dK, dV, and dQ in turn) -> cast (dQ in the output's dtype).
"""

from __future__ import annotations

import functools
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
from dash_kernels.kernels.backward_portable import launch_portable
from dash_kernels.kernels.cast_flat import cast_flat
from dash_kernels.kernels.portable_kernels import prepare_tiles
from dash_kernels.kernels.runtime import (
    LOG2E,
    SMALL_OPTIONS,
    WATCHDOG_SECONDS,
    Plan,
    TurnTimeout,
    check_tensors,
    hold_arrays,
    plan_launch,
    raise_if_turn_missed,
    turn_record,
)
from dash_kernels.problem import Config

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TurnTimeout", "backward", "raise_if_turn_missed"]

POLICIES = {"unordered": UNORDERED.value, "ordered": ORDERED.value, "two_pass": NO_DQ.value}
GLUON_DTYPES = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, config: Config, causal: bool, scale: float, allow_resident: bool = False, sm_margin: int = 0,
    watchdog_seconds: float = WATCHDOG_SECONDS,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV of attention, each (B, S, H, D) contiguous, by the backend that ``config`` names.

    ``dout``, ``q``, ``out`` are (B, Sq, H, D), ``k`` and ``v`` (B, Sk, H, D), bf16 or fp16, D 64 or 128, last dimension
    contiguous, 16-byte aligned rows; ``lse`` is (B, H, Sq) fp32, natural log, +inf for rows that see no key (their
    gradients are zeros). ``scale`` must be positive. ``sm_margin`` SMs are left free; results do not depend on it.

    Raises ValueError for what cannot run, before anything is launched. A turn that does not come within
    ``watchdog_seconds`` makes that launch's dQ NaN, and the next call on the device raises TurnTimeout naming it.
    """
    import torch

    plan = plan_launch(
        config, causal, tuple(q.shape), k.shape[1], q.dtype, q.device, sm_margin, allow_resident
    )
    check_tensors(plan, dout, q, k, v, out, lse)
    raise_if_turn_missed(q.device)
    with torch.cuda.device(q.device):
        hold_arrays(plan.arrays)
        if config.backend == "portable":
            bound_ns = int(watchdog_seconds * 1e9)
            return launch_portable(plan, dout, q, k, v, out, lse, scale, bound_ns)
        return launch_hopper(plan, dout, q, k, v, out, lse, scale, int(watchdog_seconds * 1e6))


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


def launch_hopper(
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
    _, seq_len, heads, head_dim = q.shape
    block_m, block_n, num_m = config.block_m, config.block_n, grid.num_m
    q_tiles = plan.total_heads * num_m
    policy = POLICIES[config.policy]
    mask = CAUSAL_MASK if grid.causal else TAIL_MASK if grid.seq_len_kv % block_n else NO_MASK
    q_layout, kv_layout, vector_layout, flat_layout = tile_layouts(
        block_m, block_n, head_dim, GLUON_DTYPES[str(q.dtype)]
    )
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
        workspace, arrays.tensor, arrays.num_items, arrays.num_tiles, arrays.num_steps, plan.total_heads, heads,
        plan.interleaved, num_m, grid.seq_len_kv - seq_len, grid.seq_len_kv, bound_us, scale * LOG2E, scale,
        MASK=mask.value, M=block_m, N=block_n, D=head_dim, STAGES=config.num_stages, DQ_STAGES=config.dq_stages,
        POLICY=policy, DEFERRED=config.signal == "deferred", ORDER_OF_START=plan.cooperative,
        num_warps=config.num_warps, enable_fp_fusion=True, launch_cooperative_grid=plan.cooperative,
    )  # fmt: skip
    cast_flat[(q_tiles,)](
        accumulated, dq, workspace, turn_record(q.device), heads, num_m, seq_len, scale,
        POLICY=policy, BLOCK_M=block_m, HEAD_DIM=head_dim, **SMALL_OPTIONS,
    )  # fmt: skip
    return dq, dk, dv
