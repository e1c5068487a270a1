"""Numerics keys: a hash of all that can change the bits of a result, and of nothing that cannot.

Equal keys promise equal bits for equal inputs; launch order, interleaved heads, stages, signal mode and SM margin are
left out because they cannot change an order of addition.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from typing import Any

from dash_kernels.problem import Config, padded_head_dim

logger = logging.getLogger("dash_kernels")

FORWARD_BACKEND = "aten-flash-varlen"
FLOATING_POINT_FUSION = (
    True  # set explicitly by the launcher: Triton's own default changes between releases
)
_BIT_FIELDS = ("backend", "schedule", "group", "policy", "block_m", "block_n", "num_warps")
_ENVIRONMENT_FIELDS = ("capability", "torch", "triton", "ptxas", "kernel_hash")


class NumericsError(RuntimeError):
    """This process would compute other bits than the key it was asked to keep; the message says what differs."""


def config_key(config: Config, *, dtype: str, head_dim: int, environment: dict[str, Any]) -> str:
    """Numerics key of one config on one environment (as :func:`dash_kernels.device.environment` gives it).

    ``head_dim`` counts by the kernel that serves it: 64 or 128.
    """
    return _digest(_bits(config, dtype, head_dim) | {"environment": _environment_bits(environment)})


def numerics_key(device: int | str | None = None) -> str:
    """Key of everything this process would use: environment, lookup table and default rule. Store it in a checkpoint.

    Two processes with this key pick configs of equal numerics for every problem. ``device`` is a CUDA index or a GPU
    name; the default is the current GPU.
    """
    from dash_kernels import dispatch

    return _digest(_process_bits(dispatch.frozen_source(device), device))


def require_numerics(key: str, device: int | str | None = None) -> None:
    """Raise NumericsError unless this process has numerics key ``key``; call it when resuming from a checkpoint."""
    mine = numerics_key(device)
    if mine != key:
        from dash_kernels import dispatch
        from dash_kernels.device import environment

        source = dispatch.frozen_source(device)
        software = _environment_bits(_environment_of(device, environment))
        raise NumericsError(
            f"numerics key is {mine}, the checkpoint asks for {key}: gradients would differ in bits. Here: "
            f"table {source.release} ({source.digest[:12] or 'default rule'}), "
            + ", ".join(
                f"{name} {value}" for name, value in software.items() if name != "kernel_hash"
            )
            + ". Use the table (use_table or DASH_TABLE) and the versions that wrote the checkpoint"
        )


def check_ranks(group: Any = None) -> None:
    """Raise NumericsError unless every rank of torch.distributed has the same table digest and numerics key.

    Call it once after ``init_process_group``. A single process passes; a job that has not initialised
    torch.distributed yet is told so.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                "torch.distributed is not initialised: call check_ranks() after init_process_group()"
            )
        return
    from dash_kernels import dispatch

    source = dispatch.frozen_source(None)
    mine = (source.release, source.digest, numerics_key())
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    odd = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if odd:
        what = "lookup table" if everyone[odd[0]][1] != everyone[0][1] else "numerics key"
        raise NumericsError(
            f"ranks {', '.join(map(str, odd[:8]))}{' and more' if len(odd) > 8 else ''} differ from rank 0 in their "
            f"{what}: rank 0 has {_say(everyone[0])}, rank {odd[0]} has {_say(everyone[odd[0]])}. "
            "Give every rank the same table and the same software"
        )
    logger.info("%d ranks agree: table %s, numerics key %s", len(everyone), source.release, mine[2])


def _say(answer: tuple[str, str, str]) -> str:
    release, digest, key = answer
    return f"table {release} ({digest[:12] or 'default rule'}), key {key}"


def _bits(config: Config, dtype: str, head_dim: int) -> dict[str, Any]:
    return {
        **{name: getattr(config, name) for name in _BIT_FIELDS},
        "dtype": dtype,
        "head_dim": padded_head_dim(head_dim),
    }


def _environment_bits(environment: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: environment.get(name) for name in _ENVIRONMENT_FIELDS},
        "forward": FORWARD_BACKEND,
        "floating_point_fusion": FLOATING_POINT_FUSION,
    }


def _process_bits(source: Any, device: int | str | None) -> dict[str, Any]:
    from dash_kernels import dispatch
    from dash_kernels.device import environment

    cells = [
        [
            [p.mask, p.head_dim, p.dtype, p.head_group, p.seq_len, p.seq_len_kv, p.batch, p.heads],
            _bits(cell.served.config, p.dtype, p.head_dim),
        ]
        for cell in (source.table.cells if source.table else ())
        if cell.served is not None and cell.served.servable and (p := cell.problem)
    ]
    return {
        "cells": sorted(cells, key=lambda cell: json.dumps(cell[0])),
        "default_rule": dispatch.DEFAULT_RULE,
        "environment": _environment_bits(_environment_of(device, environment)),
    }


def _environment_of(device: int | str | None, environment: Any) -> dict[str, Any]:
    if not isinstance(device, str):
        return dict(environment(device))
    from dash_kernels.device import resolve_gpu

    capability = "{}.{}".format(*resolve_gpu(device).capability)
    return {**environment(), "capability": capability}


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
