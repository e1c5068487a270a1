"""What is known of a candidate without a GPU: its schedule's proof, its kernel's resources, the model's time.

:class:`Compiler` is the handler of the compile processes (``tuner.worker``). A kernel reads its schedule from arrays,
so candidates that differ only in kind or launch share one kernel: :func:`kernel_identity` names it, and the sweep
compiles each name once.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

from dash_kernels.compile_lock import compile_once
from dash_kernels.device import GpuSpec
from dash_kernels.problem import (
    Config,
    Problem,
    hopper_dims,
    kernel_dims,
    padded_head_dim,
    walked_heads,
)
from tuner.failures import CandidateError

# Share of the matrix peak that the Hopper kernel reaches between waits, as profiled on an H200: it only ranks candidates.
MATRIX_SHARE = {64: 0.56, 128: 0.68, 256: 0.68}
# The same of the portable kernel on Hopper, waits included: its best rows of an earlier H200 sweep, full mask, seq_len 16384.
PORTABLE_SHARE_ON_HOPPER = {64: 0.22, 128: 0.31, 256: 0.31}
REDUCE_SHARE = 0.3  # r / c, the model's default
TWO_PASS_WORK = 7 / 5  # S and dP are computed a second time for dQ


def kernel_identity(problem: Problem, config: Config, cooperative: bool = False) -> str:
    """Names the compiled kernel of a candidate: equal for candidates that run the same machine code.

    ``cooperative`` is the form that a kind with min_resident > 1 runs as. The portable kernel keeps only the loops that
    its schedule needs, so there the kind is part of the name.
    """
    shared = replace(config, launch_order="ascending", heads_interleaved=1)
    if (
        config.backend == "hopper" and not problem.varlen
    ):  # packed sequences have the order built in
        shared = replace(shared, schedule="ascending", group=1)
    shape = [
        _columns(problem, config.backend),
        problem.dtype,
        problem.mask,
        walked_heads(problem, config)[1],
    ]
    shape += [problem.windowed, problem.softcap, problem.varlen]
    cut = [problem.seq_len % config.block_m != 0, problem.seq_len_kv % config.block_n != 0]
    return json.dumps([shared.to_dict(), shape, cut, cooperative], sort_keys=True)


def _columns(problem: Problem, backend: str) -> tuple[int, int]:
    """Columns of the main kernel's tiles of Q and K, and of V and dO."""
    if backend == "hopper":
        return hopper_dims(problem.head_dim, problem.head_dim_v)
    return kernel_dims(problem, backend)


def schedule_identity(problem: Problem, config: Config) -> str:
    """Names the proof that a candidate needs: equal for candidates with the same arrays and launch."""
    heads, group = walked_heads(problem, config)
    return json.dumps(
        [
            [config.schedule, config.group, config.launch_order, config.heads_interleaved],
            [problem.seq_len, problem.seq_len_kv, config.block_m, config.block_n, problem.mask],
            problem.window,
            heads if config.heads_interleaved == 0 else 0,
            group,
        ]
    )


def prediction_identity(problem: Problem, config: Config) -> str:
    """Names what the model tells apart: equal for candidates whose predicted times are equal."""
    return json.dumps(
        [
            schedule_identity(problem, config),
            [config.backend, config.policy],
            [problem.head_dim, problem.head_dim_v, problem.batch * problem.heads_kv],
        ]
    )


def prove(problem: Problem, config: Config) -> int:
    """min_resident of a candidate's schedule. Raises CandidateError (constraints) when the proof fails."""
    from dash_kernels.schedules import Launch, ScheduleError, TileGrid, build, check

    try:
        schedule = build(config.schedule, TileGrid.for_config(problem, config), config.group)
        heads, group = walked_heads(problem, config)
        launch = Launch.for_config(config)
        return check(schedule, launch, heads, group).min_resident
    except ScheduleError as error:
        raise CandidateError("constraints", str(error)) from error


def compile_kernel(
    problem: Problem, config: Config, capability: tuple[int, int], cooperative: bool
) -> dict[str, Any]:
    """Registers, spill bytes and shared memory of a candidate's main kernel, read off its cubin.

    Its other kernels are compiled too, into Triton's cache. Raises CandidateError (compile) with the compiler's words.
    """
    from dash_kernels.kernels.compile import KernelCompileError, compile_spec

    name = kernel_identity(problem, config, cooperative)
    try:
        with compile_once(f"{capability} {name}"):  # other tuners of this host may want it too
            specs = _specs(problem, config, capability, cooperative)
            main, *_ = [compile_spec(spec, capability) for spec in specs]
    except KernelCompileError as error:
        raise CandidateError("compile", f"{error}\n{error.log}".strip()) from error
    return {
        "registers": main.registers,
        "spill_bytes": main.spill_bytes,
        "shared_bytes": main.shared_bytes,
        "warnings": list(main.warnings),
    }


def _specs(
    problem: Problem, config: Config, capability: tuple[int, int], cooperative: bool
) -> list[Any]:
    """The kernels to compile for a candidate, the main one first."""
    dtype, causal = problem.dtype, problem.causal
    dim, dim_v = _columns(problem, config.backend)
    options: dict[str, Any] = {
        name: True
        for name, on in (
            ("grouped", walked_heads(problem, config)[1] > 1),
            ("softcap", problem.softcap),
        )
        if on
    }
    if config.backend == "hopper":
        from dash_kernels.kernels.compile import hopper_spec

        tail = problem.seq_len_kv % config.block_n != 0
        options |= {"windowed": True} if problem.windowed else {}
        options |= {"packed": True} if problem.varlen else {}
        options |= {"head_dim_v": dim_v, "tail": tail, "cooperative": cooperative}
        return [hopper_spec(config, dim, dtype, causal, **options)]
    from dash_kernels.kernels.backward_portable import compile_specs

    options |= {"window": problem.window} if problem.windowed else {}
    options |= {"varlen": True} if problem.varlen else {}
    options |= {"head_dim_v": dim_v} if dim_v != dim else {}
    ragged = problem.seq_len % config.block_m != 0
    return list(
        compile_specs(
            config,
            dim,
            dtype,
            causal,
            ragged=ragged,
            persistent=cooperative,
            capability=capability,
            **options,
        )
    )


def predict_ms(problem: Problem, config: Config, gpu: GpuSpec) -> float:
    """The model's time of a candidate in ms: the makespan of its tiles on the GPU's SMs.

    A tile's compute cost is its five matmuls (two passes: seven) at one SM's share of the data-sheet peak times what
    the backend reaches of it; its reduce cost is REDUCE_SHARE of that where dQ is added up in order. Delta pass and dQ
    cast are not modelled.
    """
    from dash_kernels.critical_path import simulate
    from dash_kernels.schedules import Launch, TileGrid, build

    dim, dim_v = _columns(problem, config.backend)
    schedule = build(config.schedule, TileGrid.for_config(problem, config), config.group)
    heads, group = walked_heads(problem, config)
    simulation = simulate(
        schedule,
        slots=gpu.sms,
        c=1.0,
        r=REDUCE_SHARE if config.policy == "ordered" else 0.0,
        heads=heads,
        launch=Launch.for_config(config),
        head_group=group,
        gantt=False,
    )
    passes = TWO_PASS_WORK if config.policy == "two_pass" else 1.0
    dims = 3 * dim + 2 * dim_v  # S, dK, dQ over one, dP, dV over the other
    tile_flops = 2.0 * config.block_m * config.block_n * dims * passes
    portable = config.backend == "portable" and gpu.capability[0] == 9
    share = (PORTABLE_SHARE_ON_HOPPER if portable else MATRIX_SHARE)[
        padded_head_dim(max(dim, dim_v))
    ]
    flops_per_ms = gpu.peak_tflops * 1e9 / gpu.sms * share
    return float(simulation.makespan) * tile_flops / flops_per_ms


class Compiler:
    """Worker handler for the CPU side: tasks ``prove``, ``compile`` and ``predict``."""

    def __init__(self, options: dict[str, Any]) -> None:
        from dash_kernels.device import resolve_gpu

        major, minor = options["capability"]
        self.capability = (int(major), int(minor))
        self.gpu = resolve_gpu(options["gpu"]) if options.get("gpu") else None
        self.info: dict[str, Any] = {}
        self._predict = functools.lru_cache(maxsize=None)(predict_ms)

    def handle(self, task: dict[str, Any]) -> dict[str, Any]:
        problem, config = Problem.from_dict(task["problem"]), Config.from_dict(task["config"])
        if task["kind"] == "prove":
            return {"min_resident": prove(problem, config)}
        if task["kind"] == "compile":
            return compile_kernel(problem, config, self.capability, task["cooperative"])
        if self.gpu is None:
            raise CandidateError("constraints", "the model needs a GPU whose data sheet is known")
        return {"predicted": self._predict(problem, config, self.gpu)}

    def healthy(self) -> bool:
        return True
