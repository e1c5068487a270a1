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
        template = _keep(key, _template(tensor, shape, strides, block, layout))
    return filled(template, tensor)


def describe_rows(tensor: Tensor, rows: int, cols: int, layout: Any, packed: bool) -> Any:
    """Descriptor of a tensor as :func:`rows_template` says."""
    key = tensor.shape, tensor.stride(), rows, cols, packed, id(layout), tensor.dtype
    template = _templates.get(key)
    if template is None:
        template = _keep(key, rows_template(tensor, rows, cols, layout, packed))
    return filled(template, tensor)


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
    return _template(tensor, shape, strides, (*outer_axes(packed), rows, cols), layout)


def filled(template: dict[str, Any], tensor: Tensor) -> Any:
    """The descriptor of a tensor of the template's kind."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(template, base=tensor)
    return descriptor


def outer_axes(packed: bool) -> list[int]:
    """Axes of a tile before its rows: batch and head, or of packed sequences two of their bounds and head."""
    return [1, 1, 1] if packed else [1, 1]


def _template(
    tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], layout: Any
) -> dict[str, Any]:  # fmt: skip
    checked = TensorDescriptor(tensor, list(shape), list(strides), list(block), layout)
    return {name: value for name, value in vars(checked).items() if name != "base"}


def _keep(key: Any, template: dict[str, Any]) -> dict[str, Any]:
    if len(_templates) >= MOST_TEMPLATES:
        _templates.clear()
    _templates[key] = template
    return template
