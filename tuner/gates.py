"""The inputs of a problem, and the gates that a config has to pass on them before and after it is timed."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from dash_kernels.problem import Config, Problem
from tuner.failures import CandidateError


class Entry:
    """A config and the CTAs that must be resident at once for it."""

    def __init__(self, config: Config, min_resident: int) -> None:
        self.config = config
        self.min_resident = min_resident

    @classmethod
    def of(cls, data: dict[str, Any]) -> Entry:
        return cls(Config.from_dict(data["config"]), int(data["min_resident"]))


class Cell:
    """The inputs of one problem, and the truth about its gradients: float64 for a few heads, PyTorch's for all.

    Raises CandidateError (constraints) when the inputs do not fit into the GPU's memory.
    """

    def __init__(
        self, torch: Any, problem: Problem, reference_heads: int, device: str = "cuda"
    ) -> None:
        self.torch, self.problem, self.device = torch, problem, device
        self.bytes = cell_bytes(problem)
        self.scale = 1 / math.sqrt(problem.head_dim)
        self.first: tuple[Any, ...] = ()
        try:
            self._make_inputs()
            self._make_truth(_sample_heads(problem, reference_heads))
        except torch.cuda.OutOfMemoryError as error:
            raise CandidateError(
                "constraints", f"the inputs do not fit into GPU memory: {error}"
            ) from error

    def _make_inputs(self) -> None:
        from dash_kernels.kernels.forward import forward

        torch, problem = self.torch, self.problem
        maker = torch.Generator(device=self.device)
        maker.manual_seed(secrets.randbits(62))

        def normal(length: int, heads: int) -> Any:
            shape = (problem.batch, length, heads, problem.head_dim)
            dtype = getattr(torch, problem.dtype)
            return torch.randn(shape, dtype=dtype, device=self.device, generator=maker)

        self.q, self.dout = (normal(problem.seq_len, problem.heads) for _ in range(2))
        self.k, self.v = (normal(problem.seq_len_kv, problem.heads_kv) for _ in range(2))
        self.out, self.lse = forward(
            self.q, self.k, self.v, causal=problem.causal, scale=self.scale
        )

    def _make_truth(self, sample: list[tuple[int, int]]) -> None:
        from dash_kernels.testing import budgets_of, torch_flash_gradients

        self.sample = sample
        inputs = (self.dout, self.q, self.k, self.v)
        how: dict[str, Any] = {"causal": self.problem.causal, "scale": self.scale}
        self.exact, self.budgets = budgets_of(*map(self._pick, inputs), **how)
        self.peer = torch_flash_gradients(*inputs, **how)

    def _pick(self, x: Any) -> Any:
        """(samples, S, 1, D): the sampled heads as a batch."""
        return self.torch.stack([x[batch, :, head] for batch, head in self.sample])[:, :, None]

    def runner(self, entry: Entry) -> Callable[[], tuple[Any, Any, Any]]:
        """A call that runs the whole backward of ``entry`` once and answers dq, dk, dv."""
        from dash_kernels.kernels.launch import backward

        def run() -> tuple[Any, Any, Any]:
            grads: tuple[Any, Any, Any] = backward(
                self.dout,
                self.q,
                self.k,
                self.v,
                self.out,
                self.lse,
                config=entry.config,
                causal=self.problem.causal,
                scale=self.scale,
                allow_resident=entry.min_resident > 1,
            )
            return grads

        return run

    def gate(self, config: Config, run: Callable[[], Any], runs: int) -> dict[str, Any]:
        """Columns of the row that passes: errors, their budget, bits compared. Raises CandidateError at a failure.

        The first run writes into poisoned memory. ``runs`` counts it.
        """
        from dash_kernels.testing import poisoned_outputs

        try:
            with poisoned_outputs():
                self.first = run()
        except ValueError as error:
            # The launcher refuses what cannot run here, before anything is launched.
            raise CandidateError("constraints", str(error)) from error
        self._every_turn_came()
        found = self._check(self.first)
        found["runs_compared"] = runs
        found["bits_equal"] = True
        for again in range(1, runs):
            self._compare(config, run(), f"run {again + 1} of {runs}", found)
        return found

    def gate_after_timing(
        self, config: Config, run: Callable[[], Any], found: dict[str, Any]
    ) -> None:
        """The same gates on one more run: the timed launches must not have left anything behind."""
        grads = run()
        self._every_turn_came()
        self._check(grads)
        found["runs_compared"] += 1
        self._compare(config, grads, "the run after timing", found)
        self.first = ()

    def _every_turn_came(self) -> None:
        """A turn that the kernel's watchdog gave up on is this config's fault, not the next one's."""
        from dash_kernels.kernels.launch import TurnTimeout, raise_if_turn_missed

        if self.q.is_cuda:
            self.torch.cuda.synchronize()
        try:
            raise_if_turn_missed(self.q.device)
        except TurnTimeout as error:
            raise CandidateError("timeout", str(error)) from error

    def _check(self, grads: Sequence[Any]) -> dict[str, Any]:
        """Errors against float64 on the sampled heads, and every head against PyTorch's gradients."""
        from dash_kernels.testing import GRADIENTS, error_of

        worst: dict[str, Any] = {}
        for name, grad, peer in zip(GRADIENTS, grads, self.peer, strict=True):
            error, budget = error_of(self._pick(grad), self.exact[name]), self.budgets[name]
            share = max(error.max_abs / budget.max_abs, error.relative / budget.relative)
            columns = {
                "max_abs_error": error.max_abs,
                "rel_error": error.relative,
                "budget": budget.relative,
            }
            if not error.within(budget):
                said = (
                    f"{name}: error {error.max_abs:.3g} absolute, {error.relative:.3g} relative; the budget is "
                    f"{budget.max_abs:.3g}, {budget.relative:.3g}"
                )
                raise CandidateError("correctness", said, **columns)
            self._check_heads(name, grad, peer, 2 * budget.relative)
            if share > worst.get("share", 0.0):
                worst = {"share": share, **columns}
        worst.pop("share", None)
        return worst

    def worst_error(self, grads: Sequence[Any]) -> float:
        """The largest relative error against float64 over dq, dk and dv of the sampled heads; no gate."""
        from dash_kernels.testing import GRADIENTS, error_of

        pairs = zip(GRADIENTS, grads, strict=True)
        return max(error_of(self._pick(grad), self.exact[name]).relative for name, grad in pairs)

    def _check_heads(self, name: str, grad: Any, peer: Any, limit: float) -> None:
        """Two results in budget are at most two budgets apart."""
        distance = (grad.float() - peer.float()).norm(dim=(1, 3)) / peer.float().norm(dim=(1, 3))
        bad = (~(distance <= limit)).nonzero()
        if len(bad):
            batch, head = bad[0].tolist()
            said = (
                f"{name} of batch {batch}, head {head} is {distance[batch, head].item():.3g} from PyTorch's "
                f"(limit {limit:.3g}); {len(bad)} heads are wrong"
            )
            raise CandidateError("correctness", said)

    def _compare(
        self, config: Config, grads: Sequence[Any], which: str, found: dict[str, Any]
    ) -> None:
        from dash_kernels.testing import GRADIENTS, first_difference

        for name, again, first in zip(GRADIENTS, grads, self.first, strict=True):
            if self.torch.equal(again.view(self.torch.int16), first.view(self.torch.int16)):
                continue
            found["bits_equal"] = False
            if config.deterministic:
                said = f"{name}, {which}: {first_difference(again, first)}"
                raise CandidateError("nondeterministic", said, **found)


def cell_bytes(problem: Problem) -> int:
    """GPU memory of a cell: q, dout, out, dq and k, v, dk, dv, and three of PyTorch's gradients."""
    q_rows = 5 * problem.seq_len * problem.heads
    kv_rows = 6 * problem.seq_len_kv * problem.heads_kv
    return 2 * problem.batch * problem.head_dim * (q_rows + kv_rows)


def _sample_heads(problem: Problem, count: int) -> list[tuple[int, int]]:
    """(batch, head) pairs spread over the first and the last: an indexing error shows at the ends."""
    total = problem.batch * problem.heads
    picks = sorted({round(i * (total - 1) / max(1, count - 1)) for i in range(count)})
    return [divmod(pick, problem.heads) for pick in picks]
