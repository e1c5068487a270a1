"""The dQ pass of two_pass: a CTA owns a Q tile of one query head and adds up its KV tiles, with no turnstile.

The main kernel has left dQ out; this pass computes scores and dP once more (seven matmuls in all, counted as five).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dash_kernels.kernels import sequences
from dash_kernels.kernels.portable_tiles import first_rows, load_tile, sees, store_tile, tanh
from dash_kernels.kernels.sequences import kv_bounds

Q_TILE_WORDS = tl.constexpr(sequences.Q_TILE_WORDS)


@triton.jit
def add_kv_tiles(
    dq, q, dout, lse2, delta, first, last, k, v, stride_ks, stride_vs, row, seq_len, seq_len_kv, left, right,
    scale_log2, cap_log2,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
):  # fmt: skip
    for n_block in range(first, last):
        col = n_block * BLOCK_N
        k_tile = load_tile(k, stride_ks, col, seq_len_kv, MASK, BLOCK_N, HEAD_DIM)
        v_tile = load_tile(v, stride_vs, col, seq_len_kv, MASK, BLOCK_N, HEAD_DIM_V)
        scores = tl.dot(q, tl.trans(k_tile)) * scale_log2
        if SOFTCAP:
            capped = tanh(scores)
            p = tl.math.exp2(capped * cap_log2 - lse2[:, None])
        else:
            p = tl.math.exp2(scores - lse2[:, None])
        if MASK:
            first_row = first_rows(col, row, seq_len, seq_len_kv, right, CAUSAL, WINDOWED, BLOCK_N)
            seen = sees(tl.arange(0, BLOCK_M)[:, None], first_row[None, :], left, right, WINDOWED)
            p = tl.where(seen, p, 0.0)
        if SOFTCAP:
            p *= 1.0 - capped * capped
        ds = (p * (tl.dot(dout, tl.trans(v_tile)) - delta[:, None])).to(q.dtype)
        dq = tl.dot(ds, k_tile, dq)
    return dq


@triton.jit(do_not_specialize=["heads", "group", "num_m", "seq_len", "seq_len_kv", "left", "right"])
def dq_tiles(
    q, k, v, dout, lse2, delta, dq, tiles, counts, cu_seqlens_k, heads, group, num_m,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_gb, stride_gs, stride_gh, seq_len, seq_len_kv, left, right, scale, scale_log2, cap_log2,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
):  # fmt: skip
    """dQ by ascending KV tile; the Q tiles with most of them are launched first.

    Packed sequences: ``tiles`` and ``counts`` of a SequencePlan, ``cu_seqlens_k`` of its sequences, else None.
    """
    program = tl.program_id(0)
    head = program // num_m
    m_block = num_m - 1 - program % num_m
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    q += b * stride_qb + h * stride_qh
    dout += b * stride_gb + h * stride_gh
    k += b * stride_kb + h // group * stride_kh
    v += b * stride_vb + h // group * stride_vh
    dq += (b * seq_len * heads + h) * HEAD_DIM
    padded = (head.to(tl.int64) * num_m + m_block) * BLOCK_M
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
        dout += q_start * stride_gs
        dq += q_start * heads * HEAD_DIM
        k += k_start * stride_ks
        v += k_start * stride_vs
    row = m_block * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    q_tile = load_tile(q, stride_qs, row, seq_len, True, BLOCK_M, HEAD_DIM)
    dout_tile = load_tile(dout, stride_gs, row, seq_len, True, BLOCK_M, HEAD_DIM_V)
    lse2_rows = tl.load(lse2 + padded + rows)
    delta_rows = tl.load(delta + padded + rows)

    bounds = kv_bounds(m_block, seq_len, seq_len_kv, left, right, BLOCK_M, BLOCK_N)
    dq_tile = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for section in tl.static_range(3):  # masked by a window's left edge, plain, masked
        if WINDOWED or section > 0:
            dq_tile = add_kv_tiles(
                dq_tile, q_tile, dout_tile, lse2_rows, delta_rows, bounds[section], bounds[section + 1],
                k, v, stride_ks, stride_vs, row, seq_len, seq_len_kv, left, right, scale_log2, cap_log2,
                section != 1, CAUSAL, WINDOWED, SOFTCAP, BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_DIM_V,
            )  # fmt: skip
    store_tile(dq, heads * HEAD_DIM, row, seq_len, dq_tile * scale, BLOCK_M, HEAD_DIM)
