"""Numerics keys: a hash of all that can change the bits of a result, and of nothing that cannot.

Equal keys promise equal bits for equal inputs; launch order, interleaved heads, stages, signal mode and SM margin are
left out because they cannot change an order of addition.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from typing import TYPE_CHECKING, Any

from dash_kernels.problem import Config, Problem, padded_head_dim

if TYPE_CHECKING:
    from dash_kernels.lookup import Entry

logger = logging.getLogger("dash_kernels")

FORWARD_BACKEND = "hopper, aten-flash-varlen, portable"  # the rule of kernels/forward.py
FLOATING_POINT_FUSION = (
    True  # set explicitly by the launcher: Triton's own default changes between releases
)
_BIT_FIELDS = ("backend", "schedule", "group", "policy", "block_m", "block_n", "num_warps")
_ENVIRONMENT_FIELDS = ("capability", "torch", "triton", "ptxas", "kernel_hash")


class NumericsError(RuntimeError):
    """This process would compute other bits than the key it was asked to keep; the message says what differs."""


def config_key(config: Config, *, dtype: str, head_dim: int, environment: dict[str, Any]) -> str:
    """Numerics key of one config on one environment (as :func:`dash_kernels.device.environment` gives it).

    ``head_dim`` counts as 64, 128 or 256, whichever it fits in; among kernels of more widths ``config``'s tile tells.
    """
    return _digest(_bits(config, dtype, head_dim) | {"environment": _environment_bits(environment)})


def same_bits(
    one: Entry, its_environment: dict[str, Any], two: Entry, other: dict[str, Any], problem: Problem
) -> bool:
    """Whether two entries of lookup tables give equal bits for ``problem``: by their stored keys, else by new ones."""
    if one.numerics_key and two.numerics_key:
        return one.numerics_key == two.numerics_key
    keys = {
        config_key(
            entry.config, dtype=problem.dtype, head_dim=problem.head_dim, environment=environment
        )
        for entry, environment in ((one, its_environment), (two, other))
    }
    return len(keys) == 1


def numerics_key(device: int | str | None = None) -> str:
    """Key of everything this process would use: environment, lookup table and default rule. Store it in a checkpoint.

    Two processes with this key pick configs of equal numerics for every problem. ``device`` is a CUDA index or a GPU
    name; the default is the current GPU.
    """
    from dash_kernels import dispatch

    return _digest(_process_bits(dispatch.frozen_source(device), _environment_of(device)))


def require_numerics(key: str, device: int | str | None = None) -> None:
    """Make this process use configs of numerics key ``key``, or stop; call it when resuming from a checkpoint.

    Where nothing was chosen yet and the table in force has another key, the shipped table and every table fetched on
    this machine are looked through for the one that has it: a checkpoint resumes on its own table though a newer
    release is in force. Raises NumericsError where none has, naming what differs.
    """
    from dash_kernels import dispatch

    fresh = not dispatch.is_frozen()
    source = dispatch.source_in_force(device)
    environment = _environment_of(device)
    mine = _digest(_process_bits(source, environment))
    if mine == key:
        dispatch.freeze(device, source)
        return
    if fresh:
        for other in dispatch.other_sources(device):
            if _digest(_process_bits(other, environment)) == key:
                dispatch.freeze(device, other)
                logger.info("table %s is used: it has numerics key %s", other.release, key)
                return
    said = ", ".join(
        f"{name} {value}"
        for name, value in _environment_bits(environment).items()
        if name != "kernel_hash"
    )
    raise NumericsError(
        f"numerics key is {mine}, the checkpoint asks for {key}: gradients would differ in bits. Here: "
        f"table {source.release} ({source.digest[:12] or 'default rule'}), {said}. "
        "Use the table (use_table or DASH_TABLE) and the versions that wrote the checkpoint"
    )


def check_ranks(group: Any = None) -> None:
    """Raise NumericsError unless every rank of torch.distributed has the same table digest and numerics key.

    Call it once after ``init_process_group``. A rank whose table cannot be read fails on every rank, by number, instead
    of leaving the others waiting. A single process passes; a job that has not initialised torch.distributed yet is
    told so.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                "torch.distributed is not initialised: call check_ranks() after init_process_group()"
            )
        return
    mine = _identity()
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    broken = [rank for rank, other in enumerate(everyone) if other[0] is None]
    if broken:
        raise NumericsError(
            f"{_ranks(broken)} have no lookup table to compare; rank {broken[0]} says: {everyone[broken[0]][1]}"
        )
    odd = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if odd:
        what = "lookup table" if everyone[odd[0]][1] != everyone[0][1] else "numerics key"
        raise NumericsError(
            f"{_ranks(odd)} differ from rank 0 in their {what}: rank 0 has {_say(everyone[0])}, rank {odd[0]} has "
            f"{_say(everyone[odd[0]])}. Give every rank the same table and the same software"
        )
    logger.info("%d ranks agree: table %s, numerics key %s", len(everyone), mine[0], mine[2])


def _identity() -> tuple[str | None, str, str]:
    """(release, digest, numerics key) of this process; (None, why, "") where it has none."""
    from dash_kernels import dispatch

    try:
        source = dispatch.frozen_source(None)
        return source.release, source.digest, numerics_key()
    except (ValueError, RuntimeError, OSError) as error:
        return None, str(error), ""


def _ranks(numbers: list[int]) -> str:
    return f"ranks {', '.join(map(str, numbers[:8]))}{' and more' if len(numbers) > 8 else ''}"


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


def _process_bits(source: Any, environment: dict[str, Any]) -> dict[str, Any]:
    from dash_kernels.default_rule import DEFAULT_RULE

    cells = [
        [
            [p.mask, p.head_dim, p.dtype, p.head_group, p.seq_len, p.seq_len_kv, p.batch, p.heads, p.options()],
            _bits(cell.served.config, p.dtype, p.head_dim),
        ]
        for cell in (source.table.cells if source.table else ())
        if cell.served is not None and cell.served.servable and (p := cell.problem)
    ]  # fmt: skip
    return {
        "cells": sorted(cells, key=lambda cell: json.dumps(cell[0], sort_keys=True)),
        "default_rule": DEFAULT_RULE,
        "environment": _environment_bits(environment),
    }


def _environment_of(device: int | str | None) -> dict[str, Any]:
    from dash_kernels.device import environment, resolve_gpu

    if not isinstance(device, str):
        return dict(environment(device))
    capability = "{}.{}".format(*resolve_gpu(device).capability)
    return {**environment(), "capability": capability}


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
