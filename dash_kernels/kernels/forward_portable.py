"""Attention forward in plain Triton, for compute capability 8.0 and up: every shape and option, one kernel.

A CTA owns a Q tile of one query head and walks its KV tiles upwards with a running maximum and sum. No CTA shares a
row with another and keys are never split, so the bits of a sample do not depend on batch, heads or SMs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from dash_kernels.kernels import sequences as packed
from dash_kernels.kernels.backward_portable import kernel_spec
from dash_kernels.kernels.compile import KernelSpec
from dash_kernels.kernels.portable_tiles import (
    LOG2E,
    first_rows,
    load_tile,
    score_factors,
    sees,
    tanh,
    tile_offsets,
)
from dash_kernels.kernels.sequences import (
    Sequences,
    is_windowed,
    kv_bounds,
    plan_sequences,
    reaches,
)

if TYPE_CHECKING:
    from torch import Tensor

Q_TILE_WORDS = tl.constexpr(packed.Q_TILE_WORDS)
LARGEST_HEAD_DIM = 256


class ForwardTiles(NamedTuple):
    """How the forward is cut and compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def forward_tiles(head_dim: int, capability: tuple[int, int]) -> ForwardTiles:
    """The tiles for rows of ``head_dim`` (the wider of K's and V's), a power of two, on a GPU of this capability.

    By what the compiler makes of them (benchmarks/results/portable-triton-*.json): loops without spilled registers,
    no matmul computed twice by too many warps, and shared memory within 99 KiB (8.6, 8.9, 12.x), 163 KiB (8.0) or
    227 KiB (9.0, 10.x). Three stages wherever they fit, because with two no copy runs beside a step.
    """
    if capability[0] in (9, 10):
        small, middle, large = (128, 128, 8, 3), (128, 128, 8, 3), (128, 32, 8, 3)
    elif capability == (8, 0):
        small, middle, large = (128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3)
    else:
        small, middle, large = (128, 64, 4, 3), (128, 32, 8, 3), (64, 32, 4, 2)
    return ForwardTiles(*(small if head_dim <= 64 else middle if head_dim <= 128 else large))


@triton.jit
def attend(
    out, peak, total, q, k, v, first, last, stride_ks, stride_vs, row, seq_len, seq_len_kv, left, right,
    scale_log2, cap_log2,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    """Add KV tiles ``first .. last - 1`` to the sums of a Q tile; ``peak`` is each row's maximum score in base 2."""
    for n_block in range(first, last):
        col = n_block * BLOCK_N
        k_tile = load_tile(k, stride_ks, col, seq_len_kv, MASK, BLOCK_N, HEAD_DIM, WIDTH)
        scores = tl.dot(q, tl.trans(k_tile))
        if SOFTCAP:
            scores = tanh(scores * scale_log2) * cap_log2
        if MASK:
            first_row = first_rows(col, row, seq_len, seq_len_kv, right, CAUSAL, WINDOWED, BLOCK_N)
            seen = sees(tl.arange(0, BLOCK_M)[:, None], first_row[None, :], left, right, WINDOWED)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.max(scores, 1)
        if not SOFTCAP:
            highest *= scale_log2
        new_peak = tl.maximum(peak, highest)
        level = new_peak
        if MASK:  # a row that has seen no key yet: -inf - -inf would be NaN
            level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        if SOFTCAP:
            p = tl.math.exp2(scores - level[:, None])
        else:
            p = tl.math.exp2(scores * scale_log2 - level[:, None])
        shrink = tl.math.exp2(peak - level)
        total = total * shrink + tl.sum(p, 1)
        out *= shrink[:, None]
        v_tile = load_tile(v, stride_vs, col, seq_len_kv, MASK, BLOCK_N, HEAD_DIM_V, WIDTH_V)
        out = tl.dot(p.to(v.dtype.element_ty), v_tile, out)
        peak = new_peak
    return out, peak, total


@triton.jit(do_not_specialize=["heads", "group", "num_m", "seq_len", "seq_len_kv", "left", "right"])
def forward_tile(
    q, k, v, out, lse, tiles, counts, cu_seqlens_k, heads, group, num_m,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    seq_len, seq_len_kv, left, right, scale_log2, cap_log2,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    """One Q tile of one query head a program; on a causal mask those with most keys first.

    HEAD_DIM and HEAD_DIM_V are powers of two, WIDTH and WIDTH_V what rows really have. Packed sequences: ``tiles`` and
    ``counts`` of a SequencePlan, ``cu_seqlens_k`` of its sequences, else None.
    """
    program = tl.program_id(0)
    head = program // num_m
    m_block = num_m - 1 - program % num_m
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    q += b * stride_qb + h * stride_qh
    k += b * stride_kb + h // group * stride_kh
    v += b * stride_vb + h // group * stride_vh
    out += (b * seq_len * heads + h) * WIDTH_V
    lse += head.to(tl.int64) * seq_len
    if tiles is not None:
        if m_block >= tl.load(counts + 1):
            return
        tile = tiles + m_block.to(tl.int64) * Q_TILE_WORDS
        q_start = tl.load(tile).to(tl.int64)
        seq_len = tl.load(tile + 1)
        m_block = tl.load(tile + 2)
        seq_len_kv = tl.load(tile + 3)
        k_start = tl.load(cu_seqlens_k + tl.load(tile + 4)).to(tl.int64)
        q += q_start * stride_qs
        out += q_start * heads * WIDTH_V
        lse += q_start
        k += k_start * stride_ks
        v += k_start * stride_vs
    row = m_block * BLOCK_M
    q_tile = load_tile(q, stride_qs, row, seq_len, True, BLOCK_M, HEAD_DIM, WIDTH)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, HEAD_DIM_V), tl.float32)
    bounds = kv_bounds(m_block, seq_len, seq_len_kv, left, right, BLOCK_M, BLOCK_N)
    for section in tl.static_range(3):  # masked by a window's left edge, plain, masked
        if WINDOWED or section > 0:
            sums, peak, total = attend(
                sums, peak, total, q_tile, k, v, bounds[section], bounds[section + 1], stride_ks, stride_vs,
                row, seq_len, seq_len_kv, left, right, scale_log2, cap_log2,
                section != 1, CAUSAL, WINDOWED, SOFTCAP, BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V,
            )  # fmt: skip
    rows = row + tl.arange(0, BLOCK_M)
    inside = rows < seq_len
    sees_none = total == 0.0
    row_lse = (peak + tl.math.log2(total)) / LOG2E
    tl.store(lse + rows, tl.where(sees_none, float("inf"), row_lse), mask=inside)
    sums /= tl.where(sees_none, 1.0, total)[:, None]
    cols = (tl.arange(0, HEAD_DIM_V) < WIDTH_V)[None, :]
    tl.store(
        out + tile_offsets(row, heads * WIDTH_V, BLOCK_M, HEAD_DIM_V), sums.to(out.dtype.element_ty),
        mask=inside[:, None] & cols,
    )  # fmt: skip


def main_options(tiles: ForwardTiles) -> dict[str, Any]:
    """Compiler options. Fusion is set because Triton's default differs by release."""
    return {
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "enable_fp_fusion": True,
    }


def compile_spec_of(
    head_dim: int, dtype: str, causal: bool, *, head_dim_v: int = 0, window: tuple[int, int] = (-1, -1),
    softcap: bool = False, varlen: bool = False, capability: tuple[int, int] = (9, 0), tiles: ForwardTiles | None = None,
) -> KernelSpec:  # fmt: skip
    """The forward kernel specialised as a launch on aligned tensors is; ``head_dim_v`` 0 means head_dim."""
    dims = head_dim, head_dim_v or head_dim
    tiles = tiles or forward_tiles(max(padded(dim) for dim in dims), capability)
    constexprs = kernel_constants(tiles, *dims, causal, window, softcap)
    if not varlen:
        constexprs |= dict.fromkeys(("tiles", "counts", "cu_seqlens_k"))
    return kernel_spec(forward_tile, dtype, constexprs, main_options(tiles))


def kernel_constants(
    tiles: ForwardTiles, width: int, width_v: int, causal: bool, window: tuple[int, int], softcap: bool
) -> dict[str, Any]:  # fmt: skip
    return {
        "CAUSAL": causal, "WINDOWED": is_windowed(causal, window), "SOFTCAP": softcap,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
        "HEAD_DIM": padded(width), "HEAD_DIM_V": padded(width_v), "WIDTH": width, "WIDTH_V": width_v,
    }  # fmt: skip


def padded(width: int) -> int:
    """The power of two that a tile has for rows of ``width``; a matmul takes 16 at least."""
    return max(16, triton.next_power_of_2(width))


def forward_portable(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, Sq, H, Dv), contiguous, in q's dtype, and log-sum-exp (B, H, Sq), float32, natural log.

    q is (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv), H a multiple of Hk, D and Dv up to 256, last dimension
    contiguous, other strides as they come, also 0; CUDA, bf16 or fp16, no size zero. ``scale`` is positive. Causal and
    ``window`` (left, right), -1 for all, are bottom-right aligned; ``softcap`` caps scores at that by tanh, 0.0 not.
    A row that sees no key gives zeros and +inf. With ``sequences`` B is 1 and the rows are packed.

    Raises ValueError for a head_dim above 256.
    """
    import torch

    batch, seq_len, heads, width = q.shape
    seq_len_kv, heads_kv, width_v = v.shape[1:]
    widest = padded(max(width, width_v))
    if widest > LARGEST_HEAD_DIM:
        raise ValueError(
            f"head_dim is {max(width, width_v)}; the portable forward takes up to {LARGEST_HEAD_DIM}"
        )
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
    tiles = forward_tiles(widest, capability)
    out = torch.empty((batch, seq_len, heads, width_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, seq_len), dtype=torch.float32, device=q.device)
    num_m, tables = -(-seq_len // tiles.block_m), (None, None, None)
    with torch.cuda.device_of(q):
        if sequences is not None:
            plan = plan_sequences(
                sequences, seq_len, seq_len_kv, block_m=tiles.block_m, block_n=tiles.block_n, causal=causal,
                window=window, descending=False,
            )  # fmt: skip
            num_m, tables = plan.max_q_tiles, (plan.q_tiles, plan.counts, sequences.cu_seqlens_k)
        forward_tile[(batch * heads * num_m,)](
            q, k, v, out, lse, *tables, heads, heads // heads_kv, num_m,
            *(x.stride(axis) for x in (q, k, v) for axis in range(3)), seq_len, seq_len_kv, *reaches(causal, window),
            *score_factors(scale, softcap), **kernel_constants(tiles, width, width_v, causal, window, softcap != 0),
            **main_options(tiles),
        )  # fmt: skip
    return out, lse
