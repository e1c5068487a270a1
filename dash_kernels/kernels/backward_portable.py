"""Attention backward on the portable kernels: what to compile, what to upload, and the launches.

Importing this needs triton only; launching needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dash_kernels.kernels.compile import KernelSpec
from dash_kernels.kernels.portable_kernels import (
    HEADER_WORDS,
    NO_DQ,
    ORDERED,
    UNORDERED,
    cast_tiles,
    dq_tiles,
    kv_tiles,
    prepare_tiles,
)
from dash_kernels.kernels.runtime import LOG2E, SMALL_OPTIONS, Plan, sections, turn_record
from dash_kernels.problem import Config
from dash_kernels.schedules import Launch, TileGrid, build, pack

if TYPE_CHECKING:
    from torch import Tensor

POLICIES = {"unordered": UNORDERED.value, "ordered": ORDERED.value, "two_pass": NO_DQ.value}


def main_options(config: Config) -> dict[str, Any]:
    """Compiler options of the kernels with matmuls. Fusion is set because Triton's default differs by release."""
    return {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }


def compile_specs(
    config: Config,
    head_dim: int,
    dtype: str,
    causal: bool,
    *,
    ragged: bool = False,
    persistent: bool = False,
    capability: tuple[int, int] = (9, 0),
) -> list[KernelSpec]:
    """The kernels of one backward, the main kernel first, specialised as a launch on aligned tensors is.

    ``dtype`` is bfloat16 or float16; ``ragged`` gives the kernel for a seq_len that is no multiple of block_m,
    ``persistent`` the one of a cooperative launch.
    """
    side = 16 * max(config.block_m, config.block_n)
    grid = TileGrid(side, side, config.block_m, config.block_n, causal)
    packed = pack(build(config.schedule, grid, config.group), Launch.for_config(config))
    policy = POLICIES[config.policy]
    rows = {"BLOCK_M": config.block_m, "HEAD_DIM": head_dim}
    tile = {**rows, "BLOCK_N": config.block_n, "CAUSAL": causal}
    main = {
        "SECTIONS": sections(packed, capability),
        "RAGGED": ragged,
        "POLICY": policy,
        "PERSISTENT": persistent,
        "NUM_WARPS": config.num_warps,
    }
    specs = [
        _spec(kv_tiles, dtype, {**main, **tile}, main_options(config)),
        _spec(
            prepare_tiles, dtype, {"ZERO_DQ": config.policy == "unordered", **rows}, SMALL_OPTIONS
        ),
    ]
    if config.policy == "two_pass":
        specs.append(_spec(dq_tiles, dtype, tile, main_options(config)))
    else:
        cast = {"POLICY": policy, "NUM_WARPS": config.num_warps, **rows}
        specs.append(_spec(cast_tiles, dtype, cast, SMALL_OPTIONS))
    return specs


def _spec(
    kernel: Any, dtype: str, constexprs: dict[str, Any], options: dict[str, Any]
) -> KernelSpec:
    half = {"bfloat16": "*bf16", "float16": "*fp16"}[dtype]
    types = dict.fromkeys(("q", "k", "v", "out", "dout", "dk", "dv"), half)
    types |= dict.fromkeys(("lse", "lse2", "delta", "accumulated"), "*fp32")
    types |= dict.fromkeys(("workspace", "record", "arrays"), "*i32")
    types |= {"scale": "fp32", "scale_log2": "fp32", "bound_ns": "i64"}
    types["dq"] = half if kernel in (dq_tiles, cast_tiles) else "*fp32"
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constexprs else types.get(name, "i32") for name in names
    }
    aligned = [
        i for i, name in enumerate(names) if signature[name][0] == "*" or name.startswith("stride")
    ]
    return KernelSpec(
        kernel, signature, constexprs, options, {(i,): [["tt.divisibility", 16]] for i in aligned}
    )


def launch_portable(
    plan: Plan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bound_ns: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The launches on checked arguments, on the current stream: prepare, main, then the dQ pass or the cast.

    The workspace is allocated here and cleared by ``prepare_tiles``, so every call and every replay of a captured
    graph starts from zeros, and no two streams share one.
    """
    import torch

    config, grid, arrays, total_heads = plan.config, plan.grid, plan.arrays, plan.total_heads
    _, seq_len, heads, head_dim = q.shape
    seq_len_kv, num_m = grid.seq_len_kv, grid.num_m
    padded_rows = total_heads * num_m * config.block_m
    policy, scale_log2 = POLICIES[config.policy], scale * LOG2E
    rows = {"BLOCK_M": config.block_m, "HEAD_DIM": head_dim}
    tile = {**rows, "BLOCK_N": config.block_n, "CAUSAL": grid.causal}

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    dq, dk, dv = (empty(*x.shape, dtype=x.dtype) for x in (q, k, v))
    lse2, delta = empty(padded_rows), empty(padded_rows)
    accumulated = empty(padded_rows if config.policy != "two_pass" else 0, head_dim)
    workspace = empty(HEADER_WORDS.value + total_heads * num_m, dtype=torch.int32)
    q_tiles = (total_heads * num_m,)
    strides = [x.stride(axis) for x in (q, k, v, dout) for axis in range(3)]

    prepare_tiles[q_tiles](
        out, dout, lse, lse2, delta, accumulated, workspace, *(x.stride(axis) for x in (out, dout) for axis in range(3)),
        heads, num_m, seq_len, ZERO_DQ=config.policy == "unordered", **rows, **SMALL_OPTIONS,
    )  # fmt: skip
    kv_tiles[(plan.ctas,)](
        q, k, v, dout, lse2, delta, accumulated, dk, dv, workspace, arrays.tensor,
        arrays.num_items, arrays.num_tiles, arrays.num_steps, plan.interleaved, total_heads, heads, num_m,
        *strides, seq_len, seq_len_kv, scale, scale_log2, bound_ns,
        SECTIONS=arrays.sections, RAGGED=seq_len % config.block_m != 0, POLICY=policy, PERSISTENT=plan.cooperative,
        NUM_WARPS=config.num_warps, **tile, launch_cooperative_grid=plan.cooperative, **main_options(config),
    )  # fmt: skip
    if config.policy == "two_pass":
        dq_tiles[q_tiles](
            q, k, v, dout, lse2, delta, dq, heads, num_m, *strides, seq_len, seq_len_kv, scale, scale_log2,
            **tile, **main_options(config),
        )  # fmt: skip
    else:
        cast_tiles[q_tiles](
            accumulated, dq, workspace, turn_record(q.device), heads, num_m, seq_len, scale,
            POLICY=policy, NUM_WARPS=config.num_warps, **rows, **SMALL_OPTIONS,
        )  # fmt: skip
    return dq, dk, dv
