"""Rows of a packed tensor that belong to no sequence: kernels never visit them, so they are cleared here.

Where the last sequence ends is known on the device only. A few programs read it there and write what is left, which is
nothing at all in most calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

PROGRAMS = 32
TAIL_OPTIONS = {"num_warps": 4, "num_stages": 1, "BLOCK": 512}


@triton.jit
def clear_rows(end, rows, total, width, row_stride, column_stride, value, BLOCK: tl.constexpr):
    """Fill rows from ``*end`` to ``total`` with ``value``, every num_programs-th one."""
    columns = tl.arange(0, BLOCK)
    for row in range(tl.load(end) + tl.program_id(0), total, tl.num_programs(0)):
        for first in range(0, width, BLOCK):
            line = (tl.zeros((BLOCK,), tl.int64) + row) * row_stride
            at = line + (first + columns).to(tl.int64) * column_stride
            filled = tl.full((BLOCK,), value, tl.float32).to(rows.dtype.element_ty)
            tl.store(rows + at, filled, mask=first + columns < width)


@triton.jit(do_not_specialize=["total", "width", "heads"])
def clear_outputs(end, out, lse, total, width, heads, BLOCK: tl.constexpr):
    if tl.program_id(1) == 0:
        clear_rows(end, out, total, width, width, 1, 0.0, BLOCK)
    else:
        clear_rows(end, lse, total, heads, 1, total, float("inf"), BLOCK)


@triton.jit(do_not_specialize=["total_q", "total_k", "width_q", "width_k", "width_v"])
def clear_gradients(
    end_q, end_k, dq, dk, dv, total_q, total_k, width_q, width_k, width_v, BLOCK: tl.constexpr
):
    which = tl.program_id(1)
    if which == 0:
        clear_rows(end_q, dq, total_q, width_q, width_q, 1, 0.0, BLOCK)
    elif which == 1:
        clear_rows(end_k, dk, total_k, width_k, width_k, 1, 0.0, BLOCK)
    else:
        clear_rows(end_k, dv, total_k, width_v, width_v, 1, 0.0, BLOCK)


def clear_output_tail(cu_seqlens_q: Tensor, out: Tensor, lse: Tensor) -> None:
    """``out`` (total, H, D) becomes zeros and ``lse`` (H, total) +inf past the last sequence; both contiguous."""
    import torch

    total, heads, head_dim = out.shape
    with torch.cuda.device_of(out):
        clear_outputs[(PROGRAMS, 2)](
            cu_seqlens_q[-1:], out, lse, total, heads * head_dim, heads, **TAIL_OPTIONS
        )


def clear_gradient_tails(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Gradients (total, H, D), contiguous, become zeros past the last sequence."""
    import torch

    with torch.cuda.device_of(dq):
        clear_gradients[(PROGRAMS, 3)](
            cu_seqlens_q[-1:], cu_seqlens_k[-1:], dq, dk, dv, dq.shape[0], dk.shape[0],
            *(x.shape[1] * x.shape[2] for x in (dq, dk, dv)), **TAIL_OPTIONS,
        )  # fmt: skip
