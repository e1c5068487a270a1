"""Attention backward on the portable kernels: what to compile, what to upload, and the launches.

Importing this needs triton only; launching needs torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dash_kernels.kernels.compile import KernelSpec
from dash_kernels.kernels.portable_kernels import (
    ALL_MASKED,
    HEADER_WORDS,
    NO_DQ,
    ORDERED,
    UNORDERED,
    cast_tiles,
    dq_tiles,
    kv_tiles,
    prepare_tiles,
)
from dash_kernels.problem import Config, Problem, supports
from dash_kernels.schedules import Launch, Packed, TileGrid, build, check, pack

if TYPE_CHECKING:
    from torch import Tensor

LOG2E = 1.4426950408889634


POLICIES = {"unordered": UNORDERED.value, "ordered": ORDERED.value, "two_pass": NO_DQ.value}
# Of prepare_tiles and cast_tiles.
SMALL_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
TURN_BOUND_NS = 10_000_000_000  # a turn that has not come by then will not come


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


def sections(packed: Packed, capability: tuple[int, int]) -> int:
    """Which of the loops over plain, masked and plain steps the schedule needs: bits 0 to 2 of SECTIONS.

    On 10.x each loop would hold dK and dV in tensor memory of its own and overflow it: there one loop masks all.
    """
    steps = list(zip(packed.mask_begin, packed.mask_end, packed.visit_count, strict=True))
    before = any(begin > 0 for begin, _, _ in steps)
    masked = any(end > begin for begin, end, _ in steps)
    after = any(count > end for _, end, count in steps)
    if capability[0] == 10 and masked + before + after > 1:
        return ALL_MASKED.value
    return before + 2 * masked + 4 * after


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


class TurnTimeout(RuntimeError):
    """A contribution to dQ waited for a turn that did not come within the bound; that launch's dQ is NaN."""


@dataclass(frozen=True)
class DeviceArrays:
    """A packed schedule on one device, its sections one after another in the order in which ``run_item`` cuts them."""

    tensor: Tensor
    num_items: int
    num_tiles: int
    num_steps: int
    sections: int


# A captured graph keeps no reference to the arrays that it reads.
_held_by_graphs: set[Tensor] = set()


@functools.lru_cache(maxsize=1024)
def device_arrays(
    kind: str, group: int, grid: TileGrid, launch: Launch, device: Any
) -> DeviceArrays:
    """Upload a schedule once. Raises RuntimeError while a CUDA graph is captured, where no upload is possible."""
    import torch

    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"run {kind} once for {grid} before capturing it in a CUDA graph: its arrays need an upload"
        )
    packed = pack(build(kind, grid, group), launch)
    parts = (
        packed.item_order, packed.item_begin, packed.kv_tile, packed.visit_begin, packed.visit_count,
        packed.mask_begin, packed.mask_end, packed.visit, packed.turn,
    )  # fmt: skip
    flat = [number for part in parts for number in part]
    tensor = torch.tensor(flat, dtype=torch.int32, device=device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    lengths = len(packed.item_order), len(packed.kv_tile), len(packed.visit)
    return DeviceArrays(tensor, *lengths, sections(packed, capability))


@functools.lru_cache(maxsize=1024)
def min_resident(kind: str, group: int, grid: TileGrid, launch: Launch, total_heads: int) -> int:
    """The fewest resident CTAs with which the schedule always ends; proves the schedule on the way."""
    return check(build(kind, grid, group), launch, total_heads).min_resident


@functools.cache
def turn_record(device: Any) -> Tensor:
    """Where a kernel writes (1, head, m_block, turn, seen) when a turn does not come: host memory, read without a sync."""
    import torch

    return torch.zeros(5, dtype=torch.int32, pin_memory=device.type == "cuda")


def raise_if_turn_missed(device: Any) -> None:
    """Raise TurnTimeout for a turn that an earlier launch on this device has missed, once."""
    record = turn_record(device)
    if record[0]:
        _, head, m_block, turn, seen = record.tolist()
        record.zero_()
        raise TurnTimeout(
            f"head {head}, Q tile {m_block}: turn {turn} did not come in time ({seen} contributions had been added): "
            f"the gradients of that backward are NaN; use a monotone schedule"
        )


def cooperative_grid(
    config: Config, needed: int, tickets: int, sms: int, sm_margin: int, allow_resident: bool
) -> int:
    """CTAs of a cooperative launch of a kind that needs ``needed`` of them resident; ValueError where it must not run."""
    if not allow_resident:
        raise ValueError(
            f"schedule {config.schedule} launched {config.launch_order} waits for CTAs that start later and needs "
            f"{needed} of them resident: choose ascending, descending or shortest_first with its own launch order, or pass "
            f"allow_resident=True"
        )
    if not 0 <= sm_margin < sms:
        raise ValueError(f"sm_margin is {sm_margin}; it must leave at least one of the {sms} SMs")
    grid = min(tickets, sms - sm_margin)
    if grid < needed:
        raise ValueError(
            f"schedule {config.schedule} needs {needed} resident CTAs, but {sms} SMs less sm_margin={sm_margin} hold "
            f"{grid}: choose a monotone schedule, a larger block_n or a smaller sm_margin"
        )
    return grid


def backward_portable(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, config: Config, causal: bool, scale: float, allow_resident: bool = False, sm_margin: int = 0,
    watchdog_seconds: float = TURN_BOUND_NS / 1e9,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV of attention, each (B, S, H, D) contiguous.

    ``dout``, ``q``, ``out`` are (B, Sq, H, D), ``k`` and ``v`` (B, Sk, H, D), bf16 or fp16, D 64 or 128, any strides
    with a contiguous last dimension; ``lse`` is (B, H, Sq) fp32, contiguous, natural log, +inf for rows that see no
    key (their gradients are zeros). Raises ValueError for what cannot run. A turn that does not come within
    ``watchdog_seconds`` makes that launch's dQ NaN, and the next call on the device raises TurnTimeout.
    """
    import torch

    problem = problem_of(dout, q, k, v, out, lse, causal)
    support = supports(config, problem, torch.cuda.get_device_capability(q.device))
    if not support:
        raise ValueError(f"config cannot run this problem: {support.reason}")
    raise_if_turn_missed(q.device)
    grid = TileGrid.for_config(problem, config)
    launch = Launch.for_config(config)
    total_heads = problem.batch * problem.heads
    arrays = device_arrays(config.schedule, config.group, grid, launch, q.device)
    ctas = tickets = total_heads * arrays.num_items
    needed = 1
    if config.policy == "ordered":
        needed = min_resident(config.schedule, config.group, grid, launch, total_heads)
    if needed > 1:
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        ctas = cooperative_grid(config, needed, tickets, sms, sm_margin, allow_resident)
    with torch.cuda.device(q.device):
        if torch.cuda.is_current_stream_capturing():
            _held_by_graphs.add(arrays.tensor)
        else:
            arrays.tensor.record_stream(torch.cuda.current_stream())
        return launch_kernels(
            dout, q, k, v, out, lse,
            config=config, grid=grid, interleaved=launch.interleaved(total_heads), arrays=arrays,
            scale=scale, ctas=ctas, persistent=needed > 1, bound_ns=int(watchdog_seconds * 1e9),
        )  # fmt: skip


def problem_of(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Problem:
    """The problem that these tensors pose; raises ValueError naming the first tensor that does not fit."""
    batch, seq_len, heads, head_dim = q.shape
    seq_len_kv = k.shape[1]
    wanted = {
        "dout": q.shape,
        "out": q.shape,
        "k": (batch, seq_len_kv, heads, head_dim),
        "v": k.shape,
    }
    for name, tensor in {"q": q, "dout": dout, "out": out, "k": k, "v": v}.items():
        if tuple(tensor.shape) != tuple(wanted.get(name, q.shape)):
            raise ValueError(f"{name} is {tuple(tensor.shape)}; it must be {tuple(wanted[name])}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}; q is {q.dtype} on {q.device}"
            )
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} has stride {tensor.stride(-1)} in its last dimension; make it contiguous"
            )
    if (
        tuple(lse.shape) != (batch, heads, seq_len)
        or str(lse.dtype) != "torch.float32"
        or not lse.is_contiguous()
    ):
        raise ValueError(f"lse must be a contiguous float32 tensor of {(batch, heads, seq_len)}")
    if head_dim not in (64, 128):
        raise ValueError(f"head_dim is {head_dim}; the kernels run 64 and 128: pad it with zeros")
    dtype = str(q.dtype).removeprefix("torch.")
    return Problem(
        "causal" if causal else "full", head_dim, seq_len, dtype, batch, heads, heads, seq_len_kv
    )


def launch_kernels(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, config: Config, grid: TileGrid, interleaved: int, arrays: DeviceArrays, scale: float, ctas: int, persistent: bool,
    bound_ns: int = TURN_BOUND_NS,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The launches on checked arguments, on the current stream: prepare, main, then the dQ pass or the cast.

    The workspace is allocated here and cleared by ``prepare_tiles``, so every call and every replay of a captured
    graph starts from zeros, and no two streams share one.
    """
    import torch

    batch, seq_len, heads, head_dim = q.shape
    seq_len_kv = k.shape[1]
    total_heads, num_m = batch * heads, grid.num_m
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
    kv_tiles[(ctas,)](
        q, k, v, dout, lse2, delta, accumulated, dk, dv, workspace, arrays.tensor,
        arrays.num_items, arrays.num_tiles, arrays.num_steps, interleaved, total_heads, heads, num_m,
        *strides, seq_len, seq_len_kv, scale, scale_log2, bound_ns,
        SECTIONS=arrays.sections, RAGGED=seq_len % config.block_m != 0, POLICY=policy, PERSISTENT=persistent,
        NUM_WARPS=config.num_warps, **tile, launch_cooperative_grid=persistent, **main_options(config),
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
