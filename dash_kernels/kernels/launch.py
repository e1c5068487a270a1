"""One backward: arguments checked, workspace allocated, kernels launched on the current stream.

prepare (delta, LSE in base 2, cleared workspace) -> main (dK, dV, and dQ in turn) -> cast (dQ in the output's dtype).
Packed sequences have one more before these, which finds their tiles.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton.experimental.gluon import language as gl

from dash_kernels.kernels.backward_hopper import backward_hopper
from dash_kernels.kernels.backward_portable import descending_closed_form, launch_portable
from dash_kernels.kernels.cast_flat import cast_flat
from dash_kernels.kernels.compiled import Address, current_stream, run_compiled
from dash_kernels.kernels.descriptors import filled, rows_template, template, tile_layout
from dash_kernels.kernels.hopper_shared import (
    CAUSAL_MASK,
    HEADER_WORDS,
    NO_MASK,
    ORDERED,
    TAIL_MASK,
    UNORDERED,
    WINDOW_MASK,
    dq_boxes,
    is_folded,
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
    on_device,
    plan_launch,
    raise_if_turn_missed,
    turn_record,
)
from dash_kernels.kernels.sequences import (
    Sequences,
    is_windowed,
    plan_sequences,
    reaches,
)
from dash_kernels.kernels.shares import add_shares
from dash_kernels.problem import Config, Problem, head_splits, hopper_dims, padded_head_dim

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Sequences", "TurnTimeout", "backward", "raise_if_turn_missed"]

POLICIES = {"unordered": UNORDERED.value, "ordered": ORDERED.value}
GLUON_DTYPES = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}
SHARE_ROWS = 16  # rows of dK and dV that one program adds up
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
    lengths = None
    if sequences is not None:
        lengths = (*sequences[2:], sequences.cu_seqlens_q.shape[0] - 1)
    plan = backward_plan(
        config, bool(causal), tuple(window), softcap != 0, q.shape, k.shape, v.shape[3], q.dtype, q.device, lengths,
        sm_margin, allow_resident,
    )  # fmt: skip
    check_tensors(plan, q=q, dout=dout, out=out, k=k, v=v, lse=lse, dlse=dlse)
    device = q.device
    scale = float(scale)  # an int would be compiled in as a constant
    raise_if_turn_missed(device)
    with on_device(device):
        stream = current_stream(device)
        if plan.arrays is not None:
            hold_arrays(plan.arrays, stream)
        if plan.config.backend == "portable":
            return launch_portable(
                plan, dout, q, k, v, out, lse, scale, int(watchdog_seconds * 1e9), window=window,
                softcap=softcap, sequences=sequences, dlse=dlse,
            )  # fmt: skip
        return launch_hopper(
            plan, stream, dout, q, k, v, out, lse, scale, int(watchdog_seconds * 1e6), window, softcap, sequences, dlse
        )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def backward_plan(
    config: Config, causal: bool, window: tuple[int, int], softcap: bool, q_shape: Any, k_shape: Any, head_dim_v: int,
    dtype: Any, device: Any, lengths: tuple[int, int, int] | None, sm_margin: int, allow_resident: bool,
) -> Plan:  # fmt: skip
    """All that is the same for all backwards of these shapes; ValueError for what cannot run.

    ``lengths`` of packed sequences: the longest of q and of k, and how many there are.
    """
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


VECTOR_LAYOUT, FLAT_LAYOUT = (gl.NVMMASharedLayout(0, 32, axes) for axes in (1, 2))


@dataclass(frozen=True)
class HopperForm:
    """What of a launch depends on the tensors' strides too, but not on their contents or addresses.

    ``templates`` are of the descriptors, in the main kernel's order, and ``strides`` those of out and dout.
    """

    q_tiles: int
    splits: int
    dk_shape: tuple[int, ...]
    dv_shape: tuple[int, ...]
    scratch_starts: tuple[int, ...]  # of accumulated, lse2, delta and workspace, in 32-bit words
    scratch_words: int
    templates: tuple[dict[str, Any], ...]
    strides: tuple[int, ...]
    specialised: tuple[Any, ...]
    prepare: dict[str, Any]
    main: dict[str, Any]
    cast: dict[str, Any]
    add: dict[str, Any]


def launch_hopper(
    plan: Plan, stream: int, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bound_us: int,
    window: tuple[int, int], softcap: float, sequences: Sequences | None, dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The launches on checked arguments.

    The workspace is allocated here and cleared by the first of them, so every call and every replay of a captured
    graph starts from zeros, and no two streams share one.
    """
    import torch

    config, grid, device = plan.config, plan.grid, q.device
    seq_len, heads = q.shape[1:3]
    seq_len_kv, heads_kv = k.shape[1:3]
    q_table: Tensor | None = None
    counts: Tensor | None = None
    if sequences is not None:
        tables = plan_sequences(
            sequences, seq_len, seq_len_kv, block_m=config.block_m, block_n=config.block_n, causal=grid.causal,
            window=window, descending=descending_closed_form(config.schedule),
        )  # fmt: skip
        num_m, arrays, sizes = tables.max_q_tiles, tables.kv_tiles, (0, 0, 0)
        q_table, counts = tables.q_tiles, tables.counts
        ctas = min(plan.total_heads * tables.max_kv_tiles, plan.sms)
    else:
        assert plan.arrays is not None
        num_m, arrays, ctas = grid.num_m, plan.arrays.tensor, plan.ctas
        sizes = plan.arrays.num_items, plan.arrays.num_tiles, plan.arrays.num_steps
    key = q.stride(), k.stride(), v.stride(), out.stride(), dout.stride()
    form = plan.forms.get(key)
    if form is None:
        form = plan.forms[key] = _form(plan, num_m, window, q, k, v, out, dout)
    splits = form.splits

    dq = torch.empty(q.shape, dtype=q.dtype, device=device)
    dk = torch.empty(form.dk_shape, dtype=k.dtype, device=device)
    dv = torch.empty(form.dv_shape, dtype=v.dtype, device=device)
    scratch = torch.empty(form.scratch_words, dtype=torch.int32, device=device)
    start = scratch.data_ptr()
    accumulated, lse2, delta, workspace = (
        Address(start + 4 * words, dtype)
        for words, dtype in zip(
            form.scratch_starts, (*[torch.float32] * 3, torch.int32), strict=True
        )
    )

    pointers = [x.data_ptr() % 16 == 0 for x in (out, dout, lse)]
    pointers.append(dlse is None or dlse.data_ptr() % 16 == 0)
    run_compiled(
        plan.compiled, prepare_tiles, form.q_tiles, stream,
        (out, dout, lse, lse2, delta, accumulated, workspace, *form.strides, heads, num_m, seq_len),
        {**form.prepare, "dlse": dlse, "tiles": q_table, "counts": counts}, SMALL_OPTIONS,
        special=(form.specialised, *pointers, dlse is None),
    )  # fmt: skip
    # With softcap, S' = cap tanh(x) with x = S scale / cap and tanh from exp2(2 x log2(e)).
    factors = (2 * LOG2E * scale / softcap, softcap * LOG2E) if softcap else (scale * LOG2E, 0.0)
    described = q, k, v, dout, lse2, delta, accumulated, dk, dv
    run_compiled(
        plan.compiled, backward_hopper, ctas, stream,
        (
            *map(filled, form.templates, described), workspace, arrays, counts, turn_record(device), *sizes, plan.total_heads,
            heads_kv * splits, splits, heads // heads_kv // splits, plan.interleaved, num_m, *reaches(grid.causal, window), seq_len, seq_len_kv, bound_us,
            *factors, scale,
        ),
        form.main,
        {"num_warps": CONSUMER_WARPS, "enable_fp_fusion": True, "launch_cooperative_grid": plan.cooperative},
    )  # fmt: skip
    run_compiled(
        plan.compiled, cast_flat, form.q_tiles, stream,
        (accumulated, dq, workspace, q_table, counts, heads, num_m, seq_len, scale),
        form.cast, SMALL_OPTIONS,
    )  # fmt: skip
    if splits == 1:
        return dq, dk, dv
    shares_of_dk, shares_of_dv = dk, dv
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (k, v))
    pairs = k.shape[0] * seq_len_kv * heads_kv
    run_compiled(
        plan.compiled, add_shares, -(-pairs // SHARE_ROWS), stream, (shares_of_dk, shares_of_dv, dk, dv, pairs), form.add,
        SMALL_OPTIONS,
    )  # fmt: skip
    return dq, dk, dv


def _form(
    plan: Plan, num_m: int, window: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor
) -> HopperForm:  # fmt: skip
    import torch

    config, problem, causal = plan.config, plan.problem, plan.grid.causal
    m, n, packed = config.block_m, config.block_n, problem.varlen
    d, d_v = hopper_dims(problem.head_dim, problem.head_dim_v)
    cols, halves, policy = d // pieces(d), 2 if is_wide(d) else 1, POLICIES[config.policy]
    if is_windowed(causal, window):
        mask = WINDOW_MASK
    elif causal:
        mask = CAUSAL_MASK
    else:
        mask = TAIL_MASK if packed or problem.seq_len_kv % n else NO_MASK
    q_tiles = q.shape[0] * problem.heads * num_m
    rows, flat_rows = q_tiles * m, m * d // 256
    flat_shape = q_tiles * flat_rows, 256
    dtype = GLUON_DTYPES[str(q.dtype)]

    def of_rows(tensor: Tensor, count: int, width: int) -> dict[str, Any]:
        layout = tile_layout(count, width, dtype, packed)
        return rows_template(tensor, count, width, layout, packed)

    flat = flat_shape[0] * 256
    vectors, flat_rows_of = (
        torch.empty(shape, dtype=torch.float32, device="meta") for shape in (rows, flat_shape)
    )
    splits = head_splits(problem, config)
    dk_shape, dv_shape = ((*x.shape[:2], x.shape[2] * splits, x.shape[3]) for x in (k, v))
    dk, dv = (torch.empty(shape, dtype=q.dtype, device="meta") for shape in (dk_shape, dv_shape))
    vector = template(vectors, (rows,), (1,), (m,), VECTOR_LAYOUT)
    templates = (
        of_rows(q, m, cols), of_rows(k, n, cols), of_rows(v, n, d_v), of_rows(dout, m, d_v), vector, vector,
        template(flat_rows_of, flat_shape, (256, 1), (flat_rows // dq_boxes(d), 256), FLAT_LAYOUT),
        of_rows(dk, n, cols // halves), of_rows(dv, n, d_v // halves),
    )  # fmt: skip
    strides = (*out.stride()[:3], *dout.stride()[:3])
    tile = {"BLOCK_M": m, "HEAD_DIM": cols}
    return HopperForm(
        q_tiles, splits, dk_shape, dv_shape, (0, flat, flat + rows, flat + 2 * rows),
        flat + 2 * rows + HEADER_WORDS.value + q_tiles * shares(d), templates, strides,
        tuple((s == 1, s % 16 == 0, s >= 1 << 31) for s in strides),
        prepare={
            "ZERO_DQ": config.policy == "unordered", **tile, "HEAD_DIM_V": padded_head_dim(problem.head_dim_v),
            "dlse": None, "tiles": None, "counts": None,
            "WIDTH": problem.head_dim_v, "SEMAPHORES": shares(d), "PIECES": pieces(d),
            "FOLDED": is_folded(d, mask.value, problem.softcap),
        },
        main={
            "MASK": mask.value, "SOFTCAP": problem.softcap, "GROUPED": problem.head_group > splits, "PACKED": packed,
            "DESCENDING": packed and descending_closed_form(config.schedule),
            "M": m, "N": n, "D": d, "DV": d_v, "STAGES": config.num_stages, "DQ_STAGES": config.dq_stages,
            "POLICY": policy, "ORDER_OF_START": plan.cooperative,
        },
        cast={
            "POLICY": policy, **tile, "PIECES": pieces(d), "WIDTH": problem.head_dim, "SEMAPHORES": shares(d),
        },
        add={
            "SPLITS": splits, "COLS": padded_head_dim(problem.head_dim), "COLS_V": padded_head_dim(problem.head_dim_v),
            "WIDTH": problem.head_dim, "WIDTH_V": problem.head_dim_v, "ROWS": SHARE_ROWS,
        },
    )  # fmt: skip
