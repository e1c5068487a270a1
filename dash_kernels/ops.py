"""The public function :func:`attention`, and the torch.library ops that carry it through torch.compile.

Eager calls on plain tensors skip the dispatcher: the same forward and backward run from one autograd function, which
costs the host less than an op in Python does. Everything a caller can get wrong is refused before either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dash_kernels import checks
from dash_kernels.execute import Options, encode_config, lse_shape, run_backward, run_forward
from dash_kernels.problem import Config

_PLAIN = (Tensor, torch.nn.Parameter)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    config: Config | None = None,
    deterministic: bool = True,
    allow_resident: bool = False,
    sm_margin: int = 0,
    return_lse: bool = False,
) -> Any:
    """Softmax attention whose backward gives the same bits on every run.

    q is (batch, seq_len, heads, head_dim), k (batch, seq_len_kv, heads_kv, head_dim), v the same with a head_dim of
    its own, bf16 or fp16, on one device; heads is a multiple of heads_kv, both head_dims are multiples of 8 up to
    256. Under torch.autocast they are cast to its dtype. Returns the output (batch, seq_len, heads, head_dim of v),
    and with ``return_lse`` also the log-sum-exp (batch, heads, seq_len), float32, natural log, differentiable. A row
    that sees no key gives zeros and +inf, and no gradient.

    ``causal`` and ``window_size`` are bottom-right aligned: query i sits at key p = i + seq_len_kv - seq_len and sees
    keys p - left to p + right, -1 or None being no limit; causal is right = 0. ``scale`` defaults to head_dim ** -0.5.
    ``softcap`` c > 0 makes a score s into c * tanh(s / c). ``sink`` (heads,) adds to each row's softmax a logit that
    has no value.

    Packed sequences: q is (total, heads, head_dim), k and v alike, ``cu_seqlens_q`` and ``cu_seqlens_k`` int32
    (number of sequences + 1) on the same device say where each begins, ``max_seqlen_q`` and ``max_seqlen_k`` are the
    longest lengths. Nothing waits for the device. The log-sum-exp is (heads, total).

    ``config`` pins the backward by hand; by default it is looked up (:func:`dash_kernels.choose`).
    ``deterministic=False`` takes the unordered kernel. ``allow_resident`` permits schedules that wait on later CTAs,
    as a cooperative launch on all SMs but ``sm_margin``: beside communication kernels that need SMs such a launch
    can deadlock a job.

    Raises TypeError or ValueError naming the argument, RuntimeError for a second derivative.
    """
    device_type = q.device.type if isinstance(q, Tensor) else ""
    if device_type in ("cuda", "cpu") and torch.is_autocast_enabled(device_type):
        q, k, v = (_autocast(x, device_type) for x in (q, k, v))
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    checks.check_tensors(q, k, v, packed)
    if packed:
        checks.check_sequences(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    elif max_seqlen_q is not None or max_seqlen_k is not None:
        raise ValueError(
            "max_seqlen_q and max_seqlen_k go with cu_seqlens_q and cu_seqlens_k: give them too"
        )
    if sink is not None:
        checks.check_sink(sink, q)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    checks.check_scale(scale, softcap)
    checks.check_policy(config, deterministic, sm_margin)
    causal, left, right = checks.settle_window(window_size, causal)
    options = Options(
        max_seqlen_q if max_seqlen_q is not None else 0,
        max_seqlen_k if max_seqlen_k is not None else 0,
        causal, left, right, scale, softcap, *encode_config(config), deterministic, allow_resident, sm_margin,
    )  # fmt: skip
    tensors = q, k, v, sink, cu_seqlens_q, cu_seqlens_k
    if forward_ad._current_level >= 0:
        _refuse_forward_mode(*tensors)
    if not _is_plain(*tensors):
        transformed = (
            not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
        )
        run = _Transformed.apply if transformed else torch.ops.dash.attention
        out, lse = run(*tensors, *options)
    elif torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
    ):  # fmt: skip
        out, lse = _Attention.apply(*tensors, options)
    else:
        out, lse = run_forward(options, *tensors)
    return (out, lse) if return_lse else out


def _autocast(x: Any, device_type: str) -> Any:
    """``x`` as scaled_dot_product_attention takes it under autocast: every floating dtype but float64 is cast."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device_type))


def _is_plain(*tensors: Tensor | None) -> bool:
    """Whether nobody watches or transforms this call: no compiler, mode, functorch transform, subclass or meta tensor."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or any(x is not None and (type(x) not in _PLAIN or x.is_meta) for x in tensors)
    )


def _refuse_forward_mode(*tensors: Tensor | None) -> None:
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "attention has no forward-mode derivative (jvp, jacfwd): use reverse mode"
        )


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """What eager calls run; the same as the ops with their autograd formula."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None, options: Options,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        tensors = q, k, v, sink, cu_seqlens_q, cu_seqlens_k
        out, lse = run_forward(options, *tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.options = options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            _refuse_double_backward()
        grads = run_backward(ctx.options, dout, dlse, *ctx.saved_tensors)
        return *_needed(grads, ctx.needs_input_grad), None, None, None


class _Transformed(torch.autograd.Function):  # type: ignore[misc]
    """The op under torch.func's transforms, which want a function written for them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.dash.attention(*arguments)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients_of(ctx, dout, dlse, _TransformedBackward.apply)


class _TransformedBackward(torch.autograd.Function):  # type: ignore[misc]
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(torch.ops.dash.attention_backward(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing to keep: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        _refuse_double_backward()


def _needed(grads: Any, needs: Any) -> list[Tensor | None]:
    """The gradients of q, k, v and sink that were asked for, None for the others."""
    return [grad if need else None for grad, need in zip(grads, needs[:4], strict=True)]


def _refuse_double_backward(*_: Any) -> Any:
    raise RuntimeError(
        "attention has no second derivative: double backward (create_graph=True) is not supported"
    )


_OPTIONS_SCHEMA = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, SymInt window_left, SymInt window_right, float scale, "
    "float softcap, str names, SymInt[] numbers, bool deterministic, bool allow_resident, SymInt sm_margin"
)
_SEQUENCES_SCHEMA = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"


def _options(values: tuple[Any, ...]) -> Options:
    """What an op was called with after its tensors."""
    options = Options(*values)
    return options._replace(numbers=tuple(options.numbers))


def _attention_op(*arguments: Any) -> tuple[Tensor, Tensor]:
    return run_forward(_options(arguments[6:]), *arguments[:6])


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse_shape(q), dtype=torch.float32)


def _backward_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dsink = run_backward(_options(arguments[10:]), *arguments[:10])
    return dq, dk, dv, dq.new_empty(0) if dsink is None else dsink


def _backward_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.options = inputs[6:]


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        _refuse_double_backward()
    return _gradients_of(ctx, dout, dlse, torch.ops.dash.attention_backward)


def _gradients_of(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, run: Any
) -> tuple[Tensor | None, ...]:
    if dout is None:
        dout = torch.zeros_like(ctx.saved_tensors[6])
    grads = run(dout, dlse, *ctx.saved_tensors, *ctx.options)
    return *_needed(grads, ctx.needs_input_grad), None, None, *(None for _ in ctx.options)


def _register() -> None:
    """Define the two ops: real on CUDA and the CPU, shapes only elsewhere, differentiable once."""
    tags = torch.Tag.pt2_compliant_tag
    for name, schema, run, fake in (
        (
            "dash::attention",
            f"(Tensor q, Tensor k, Tensor v, Tensor? sink, {_SEQUENCES_SCHEMA}, {_OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
            _attention_op,
            _attention_fake,
        ),
        (
            "dash::attention_backward",
            f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? sink, {_SEQUENCES_SCHEMA}, Tensor out, "
            f"Tensor lse, {_OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
            _backward_op,
            _backward_fake,
        ),
    ):
        torch.library.define(name, schema, tags=tags)
        torch.library.impl(name, ("cuda", "cpu"), run)
        torch.library.register_fake(name, fake)
    torch.library.register_autograd("dash::attention", _differentiate, setup_context=_save)
    torch.library.register_autograd("dash::attention_backward", _refuse_double_backward)


_register()
