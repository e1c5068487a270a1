"""dK and dV where several CTAs have shared the query heads of a KV head: their shares, added up in order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_up(
    shares, total, row, inside, SPLITS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr
):
    """``total`` (rows, WIDTH) from ``shares`` (rows, SPLITS, WIDTH): added in float32, rounded once."""
    cols = tl.arange(0, COLS)
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    source = shares + row[:, None] * (SPLITS * WIDTH) + cols[None, :]
    added = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    for share in tl.static_range(1, SPLITS):
        added += tl.load(source + share * WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        total + row[:, None] * WIDTH + cols[None, :], added.to(total.dtype.element_ty), mask=mask
    )


@triton.jit(do_not_specialize=["rows"])
def add_shares(
    dk_shares, dv_shares, dk, dv, rows,
    SPLITS: tl.constexpr, COLS: tl.constexpr, COLS_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS (token, KV head) pairs a program. Shares of dK have WIDTH columns, of dV WIDTH_V; COLS are powers of two."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    add_up(dk_shares, dk, row, inside, SPLITS, COLS, WIDTH)
    add_up(dv_shares, dv, row, inside, SPLITS, COLS_V, WIDTH_V)
