"""Public attention functions, their argument checks, and the torch.library ops behind them.

Everything a caller can get wrong is refused here, by the argument's name, before anything is launched. CUDA tensors
run PyTorch's flash forward and this package's backward; CPU tensors are served by the float64 reference.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dash_kernels import reference
from dash_kernels.device import nvidia_gpu_present
from dash_kernels.problem import Config, Problem, padded_head_dim, supports
from dash_kernels.schedules import SCHEDULES, Launch, TileGrid

MAX_HEAD_DIM = 128
ALIGNMENT = 16  # bytes: what a TMA descriptor and a 128-bit load ask of a base address and of each row stride
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_NAME_FIELDS = ("backend", "schedule", "policy", "signal", "launch_order")
_NUMBER_FIELDS = tuple(name for name in Config.__dataclass_fields__ if name not in _NAME_FIELDS)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    config: Config | None = None,
    deterministic: bool = True,
    allow_resident: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
) -> Any:
    """Softmax attention whose backward gives the same bits on every run.

    q is (batch, seq_len, heads, head_dim), k and v (batch, seq_len_kv, heads_kv, head_dim), bf16 or fp16, on one
    device; heads is a multiple of heads_kv, head_dim a multiple of 8 up to 128. ``causal`` is bottom-right aligned.
    ``scale`` defaults to head_dim ** -0.5. Returns the output in q's shape and dtype, and with ``return_lse`` also
    the log-sum-exp (batch, heads, seq_len), float32, which carries no gradient.

    ``config`` pins the backward by hand; by default it is looked up (:func:`dash_kernels.choose`).
    ``deterministic=False`` takes the unordered kernel. ``allow_resident`` permits schedules that wait on later CTAs,
    as a cooperative launch on all SMs but ``sm_margin``: beside communication kernels that need SMs such a launch
    can deadlock a job.

    Raises TypeError or ValueError naming the argument; NotImplementedError for what this release lacks.
    """
    _check_tensors(q, k, v)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}; it must be a positive number")
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config is a {type(config).__name__}; give a dash_kernels.Config")
    if sm_margin < 0:
        raise ValueError(f"sm_margin is {sm_margin}; it counts SMs to leave free, 0 or more")
    if not deterministic:
        _check_may_be_unordered()
        if config is not None and config.deterministic:
            raise ValueError(
                f"config.policy is {config.policy!r} but deterministic=False; pin one or the other"
            )
    elif config is not None and not config.deterministic:
        raise ValueError(
            "config.policy is 'unordered', which is not deterministic; add deterministic=False"
        )
    names, numbers = _encode(config)
    out, lse = torch.ops.dash.attention(
        q, k, v, causal, scale, names, numbers, deterministic, allow_resident, sm_margin
    )
    return (out, lse) if return_lse else out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = True,
    return_attn_probs: bool = False,
) -> Any:
    """flash-attn 2's function of this name, deterministic unless told otherwise. See :func:`attention`.

    With ``return_attn_probs`` the answer is (out, softmax_lse, None). Dropout, ALiBi, softcap and windows are refused
    by name (NotImplementedError).
    """
    refuse_unsupported(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    out = attention(
        q,
        k,
        v,
        causal=window_is_causal(window_size, causal),
        scale=softmax_scale,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )
    return (*out, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = True,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """flash-attn 2's function for packed sequences: not in this release, and it says so (NotImplementedError)."""
    raise NotImplementedError(VARLEN_MESSAGE)


VARLEN_MESSAGE = (
    "flash_attn_varlen_func: packed sequences (cu_seqlens) are not in this release; pad them to one length and call "
    "flash_attn_func"
)


def refuse_unsupported(**arguments: Any) -> None:
    """Raise NotImplementedError naming the first argument that asks for something this release lacks."""
    for name, value in arguments.items():
        if value is not None and (isinstance(value, Tensor) or value):
            said = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(
                f"{name} is {said}; this release does not support {name}: leave it out"
            )


def window_is_causal(window_size: Any, causal: bool) -> bool:
    """Whether this mask is causal. Raises NotImplementedError for a window that limits the past or shows the future."""
    left, right = (-1 if side is None else side for side in window_size)
    if left >= 0 or right > 0 or left < -1 or right < -1:
        raise NotImplementedError(
            f"window_size is {(left, right)}; this release has no sliding window: use (-1, -1), with causal as needed"
        )
    return bool(causal) or right == 0


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; give a tensor")
        if x.ndim != 4:
            raise ValueError(
                f"{name} has {x.ndim} dimensions; give (batch, seq_len, heads, head_dim)"
            )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in _DTYPES:
            raise TypeError(
                f"{name} is {x.dtype}; attention takes bfloat16 or float16: cast {name}"
            )
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype} but q is {q.dtype}; give one dtype")
        if x.device != q.device:
            raise ValueError(
                f"{name} is on {x.device} but q is on {q.device}; move them to one device"
            )
    if q.device.type not in ("cuda", "cpu"):
        raise ValueError(
            f"q is on {q.device}; attention runs on CUDA tensors, and on CPU tensors by reference"
        )
    batch, _, heads, head_dim = q.shape
    if k.shape[0] != batch:
        raise ValueError(f"k has batch {k.shape[0]} but q has {batch}")
    if k.shape[3] != head_dim:
        raise ValueError(f"k has head_dim {k.shape[3]} but q has {head_dim}")
    if v.shape != k.shape:
        raise ValueError(f"v is {tuple(v.shape)} but k is {tuple(k.shape)}; give one shape")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; this release runs up to {MAX_HEAD_DIM}")
    if head_dim % 8 or head_dim == 0:
        raise ValueError(
            f"head_dim is {head_dim}; it must be a multiple of 8: pad q, k and v with zeros"
        )
    if heads == 0 or k.shape[2] == 0 or heads % k.shape[2]:
        raise ValueError(
            f"q has {heads} heads and k has {k.shape[2]}; q's must be a multiple of k's"
        )


def _check_may_be_unordered() -> None:
    if (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        raise RuntimeError(
            "deterministic=False asks for the unordered backward, but torch.use_deterministic_algorithms is on; "
            "drop one of the two"
        )


def _encode(config: Config | None) -> tuple[str, list[int]]:
    """A config as what a torch.library op can carry: its names, joined, and its numbers; empty means look it up."""
    if config is None:
        return "", []
    names = " ".join([getattr(config, name) for name in _NAME_FIELDS])
    return names, [getattr(config, name) for name in _NUMBER_FIELDS]


def _decode(names: str, numbers: list[int]) -> Config:
    fields: dict[str, Any] = dict(zip(_NAME_FIELDS, names.split(), strict=True))
    fields.update(zip(_NUMBER_FIELDS, numbers, strict=True))
    return Config(**fields)


def _run_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    names: str,
    numbers: list[int],
    deterministic: bool,
    allow_resident: bool,
    sm_margin: int,
) -> tuple[Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0:
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), math.inf, dtype=torch.float32)
        return q.new_zeros(q.shape), lse
    if not q.is_cuda:
        _warn_if_a_gpu_stands_idle()
        if names and (schedule := _decode(names, numbers).schedule) not in SCHEDULES:
            raise ValueError(
                f"config.schedule is {schedule!r}; choose one of {', '.join(SCHEDULES)}"
            )
        out, lse = reference.attention_forward(q, k, v, causal=causal, scale=scale)
        return out.to(q.dtype).contiguous(), lse.float()
    _require_triton()
    from dash_kernels.kernels.forward import forward

    _resolve(q, k, causal, names, numbers, deterministic, allow_resident, sm_margin)
    with torch.cuda.device(q.device):
        return forward(
            kernel_ready(q), kernel_ready(k), kernel_ready(v), causal=causal, scale=scale
        )


def _fake_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    names: str,
    numbers: list[int],
    deterministic: bool,
    allow_resident: bool,
    sm_margin: int,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(
        (q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32
    )


def _run_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    names: str,
    numbers: list[int],
    deterministic: bool,
    allow_resident: bool,
    sm_margin: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    if not q.is_cuda:
        grads = reference.attention_backward(dout, q, k, v, causal=causal, scale=scale)
        dq, dk, dv = (grad.to(q.dtype).contiguous() for grad in grads)
        return dq, dk, dv
    from dash_kernels.kernels.launch import backward

    chosen = _resolve(q, k, causal, names, numbers, deterministic, allow_resident, sm_margin)
    head_dim, heads_kv, group = q.shape[3], k.shape[2], q.shape[2] // k.shape[2]
    with torch.cuda.device(q.device):
        if group > 1:
            k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        pad = padded_head_dim(head_dim) - head_dim
        dout, q, k, v, out = (
            kernel_ready(F.pad(x, (0, pad)) if pad else x) for x in (dout, q, k, v, out)
        )
        dq, dk, dv = backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            config=chosen,
            causal=causal,
            scale=scale,
            allow_resident=allow_resident,
            sm_margin=sm_margin,
        )
        if group > 1:
            dk, dv = sum_groups(dk, heads_kv), sum_groups(dv, heads_kv)
        dq, dk, dv = (grad[..., :head_dim].contiguous() for grad in (dq, dk, dv))
        return dq, dk, dv


def _fake_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    names: str,
    numbers: list[int],
    deterministic: bool,
    allow_resident: bool,
    sm_margin: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.save_for_backward(*inputs[:3], out, lse)
    ctx.options = inputs[3:]
    ctx.mark_non_differentiable(lse)


def _differentiate(ctx: Any, dout: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        _refuse_double_backward()
    grads = torch.ops.dash.attention_backward(dout, *ctx.saved_tensors, *ctx.options)
    wanted = [
        grad if need else None for grad, need in zip(grads, ctx.needs_input_grad[:3], strict=True)
    ]
    return (*wanted, *(None for _ in ctx.options))


def _refuse_double_backward(*_: Any) -> Any:
    raise RuntimeError(
        "attention has no second derivative: double backward (create_graph=True) is not supported"
    )


def _register() -> None:
    forward: Any = torch.library.custom_op("dash::attention", _run_attention, mutates_args=())
    forward.register_fake(_fake_attention)
    forward.register_autograd(_differentiate, setup_context=_save)
    backward: Any = torch.library.custom_op(
        "dash::attention_backward", _run_attention_backward, mutates_args=()
    )
    backward.register_fake(_fake_attention_backward)
    backward.register_autograd(_refuse_double_backward)


_register()


def _resolve(
    q: Tensor,
    k: Tensor,
    causal: bool,
    names: str,
    numbers: list[int],
    deterministic: bool,
    allow_resident: bool,
    sm_margin: int,
) -> Config:
    """The config that the backward of these shapes runs. Raises ValueError when a pinned one cannot or must not."""
    from dash_kernels import dispatch
    from dash_kernels.device import current_gpu

    batch, seq_len, heads, head_dim = q.shape
    problem = Problem(
        mask="causal" if causal else "full",
        head_dim=head_dim,
        seq_len=seq_len,
        dtype=_DTYPES[q.dtype],
        batch=batch,
        heads=heads,
        heads_kv=k.shape[2],
        seq_len_kv=k.shape[1],
    )
    if not names:
        return dispatch.choose(problem, q.device.index, deterministic=deterministic).config
    pinned, gpu = _decode(names, numbers), current_gpu(q.device.index)
    support = supports(pinned, problem, gpu.capability)
    if not support:
        raise ValueError(f"config cannot run this problem: {support.reason}")
    if pinned.policy == "ordered":
        _check_resident(pinned, problem, gpu.sms, allow_resident, sm_margin)
    return pinned


def _check_resident(
    config: Config, problem: Problem, sms: int, allow_resident: bool, sm_margin: int
) -> None:
    """Refuse already in the forward what the backward's launch would refuse: a kind that waits on later CTAs."""
    from dash_kernels.kernels.runtime import cooperative_grid, min_resident

    grid, launch = TileGrid.for_config(problem, config), Launch.for_config(config)
    needed = min_resident(
        config.schedule, config.group, grid, launch, problem.batch * problem.heads
    )
    if needed > 1:
        cooperative_grid(config, needed, sms, sms, sm_margin, allow_resident)


def kernel_ready(x: Tensor) -> Tensor:
    """``x`` if the kernels can read it in place, else a contiguous copy.

    They need the last dimension contiguous, every other stride a nonzero multiple of 16 bytes, and a 16-byte aligned
    base; a size-1 dimension counts too, since its stride is written into the TMA descriptor.
    """
    strides = [stride * x.element_size() for stride in x.stride()[:-1]]
    if (
        x.stride(-1) == 1
        and all(stride and stride % ALIGNMENT == 0 for stride in strides)
        and x.data_ptr() % ALIGNMENT == 0
    ):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def sum_groups(grad: Tensor, heads_kv: int) -> Tensor:
    """(B, S, H, D) -> (B, S, heads_kv, D): the gradients of each group of query heads added in head order in float32."""
    batch, length, heads, dim = grad.shape
    groups = grad.view(batch, length, heads_kv, heads // heads_kv, dim)
    total = groups[:, :, :, 0].float()
    for member in range(1, groups.shape[3]):
        total = total + groups[:, :, :, member]
    return total.to(grad.dtype)


@functools.cache
def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError(
            "attention on CUDA tensors needs Triton, which is not installed: pip install triton (Linux); "
            "CPU tensors are served by the float64 reference"
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
