"""``dash-tune peers``: whole backwards of ours and of the attention kernels installed here, in one run, interleaved."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dash_kernels.problem import OPTION_FIELDS, Config, Problem
from tuner.command import UsageError
from tuner.compile import prove
from tuner.engines.local import Pool
from tuner.failures import CandidateError
from tuner.gates import Cell, Entry
from tuner.nvml import visible_gpus
from tuner.peer_kernels import available, fa4_version
from tuner.policy import MeasurementPolicy
from tuner.results import ResultFilter, Store
from tuner.sampling import Sampler, Timing, matmul_tflops
from tuner.space import SpaceFilter, baseline_config, problems, validate
from tuner.stats import median_interval
from tuner.worker import WorkerStartError

WARM_TIMEOUT_S = 300.0
OURS = ("dash_served", "dash_best", "dash_unordered", "dash_ascending")


def run_peers(
    filters: SpaceFilter, db: str | None, output: Path | None, rounds: int, as_json: bool
) -> int:
    """Measure, print the table, write the file; 0 when every row of ours is right, 1 otherwise."""
    from dash_kernels.device import NoGpuError, current_gpu

    try:
        validate(filters)
        gpu = current_gpu(0)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except NoGpuError as error:
        raise UsageError(f"peers runs on a GPU: {error}") from None
    shapes = problems(filters)
    others = [problem for problem in shapes if takes_peers(problem)]
    try:
        warm_up([name for name in available() if name.startswith("fa4")], others)
    except WorkerStartError as error:
        raise UsageError(str(error)) from None
    bench = Bench(gpu, rounds)
    today = datetime.now(timezone.utc).date().isoformat()
    path = output or Path("benchmarks") / "results" / f"peers-{gpu.name}-{today}.json"
    about = bench.about()
    rows: list[dict[str, Any]] = []
    with Store.open(db) as store:
        store.load_shipped()
        for problem in shapes:
            rows.append(bench.row(problem, our_configs(problem, gpu, store)))
            write(path, {**about, "rows": rows, "summary": summary(rows)})
            print(json.dumps(rows[-1]) if as_json else _line(rows[-1]), flush=True)
    print(json.dumps(summary(rows)) if as_json else _verdict(summary(rows)))
    print(f"wrote {path}", file=sys.stderr)
    wrong = [row for row in rows for name in OURS if "error" in row["peers"].get(name, {})]
    return 1 if wrong else 0


def write(path: Path, found: dict[str, Any]) -> None:
    """The file so far, whole at any moment: a run that is cut short keeps the rows it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    draft.replace(path)


def our_configs(problem: Problem, gpu: Any, store: Store) -> dict[str, Config]:
    """The configs of ours to time: the stored winners of this cell, else the default rule's answer."""
    from dash_kernels.default_rule import default_config

    served = default_config(problem, gpu.capability)
    found = {"dash_served": served, "dash_best": served}
    found["dash_unordered"] = replace(served, policy="unordered")
    found["dash_ascending"] = baseline_config(problem, gpu.capability)
    shape = ResultFilter(
        mask=problem.mask,
        head_dim=problem.head_dim,
        seq_len=problem.seq_len,
        dtype=problem.dtype,
        batch=problem.batch,
        heads=problem.heads,
        heads_kv=problem.heads_kv,
        **{name: getattr(problem, name) for name in OPTION_FIELDS},
    )
    for cell in store.winners(gpu.name, shape):
        if cell.served is not None:
            found["dash_served"] = cell.served.row.to_config()
        found["dash_best"] = cell.best.row.to_config()
        if "unordered" in cell.baselines:
            found["dash_unordered"] = cell.baselines["unordered"].row.to_config()
    return found


def takes_peers(problem: Problem) -> bool:
    """Whether the calls of ``peer_kernels`` compute this problem: they know no window, softcap, packing or head group."""
    return not (set(problem.options()) - {"head_dim_v"}) and problem.head_group == 1


def warm_up(names: Sequence[str], shapes: Sequence[Problem]) -> None:
    """Compile each variant of the peers that compile slowly, side by side, into their cache on disk."""
    variants = {
        (name, problem.head_dim, problem.mask): replace(problem, batch=1)
        for problem in sorted(shapes, key=lambda problem: -problem.seq_len)
        for name in names
    }
    todo = [(name, problem) for (name, _, _), problem in variants.items()]
    if not todo:
        return
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    print(f"compiling {len(todo)} variants of {', '.join(names)}", flush=True)
    places: list[tuple[dict[str, str], dict[str, Any]]] = [({}, {})] * min(
        len(todo), os.cpu_count() or 1
    )
    pool = Pool("tuner.peer_kernels:Warmer", places, print, "compile process")
    try:
        while todo or pool.busy:
            for slot in pool.idle_slots():
                if todo:
                    name, problem = todo.pop()
                    task = {"peer": name, "problem": problem.to_dict()}
                    pool.submit(slot, name, task, WARM_TIMEOUT_S)
            wait(pool.connections, timeout=0.5)
            for _, name, reply in pool.poll():
                if not reply.ok:
                    print(f"{name} did not compile: {reply.error.splitlines()[0]}", flush=True)
    finally:
        pool.close()


class Bench:
    """Times every kernel of one shape in turn, so that clocks move under all of them alike."""

    def __init__(self, gpu: Any, rounds: int) -> None:
        import torch

        from dash_kernels.device import environment
        from tuner.nvml import Monitor
        from tuner.sampling import flush_buffer

        self.torch, self.gpu = torch, gpu
        self.policy = replace(
            MeasurementPolicy(), min_samples=rounds, max_samples=rounds, baseline="none: see rows"
        )
        uuid = visible_gpus()[0].uuid
        flush = flush_buffer(torch, gpu.l2_bytes)
        self.sampler = Sampler(torch, self.policy, Monitor(uuid), flush)
        self.environment = environment(0)

    def about(self) -> dict[str, Any]:
        """Which machine, which versions, when, and the chip's own ceiling for a matrix product."""
        torch = self.torch
        return {
            "device": self.gpu.driver_name,
            "gpu": self.gpu.name,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            **{
                name: self.environment[name]
                for name in ("driver", "torch", "triton", "ptxas", "cuda")
            },
            "kernel_hash": self.environment["kernel_hash"],
            "cudnn": torch.backends.cudnn.version(),
            "flash_attn_4": fa4_version(),
            "matmul_bf16_8192_tflops": round(matmul_tflops(self.torch, self.sampler), 1),
            "measurement_policy": self.policy.to_dict(),
            "flops": "2.5 * 4*B*H*S*S*D, halved for causal",
            "note": "one run; every kernel of a row sampled in turn; whole backward, zeroing and casts included",
        }

    def row(self, problem: Problem, ours: dict[str, Config]) -> dict[str, Any]:
        """One shape: what every kernel did."""
        cell = Cell(self.torch, problem, self.policy.reference_heads)
        peers: dict[str, dict[str, Any]] = {}
        runs: dict[str, Any] = {}
        for name, config in ours.items():
            self._try(peers, runs, name, lambda config=config: self._ours(cell, config))
        for name, make in (available() if takes_peers(problem) else {}).items():
            self._try(peers, runs, name, lambda make=make: self._theirs(cell, make(cell)))
        try:
            timing = self.sampler.run(list(runs.values()))
        except CandidateError as error:  # the GPU stays hot: no time of this shape is worth keeping
            for name in runs:
                peers[name] = {"error": f"{error.failure}: {error}"}
            timing = Timing(0)
            runs = {}
        for (name, _), samples in zip(runs.items(), timing.samples, strict=True):
            middle, low, high = median_interval(samples)
            peers[name] |= {
                "ms": round(middle, 4),
                "ms_low": round(low, 4),
                "ms_high": round(high, 4),
                "tflops": round(cell.tflops(middle), 1),
            }
        shape = {
            name: getattr(problem, name)
            for name in ("head_dim", "mask", "seq_len", "batch", "heads", "dtype")
        }
        shape |= {"heads_kv": problem.heads_kv} if problem.head_group > 1 else {}
        options = problem.options()
        return {**shape, **options, "peers": peers, "telemetry": timing.telemetry}

    def _try(self, peers: dict[str, Any], runs: dict[str, Any], name: str, make: Any) -> None:
        try:
            peers[name], runs[name] = make()
        except CandidateError as error:
            peers[name] = {"error": f"{error.failure}: {error}"}
        except (
            Exception
        ) as error:  # a peer that refuses a shape is a line in the file, not the end of the run
            peers[name] = {"error": f"{type(error).__name__}: {error}"[:300]}

    def _ours(self, cell: Cell, config: Config) -> tuple[dict[str, Any], Any]:
        residents = prove(cell.problem, config) if config.policy == "ordered" else 1
        run = cell.runner(Entry(config, residents))
        found = cell.gate(config, run, self.policy.runs_compared)
        about = {
            "config": config.to_dict(),
            "min_resident": residents,
            "bitwise_equal_on_rerun": found["bits_equal"],
            "rel_error": found["rel_error"],
        }
        return about, run

    def _theirs(self, cell: Cell, run: Any) -> tuple[dict[str, Any], Any]:
        first = run()
        equal = True
        for _ in range(1, self.policy.runs_compared):
            for x, y in zip(run(), first, strict=True):
                equal &= bool(self.torch.equal(x, y))
        worst = cell.worst_error(first)
        return {"bitwise_equal_on_rerun": equal, "rel_error": worst}, run


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of our served configs over each other column, and in how many cells they are at least equal."""
    found: dict[str, Any] = {}
    names = sorted({name for row in rows for name in row["peers"]} - {"dash_served"})
    for name in names:
        for subset in ("all", "causal", "full"):
            ratios = [
                row["peers"]["dash_served"]["tflops"] / row["peers"][name]["tflops"]
                for row in rows
                if subset in ("all", row["mask"])
                and "tflops" in row["peers"].get(name, {})
                and "tflops" in row["peers"]["dash_served"]
            ]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                found[f"dash_served/{name} {subset}"] = {
                    "geometric_mean": round(mean, 4),
                    "at_least_equal": sum(ratio >= 1 for ratio in ratios),
                    "cells": len(ratios),
                }
    return found


def _line(row: dict[str, Any]) -> str:
    speeds = [
        f"{name} {entry['tflops']:.1f}{'' if entry['bitwise_equal_on_rerun'] else '~'}"
        if "tflops" in entry
        else f"{name} failed ({entry['error'].splitlines()[0][:120]})"
        for name, entry in row["peers"].items()
    ]
    return f"{row['mask']} d={row['head_dim']} seq_len={row['seq_len']}: " + ", ".join(speeds)


def _verdict(found: dict[str, Any]) -> str:
    lines = [
        f"{name}: {entry['geometric_mean']:.3f}x, at least equal in {entry['at_least_equal']} of {entry['cells']}"
        for name, entry in found.items()
    ]
    return "\n".join([*lines, "~ = bits differed on rerun"])
