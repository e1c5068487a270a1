"""The tensors that a problem's options ask for, and the truth about its gradients: float64, and how far it may be missed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dash_kernels.problem import Problem, unmasked_pairs


def packed_lengths(problem: Problem) -> list[tuple[int, int]]:
    """(queries, keys) of each packed sequence: a ramp, the same in every run, so that times compare."""
    from dash_kernels.testing import packed_starts

    queries, keys = (starts.diff().tolist() for starts in packed_starts(problem, "cpu"))
    return list(zip(queries, keys, strict=True))


def work_share(problem: Problem) -> float:
    """Share of ``problem.flops()``, which counts every packed sequence as the longest, that its sequences are."""
    if not problem.varlen:
        return 1.0

    def pairs(queries: int, keys: int) -> int:
        if problem.windowed:
            return unmasked_pairs(queries, keys, problem.causal, problem.window)
        return queries * keys

    longest = pairs(problem.seq_len, problem.seq_len_kv) * problem.batch
    return sum(pairs(*lengths) for lengths in packed_lengths(problem)) / longest


def options_of(problem: Problem) -> dict[str, Any]:
    """Keyword arguments of forward, backward and reference that are not at their defaults, without the sequences."""
    from dash_kernels.testing import SOFTCAP

    options: dict[str, Any] = {}
    if problem.windowed:
        options["window"] = problem.window
    if problem.softcap:
        options["softcap"] = SOFTCAP
    return options


def sequences_of(problem: Problem, device: str) -> Any:
    """Where the packed sequences begin, None where they are not packed."""
    if not problem.varlen:
        return None
    from dash_kernels.kernels.sequences import Sequences
    from dash_kernels.testing import packed_starts

    starts_q, starts_k = packed_starts(problem, device)
    return Sequences(starts_q, starts_k, problem.seq_len, problem.seq_len_kv)


def peer_runs(problem: Problem) -> bool:
    """Whether PyTorch's flash attention computes this problem, so that its error is the measure of ours."""
    lacking = problem.softcap or problem.varlen
    return not lacking and problem.head_dim_v == problem.head_dim


@dataclass(frozen=True, slots=True)
class Truth:
    """``exact`` and ``budgets`` by gradient, of what ``pick`` takes out of a tensor; ``peer`` has every head, or is None
    where ``pick`` takes every head already."""

    exact: dict[str, Any]
    budgets: dict[str, Any]
    peer: tuple[Any, ...] | None
    pick: Callable[[Any], Any]


def truth_of(
    torch: Any,
    problem: Problem,
    inputs: tuple[Any, Any, Any, Any],
    scale: float,
    sequences: Any,
    heads: int,
) -> Truth:
    """The truth about ``inputs`` (dout, q, k, v).

    Where PyTorch's flash attention runs, float64 for ``heads`` groups of heads and PyTorch's own gradients for all.
    Elsewhere float64 for all; the budget is that of ``budgets_of`` either way.
    """
    from dash_kernels.testing import budgets_of, torch_flash_gradients

    total = problem.batch * problem.heads_kv
    plain = peer_runs(problem)
    how: dict[str, Any] = {"causal": problem.causal, "scale": scale, **options_of(problem)}
    if sequences is not None:
        how["cu_seqlens"] = sequences.cu_seqlens_q, sequences.cu_seqlens_k
        pick: Callable[[Any], Any] = _everything
    else:
        pick = picker(torch, problem, spread(total, heads if plain else total))
    dout, q, k, v = (pick(x) for x in inputs)
    exact, budgets = budgets_of(dout, q, k, v, **how)
    peer = torch_flash_gradients(*inputs, **how) if plain else None
    return Truth(exact, budgets, peer, pick)


def spread(total: int, count: int) -> list[int]:
    """``count`` of ``total`` places, from the first to the last: an indexing error shows at the ends."""
    count = min(count, total)
    return sorted({round(i * (total - 1) / max(1, count - 1)) for i in range(count)})


def picker(torch: Any, problem: Problem, places: Sequence[int]) -> Callable[[Any], Any]:
    """Takes the heads of some KV heads out of (B, S, heads, D): (places, S, heads of one KV head, D)."""
    groups = [divmod(place, problem.heads_kv) for place in places]

    def pick(x: Any) -> Any:
        size = x.shape[2] // problem.heads_kv
        return torch.stack([x[batch, :, kv * size : (kv + 1) * size] for batch, kv in groups])

    return pick


def _everything(x: Any) -> Any:
    """Packed rows (1, total, heads, D) without their batch."""
    return x[0]
