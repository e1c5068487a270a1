"""Attention on CPU tensors: the float64 reference, rounded once to the tensors' own dtypes.

Slow and exact. Options mean what they mean on a GPU; what only a reader of cu_seqlens can tell is refused here.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import torch
from torch import Tensor

from dash_kernels import reference
from dash_kernels.device import nvidia_gpu_present
from dash_kernels.execute import Options, decode_config
from dash_kernels.schedules import SCHEDULES


def forward(
    options: Options, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp as :func:`dash_kernels.execute.run_forward` gives them."""
    _warn_if_a_gpu_stands_idle()
    if options.names:
        schedule = decode_config(options.names, options.numbers).schedule
        if schedule not in SCHEDULES:
            raise ValueError(
                f"config.schedule is {schedule!r}; choose one of {', '.join(SCHEDULES)}"
            )
    how = _of_reference(sink, options)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        out, lse = reference.attention_forward(q, k, v, **how)
    else:
        check_starts(options, q, k, cu_seqlens_q, cu_seqlens_k)
        out, lse = reference.packed_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, **how)
    return out.to(q.dtype).contiguous(), lse.float().contiguous()


def backward(
    options: Options, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients as :func:`dash_kernels.execute.run_backward` gives them."""
    how = _of_reference(sink, options) | {"dlse": dlse}
    if cu_seqlens_q is None or cu_seqlens_k is None:
        grads = reference.attention_gradients(dout, q, k, v, **how)
    else:
        grads = reference.packed_gradients(dout, q, k, v, cu_seqlens_q, cu_seqlens_k, **how)
    dq, dk, dv = (grad.to(q.dtype).contiguous() for grad in grads[:3])
    dsink = None if sink is None or grads.dsink is None else grads.dsink.to(sink.dtype)
    return dq, dk, dv, dsink


def _of_reference(sink: Tensor | None, options: Options) -> dict[str, Any]:
    return {
        "causal": options.causal,
        "scale": options.scale,
        "window": (options.window_left, options.window_right),
        "softcap": options.softcap,
        "sink": sink,
    }


def check_starts(
    options: Options, q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> None:
    """Raise ValueError unless both starts describe sequences of q and k that are no longer than was said."""
    _check_starts("q", cu_seqlens_q, q.shape[0], options.max_seqlen_q)
    _check_starts("k", cu_seqlens_k, k.shape[0], options.max_seqlen_k)


def _check_starts(name: str, cu_seqlens: Tensor, total: int, longest: int) -> None:
    """Raise ValueError unless these starts rise within the tensor and no sequence is longer than was said."""
    starts = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    if starts[0] != 0 or min(lengths) < 0 or starts[-1] > total:
        raise ValueError(
            f"cu_seqlens_{name} is {starts}; it must rise from 0 to at most {total}, the rows of {name}"
        )
    if max(lengths) > longest:
        raise ValueError(
            f"max_seqlen_{name} is {longest} but a sequence has {max(lengths)} rows; give the longest length"
        )


@functools.cache
def _warn_if_a_gpu_stands_idle() -> None:
    if torch.version.cuda is None and nvidia_gpu_present():
        warnings.warn(
            f"CPU tensors are served by the float64 reference, slowly: this machine has an NVIDIA GPU but PyTorch "
            f"{torch.__version__} is a build without CUDA; reinstall torch with CUDA to use it",
            RuntimeWarning,
            stacklevel=2,
        )
