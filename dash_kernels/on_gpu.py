"""Attention on CUDA tensors: the config looked up, rows padded and copied where kernels need it, kernels launched."""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_kernels.checks import DTYPES
from dash_kernels.compile_lock import compile_once
from dash_kernels.execute import Options, decode_config
from dash_kernels.layouts import kernel_ready, pad_head_dim
from dash_kernels.problem import Config, Problem, kernel_dims, supports, walked_heads
from dash_kernels.schedules import Launch, TileGrid


class Plan(NamedTuple):
    """How the kernels are called for these shapes: ``window`` is (-1, -1) where it hides nothing."""

    config: Config
    window: tuple[int, int]
    head_dim: int
    head_dim_v: int
    strict: bool  # the backward reads through TMA
    name: str  # of the kernels that run

    def first(self, what: str) -> AbstractContextManager[None]:
        """The lock of a first launch, which compiles: the processes of a host compile a new kernel once."""
        if (what, self.name) in _launched:
            return _NO_LOCK
        _launched.add((what, self.name))
        return compile_once(f"{what} {self.name}")


_NO_LOCK: AbstractContextManager[None] = nullcontext()
_launched: set[tuple[str, str]] = set()  # by this process, of whatever shape


def forward(
    options: Options, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp as :func:`dash_kernels.execute.run_forward` gives them."""
    _require_triton()
    from dash_kernels.kernels import forward as kernels

    plan = resolve(q.shape, k.shape, v.shape[-1], q.dtype, q.device, _count(cu_seqlens_q), options)
    if cu_seqlens_q is None:
        sequences = None
    else:
        sequences = _sequences(cu_seqlens_q, cu_seqlens_k, options)
        q, k, v = q[None], k[None], v[None]
    with plan.first("forward"):
        out, lse = kernels.forward(
            q, k, v, causal=options.causal, scale=options.scale, window=plan.window, softcap=options.softcap,
            sequences=sequences,
        )  # fmt: skip
    if sink is not None:
        from dash_kernels.kernels.sinks import apply_sink

        lse = apply_sink(out, lse, sink)
    if sequences is None:
        return out, lse
    from dash_kernels.kernels.tails import clear_output_tail

    clear_output_tail(sequences.cu_seqlens_q, out[0], lse[0])
    return out[0], lse[0]


def backward(
    options: Options, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, out: Tensor, lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients as :func:`dash_kernels.execute.run_backward` gives them."""
    from dash_kernels.kernels import launch

    plan = resolve(q.shape, k.shape, v.shape[-1], q.dtype, q.device, _count(cu_seqlens_q), options)
    sequences = None
    if cu_seqlens_q is not None:
        sequences = _sequences(cu_seqlens_q, cu_seqlens_k, options)
        dout, q, k, v, out, lse = dout[None], q[None], k[None], v[None], out[None], lse[None]
        dlse = None if dlse is None else dlse[None]
    if dlse is not None:
        dlse = dlse.contiguous()
    dim, dim_v = q.shape[3], v.shape[3]
    q, k = (kernel_ready(pad_head_dim(x, plan.head_dim), copies=plan.strict) for x in (q, k))
    dout, v, out = (
        kernel_ready(pad_head_dim(x, plan.head_dim_v), copies=plan.strict) for x in (dout, v, out)
    )
    lse = lse.contiguous()
    with plan.first("backward"):
        dq, dk, dv = launch.backward(
            dout, q, k, v, out, lse, config=plan.config, causal=options.causal, scale=options.scale,
            window=plan.window, softcap=options.softcap, sequences=sequences, dlse=dlse, allow_resident=options.allow_resident,
            sm_margin=options.sm_margin,
        )  # fmt: skip
    dsink = None
    if sink is not None:
        from dash_kernels.kernels.sinks import sink_gradient

        dsink = sink_gradient(dout, out, lse, dlse, sink)
    if dim != plan.head_dim:
        dq, dk = dq[..., :dim].contiguous(), dk[..., :dim].contiguous()
    if dim_v != plan.head_dim_v:
        dv = dv[..., :dim_v].contiguous()
    if sequences is None:
        return dq, dk, dv, dsink
    from dash_kernels.kernels.tails import clear_gradient_tails

    clear_gradient_tails(sequences.cu_seqlens_q, sequences.cu_seqlens_k, dq[0], dk[0], dv[0])
    return dq[0], dk[0], dv[0], dsink


def _count(cu_seqlens: Tensor | None) -> int:
    """Number of packed sequences, 0 when they are not packed."""
    return 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, options: Options) -> Any:
    from dash_kernels.kernels.sequences import Sequences

    assert cu_seqlens_k is not None
    starts = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    return Sequences(*starts, options.max_seqlen_q, options.max_seqlen_k)


@functools.lru_cache(maxsize=4096)
def resolve(
    q_shape: torch.Size, k_shape: torch.Size, head_dim_v: int, dtype: torch.dtype, device: torch.device, sequences: int,
    options: Options,
) -> Plan:  # fmt: skip
    """The plan of these shapes on one GPU. Raises ValueError when a pinned config cannot or must not run them."""
    from dash_kernels import dispatch
    from dash_kernels.device import current_gpu

    seq_len, heads, head_dim = q_shape[-3:]
    seq_len_kv, heads_kv = k_shape[-3:-1]
    if sequences:
        # Lengths of at least 1 in name: a pack of empty sequences that has rows left over.
        seq_len, seq_len_kv = max(1, options.max_seqlen_q), max(1, options.max_seqlen_k)
    left, right = options.window_left, options.window_right
    left = -1 if left >= seq_len_kv - 1 else left
    right = -1 if right >= seq_len - 1 else right
    problem = Problem(
        mask="causal" if options.causal else "full",
        head_dim=head_dim,
        seq_len=seq_len,
        dtype=DTYPES[dtype],
        batch=sequences or q_shape[0],
        heads=heads,
        heads_kv=heads_kv,
        seq_len_kv=seq_len_kv,
        window_left=left,
        window_right=right,
        head_dim_v=head_dim_v,
        softcap=options.softcap > 0,
        varlen=sequences > 0,
    )
    if options.names:
        config, gpu = decode_config(options.names, options.numbers), current_gpu(device.index)
        support = supports(config, problem, gpu.capability)
        if not support:
            raise ValueError(f"config cannot run this problem: {support.reason}")
        if config.policy == "ordered" and not sequences:
            _check_resident(config, problem, gpu.sms, options)
    else:
        config = dispatch.choose(problem, device.index, deterministic=options.deterministic).config
    strict = config.backend == "hopper"
    dims = kernel_dims(problem, config.backend)
    form = problem.mask, problem.dtype, problem.windowed, problem.softcap, problem.varlen
    name = " ".join(map(str, (config.key(), *dims, *form)))
    return Plan(config, (left, right), *dims, strict, name)


def _check_resident(config: Config, problem: Problem, sms: int, options: Options) -> None:
    """Refuse already in the forward what the backward's launch would refuse: a kind that waits on later CTAs."""
    from dash_kernels.kernels.runtime import cooperative_grid, min_resident

    grid, launch = TileGrid.for_config(problem, config), Launch.for_config(config)
    needed = min_resident(
        config.schedule, config.group, grid, launch, *walked_heads(problem, config)
    )
    if needed > 1:
        cooperative_grid(config, needed, sms, sms, options.sm_margin, options.allow_resident)


@functools.cache
def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError(
            "attention on CUDA tensors needs Triton, which is not installed: pip install triton (Linux); "
            "CPU tensors are served by the float64 reference"
        )
