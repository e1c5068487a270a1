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
    kv_tiles,
    prepare_tiles,
)
from dash_kernels.kernels.portable_tiles import score_factors
from dash_kernels.kernels.portable_two_pass import dq_tiles
from dash_kernels.kernels.runtime import ALL_MASKED, SMALL_OPTIONS, Plan, sections, turn_record
from dash_kernels.kernels.sequences import Sequences, is_windowed, plan_sequences, reaches
from dash_kernels.problem import Config
from dash_kernels.schedules import Launch, TileGrid, build, pack

if TYPE_CHECKING:
    from torch import Tensor

POLICIES = {"unordered": UNORDERED.value, "ordered": ORDERED.value, "two_pass": NO_DQ.value}
CLOSED_FORMS = {"ascending": False, "shortest_first": True}  # kind -> whether by descending KV tile


def main_options(config: Config) -> dict[str, Any]:
    """Compiler options of the kernels with matmuls. Fusion is set because Triton's default differs by release."""
    return {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }


def dq_transposed(config: Config, head_dim: int, capability: tuple[int, int]) -> bool:
    """Whether the main kernel forms dQ^T = K^T dS: on Hopper where its tensor cores want 64 rows, or registers are short.

    With dQ = dS^T K a Q tile of 32 rows leaves wgmma for the matmuls of older chips, and dS^T goes through registers:
    at head_dim 256 and 64x64 tiles Triton 3.6 then spills 248 bytes instead of 128.
    """
    return capability[0] == 9 and (config.block_m < 64 or head_dim > 128)


def packed_sections(windowed: bool, capability: tuple[int, int]) -> int:
    """``runtime.sections`` for packed sequences: every loop that their masks may need, whatever their lengths."""
    if capability[0] == 10:
        return ALL_MASKED
    return 7 if windowed else 6


def compile_specs(
    config: Config,
    head_dim: int,
    dtype: str,
    causal: bool,
    *,
    ragged: bool = False,
    persistent: bool = False,
    capability: tuple[int, int] = (9, 0),
    head_dim_v: int = 0,
    grouped: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: bool = False,
    varlen: bool = False,
    dlse: bool = False,
) -> list[KernelSpec]:
    """The kernels of one backward, the main kernel first, specialised as a launch on aligned tensors is.

    ``dtype`` is bfloat16 or float16; ``ragged`` gives the kernel for a seq_len that is no multiple of block_m,
    ``persistent`` the one of a cooperative launch, ``grouped`` the one for several query heads a KV head,
    ``head_dim_v`` 0 means head_dim, ``varlen`` packed sequences, ``dlse`` a gradient of LSE.
    """
    windowed = is_windowed(causal, window)
    if varlen:
        loops = packed_sections(windowed, capability)
    else:
        side = 16 * max(config.block_m, config.block_n)
        grid = TileGrid(side, side, config.block_m, config.block_n, causal, *window)
        loops = sections(pack(build(config.schedule, grid, config.group), Launch()), capability)
    policy = POLICIES[config.policy]
    rows = {"BLOCK_M": config.block_m, "HEAD_DIM": head_dim}
    value_dim = {"HEAD_DIM_V": head_dim_v or head_dim}
    mask = {"CAUSAL": causal, "WINDOWED": windowed, "SOFTCAP": softcap}
    tile = {**rows, **value_dim, "BLOCK_N": config.block_n, **mask}
    tables = {} if varlen else dict.fromkeys(("tiles", "counts", "cu_seqlens_k"))
    main = {
        "GROUPED": grouped,
        "VARLEN": varlen,
        "DESCENDING": CLOSED_FORMS.get(config.schedule, False) and varlen,
        "SECTIONS": loops,
        "RAGGED": ragged or varlen,
        "POLICY": policy,
        "DQ_TRANSPOSED": dq_transposed(config, head_dim, capability),
        "PERSISTENT": persistent,
        "NUM_WARPS": config.num_warps,
    }
    prepare = {"ZERO_DQ": config.policy == "unordered", **rows, **value_dim}
    prepare |= {"WIDTH": None, "SEMAPHORES": 1, "PIECES": 1}
    prepare |= {} if dlse else {"dlse": None}
    specs = [
        kernel_spec(kv_tiles, dtype, {**main, **tile, **tables}, main_options(config)),
        kernel_spec(prepare_tiles, dtype, {**prepare, **tables}, SMALL_OPTIONS),
    ]
    if config.policy == "two_pass":
        specs.append(kernel_spec(dq_tiles, dtype, {**tile, **tables}, main_options(config)))
    else:
        cast = {name: main[name] for name in ("POLICY", "DQ_TRANSPOSED", "NUM_WARPS")}
        cast |= {**rows, **tables}
        specs.append(kernel_spec(cast_tiles, dtype, cast, SMALL_OPTIONS))
    return specs


def kernel_spec(
    kernel: Any, dtype: str, constexprs: dict[str, Any], options: dict[str, Any]
) -> KernelSpec:
    """A portable kernel specialised as a launch on aligned tensors is; ``constexprs`` may name others' parameters."""
    half = {"bfloat16": "*bf16", "float16": "*fp16"}[dtype]
    types = dict.fromkeys(("q", "k", "v", "out", "dout", "dk", "dv"), half)
    types |= dict.fromkeys(("lse", "lse2", "delta", "dlse", "accumulated"), "*fp32")
    types |= dict.fromkeys(
        ("workspace", "record", "arrays", "tiles", "counts", "cu_seqlens_k"), "*i32"
    )
    types |= dict.fromkeys(("scale", "scale_log2", "cap_log2"), "fp32") | {"bound_ns": "i64"}
    types["dq"] = "*fp32" if kernel in (kv_tiles, prepare_tiles) else half
    names = kernel.arg_names
    constexprs = {name: value for name, value in constexprs.items() if name in names}
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
    plan: Plan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bound_ns: int,
    *, window: tuple[int, int] = (-1, -1), softcap: float = 0.0, sequences: Sequences | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The launches on checked arguments, on the current stream: prepare, main, then the dQ pass or the cast.

    With ``sequences`` one more goes before them, which finds their tiles. The workspace is allocated here and cleared
    by ``prepare_tiles``, so every call and every replay of a captured graph starts from zeros, and no two streams
    share one. Raises ValueError for a kind without a closed form on packed sequences.
    """
    import torch

    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
    config, grid, arrays = plan.config, plan.grid, plan.arrays
    batch, seq_len, heads, head_dim = q.shape
    seq_len_kv, heads_kv, head_dim_v = v.shape[1:]
    group, causal, windowed = heads // heads_kv, grid.causal, is_windowed(grid.causal, window)
    policy, factors = POLICIES[config.policy], score_factors(scale, softcap)
    tables: dict[str, Any] = {"tiles": None, "counts": None}
    if sequences is None:
        num_m, tickets = grid.num_m, plan.ctas
        work = arrays.tensor, None, arrays.num_items, arrays.num_tiles, arrays.num_steps
        loops, ragged, descending = arrays.sections, seq_len % config.block_m != 0, False
    else:
        descending = descending_closed_form(config.schedule)
        packed = plan_sequences(
            sequences, seq_len, seq_len_kv, block_m=config.block_m, block_n=config.block_n, causal=causal,
            window=window, descending=descending,
        )  # fmt: skip
        num_m, tickets = packed.max_q_tiles, packed.max_kv_tiles * heads_kv
        work = packed.kv_tiles, packed.counts, 0, 0, 0
        loops, ragged = packed_sections(windowed, capability), True
        tables = {"tiles": packed.q_tiles, "counts": packed.counts}
    q_tiles = (batch * heads * num_m,)
    padded_rows = q_tiles[0] * config.block_m
    rows = {"BLOCK_M": config.block_m, "HEAD_DIM": head_dim}
    mask = {"CAUSAL": causal, "WINDOWED": windowed, "SOFTCAP": softcap != 0}
    flat = {
        "POLICY": policy,
        "DQ_TRANSPOSED": dq_transposed(config, head_dim, capability),
        "NUM_WARPS": config.num_warps,
    }
    tile = {**rows, "HEAD_DIM_V": head_dim_v, "BLOCK_N": config.block_n, **mask}

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    dq, dk, dv = (empty(*x.shape, dtype=x.dtype) for x in (q, k, v))
    lse2, delta = empty(padded_rows), empty(padded_rows)
    accumulated = empty(padded_rows if config.policy != "two_pass" else 0, head_dim)
    workspace = empty(HEADER_WORDS.value + q_tiles[0], dtype=torch.int32)
    strides = [x.stride(axis) for x in (q, k, v, dout) for axis in range(3)]
    lengths = seq_len, seq_len_kv, *reaches(causal, window)

    prepare_tiles[q_tiles](
        out, dout, lse, lse2, delta, accumulated, workspace, *(x.stride(axis) for x in (out, dout) for axis in range(3)),
        heads, num_m, seq_len, dlse=dlse, ZERO_DQ=config.policy == "unordered", HEAD_DIM_V=head_dim_v, **rows, **tables,
        **SMALL_OPTIONS,
    )  # fmt: skip
    kv_tiles[(tickets,)](
        q, k, v, dout, lse2, delta, accumulated, dk, dv, workspace, *work,
        plan.interleaved, batch * heads_kv, heads_kv, group, num_m, *strides, *lengths, scale, *factors, bound_ns,
        GROUPED=group > 1, VARLEN=sequences is not None, DESCENDING=descending, SECTIONS=loops, RAGGED=ragged,
        PERSISTENT=plan.cooperative, **flat, **tile, launch_cooperative_grid=plan.cooperative, **main_options(config),
    )  # fmt: skip
    if config.policy == "two_pass":
        dq_tiles[q_tiles](
            q, k, v, dout, lse2, delta, dq, *tables.values(), sequences and sequences.cu_seqlens_k,
            heads, group, num_m, *strides, *lengths, scale, *factors, **tile, **main_options(config),
        )  # fmt: skip
    else:
        cast_tiles[q_tiles](
            accumulated, dq, workspace, turn_record(q.device), *tables.values(), heads, num_m, seq_len, scale,
            **flat, **rows, **SMALL_OPTIONS,
        )  # fmt: skip
    return dq, dk, dv


def descending_closed_form(kind: str) -> bool:
    """Whether a kind's closed form goes by descending KV tile; ValueError for a kind that has none."""
    if kind not in CLOSED_FORMS:
        raise ValueError(
            f"schedule {kind} has no closed form for packed sequences: choose {' or '.join(CLOSED_FORMS)}"
        )
    return CLOSED_FORMS[kind]
