"""The inputs of a problem, and the gates that a config has to pass on them before and after it is timed."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from dash_kernels.compile_lock import compile_once
from dash_kernels.problem import Config, Problem, kernel_dims
from tuner.compile import kernel_identity
from tuner.failures import CandidateError
from tuner.truth import (
    options_of,
    packed_lengths,
    peer_runs,
    sequences_of,
    truth_of,
    work_share,
)


class Entry:
    """A config and the CTAs that must be resident at once for it."""

    def __init__(self, config: Config, min_resident: int) -> None:
        self.config = config
        self.min_resident = min_resident

    @classmethod
    def of(cls, data: dict[str, Any]) -> Entry:
        return cls(Config.from_dict(data["config"]), int(data["min_resident"]))


class Cell:
    """The inputs of one problem, and the truth about its gradients (``tuner.truth``).

    Packed sequences stand in one row of a batch of 1. Raises CandidateError (constraints) when the inputs do not fit
    into the GPU's memory or no forward pass computes them.
    """

    def __init__(
        self, torch: Any, problem: Problem, reference_heads: int, device: str = "cuda"
    ) -> None:
        self.torch, self.problem, self.device = torch, problem, device
        self.bytes = cell_bytes(problem)
        self.scale = 1 / math.sqrt(problem.head_dim)
        self.first: tuple[Any, ...] = ()
        self.sequences = sequences_of(problem, device)
        self.how: dict[str, Any] = {"causal": problem.causal, "scale": self.scale}
        self.how |= options_of(problem)
        if self.sequences is not None:
            self.how["sequences"] = self.sequences
        try:
            self._make_inputs()
            inputs = self.dout, self.q, self.k, self.v
            self.truth = truth_of(
                torch, problem, inputs, self.scale, self.sequences, reference_heads
            )
        except torch.cuda.OutOfMemoryError as error:
            raise CandidateError(
                "constraints", f"the inputs do not fit into GPU memory: {error}"
            ) from error
        except NotImplementedError as error:
            raise CandidateError("constraints", str(error)) from error

    def _make_inputs(self) -> None:
        from dash_kernels.kernels.forward import forward

        torch, problem = self.torch, self.problem
        maker = torch.Generator(device=self.device)
        maker.manual_seed(secrets.randbits(62))
        batch, rows, keys = problem.batch, problem.seq_len, problem.seq_len_kv
        if problem.varlen:
            batch, (rows, keys) = 1, map(sum, zip(*packed_lengths(problem), strict=True))

        def normal(length: int, heads: int, dim: int) -> Any:
            dtype = getattr(torch, problem.dtype)
            shape = (batch, length, heads, dim)
            return torch.randn(shape, dtype=dtype, device=self.device, generator=maker)

        self.q = normal(rows, problem.heads, problem.head_dim)
        self.dout = normal(rows, problem.heads, problem.head_dim_v)
        self.k = normal(keys, problem.heads_kv, problem.head_dim)
        self.v = normal(keys, problem.heads_kv, problem.head_dim_v)
        self.out, self.lse = forward(self.q, self.k, self.v, **self.how)

    def tflops(self, milliseconds: float) -> float:
        """Of the whole problem; of packed sequences the work that they are."""
        return self.problem.tflops(milliseconds) * work_share(self.problem)

    def runner(self, entry: Entry) -> Callable[[], tuple[Any, Any, Any]]:
        """A call that runs the whole backward of ``entry`` once and answers dq, dk, dv.

        Head dims that no kernel has are filled up with zeros on the way in and cut on the way out, as users' are.
        """
        from dash_kernels.kernels.launch import backward

        problem, resident = self.problem, entry.min_resident > 1
        dim, dim_v = kernel_dims(problem, entry.config.backend)
        how = {**self.how, "config": entry.config, "allow_resident": resident}
        if (dim, dim_v) == (problem.head_dim, problem.head_dim_v):
            inputs = self.dout, self.q, self.k, self.v, self.out, self.lse

            def run() -> tuple[Any, Any, Any]:
                grads: tuple[Any, Any, Any] = backward(*inputs, **how)
                return grads

            return run

        from dash_kernels.layouts import pad_head_dim

        def run_padded() -> tuple[Any, Any, Any]:
            q, k = (pad_head_dim(x, dim) for x in (self.q, self.k))
            dout, v, out = (pad_head_dim(x, dim_v) for x in (self.dout, self.v, self.out))
            dq, dk, dv = backward(dout, q, k, v, out, self.lse, **how)
            cut = ((dq, problem.head_dim), (dk, problem.head_dim), (dv, problem.head_dim_v))
            dq, dk, dv = (x[..., :own].contiguous() for x, own in cut)
            return dq, dk, dv

        return run_padded

    def gate(self, config: Config, run: Callable[[], Any], runs: int) -> dict[str, Any]:
        """Columns of the row that passes: errors, their budget, bits compared. Raises CandidateError at a failure.

        The first run writes into poisoned memory. ``runs`` counts it.
        """
        from dash_kernels.testing import poisoned_outputs

        name = kernel_identity(self.problem, config)
        try:
            # The workers of all GPUs of this host meet the small kernels beside the main one at once.
            with compile_once(f"launch {name}"), poisoned_outputs():
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
        truth = self.truth
        for place, (name, grad) in enumerate(zip(GRADIENTS, grads, strict=True)):
            error = error_of(truth.pick(grad), truth.exact[name])
            budget = truth.budgets[name]
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
            if truth.peer is not None:
                self._check_heads(name, grad, truth.peer[place], 2 * budget.relative)
            if share > worst.get("share", 0.0):
                worst = {"share": share, **columns}
        worst.pop("share", None)
        return worst

    def worst_error(self, grads: Sequence[Any]) -> float:
        """The largest relative error against float64 over dq, dk and dv of the sampled heads; no gate."""
        from dash_kernels.testing import GRADIENTS, error_of

        pairs = zip(GRADIENTS, grads, strict=True)
        truth = self.truth
        return max(error_of(truth.pick(grad), truth.exact[name]).relative for name, grad in pairs)

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
    """GPU memory of a cell: q, dout, out, dq and k, v, dk, dv, shares of these, and the gradients that they are held against.

    The latter are PyTorch's, or, where it computes no such problem, float64 ones.
    """
    row = max(problem.head_dim, problem.head_dim_v)
    truth = 1 if peer_runs(problem) else 4
    q_rows = (4 + truth) * problem.seq_len * problem.heads
    shares = 2 * problem.head_group if problem.head_group > 1 else 0
    kv_rows = (4 + 2 * truth + shares) * problem.seq_len_kv * problem.heads_kv
    return 2 * problem.batch * row * (q_rows + kv_rows)
