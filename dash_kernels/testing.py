"""Error budgets taken from data, bitwise comparison that says where, and poisoned memory.

The error budget: max-abs and relative error against float64 at most twice that of PyTorch's flash attention in the
same dtype, plus one rounding of the result. PyTorch's has windows and groups of heads. Where it lacks an option
(softcap, attention sinks, a gradient of LSE, a head_dim of V, CPU tensors) its place is taken by the same roundings on
exact scores: float32 arithmetic in which P, dS and the output are rounded to the dtype (``rounded_to`` of
:mod:`dash_kernels.reference`). Packed sequences are compared one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dash_kernels import reference
from dash_kernels.problem import Config, Problem

GRADIENTS = ("dq", "dk", "dv")
SOFTCAP = 2.0  # of a Problem with softcap: low enough for the scores of normal inputs to feel it
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


def torch_flash_runs(q: Tensor, v: Tensor, **options: Any) -> bool:
    """Whether PyTorch's flash attention computes these inputs with these options of :func:`budgets_of`."""
    lacking = any(options.get(name) is not None for name in ("sink", "dlse"))
    if lacking or options.get("softcap") or not q.is_cuda:
        return False
    return bool(q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0)


def torch_flash_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
    *, causal: bool, scale: float, window: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of PyTorch's flash attention, bottom-right aligned, the peer of the error budget. CUDA only."""
    heads, heads_kv = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(heads // heads_kv, dim=2) for x in (k, v))
    if causal:
        window = (window[0], -1)  # flash attention sets the right side itself
    if max(window) >= 0:
        grads = _flash_with_window(dout, q, k, v, causal, scale, window)
    else:
        grads = _flash_without_window(dout, q, k, v, causal, scale)
    dq, dk, dv = grads
    if heads != heads_kv:
        dk, dv = (x.unflatten(2, (heads_kv, -1)).float().sum(3).to(x.dtype) for x in (dk, dv))
    return dq, dk, dv


def _flash_without_window(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    dout, q, k, v = (x.transpose(1, 2).contiguous() for x in (dout, q, k, v))
    aten = torch.ops.aten
    out, lse, *rest = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    starts_q, starts_k, max_q, max_k, seed, offset, _ = rest
    grads = aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, starts_q, starts_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale
    )  # fmt: skip
    return tuple(grad.transpose(1, 2) for grad in grads)


def _flash_with_window(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: tuple[int, int]
) -> tuple[Tensor, ...]:  # fmt: skip
    dout, q, k, v = (x.contiguous() for x in (dout, q, k, v))
    sizes = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
    lengths = (None, None, q.shape[1], k.shape[1], 0.0, causal)  # no packed sequences, no dropout
    aten = torch.ops.aten
    out, lse, seed, offset, _ = aten._flash_attention_forward(q, k, v, *lengths, False, **sizes)
    return tuple(
        aten._flash_attention_backward(dout, q, k, v, out, lse, *lengths, seed, offset, **sizes)
    )


def peer_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, **options: Any
) -> tuple[Tensor, ...]:
    """Gradients in q's dtype with which ours are compared: PyTorch's, or where it lacks an option the stand-in's.

    ``options`` are those of :func:`budgets_of` but for ``cu_seqlens``. With a sink its gradient comes last.
    """
    if torch_flash_runs(q, v, **options):
        window = options.get("window", (-1, -1))
        return torch_flash_gradients(dout, q, k, v, causal=causal, scale=scale, window=window)
    grads = reference.attention_gradients(
        dout, q, k, v, causal=causal, scale=scale, rounded_to=q.dtype, **options
    )
    return tuple(grad.to(q.dtype) for grad in grads if grad is not None)


def budgets_of(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
    *, causal: bool, scale: float, cu_seqlens: tuple[Tensor, Tensor] | None = None, **options: Any,
) -> tuple[dict[str, Tensor], dict[str, Error]]:  # fmt: skip
    """Exact gradients in float64 and their error budgets, by name: dq, dk, dv, and dsink with a sink.

    Inputs are (B, S, H, D); with ``cu_seqlens``, where the sequences of q and of k begin, (total, H, D). ``options``:
    ``window``, ``softcap``, ``sink``, ``dlse`` as in :mod:`dash_kernels.reference`. dsink has a value a head: how close a
    peer came to so few says little, so its budget is at least six standard deviations of what rounding the output does to it.
    """
    inputs, how = (dout, q, k, v), {"causal": causal, "scale": scale, **options}
    if cu_seqlens is None:
        exact: tuple[Tensor | None, ...] = reference.attention_gradients(*inputs, **how)
        peer = peer_gradients(*inputs, **how)
    else:
        exact = reference.packed_gradients(*inputs, *cu_seqlens, **how)
        peer = tuple(_packed_peer(inputs, cu_seqlens, how))
    names = (*GRADIENTS, "dsink")[: len(peer)]
    truth = {name: x for name, x in zip(names, exact, strict=False) if x is not None}
    budgets = {name: error_budget(truth[name], x) for name, x in zip(names, peer, strict=True)}
    if "dsink" in budgets:
        noise = 6 * _sink_noise(inputs, cu_seqlens, how)
        norm, budget = truth["dsink"].norm().item(), budgets["dsink"]
        budgets["dsink"] = Error(
            max(budget.max_abs, noise.max().item()),
            max(budget.relative, noise.norm().item() / norm if norm else 0.0),
        )
    return truth, budgets


def _sink_noise(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    cu_seqlens: tuple[Tensor, Tensor] | None,
    how: dict[str, Any],
) -> Tensor:
    """Standard deviation, (H,), of the error in dsink when the output is rounded to its dtype and all else is exact."""
    dout, q, k, v = inputs
    how = {name: x for name, x in how.items() if name != "dlse"}
    if cu_seqlens is None:
        out, lse = reference.attention_forward(q, k, v, **how)
    else:
        packed_out, packed_lse = reference.packed_forward(q, k, v, *cu_seqlens, **how)
        dout, out, lse = dout[None], packed_out[None], packed_lse[None]
    # 0 for rows that see no key: their LSE is +inf.
    share = (how["sink"].double()[:, None] - lse).exp()
    products = (dout.double() * out).square().sum(-1).transpose(1, 2)
    variance = (share.square() * products).sum((0, 2)) / 12
    return torch.finfo(dout.dtype).eps * variance.sqrt()


def _packed_peer(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    cu_seqlens: tuple[Tensor, Tensor],
    how: dict[str, Any],
) -> list[Tensor]:
    """The peer's gradients of packed sequences; zeros of those without queries or keys."""
    dout, q, k, v = inputs
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    dsink = torch.zeros(q.shape[1], device=q.device)
    dlse = how.get("dlse")
    for rows, keys in reference.sequences_of(*cu_seqlens):
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        one = (x[None, part] for x, part in ((dout, rows), (q, rows), (k, keys), (v, keys)))
        of_rows = {} if dlse is None else {"dlse": dlse[None, :, rows]}
        dq, dk, dv, *more = peer_gradients(*one, **how | of_rows)
        grads[0][rows], grads[1][keys], grads[2][keys] = dq[0], dk[0], dv[0]
        for part in more:
            dsink += part
    return grads if how.get("sink") is None else [*grads, dsink.to(q.dtype)]


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
    """dout, q, k, v of ``problem``: standard normal, q, k and v requiring grad.

    (B, S, H, D); of packed sequences (total, H, D), their lengths those of :func:`packed_starts`.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype, dims = _TORCH_DTYPES[problem.dtype], (problem.head_dim, problem.head_dim_v)
    rows: tuple[int, ...] = (problem.batch, problem.seq_len)
    keys: tuple[int, ...] = (problem.batch, problem.seq_len_kv)
    if problem.varlen:
        rows, keys = ((int(starts[-1]),) for starts in packed_starts(problem, "cpu"))
    shapes = [
        (*length, heads, dim)
        for length, heads, dim in (
            (rows, problem.heads, dims[1]),
            (rows, problem.heads, dims[0]),
            (keys, problem.heads_kv, dims[0]),
            (keys, problem.heads_kv, dims[1]),
        )
    ]
    dout, q, k, v = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes
    )
    return dout, q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def packed_starts(problem: Problem, device: Any = "cuda") -> tuple[Tensor, Tensor]:
    """``cu_seqlens`` of q and of k, int32: ``batch`` sequences from the longest down, evenly, the last at least 1 long."""

    def starts(longest: int) -> Tensor:
        lengths = [max(1, longest * left // problem.batch) for left in range(problem.batch, 0, -1)]
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    return starts(problem.seq_len), starts(problem.seq_len_kv)


def problem_options(
    problem: Problem, device: Any = "cuda"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``problem`` asks of :func:`dash_kernels.attention`, and of :func:`budgets_of` on the same inputs."""
    scale = problem.head_dim**-0.5
    softcap = SOFTCAP if problem.softcap else 0.0
    ours: dict[str, Any] = {"causal": problem.causal, "scale": scale, "softcap": softcap}
    exact = {**ours, "window": problem.window}
    ours["window_size"] = problem.window
    if problem.varlen:
        exact["cu_seqlens"] = starts = packed_starts(problem, device)
        ours |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
        ours |= {"max_seqlen_q": problem.seq_len, "max_seqlen_k": problem.seq_len_kv}
    return ours, exact


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
    ours, how = problem_options(problem)
    options: dict[str, Any] = {
        **ours,
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
    exact, budgets = budgets_of(*(x.detach() for x in (dout, q, k, v)), **how)
    errors = {name: error_of(x, exact[name]) for name, x in zip(GRADIENTS, first, strict=True)}
    return Verification(config, gpu.name, runs, said, errors, budgets)
