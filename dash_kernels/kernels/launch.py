"""One backward: arguments checked, workspace allocated, kernels launched on the current stream.

prepare (delta, LSE in base 2, cleared workspace) -> main (dK, dV, and dQ in turn) -> cast (dQ in the output's dtype).
Packed sequences have one more before these, which finds their tiles.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from triton.experimental.gluon import language as gl

from dash_kernels.kernels.backward_hopper import backward_hopper
from dash_kernels.kernels.backward_portable import descending_closed_form, launch_portable
from dash_kernels.kernels.cast_flat import cast_flat
from dash_kernels.kernels.descriptors import describe, describe_rows, outer_axes
from dash_kernels.kernels.hopper_shared import (
    CAUSAL_MASK,
    HEADER_WORDS,
    NO_DQ,
    NO_MASK,
    ORDERED,
    TAIL_MASK,
    UNORDERED,
    WINDOW_MASK,
    dq_boxes,
    is_wide,
    pieces,
    shares,
)
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
    run_compiled,
    turn_record,
)
from dash_kernels.kernels.sequences import (
    SequencePlan,
    Sequences,
    is_windowed,
    plan_sequences,
    reaches,
)
from dash_kernels.problem import Config, Problem, hopper_dims, padded_head_dim

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Sequences", "TurnTimeout", "backward", "raise_if_turn_missed"]

POLICIES = {"unordered": UNORDERED.value, "ordered": ORDERED.value, "two_pass": NO_DQ.value}
GLUON_DTYPES = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}
CONSUMER_WARPS = 4  # of each of the two warpgroups; the kernel's own num_warps


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, config: Config, causal: bool, scale: float, window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    sequences: Sequences | None = None, dlse: Tensor | None = None, allow_resident: bool = False, sm_margin: int = 0,
    watchdog_seconds: float = WATCHDOG_SECONDS,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV of attention in the shapes of q, k and v, contiguous, by the backend that ``config`` names.

    q is (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), ``out`` and ``dout`` (B, Sq, H, Dv), bf16 or fp16, last
    dimension contiguous, H a multiple of Hk; D and Dv are 64, 128 or 256, on the Hopper backend any multiple of 16 up to
    256, with 16-byte aligned rows. ``lse`` is (B, H, Sq) fp32, natural log, +inf for rows that see no key
    (their gradients are zeros); ``dlse`` is the gradient of the loss by it. ``window`` is (left, right), -1 for all;
    ``scale`` must be positive. With ``sequences`` B is 1 and rows are packed. ``sm_margin`` SMs stay free of the Hopper
    kernel's CTAs, of the portable kernel's only in a cooperative launch; results do not depend on it.

    Raises ValueError for what cannot run, before anything is launched. A turn that does not come within
    ``watchdog_seconds`` makes that launch's dQ NaN, and the next call on the device raises TurnTimeout naming it.
    """
    import torch

    lengths = None
    if sequences is not None:
        lengths = (*sequences[2:], sequences.cu_seqlens_q.shape[0] - 1)
    plan = _plan(
        config, bool(causal), tuple(window), softcap != 0, q.shape, k.shape, v.shape[3], q.dtype, q.device, lengths,
        sm_margin, allow_resident,
    )  # fmt: skip
    check_tensors(plan, q=q, dout=dout, out=out, k=k, v=v, lse=lse, dlse=dlse)
    raise_if_turn_missed(q.device)
    with torch.cuda.device(q.device):
        if plan.arrays is not None:
            hold_arrays(plan.arrays)
        if config.backend == "portable":
            return launch_portable(
                plan, dout, q, k, v, out, lse, scale, int(watchdog_seconds * 1e9), window=window,
                softcap=softcap, sequences=sequences, dlse=dlse,
            )  # fmt: skip
        return launch_hopper(
            plan, dout, q, k, v, out, lse, scale, int(watchdog_seconds * 1e6), window, softcap, sequences, dlse
        )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _plan(
    config: Config, causal: bool, window: tuple[int, int], softcap: bool, q_shape: Any, k_shape: Any, head_dim_v: int,
    dtype: Any, device: Any, lengths: tuple[int, int, int] | None, sm_margin: int, allow_resident: bool,
) -> Plan:  # fmt: skip
    batch, rows, heads, head_dim = q_shape
    rows_kv, heads_kv = k_shape[1:3]
    seq_len, seq_len_kv, batch = lengths or (rows, rows_kv, batch)
    left, right = window
    problem = Problem(
        mask="causal" if causal else "full",
        head_dim=head_dim,
        seq_len=max(seq_len, 1),
        dtype=str(dtype).removeprefix("torch."),
        batch=max(batch, 1),
        heads=heads,
        heads_kv=heads_kv,
        seq_len_kv=max(seq_len_kv, 1),
        window_left=left,
        window_right=-1 if causal else right,
        head_dim_v=head_dim_v,
        softcap=softcap,
        varlen=lengths is not None,
    )
    totals = (rows, rows_kv) if lengths is not None else (0, 0)
    return plan_launch(config, problem, device, sm_margin, allow_resident, totals)


@functools.cache
def tile_layout(rows: int, cols: int, dtype: Any, packed: bool = False) -> Any:
    """Shared-memory layout of so many rows of a tensor."""
    return gl.NVMMASharedLayout.get_default_for([*outer_axes(packed), rows, cols], dtype)


VECTOR_LAYOUT, FLAT_LAYOUT = (gl.NVMMASharedLayout(0, 32, axes) for axes in (1, 2))


def launch_hopper(
    plan: Plan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bound_us: int,
    window: tuple[int, int], softcap: float, sequences: Sequences | None, dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The launches on checked arguments.

    The workspace is allocated here and cleared by the first of them, so every call and every replay of a captured
    graph starts from zeros, and no two streams share one.
    """
    import torch

    config, grid = plan.config, plan.grid
    seq_len, heads, head_dim = q.shape[1:]
    seq_len_kv, heads_kv, head_dim_v = v.shape[1:]
    group = heads // heads_kv
    block_m, block_n = config.block_m, config.block_n
    policy = POLICIES[config.policy]
    packed = sequences is not None
    tables: SequencePlan | None = None
    descending = False
    if sequences is not None:
        descending = descending_closed_form(config.schedule)
        tables = plan_sequences(
            sequences, seq_len, seq_len_kv, block_m=block_m, block_n=block_n, causal=grid.causal, window=window,
            descending=descending,
        )  # fmt: skip
        num_m, arrays, counts, sizes = tables.max_q_tiles, tables.kv_tiles, tables.counts, (0, 0, 0)
        ctas = min(plan.total_heads * tables.max_kv_tiles, plan.sms)
    else:
        assert plan.arrays is not None
        num_m, arrays, counts, ctas = grid.num_m, plan.arrays.tensor, None, plan.ctas
        sizes = plan.arrays.num_items, plan.arrays.num_tiles, plan.arrays.num_steps
    if is_windowed(grid.causal, window):
        mask = WINDOW_MASK
    elif grid.causal:
        mask = CAUSAL_MASK
    else:
        mask = TAIL_MASK if packed or seq_len_kv % block_n else NO_MASK
    q_tiles = q.shape[0] * heads * num_m
    d, d_v = hopper_dims(head_dim, head_dim_v)
    parts, halves = pieces(d), 2 if is_wide(d) else 1
    rows, flat_rows = q_tiles * block_m, block_m * d // 256

    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    lse2, delta = torch.empty((2, rows), dtype=torch.float32, device=q.device)
    accumulated = torch.empty((q_tiles * flat_rows, 256), dtype=torch.float32, device=q.device)
    workspace = torch.empty(
        HEADER_WORDS.value + q_tiles * shares(d), dtype=torch.int32, device=q.device
    )

    strides = (*out.stride()[:3], *dout.stride()[:3])
    prepared = {
        "ZERO_DQ": config.policy == "unordered", "BLOCK_M": block_m, "HEAD_DIM": d // parts, "HEAD_DIM_V": padded_head_dim(head_dim_v),
        "dlse": dlse, "tiles": tables and tables.q_tiles, "counts": counts, "WIDTH": head_dim_v, "SEMAPHORES": shares(d),
        "PIECES": parts,
    }  # fmt: skip
    pointers = [x.data_ptr() % 16 == 0 for x in (out, dout, lse)]
    pointers.append(dlse is None or dlse.data_ptr() % 16 == 0)
    special = (
        *((s == 1, s % 16 == 0, s >= 1 << 31) for s in strides), *pointers, dlse is None,
    )  # fmt: skip
    run_compiled(
        plan.compiled, prepare_tiles, q_tiles,
        (out, dout, lse, lse2, delta, accumulated, workspace, *strides, heads, num_m, seq_len), prepared, SMALL_OPTIONS,
        special=special,
    )  # fmt: skip
    dtype = GLUON_DTYPES[str(q.dtype)]

    def rows_of(tensor: Tensor, count: int, cols: int) -> Any:
        return describe_rows(tensor, count, cols, tile_layout(count, cols, dtype, packed), packed)

    # With softcap, S' = cap tanh(x) with x = S scale / cap and tanh from exp2(2 x log2(e)).
    factors = (2 * LOG2E * scale / softcap, softcap * LOG2E) if softcap else (scale * LOG2E, 0.0)
    run_compiled(
        plan.compiled, backward_hopper, ctas,
        (
            rows_of(q, block_m, d // parts), rows_of(k, block_n, d // parts), rows_of(v, block_n, d_v), rows_of(dout, block_m, d_v),
            describe(lse2, (rows,), (1,), (block_m,), VECTOR_LAYOUT),
            describe(delta, (rows,), (1,), (block_m,), VECTOR_LAYOUT),
            describe(accumulated, (q_tiles * flat_rows, 256), (256, 1), (flat_rows // dq_boxes(d), 256), FLAT_LAYOUT),
            rows_of(dk, block_n, d // parts // halves), rows_of(dv, block_n, d_v // halves),
            workspace, arrays, counts, *sizes, plan.total_heads, heads_kv, group, plan.interleaved, num_m,
            *reaches(grid.causal, window), seq_len, seq_len_kv, bound_us, *factors, scale,
        ),
        {
            "MASK": mask.value, "SOFTCAP": softcap != 0, "GROUPED": group > 1, "PACKED": packed, "DESCENDING": descending,
            "M": block_m, "N": block_n, "D": d, "DV": d_v, "STAGES": config.num_stages, "DQ_STAGES": config.dq_stages,
            "POLICY": policy, "ORDER_OF_START": plan.cooperative,
        },
        {"num_warps": CONSUMER_WARPS, "enable_fp_fusion": True, "launch_cooperative_grid": plan.cooperative},
    )  # fmt: skip
    run_compiled(
        plan.compiled, cast_flat, q_tiles,
        (accumulated, dq, workspace, turn_record(q.device), tables and tables.q_tiles, counts, heads, num_m, seq_len, scale),
        {"POLICY": policy, "BLOCK_M": block_m, "HEAD_DIM": d // parts, "PIECES": parts, "WIDTH": head_dim, "SEMAPHORES": shares(d)}, SMALL_OPTIONS,
    )  # fmt: skip
    return dq, dk, dv
