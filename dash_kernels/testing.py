"""Error budgets taken from data, bitwise comparison that says where, and poisoned memory.

The error budget: max-abs and relative error against float64 at most twice that of PyTorch's flash attention in the
same dtype, plus one rounding of the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dash_kernels import reference
from dash_kernels.problem import Config, Problem

GRADIENTS = ("dq", "dk", "dv")
_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Error:
    """Distance from an exact result: largest absolute difference, and norm of the difference over its norm."""

    max_abs: float
    relative: float

    def within(self, budget: Error) -> bool:
        """Whether both parts are in ``budget``; a NaN never is."""
        return self.max_abs <= budget.max_abs and self.relative <= budget.relative


@dataclass(frozen=True, slots=True)
class Verification:
    """Answer of :func:`verify`. ``first_difference`` is "" when all runs gave equal bits."""

    config: Config
    gpu: str
    runs: int
    first_difference: str
    errors: dict[str, Error]
    budgets: dict[str, Error]

    @property
    def bits_equal(self) -> bool:
        return not self.first_difference

    @property
    def within_budget(self) -> bool:
        return all(self.errors[name].within(self.budgets[name]) for name in GRADIENTS)

    @property
    def ok(self) -> bool:
        return self.bits_equal and self.within_budget


def error_of(actual: Tensor, exact: Tensor) -> Error:
    """Error of ``actual`` against the float64 ``exact``; infinite when ``actual`` is not finite."""
    difference = actual.double() - exact
    if not bool(difference.isfinite().all()):
        return Error(float("inf"), float("inf"))
    if difference.numel() == 0 or not bool(difference.any()):
        return Error(0.0, 0.0)
    norm = exact.norm().item()
    return Error(
        difference.abs().max().item(), difference.norm().item() / norm if norm else float("inf")
    )


def error_budget(exact: Tensor, peer: Tensor) -> Error:
    """Twice the error of ``peer`` (PyTorch's own result) plus one rounding of the exact result to peer's dtype."""
    rounding = torch.finfo(peer.dtype).eps / 2
    theirs = error_of(peer, exact)
    largest = exact.abs().max().item() if exact.numel() else 0.0
    return Error(2 * theirs.max_abs + rounding * largest, 2 * theirs.relative + rounding)


def torch_flash_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of PyTorch's flash attention, bottom-right aligned, the peer of the error budget. CUDA only."""
    heads, heads_kv = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(heads // heads_kv, dim=2) for x in (k, v))
    dout, q, k, v = (x.transpose(1, 2).contiguous() for x in (dout, q, k, v))
    aten = torch.ops.aten
    out, lse, *rest = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    starts_q, starts_k, max_q, max_k, seed, offset, _ = rest
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
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    if heads != heads_kv:
        dk, dv = (x.unflatten(2, (heads_kv, -1)).float().sum(3).to(x.dtype) for x in (dk, dv))
    return dq, dk, dv


def budgets_of(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[dict[str, Tensor], dict[str, Error]]:
    """Exact gradients in float64 and their error budgets, by name, for CUDA inputs in (B, S, H, D)."""
    exact = reference.attention_backward(dout, q, k, v, causal=causal, scale=scale)
    peer = torch_flash_gradients(dout, q, k, v, causal=causal, scale=scale)
    budgets = {name: error_budget(x, y) for name, x, y in zip(GRADIENTS, exact, peer, strict=True)}
    return dict(zip(GRADIENTS, exact, strict=True)), budgets


def first_difference(actual: Tensor, expected: Tensor) -> str:
    """ "" when both hold the same bytes, else where they first part: index, both values, both bit patterns.

    NaNs of equal bits are equal; 0.0 and -0.0 are not.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return (
            f"{tuple(actual.shape)} {actual.dtype} against {tuple(expected.shape)} {expected.dtype}"
        )
    integer = _INTEGERS[actual.element_size()]
    a, b = actual.contiguous(), expected.contiguous()
    differs = (a.view(integer) != b.view(integer)).flatten().nonzero()
    if not len(differs):
        return ""
    flat = int(differs[0])
    index = []
    for size in reversed(actual.shape):
        index.append(flat % size)
        flat //= size
    where = tuple(reversed(index))
    width = actual.element_size()
    bits = [int(x.view(integer)[where]) & ((1 << 8 * width) - 1) for x in (a, b)]
    return (
        f"{len(differs)} of {actual.numel()} elements differ; first at {where}: {a[where].item()!r} "
        f"(0x{bits[0]:0{2 * width}x}) against {b[where].item()!r} (0x{bits[1]:0{2 * width}x})"
    )


def assert_bits_equal(actual: Tensor, expected: Tensor, name: str = "tensor") -> None:
    """Raise AssertionError naming ``name`` and the first differing element unless the bytes are equal."""
    said = first_difference(actual, expected)
    if said:
        raise AssertionError(f"{name}: {said}")


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """While open, each new uninitialised tensor holds NaN (integers: their largest value)."""
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def poison_free_memory(num_bytes: int, word: int, device: Any = "cuda") -> None:
    """Fill ``num_bytes`` of memory with a 32-bit pattern and free it to PyTorch's allocator, large and small blocks.

    What the next calls get from it is stale: 7 looks like a semaphore left behind, 0x7FC07FC0 is NaN in every dtype.
    """
    large = torch.full((num_bytes // 4,), word, dtype=torch.int32, device=device)
    small = [torch.full((1 << 16,), word, dtype=torch.int32, device=device) for _ in range(256)]
    del large, small


def make_inputs(
    problem: Problem, seed: int = 0, device: Any = "cuda"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dout, q, k, v of ``problem``: standard normal, q, k and v requiring grad."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype, b, d = _TORCH_DTYPES[problem.dtype], problem.batch, problem.head_dim
    q_shape, kv_shape = (
        (b, problem.seq_len, problem.heads, d),
        (b, problem.seq_len_kv, problem.heads_kv, d),
    )
    dout, q, k, v = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype)
        for shape in (q_shape, q_shape, kv_shape, kv_shape)
    )
    return dout, q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of one forward and backward through :func:`dash_kernels.attention` with these options."""
    from dash_kernels.ops import attention

    dq, dk, dv = torch.autograd.grad(attention(q, k, v, **options), (q, k, v), dout)
    return dq, dk, dv


def verify(
    problem: Problem,
    runs: int = 100,
    *,
    config: Config | None = None,
    allow_resident: bool = False,
    sm_margin: int = 0,
) -> Verification:
    """Run a problem's forward and backward ``runs`` times on the current GPU: equal bits, and errors in budget?

    ``config`` defaults to what :func:`dash_kernels.choose` answers. Raises NoGpuError without a GPU.
    """
    from dash_kernels.device import current_gpu
    from dash_kernels.dispatch import choose

    gpu = current_gpu()
    if runs < 2:
        raise ValueError(f"runs is {runs}; comparing bits takes at least 2")
    config = config or choose(problem).config
    dout, q, k, v = make_inputs(problem)
    options: dict[str, Any] = {
        "causal": problem.causal,
        "config": config,
        "deterministic": config.deterministic,
        "allow_resident": allow_resident,
        "sm_margin": sm_margin,
    }
    first = gradients(dout, q, k, v, **options)
    said = ""
    for run in range(1, runs):
        again = gradients(dout, q, k, v, **options)
        for name, x, y in zip(GRADIENTS, again, first, strict=True):
            difference = first_difference(x, y)
            if difference and not said:
                said = f"run {run}, {name}: {difference}"
        if said:
            break
    scale = problem.head_dim**-0.5
    exact, budgets = budgets_of(
        *(x.detach() for x in (dout, q, k, v)), causal=problem.causal, scale=scale
    )
    errors = {name: error_of(x, exact[name]) for name, x in zip(GRADIENTS, first, strict=True)}
    return Verification(config, gpu.name, runs, said, errors, budgets)
