"""What runs where nothing has been measured: one rule of shapes, options and compute capability, the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator

from dash_kernels.problem import (
    HOPPER_TILES,
    Config,
    Problem,
    hopper_dims,
    padded_head_dim,
    supports,
)

DEFAULT_RULE = "default-3"  # name of default_config(); a change of the rule is a new name, and a new numerics key
HOPPER_CLASS = (
    9  # major capability from which an SM has the shared memory for a large tile in three stages
)
SMALL_STEP = 64 * 64 * 64  # multiply-adds of one of a step's matmuls
PORTABLE_TILES = {  # padded head_dim -> (block_m, block_n, num_stages), the first that fits is taken
    64: ((64, 128, 3), (64, 64, 3)),
    128: ((64, 128, 3), (64, 64, 3), (32, 64, 3)),
    256: ((32, 64, 3), (32, 32, 2)),
}


def default_config(problem: Problem, capability: tuple[int, int], backend: str = "") -> Config:
    """The rule where nothing has been measured; with ``backend`` the first of its configs that runs.

    Causal masks and left windows shortest_first, others ascending with four heads interleaved. Hopper: its own tile, in
    two stages or, where only that fits (head_dim 256), in one. Where the Hopper kernel does not run the problem, the
    portable one: 64x128 tiles up to head_dim 128 on chips with Hopper's shared memory, 64x64 where tensor memory is too
    small for that (10.x at 128). On smaller ones a 128-row tile up to 2048 keys at head_dim 64 and a 64-row one beyond
    it, half of that at head_dim 128; 32x64 where shared memory is too small for that, and above head_dim 128. Three
    stages, because with two no copy of a Q tile runs beside a step; two where only they fit (32x32, head_dim 256 on
    chips with 99 KiB). Eight warps, four for small steps. What the compiler makes of each:
    benchmarks/results/portable-triton-*.json.

    Raises ValueError, with the last candidate's reason, where no backend runs the problem.
    """
    support = None
    for config in _candidates(problem, capability):
        if backend and config.backend != backend:
            continue
        support = supports(config, problem, capability)
        if support:
            return config
    reason = f"the rule has none for backend {backend} there"
    if support is not None:
        reason = support.reason
    raise ValueError(
        f"no config runs this problem on compute capability {capability[0]}.{capability[1]}: {reason}"
    )


def _candidates(problem: Problem, capability: tuple[int, int]) -> Iterator[Config]:
    dim = padded_head_dim(max(problem.head_dim, problem.head_dim_v))
    one_sided = problem.causal or (problem.window_left >= 0 and problem.window_right < 0)
    order = (
        Config(schedule="shortest_first", launch_order="descending")
        if one_sided
        else Config(schedule="ascending", launch_order="ascending", heads_interleaved=4)
    )
    if capability[0] == 9:
        columns, _ = hopper_dims(problem.head_dim, problem.head_dim_v)
        for block_m, block_n in HOPPER_TILES.get(columns, ()):
            hopper = order.with_(backend="hopper", block_m=block_m, block_n=block_n)
            yield hopper
            yield hopper.with_(num_stages=1)
    portable = order.with_(backend="portable")
    if capability[0] < HOPPER_CLASS and dim <= 128:
        short = problem.seq_len_kv <= 2048
        tile = {
            "block_n": 128 if dim == 64 and short else 64,
            "block_m": 64 if dim == 64 or short else 32,
        }
        yield _warps(portable.with_(num_stages=3, **tile), dim)
    for block_m, block_n, num_stages in PORTABLE_TILES[dim]:
        tile = {"block_m": block_m, "block_n": block_n, "num_stages": num_stages}
        yield _warps(portable.with_(**tile), dim)


def _warps(config: Config, dim: int) -> Config:
    """Eight warps, or four for a small step: eight compute part of its matmuls twice, four spill in a large one."""
    return config.with_(num_warps=4 if config.block_m * config.block_n * dim <= SMALL_STEP else 8)
