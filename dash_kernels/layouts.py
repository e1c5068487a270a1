"""Which tensors the kernels read in place, and copies of those that they cannot."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BASE_BYTES = 16  # what a TMA descriptor and a 128-bit load ask of a base address
STRIDE_ELEMENTS = (
    16  # strides that are no multiple compile to another kernel, which may add in another order
)


def kernel_ready(x: Tensor, *, copies: bool = True, elements: int = STRIDE_ELEMENTS) -> Tensor:
    """``x`` (B, S, H, D) if the kernels can read it in place, else a contiguous copy.

    They need the last dimension contiguous, the other strides multiples of so many ``elements``, and a 16-byte aligned
    base; a dimension of size 1 counts too, since its stride is written into the TMA descriptor. ``copies``: a stride of
    0 (one head shown to many) is copied as well; only TMA needs that.
    """
    batch, row, head, column = x.stride()
    ready = (
        column == 1
        and not (batch | row | head) % elements
        and not (copies and not (batch and row and head))
        and not x.data_ptr() % BASE_BYTES
    )
    return x if ready else x.clone(memory_format=torch.contiguous_format)


def pad_head_dim(x: Tensor, head_dim: int) -> Tensor:
    """``x`` with its last dimension filled up with zeros to ``head_dim``; ``x`` itself when it has that already."""
    missing = head_dim - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x
