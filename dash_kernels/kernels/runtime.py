"""What the launches of both backends share: the plan of a launch, a schedule's arrays on the device, missed turns."""

from __future__ import annotations

import ctypes
import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dash_kernels.problem import (
    HEAD_DIM_STEP,
    KERNEL_HEAD_DIMS,
    Config,
    Problem,
    supports,
    walked_heads,
)
from dash_kernels.schedules import Launch, Packed, TileGrid, build, check, pack

if TYPE_CHECKING:
    from torch import Tensor

LOG2E = 1.4426950408889634
WATCHDOG_SECONDS = 10.0  # a turn that has not come by then will not come
# Of the passes before and after a main kernel.
SMALL_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
ALL_MASKED = 10  # portable kernel: one loop that masks every step


class TurnTimeout(RuntimeError):
    """A contribution to dQ waited for a turn that did not come within the bound; that launch's dQ is NaN."""


@dataclass(frozen=True)
class DeviceArrays:
    """A packed schedule on one device: its sections one after another, in the order of ``device_arrays``.

    ``streams`` are those that :func:`hold_arrays` has told the allocator of.
    """

    tensor: Tensor
    num_items: int
    num_tiles: int
    num_steps: int
    sections: int
    streams: set[int] = field(default_factory=set, compare=False)


@dataclass(frozen=True)
class Plan:
    """All of a launch that does not depend on the tensors' contents or addresses.

    ``arrays`` is None for packed sequences, whose tiles the device works out. ``compiled`` fills as kernels are launched:
    see ``compiled.run_compiled``; ``forms`` fill with what a launch works out once for the strides that it was given.
    """

    config: Config
    problem: Problem
    grid: TileGrid
    shapes: dict[str, Any]
    total_heads: int  # (batch, KV head) pairs as CTAs walk them: what tickets count
    arrays: DeviceArrays | None
    interleaved: int
    sms: int
    cooperative: bool
    compiled: dict[Any, Any] = field(default_factory=dict, compare=False)
    forms: dict[Any, Any] = field(default_factory=dict, compare=False)

    @property
    def ctas(self) -> int:
        """Persistent CTAs, one an SM; of the portable kernel only in a cooperative launch, else one a ticket."""
        assert self.arrays is not None
        tickets = self.total_heads * self.arrays.num_items
        persistent = self.cooperative or self.config.backend == "hopper"
        return min(tickets, self.sms) if persistent else tickets


# A captured graph keeps no reference to the arrays that it reads.
_held_by_graphs: set[Tensor] = set()


@functools.lru_cache(maxsize=4096)
def plan_launch(
    config: Config, problem: Problem, device: Any, sm_margin: int = 0, allow_resident: bool = False,
    total_rows: tuple[int, int] = (0, 0),
) -> Plan:  # fmt: skip
    """Check that ``config`` can run this problem and work out its launch; ValueError naming what cannot run.

    Head dims are those that :func:`kernel_dims` gives. For packed sequences ``total_rows`` are the rows of q and of k.
    """
    import torch

    for name in ("head_dim", "head_dim_v"):
        dim = getattr(problem, name)
        if config.backend == "hopper" and dim % HEAD_DIM_STEP:
            raise ValueError(
                f"{name} is {dim}; the Hopper kernel runs multiples of {HEAD_DIM_STEP}: pad with zeros"
            )
        if config.backend == "portable" and dim not in KERNEL_HEAD_DIMS["portable"]:
            raise ValueError(
                f"{name} is {dim}; the portable kernels run 64, 128 and 256: pad with zeros"
            )
    support = supports(config, problem, torch.cuda.get_device_capability(device))
    if not support:
        raise ValueError(f"config cannot run this problem: {support.reason}")
    grid, order = TileGrid.for_config(problem, config), Launch.for_config(config)
    heads_kv = problem.heads_kv
    total_heads, head_group = walked_heads(problem, config)
    if problem.varlen:  # one sample to the kernel
        total_heads = heads_kv
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if not 0 <= sm_margin < sms:
        raise ValueError(f"sm_margin is {sm_margin}; it must leave at least one of the {sms} SMs")
    arrays, needed = None, 1
    if not problem.varlen:
        arrays = device_arrays(config.schedule, config.group, grid, order, device)
        if config.policy == "ordered":
            needed = min_resident(
                config.schedule, config.group, grid, order, total_heads, head_group
            )
    if needed > 1:
        assert arrays is not None
        tickets = total_heads * arrays.num_items
        cooperative_grid(config, needed, tickets, sms, sm_margin, allow_resident)
    batch, seq_len, seq_len_kv = problem.batch, problem.seq_len, problem.seq_len_kv
    if problem.varlen:
        batch, (seq_len, seq_len_kv) = 1, total_rows
    shapes = {
        "q": (batch, seq_len, problem.heads, problem.head_dim),
        "dout": (batch, seq_len, problem.heads, problem.head_dim_v),
        "out": (batch, seq_len, problem.heads, problem.head_dim_v),
        "k": (batch, seq_len_kv, heads_kv, problem.head_dim),
        "v": (batch, seq_len_kv, heads_kv, problem.head_dim_v),
        "lse": (batch, problem.heads, seq_len),
        "dlse": (batch, problem.heads, seq_len),
    }
    return Plan(
        config,
        problem,
        grid,
        shapes,
        total_heads,
        arrays,
        order.interleaved(total_heads),
        sms - sm_margin,
        needed > 1,
    )


def check_tensors(plan: Plan, **tensors: Tensor | None) -> None:
    """ValueError naming the first tensor that does not fit the others or that the backend cannot read in place."""
    q = tensors["q"]
    assert q is not None
    aligned = plan.config.backend == "hopper"  # its copy engine wants 16-byte rows
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        shape = plan.shapes[name]
        if tensor.shape != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; it must be {shape}")
        if name in ("lse", "dlse"):
            if not tensor.is_contiguous() or str(tensor.dtype) != "torch.float32":
                raise ValueError(f"{name} must be a contiguous float32 tensor of {shape}")
            continue
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}; q is {q.dtype} on {q.device}"
            )
        batch, row, head, col = tensor.stride()
        if col != 1:
            raise ValueError(f"{name} has stride {col} in its last dimension; make it contiguous")
        if aligned and (batch % 8 or row % 8 or head % 8 or tensor.data_ptr() % 16):
            raise ValueError(
                f"{name} has strides {tensor.stride()} or a base that is not 16-byte aligned: make it contiguous"
            )


def hold_arrays(arrays: DeviceArrays, stream: int) -> None:
    """Keep a schedule's arrays alive for the launch that is about to read them on ``stream``, which is current."""
    import torch

    if torch.cuda.is_current_stream_capturing():
        _held_by_graphs.add(arrays.tensor)
    elif stream not in arrays.streams:
        arrays.tensor.record_stream(torch.cuda.current_stream())
        arrays.streams.add(stream)


def on_device(device: Any) -> AbstractContextManager[None]:
    """Make ``device`` current, where it is not."""
    import torch

    here: bool = torch.cuda.current_device() == device.index
    return nullcontext() if here else torch.cuda.device(device)


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


def sections(packed: Packed, capability: tuple[int, int]) -> int:
    """Which of the loops over plain, masked and plain steps the schedule needs: bits 0 to 2, for the portable kernel.

    On 10.x each loop would hold dK and dV in tensor memory of its own and overflow it: there one loop masks all.
    """
    steps = list(zip(packed.mask_begin, packed.mask_end, packed.visit_count, strict=True))
    before = any(begin > 0 for begin, _, _ in steps)
    masked = any(end > begin for begin, end, _ in steps)
    after = any(count > end for _, end, count in steps)
    if capability[0] == 10 and masked + before + after > 1:
        return ALL_MASKED
    return before + 2 * masked + 4 * after


@functools.lru_cache(maxsize=1024)
def min_resident(
    kind: str, group: int, grid: TileGrid, order: Launch, total_heads: int, head_group: int = 1
) -> int:
    """The fewest resident CTAs with which the schedule always ends; proves the schedule on the way.

    ``total_heads`` counts (batch, KV head) pairs, ``head_group`` the query heads of each.
    """
    return check(build(kind, grid, group), order, total_heads, head_group).min_resident


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


_records: dict[Any, tuple[Tensor, ctypes.c_int32]] = {}
_records_lock = threading.Lock()


def _record(device: Any) -> tuple[Tensor, ctypes.c_int32]:
    """The record of :func:`turn_record`, and its first word: an index into the tensor costs the host microseconds."""
    import torch

    with _records_lock:
        if device not in _records:
            record = torch.zeros(5, dtype=torch.int32, pin_memory=device.type == "cuda")
            _records[device] = record, ctypes.c_int32.from_address(record.data_ptr())
        return _records[device]


def turn_record(device: Any) -> Tensor:
    """Where a kernel writes (1, head, m_block, turn, seen) when a turn does not come: host memory, read without a sync."""
    return (_records.get(device) or _record(device))[0]


def raise_if_turn_missed(device: Any) -> None:
    """Raise TurnTimeout for a turn that an earlier launch on this device has missed, once."""
    record, flag = _records.get(device) or _record(device)
    if flag.value:
        _, head, m_block, turn, seen = record.tolist()
        record.zero_()
        raise TurnTimeout(
            f"head {head}, Q tile {m_block}: turn {turn} did not come in time ({seen} contributions had been added): "
            f"the gradients of that backward are NaN; use a monotone schedule"
        )
