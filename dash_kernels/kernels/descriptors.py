"""Tensor descriptors for the copy engine: Triton checks the first of a kind, those after it are copies with another base."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dash_kernels.kernels.hopper_shared import ROWS_END

if TYPE_CHECKING:
    from torch import Tensor

LONGEST_AXIS = 0x7FFF0000


def rows_template(
    tensor: Tensor, rows: int, cols: int, layout: Any, packed: bool
) -> dict[str, Any]:
    """For :func:`filled`: a (B, S, H, D) tensor in tiles of ``rows`` rows of one head; rows past S and columns from D to
    ``cols`` read as zeros.

    Packed sequences (B is 1): (ROWS_END, ROWS_END, H, ROWS_END, D). A row coordinate that ends at ROWS_END at a sequence's
    end is in bounds up to there, and the first two coordinates, ROWS_END and the end's row, bring the address back: the
    strides add up to a multiple of 2**64 bytes.
    """
    batch, seq_len, heads, head_dim = tensor.shape
    # A dimension of one entry may have any stride in torch; the copy engine wants a multiple of 16 bytes.
    sb, ss, sh = (tensor.stride(i) if tensor.shape[i] > 1 else head_dim for i in range(3))
    shape: tuple[int, ...] = (batch, heads, seq_len, head_dim)
    strides: tuple[int, ...] = (sb, sh, ss, 1)
    if packed:
        shape = (LONGEST_AXIS, LONGEST_AXIS, heads, ROWS_END.value, head_dim)
        strides = (2**34 - ss, ss, sh, ss, 1)
    return template(tensor, shape, strides, (*outer_axes(packed), rows, cols), layout)


def filled(kind: dict[str, Any], tensor: Tensor) -> Any:
    """The descriptor of a tensor of the kind that a template is of."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(kind, base=tensor)
    return descriptor


def outer_axes(packed: bool) -> list[int]:
    """Axes of a tile before its rows: batch and head, or of packed sequences two of their bounds and head."""
    return [1, 1, 1] if packed else [1, 1]


@functools.cache
def tile_layout(rows: int, cols: int, dtype: Any, packed: bool = False) -> Any:
    """Shared-memory layout of so many rows of a tensor."""
    return gl.NVMMASharedLayout.get_default_for([*outer_axes(packed), rows, cols], dtype)


def template(
    tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], layout: Any
) -> dict[str, Any]:  # fmt: skip
    """For :func:`filled`; Triton checks the descriptor."""
    checked = TensorDescriptor(tensor, list(shape), list(strides), list(block), layout)
    return {name: value for name, value in vars(checked).items() if name != "base"}
