"""The space of a sweep: problems, and for each problem the configs worth measuring, most useful first.

A candidate's ``tier`` is its place in the order of work. Tier 0 (the ``ascending`` baseline, the unordered yardstick
and the default winner) runs for every problem before any of tier 1, so that a short budget already gives a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from dash_kernels.default_rule import default_config
from dash_kernels.problem import (
    BACKENDS,
    DTYPES,
    HOPPER_TILES,
    MASKS,
    Config,
    Problem,
    Support,
    hopper_dims,
    padded_head_dim,
    supports,
)

TOKENS = 16384
HIDDEN = 2048
# Seq lens in the order in which a sweep takes them: the middle first, so that a short budget brackets the range.
SEQ_LENS = (4096, 16384, 1024, 8192, 2048, 512)
HEAD_DIMS = (128, 64)
GROUPS = (2, 4, 8)
BASELINE = "ascending"
INTERLEAVED = (2, 4, 8, 16)  # heads that take turns in the launch
# Of descending, whose tiles of a head start together and wait for each other; 0: all.
MANY_INTERLEAVED = (4, 8, 16, 32, 0)
# The two-pass config of the portable backend that was fastest on an H200 (portable-h200-2026-11-30.json).
TWO_PASS = {"policy": "two_pass", "block_m": 64, "block_n": 64, "num_stages": 2, "num_warps": 4}
MONOTONE = ("ascending", "descending", "shortest_first")
NO_WINDOW = (-1, -1)


@dataclass(frozen=True, slots=True)
class SpaceFilter:
    """What the user asked for. An empty tuple means the default of that axis.

    ``seq_lens`` and ``head_dims`` are positive integers, a pair being (head_dim, head_dim_v); ``windows`` are (left,
    right), -1 for all; ``head_groups`` are query heads per KV head; ``heads`` overrides hidden / head_dim; ``tiles`` and
    ``stages`` replace the tuned values, and what does not fit then becomes a row of class ``constraints``.
    """

    masks: tuple[str, ...] = ()
    head_dims: tuple[int | tuple[int, int], ...] = ()
    seq_lens: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    heads: int = 0
    schedules: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    tiles: tuple[tuple[int, int], ...] = ()
    stages: tuple[int, ...] = ()
    windows: tuple[tuple[int, int], ...] = ()
    head_groups: tuple[int, ...] = ()
    softcaps: tuple[bool, ...] = ()
    varlens: tuple[bool, ...] = ()
    tokens: int = TOKENS
    hidden: int = HIDDEN
    thorough: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """One config of one problem. ``support`` says why it cannot run, where it cannot."""

    problem: Problem
    config: Config
    tier: int
    support: Support

    @property
    def runnable(self) -> bool:
        return self.support.ok


def validate(filters: SpaceFilter) -> None:
    """Raise ValueError naming the first value that no sweep can take, and what can be chosen instead."""
    from dash_kernels.schedules import SCHEDULES

    for option, values, known in (
        ("mask", filters.masks, MASKS),
        ("dtype", filters.dtypes, DTYPES),
        ("backend", filters.backends, BACKENDS),
        ("schedule", filters.schedules, tuple(SCHEDULES)),
    ):
        for value in values:
            if value not in known:
                raise ValueError(f"unknown {option} {value!r}; choose from {', '.join(known)}")
    dims = tuple(size for dim in filters.head_dims for size in _pair(dim))
    for option, sizes in (
        ("head-dim", dims),
        ("seq-len", filters.seq_lens),
        ("head-group", filters.head_groups),
    ):
        for size in sizes:
            if size < 1:
                raise ValueError(f"{option} is {size}; it must be a positive integer")
    for group in filters.head_groups:
        if filters.heads % group:
            raise ValueError(f"head-group {group} does not divide --heads {filters.heads}")
    problems(filters)
    if filters.heads < 0:
        raise ValueError(f"heads is {filters.heads}; it must be a positive integer")


def problems(filters: SpaceFilter) -> list[Problem]:
    """The shapes of a sweep: ``tokens`` tokens and ``hidden`` channels in every one, so that speeds compare.

    Packed sequences (varlen) are as many, of lengths up to ``seq_len``. Raises ValueError for a window that no mask of
    the sweep can have.
    """
    shapes = []
    options = product(
        filters.windows or (NO_WINDOW,),
        filters.head_groups or (1,),
        filters.softcaps or (False,),
        filters.varlens or (False,),
    )
    for (window, group, softcap, varlen), dtype, seq_len, dim, mask in product(
        tuple(options),
        filters.dtypes or DTYPES[:1],
        filters.seq_lens or SEQ_LENS,
        filters.head_dims or HEAD_DIMS,
        filters.masks or tuple(reversed(MASKS)),
    ):
        head_dim, head_dim_v = _pair(dim)
        heads = filters.heads or max(1, filters.hidden // head_dim // group) * group
        shapes.append(
            Problem(
                mask,
                head_dim,
                seq_len,
                dtype,
                max(1, filters.tokens // seq_len),
                heads,
                heads // group,
                window_left=window[0],
                window_right=window[1],
                head_dim_v=head_dim_v,
                softcap=softcap,
                varlen=varlen,
            )
        )
    return list(dict.fromkeys(shapes))


def _pair(dim: int | tuple[int, int]) -> tuple[int, int]:
    return (dim, dim) if isinstance(dim, int) else dim


def baseline_config(problem: Problem, capability: tuple[int, int], backend: str = "") -> Config:
    """The ``ascending`` config that every speed-up of this problem is measured against (FA3's order)."""
    return _of_kind(_base(problem, capability, backend), BASELINE)


def candidates(
    problem: Problem, capability: tuple[int, int], filters: SpaceFilter
) -> list[Candidate]:
    """The configs of one problem in order of tier, each once.

    Those that cannot run are left out, but kept (marked with the reason) where the user named tiles or stages or where
    nothing fits, so that a row can say why. Baseline, default and yardstick stand beside named tiles only if one of
    these runs: there is nothing to compare otherwise.
    """
    backends = filters.backends or (("hopper",) if capability[0] == 9 else ("portable",))
    found: dict[Config, int] = {}
    named: set[Config] = set()
    for backend in backends:
        for tier, config in _tiers(problem, capability, backend, filters):
            config = _canonical(config, problem)
            found[config] = min(tier, found.get(config, tier))
            named |= {config} if tier else set()
    wanted = [
        Candidate(problem, config, tier, supports(config, problem, capability))
        for config, tier in found.items()
        if _selected(config, filters)
    ]
    asked = filters.tiles or filters.stages or not any(candidate.runnable for candidate in wanted)
    only = [candidate for candidate in wanted if candidate.config in named]
    if (filters.tiles or filters.stages) and not any(candidate.runnable for candidate in only):
        wanted = only
    kept = [candidate for candidate in wanted if candidate.runnable or asked]
    return sorted(kept, key=lambda candidate: candidate.tier)


def space(capability: tuple[int, int], filters: SpaceFilter) -> list[Candidate]:
    """Every candidate of a sweep in the order of work: by tier, then problem by problem."""
    validate(filters)
    found = [c for problem in problems(filters) for c in candidates(problem, capability, filters)]
    return sorted(found, key=lambda candidate: candidate.tier)


def require_backend(filters: SpaceFilter, capability: tuple[int, int]) -> None:
    """Raise ValueError where backend hopper alone was asked for and this chip has none; where it has, it runs every shape."""
    if set(filters.backends) != {"hopper"} or capability[0] == 9:
        return
    problem = problems(filters)[0]
    reason = supports(Config(backend="hopper"), problem, capability).reason
    raise ValueError(f"--backend hopper: {reason}; --backend portable, or none, runs there")


def _selected(config: Config, filters: SpaceFilter) -> bool:
    """Whether ``--backend`` and ``--schedule`` keep this config: baseline and yardstick stand beside any kind."""
    if filters.backends and config.backend not in filters.backends:
        return False
    if not filters.schedules or config.policy == "unordered":
        return True
    return config.schedule in filters.schedules or config.schedule == BASELINE


def _base(problem: Problem, capability: tuple[int, int], backend: str = "") -> Config:
    """The default config of this problem on ``backend``; the kinds are tried on its tile first."""
    config = default_config(problem, capability)
    if backend == "portable" and config.backend != "portable":
        return default_config(problem, (8, 0))
    return config


def _of_kind(base: Config, kind: str, **changes: Any) -> Config:
    """``base`` with another kind of schedule and the launch that fits it."""
    from dash_kernels.schedules import SCHEDULES

    launch = SCHEDULES[kind].default_launch
    return replace(
        base, schedule=kind, launch_order=launch.order, heads_interleaved=launch.heads, **changes
    )


def _tiers(
    problem: Problem, capability: tuple[int, int], backend: str, filters: SpaceFilter
) -> Iterator[tuple[int, Config]]:
    winner = base = _base(problem, capability, backend)
    backend = base.backend  # portable where the chip has no Hopper kernel
    kinds = [kind for kind in _kinds(problem) if kind != "grouped_shift"]
    yield 0, _of_kind(base, BASELINE)
    yield 0, winner
    yield 0, replace(winner, policy="unordered")
    if filters.tiles or filters.stages:
        yield from _asked_tiles(base, kinds, filters)
        return
    for kind in kinds:
        yield 1, _of_kind(base, kind)
    groups = GROUPS if "grouped_shift" in _kinds(problem) else ()
    for group in groups[:1]:
        yield 1, _of_kind(base, "grouped_shift", group=group)
    for heads in INTERLEAVED:
        yield 2, replace(winner, heads_interleaved=heads)
    for heads in MANY_INTERLEAVED:
        yield 2, replace(_of_kind(base, "descending"), heads_interleaved=heads)
    yield 2, replace(_of_kind(base, BASELINE), heads_interleaved=4)
    if winner.launch_order == "descending":  # long first: not monotone
        yield 2, replace(winner, launch_order="ascending")
    yield 2, replace(_of_kind(base, BASELINE), policy="unordered")
    for block_m, block_n in _tiles(problem, backend):
        if (block_m, block_n) == (base.block_m, base.block_n):
            continue
        for config in (winner, *(_of_kind(base, kind) for kind in MONOTONE)):
            yield 3, replace(config, block_m=block_m, block_n=block_n)
    for block_m, block_n in _tiles(problem, backend):
        tile = replace(winner, block_m=block_m, block_n=block_n)
        yield 3, replace(tile, num_stages=winner.num_stages + 1)
        if backend == "hopper":
            yield 3, replace(tile, num_stages=max(1, winner.num_stages - 1))
    for group in groups[1:]:
        yield 3, _of_kind(base, "grouped_shift", group=group)
    portable = _base(problem, capability, "portable")
    yield 3, portable
    yield 3, replace(portable, policy="two_pass")
    yield 3, portable.with_(**TWO_PASS)
    yield 3, replace(portable, block_m=64, block_n=128)
    if filters.thorough:
        yield from _product(base, problem, backend)


def _product(base: Config, problem: Problem, backend: str) -> Iterator[tuple[int, Config]]:
    """Everything else: kinds x tiles x launches, the tail of a ``--thorough`` sweep."""
    for kind in _kinds(problem):
        groups = GROUPS if kind == "grouped_shift" else (1,)
        tiles = _tiles(problem, backend)
        for (block_m, block_n), heads, group in product(tiles, (1, 2, 4, 8, 0), groups):
            config = _of_kind(base, kind, block_m=block_m, block_n=block_n, group=group)
            yield 4, replace(config, heads_interleaved=heads)


def _asked_tiles(
    base: Config, kinds: list[str], filters: SpaceFilter
) -> Iterator[tuple[int, Config]]:
    """The kinds on exactly the tiles and stages that the user named, whether they fit or not."""
    tiles = filters.tiles or ((base.block_m, base.block_n),)
    for kind, (block_m, block_n), stages in product(
        kinds, tiles, filters.stages or (base.num_stages,)
    ):
        yield 1, _of_kind(base, kind, block_m=block_m, block_n=block_n, num_stages=stages)


def _kinds(problem: Problem) -> list[str]:
    from dash_kernels.schedules import SCHEDULES

    mask = "window" if problem.windowed else problem.mask
    return [name for name, kind in SCHEDULES.items() if mask in kind.masks]


def _tiles(problem: Problem, backend: str) -> tuple[tuple[int, int], ...]:
    if backend == "hopper":
        return HOPPER_TILES[hopper_dims(problem.head_dim, problem.head_dim_v)[0]]
    wide = padded_head_dim(max(problem.head_dim, problem.head_dim_v)) > 128
    return ((64, 64), (64, 128), (128, 64), (32, 64), *(((32, 32),) if wide else ()))


def _canonical(config: Config, problem: Problem) -> Config:
    """One name for launches that hand out the same tickets: as many heads as there are is all of them."""
    total = problem.batch * problem.heads_kv
    if total == 1:
        return replace(config, heads_interleaved=1)
    return replace(config, heads_interleaved=0) if config.heads_interleaved >= total else config
