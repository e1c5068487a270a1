"""A results database of a million FAKE rows: many sweeps of several GPUs, most of them history. Never shipped."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from dash_kernels.problem import Config, Problem
from dashboard.snapshot import Snapshots
from tuner.export import freeze
from tuner.results.models import Result
from tuner.results.rows import ResultRow, RunInfo
from tuner.results.store import ROW_FIELDS, Store

GPUS = ("h200", "h100", "h800", "a100", "b200")
LENGTHS = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768)
START = datetime(2025, 1, 1, tzinfo=timezone.utc)


def configs(mask: str) -> list[Config]:
    """Forty configs of a mask, the ascending baseline and the unordered yardstick among them."""
    kinds = ["ascending", "descending", "shortest_first"]
    kinds += ["symmetric_shift"] if mask == "causal" else ["shift"]
    found = [
        Config(schedule=kind, launch_order=order, num_stages=stages, heads_interleaved=heads)
        for kind, order, stages, heads in itertools.product(
            kinds, ("ascending", "descending"), (1, 2, 3), (1, 4)
        )
    ]
    return [found[0], Config(schedule="descending", policy="unordered"), *found[1:39]]


def problems() -> list[Problem]:
    return [
        Problem(mask, dim, length, batch=max(1, 16384 // length), heads=2048 // dim)
        for mask, dim, length in itertools.product(("causal", "full"), (64, 128), LENGTHS)
    ]


def templates(gpu: str) -> list[dict[str, Any]]:
    """One sweep of ``gpu`` as column values; invented speeds."""
    draw = random.Random(gpu)
    rows = []
    for problem in problems():
        for config in configs(problem.mask):
            ms = problem.tflops(1.0) / draw.uniform(200.0, 600.0)
            row = ResultRow.of(
                problem,
                config,
                gpu=gpu,
                ms=ms,
                tflops=problem.tflops(ms),
                samples=[round(ms * draw.uniform(0.995, 1.005), 6) for _ in range(6)],
                registers=168 + 8 * config.num_stages,
                spill_bytes=0,
                min_resident=1 if "shift" not in config.schedule else 8,
                bits_equal=config.policy != "unordered",
                numerics_key=config.key(),
            )
            rows.append({name: getattr(row, name) for name in ROW_FIELDS if name != "id"})
    return rows


def fill(store: Store, wanted: int) -> int:
    """Add rows until there are ``wanted``; answers how many there are."""
    sweeps = {gpu: templates(gpu) for gpu in GPUS}
    made = store.last_result_id()
    for number in itertools.count():
        for gpu in GPUS:
            if made >= wanted:
                return made
            part = sweeps[gpu][: wanted - made]
            made += _sweep(store, gpu, number, part)
        print(f"{made:,} rows", file=sys.stderr)
    return made


def _sweep(store: Store, gpu: str, number: int, part: list[dict[str, Any]]) -> int:
    at = START + timedelta(hours=number)
    info = RunInfo(gpu, {"gpu": gpu, "driver": str(number), "note": "FAKE"}, {"version": 0})
    run = replace(info, started=at, command="FAKE rows of a benchmark")
    run_id = store.start_run(run)
    for chunk in _chunks(part, 2000):
        values = [
            row | {"run_id": run_id, "created_at": at + timedelta(seconds=i)}
            for i, row in enumerate(chunk)
        ]
        with store.transaction() as connection:
            connection.execute(insert(Result), values)
    return len(part)


def _chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def main() -> None:
    url, wanted = sys.argv[1], int(sys.argv[2])
    if "://" not in url:
        Path(url).parent.mkdir(parents=True, exist_ok=True)
    with Store.open(url) as store:
        print(f"{fill(store, wanted):,} rows in {store.where}", file=sys.stderr)
        snapshots = Snapshots(store)
        for gpu in GPUS:
            if store.get_release(gpu=gpu) is None:
                found = snapshots.of(gpu)
                freeze(store, gpu, "FAKE", cells=found.cells, until_id=found.last_id)


if __name__ == "__main__":
    main()
