"""``--numerics-key``: tuning among the configs that keep the bits, for a checkpoint that must resume to the bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

from dash_kernels.device import environment_difference, software
from dash_kernels.numerics import config_key
from dash_kernels.problem import Config, Problem, supports
from tuner.results import ResultFilter, Store
from tuner.space import INTERLEAVED, Candidate, SpaceFilter, baseline_config, space

STAGES = (1, 2, 3, 4)
BITS = ("capability", "torch", "triton", "ptxas", "kernel_hash")  # of the environment


class NoSuchBits(ValueError):
    """No config here has the numerics key that was asked for; the message says what differs."""


def keeping(
    key: str, filters: SpaceFilter, capability: tuple[int, int], gpu: str, store: Store
) -> list[Candidate]:
    """Every candidate of numerics key ``key``, with the baseline of its problem to compare it with.

    ``key`` is a config's (rows and tables carry it) or what ``dash_kernels.numerics_key()`` gave for the process: then
    each problem keeps the bits of what this process would choose. Raises NoSuchBits.
    """
    about = {**software(), "capability": "{}.{}".format(*capability)}
    found = space(capability, replace(filters, thorough=True))
    named = {candidate: _key(candidate, about) for candidate in found if candidate.runnable}
    wanted = dict.fromkeys((c.problem for c in found), key)
    if key not in named.values():
        wanted = _chosen_keys(key, wanted, gpu)
    bits = {c.problem: c.config for c, name in named.items() if name == wanted.get(c.problem)}
    if not bits:
        raise NoSuchBits(_explained(key, gpu, about, store))
    kept: dict[Candidate, None] = {}
    for problem, config in bits.items():
        base = baseline_config(problem, capability, config.backend)
        kept[Candidate(problem, base, 0, supports(base, problem, capability))] = None
        for tier, again in _variants(config, problem):
            support = supports(again, problem, capability)
            if support:
                kept.setdefault(Candidate(problem, again, tier, support))
    return sorted(kept, key=lambda candidate: candidate.tier)


def _key(candidate: Candidate, about: dict[str, Any]) -> str:
    problem = candidate.problem
    return config_key(
        candidate.config, dtype=problem.dtype, head_dim=problem.head_dim, environment=about
    )


def _chosen_keys(key: str, problems: Iterable[Problem], gpu: str) -> dict[Problem, str]:
    """The keys of what this process would choose, if ``key`` is the process's own; else nothing."""
    from dash_kernels.dispatch import choose
    from dash_kernels.numerics import numerics_key

    try:
        if numerics_key(gpu) != key:
            return {}
        return {problem: choose(problem, gpu).numerics_key for problem in problems}
    except ValueError:  # a chip without a name of its own has no table either
        return {}


def _variants(config: Config, problem: Problem) -> Iterable[tuple[int, Config]]:
    """The config in all that cannot change a bit: heads interleaved, then stages."""
    total = problem.batch * problem.heads_kv
    yield 0, config
    for heads in (1, *INTERLEAVED, 0):
        if heads < total:
            yield 1, replace(config, heads_interleaved=heads)
    for heads, stages in product((1, *INTERLEAVED, 0), STAGES):
        if heads < total:
            yield 2, replace(config, num_stages=stages, heads_interleaved=heads)


def _explained(key: str, gpu: str, about: dict[str, Any], store: Store) -> str:
    """Why nothing here has this key: what a stored row of it was made with, and where that differs."""
    said = f"no config that this sweep could try has numerics key {key} here"
    rows = store.results(ResultFilter(numerics_key=key), limit=1)
    if not rows:
        return f"{said}, and no stored row has it: give a row's or a table's key"
    row = rows[0]
    run = next(run for run in store.runs(row.gpu) if run.id == row.run_id)
    differs = environment_difference(about, run.environment)
    fields = [f"{name} {_said(there)} there, {_said(here)} here" for name, (here, there) in differs.items() if name in BITS]  # fmt: skip
    what = f"it is of {row.to_config().label()} ({row.to_problem().label()}) on {row.gpu}"
    why = "; ".join(fields) or "the filters leave that config out"
    return f"{said}: {what}; {why}"


def _said(value: Any) -> str:
    return str(value)[:12]
