"""What a caller can get wrong: refused here by the argument's name, with the remedy, before anything is launched.

Shapes, dtypes and devices only: nothing here reads a tensor's contents or waits for a GPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from dash_kernels.problem import Config

MAX_HEAD_DIM = 256
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
DEVICES = ("cuda", "cpu", "meta")
BATCHED = "(batch, seq_len, heads, head_dim)"
PACKED = "(total, heads, head_dim) with cu_seqlens"


def check_tensors(q: Any, k: Any, v: Any, packed: bool) -> None:
    """Raise TypeError or ValueError unless q, k and v go together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; give a tensor")
    check = check_layouts if torch.compiler.is_compiling() else _check_layouts_once
    check(
        (q.shape, k.shape, v.shape),
        (q.dtype, k.dtype, v.dtype),
        (q.device, k.device, v.device),
        packed,
    )


def check_layouts(
    shapes: tuple[Any, ...], dtypes: tuple[Any, ...], devices: tuple[Any, ...], packed: bool
) -> None:
    """What :func:`check_tensors` asks of the shapes, dtypes and devices of q, k and v."""
    names = "q", "k", "v"
    for name, shape in zip(names, shapes, strict=True):
        if len(shape) != (3 if packed else 4):
            raise ValueError(
                f"{name} has {len(shape)} dimensions; give {PACKED if packed else BATCHED}"
            )
    for name, dtype, device in zip(names, dtypes, devices, strict=True):
        if dtype not in DTYPES:
            raise TypeError(
                f"{name} is {dtype}; attention takes bfloat16 or float16: cast {name}, or run it under torch.autocast"
            )
        if dtype != dtypes[0]:
            raise TypeError(f"{name} is {dtype} but q is {dtypes[0]}; give one dtype")
        if device != devices[0]:
            raise ValueError(
                f"{name} is on {device} but q is on {devices[0]}; move them to one device"
            )
    if devices[0].type not in DEVICES:
        raise ValueError(
            f"q is on {devices[0]}; attention runs on CUDA tensors, and on CPU tensors by reference"
        )
    q, k, v = shapes
    if not packed and k[0] != q[0]:
        raise ValueError(f"k has batch {k[0]} but q has {q[0]}")
    if k[-1] != q[-1]:
        raise ValueError(f"k has head_dim {k[-1]} but q has {q[-1]}")
    if v[:-1] != k[:-1]:
        raise ValueError(
            f"v is {tuple(v)} but k is {tuple(k)}; they may differ in the last dimension only"
        )
    for name, dim in (("head_dim", q[-1]), ("head_dim of v", v[-1])):
        if dim > MAX_HEAD_DIM:
            raise ValueError(f"{name} is {dim}; this release runs up to {MAX_HEAD_DIM}")
        if dim % 8 or dim == 0:
            raise ValueError(f"{name} is {dim}; it must be a multiple of 8: pad with zeros")
    heads, heads_kv = q[-2], k[-2]
    if heads == 0 or heads_kv == 0 or heads % heads_kv:
        raise ValueError(f"q has {heads} heads and k has {heads_kv}; q's must be a multiple of k's")


_check_layouts_once = functools.lru_cache(maxsize=4096)(check_layouts)


def check_sequences(
    q: Tensor, k: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any
) -> None:
    """Raise TypeError or ValueError unless these describe packed sequences of q and k."""
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(starts, Tensor):
            raise TypeError(
                f"{name} is a {type(starts).__name__}; give an int32 tensor of batch + 1 starts"
            )
        if starts.dtype != torch.int32:
            raise TypeError(f"{name} is {starts.dtype}; it must be torch.int32")
        if starts.ndim != 1 or starts.shape[0] < 2:
            raise ValueError(
                f"{name} is {tuple(starts.shape)}; give (batch + 1,) starts, the first 0, the last the number of rows"
            )
        if starts.device != q.device:
            raise ValueError(
                f"{name} is on {starts.device} but q is on {q.device}; move it to one device"
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k has {cu_seqlens_k.shape[0]} starts but cu_seqlens_q has {cu_seqlens_q.shape[0]}"
        )
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(longest, Tensor) or not isinstance(longest, int):
            raise TypeError(
                f"{name} is a {type(longest).__name__}; give the longest length as an int, known without a wait"
            )
        if longest < 0:
            raise ValueError(f"{name} is {longest}; it must be 0 or more")


def check_sink(sink: Any, q: Tensor) -> None:
    """Raise TypeError or ValueError unless ``sink`` is one logit for each head of q."""
    if not isinstance(sink, Tensor):
        raise TypeError(f"sink is a {type(sink).__name__}; give a tensor of one logit a head")
    if sink.shape != (q.shape[-2],):
        raise ValueError(
            f"sink is {tuple(sink.shape)}; it must be ({q.shape[-2]},), one logit a head of q"
        )
    if sink.dtype != torch.float32 and sink.dtype not in DTYPES:
        raise TypeError(f"sink is {sink.dtype}; give float32, bfloat16 or float16")
    if sink.device != q.device:
        raise ValueError(f"sink is on {sink.device} but q is on {q.device}; move it to one device")


def check_scale(scale: Any, softcap: Any) -> None:
    """Raise TypeError or ValueError unless both are numbers that attention can take."""
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is None or isinstance(value, str | bytes):
            raise TypeError(f"{name} is {value!r}; give a number")
        if isinstance(value, Tensor) and value.requires_grad:
            raise TypeError(
                f"{name} requires a gradient, which attention does not give it; give a number, or detach it"
            )
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}; it must be a positive number")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; give a positive number, or 0 for none")


def settle_window(window_size: Any, causal: bool) -> tuple[bool, int, int]:
    """(causal, left, right) of a mask: -1 is unlimited, as None is; a right side of 0 is causal, and -1 then.

    Raises ValueError for what is not (left, right) keys on each side of a query's own position.
    """
    if window_size == (-1, -1):
        return bool(causal), -1, -1
    try:
        left, right = (-1 if side is None else side for side in window_size)
    except (TypeError, ValueError):
        raise ValueError(f"window_size is {window_size!r}; give (left, right)") from None
    for side in (left, right):
        if not isinstance(side, int) or isinstance(side, bool) or side < -1:
            raise ValueError(
                f"window_size is {(left, right)}; each side is a number of keys, or -1 for all"
            )
    left, right = (side if side < 2**31 - 1 else -1 for side in (left, right))
    if causal or right == 0:
        return True, left, -1
    return False, left, right


def check_policy(config: Any, deterministic: bool, sm_margin: Any) -> None:
    """Raise unless ``config`` and ``deterministic`` ask for the same thing, and the caller may have it."""
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config is a {type(config).__name__}; give a dash_kernels.Config")
    if not isinstance(sm_margin, int) or sm_margin < 0:
        raise ValueError(f"sm_margin is {sm_margin}; it counts SMs to leave free, 0 or more")
    if not deterministic:
        if (
            torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled()
        ):
            raise RuntimeError(
                "deterministic=False asks for the unordered backward, but torch.use_deterministic_algorithms is on; "
                "drop one of the two"
            )
        if config is not None and config.deterministic:
            raise ValueError(
                f"config.policy is {config.policy!r} but deterministic=False; pin one or the other"
            )
    elif config is not None and not config.deterministic:
        raise ValueError(
            "config.policy is 'unordered', which is not deterministic; add deterministic=False"
        )


def refuse_unsupported(**arguments: Any) -> None:
    """Raise NotImplementedError naming the first argument that asks for something this release lacks."""
    for name, value in arguments.items():
        if value is not None and (isinstance(value, Tensor) or value):
            said = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(
                f"{name} is {said}; this release does not support {name}: leave it out"
            )
