"""Tensor descriptors for the copy engine: Triton checks the first of a kind, those after it are copies with another base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dash_kernels.kernels.hopper_shared import ROWS_END

if TYPE_CHECKING:
    from torch import Tensor

MOST_TEMPLATES = 4096
LONGEST_AXIS = 0x7FFF0000

# By what they depend on; layouts by id, which is quick, and which a template keeps from being used again.
_templates: dict[Any, dict[str, Any]] = {}


def describe(
    tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], layout: Any
) -> Any:  # fmt: skip
    key = shape, strides, block, id(layout), tensor.dtype
    template = _templates.get(key)
    if template is None:
        template = _template(key, tensor, shape, strides, block, layout)
    return _copy(template, tensor)


def describe_rows(tensor: Tensor, rows: int, cols: int, layout: Any, packed: bool) -> Any:
    """Descriptor of a (B, S, H, D) tensor in tiles of ``rows`` rows of one head; rows past S and columns from D to
    ``cols`` read as zeros.

    Packed sequences (B is 1): (ROWS_END, ROWS_END, H, ROWS_END, D). A row coordinate that ends at ROWS_END at a sequence's
    end is in bounds up to there, and the first two coordinates, ROWS_END and the end's row, bring the address back: the
    strides add up to a multiple of 2**64 bytes.
    """
    key = tensor.shape, tensor.stride(), rows, cols, packed, id(layout), tensor.dtype
    template = _templates.get(key)
    if template is None:
        batch, seq_len, heads, head_dim = tensor.shape
        # A dimension of one entry may have any stride in torch; the copy engine wants a multiple of 16 bytes.
        sb, ss, sh = (tensor.stride(i) if tensor.shape[i] > 1 else head_dim for i in range(3))
        shape, strides = (batch, heads, seq_len, head_dim), (sb, sh, ss, 1)
        if packed:
            shape = (LONGEST_AXIS, LONGEST_AXIS, heads, ROWS_END.value, head_dim)
            strides = (2**34 - ss, ss, sh, ss, 1)
        block = (*outer_axes(packed), rows, cols)
        template = _template(key, tensor, shape, strides, block, layout)
    return _copy(template, tensor)


def outer_axes(packed: bool) -> list[int]:
    """Axes of a tile before its rows: batch and head, or of packed sequences two of their bounds and head."""
    return [1, 1, 1] if packed else [1, 1]


def _template(
    key: Any, tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], layout: Any
) -> dict[str, Any]:  # fmt: skip
    checked = TensorDescriptor(tensor, list(shape), list(strides), list(block), layout)
    if len(_templates) >= MOST_TEMPLATES:
        _templates.clear()
    template = {name: value for name, value in vars(checked).items() if name != "base"}
    return _templates.setdefault(key, template)


def _copy(template: dict[str, Any], tensor: Tensor) -> Any:
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(template, base=tensor)
    return descriptor
