"""The attention backwards that stand beside ours: PyTorch's SDPA kernels and flash-attn-4, where installed.

Each peer is a function (cell) -> a call that runs its whole backward and answers dq, dk, dv in (B, S, H, D). Names
are those of earlier side-by-side files; ``_det`` is the peer's own deterministic mode.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from dash_kernels.problem import Problem
from tuner.gates import Cell

Run = Callable[[], Any]


def available() -> dict[str, Callable[[Cell], Run]]:
    """Peers that can be imported here, by name."""
    found: dict[str, Callable[[Cell], Run]] = {}
    if importlib.util.find_spec("torch"):
        found["sdpa_fa2_det"] = lambda cell: _sdpa_flash(cell, True)
        found["sdpa_fa2_nondet"] = lambda cell: _sdpa_flash(cell, False)
        found["cudnn_det"] = lambda cell: _sdpa_cudnn(cell, True)
        found["cudnn_nondet"] = lambda cell: _sdpa_cudnn(cell, False)
    if fa4_version():
        found["fa4_det"] = lambda cell: _flash_attn_4(cell, True)
        found["fa4_nondet"] = lambda cell: _flash_attn_4(cell, False)
    return found


def fa4_version() -> str | None:
    """Version of the flash-attn-4 package, None where it is not installed."""
    try:
        return importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return None


def _flash_attn_4(cell: Cell, deterministic: bool) -> Run:
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute.interface import _flash_attn_bwd

    def run() -> Any:
        return _flash_attn_bwd(
            cell.q,
            cell.k,
            cell.v,
            cell.out,
            cell.dout,
            cell.lse,
            cell.scale,
            cell.problem.causal,
            deterministic=deterministic,
        )[:3]

    return run


def _sdpa_flash(cell: Cell, deterministic: bool) -> Run:
    torch, aten = cell.torch, cell.torch.ops.aten
    q, k, v, dout = _heads_first(cell)
    causal, scale = cell.problem.causal, cell.scale
    out, lse, *rest = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    starts_q, starts_k, max_q, max_k, seed, offset, _ = rest

    def run() -> Any:
        _deterministic(torch, deterministic)
        grads = aten._scaled_dot_product_flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            starts_q,
            starts_k,
            max_q,
            max_k,
            0.0,
            causal,
            seed,
            offset,
            scale=scale,
        )
        _deterministic(torch, False)
        return tuple(grad.transpose(1, 2) for grad in grads)

    return run


def _sdpa_cudnn(cell: Cell, deterministic: bool) -> Run:
    torch, aten = cell.torch, cell.torch.ops.aten
    q, k, v, dout = _heads_first(cell)
    causal, scale = cell.problem.causal, cell.scale
    out, lse, *rest = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    starts_q, starts_k, max_q, max_k, seed, offset, _ = rest

    def run() -> Any:
        _deterministic(torch, deterministic)
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            seed,
            offset,
            None,
            starts_q,
            starts_k,
            max_q,
            max_k,
            0.0,
            causal,
            scale=scale,
        )
        _deterministic(torch, False)
        return tuple(grad.transpose(1, 2) for grad in grads[:3])

    return run


def _heads_first(cell: Cell) -> tuple[Any, ...]:
    inputs = (cell.q, cell.k, cell.v, cell.dout)
    return tuple(x.transpose(1, 2).contiguous() for x in inputs)


def _deterministic(torch: Any, wanted: bool) -> None:
    """PyTorch's switch; without its filling of fresh memory, which is for finding bugs and would count as time."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(wanted, warn_only=True)


class Warmer:
    """Worker handler that makes a peer compile for a shape and leave the result in its cache on disk.

    flash-attn-4 compiles each variant for many seconds; a few processes do it side by side before the timing.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        self.torch = torch
        self.info: dict[str, Any] = {}

    def handle(self, task: dict[str, Any]) -> dict[str, Any]:
        cell = Cell(self.torch, Problem.from_dict(task["problem"]), 1)
        available()[task["peer"]](cell)()
        self.torch.cuda.synchronize()
        return {}

    def healthy(self) -> bool:
        return False
