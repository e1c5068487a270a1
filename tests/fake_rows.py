"""FAKE results for tests of the server and the pages: invented speeds, never measured, never shipped."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from dash_kernels.problem import Config, Problem
from tuner.results.rows import ResultRow, RunInfo
from tuner.results.store import Store

START = datetime(2026, 1, 1, 20, tzinfo=timezone.utc)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FACTOR = {  # invented speed relative to the kind's ceiling
    ("causal", "ascending"): 0.45,
    ("causal", "descending"): 0.78,
    ("causal", "shortest_first"): 0.92,
    ("causal", "symmetric_shift"): 0.86,
    ("full", "ascending"): 0.82,
    ("full", "descending"): 0.80,
    ("full", "shift"): 0.95,
    ("full", "grouped_shift"): 0.90,
}
RESIDENT = {"shift": 8, "symmetric_shift": 8, "grouped_shift": 4}


def fake_speed(mask: str, head_dim: int, seq_len: int, kind: str) -> float:
    ramp = (seq_len / 16384) ** 0.12
    drop = 0.9 if kind == "shift" and seq_len == 16384 else 1.0
    return round(620 * (0.9 if head_dim == 64 else 1.0) * ramp * drop * FACTOR[mask, kind], 1)


def fake_row(
    problem: Problem, config: Config, speed: float, gpu: str = "h200", **values: object
) -> ResultRow:
    ms = problem.tflops(1.0) / speed
    samples = [ms * (1 + 0.001 * ((i * 7) % 5 - 2)) for i in range(12)]
    spill = 16 if config.schedule == "symmetric_shift" and config.num_stages == 3 else 0
    fixed = {
        "tflops": speed,
        "ms": ms,
        "ms_low": ms * 0.998,
        "ms_high": ms * 1.002,
        "samples": samples,
        "registers": 168 + 8 * config.num_stages,
        "spill_bytes": spill,
        "shared_bytes": 200_000,
        "min_resident": RESIDENT.get(config.schedule, 1),
        "numerics_key": "fake" + config.key()[:8],
        "bits_equal": True,
        "runs_compared": 4,
    }
    return ResultRow.of(problem, config, gpu=gpu, **{**fixed, **values})


def fake_problem(mask: str, head_dim: int, seq_len: int) -> Problem:
    return Problem(mask, head_dim, seq_len, batch=16384 // seq_len, heads=2048 // head_dim)


def fake_rows(gpu: str = "h200") -> list[ResultRow]:
    """A whole invented sweep: two masks, two head dims, six lengths, every kind, atomics, and some failures."""
    rows = []
    for mask in ("causal", "full"):
        for head_dim in (64, 128):
            for seq_len in LENGTHS:
                problem = fake_problem(mask, head_dim, seq_len)
                for kind in (k for m, k in FACTOR if m == mask):
                    base = Config(
                        schedule=kind,
                        group=2 if kind == "grouped_shift" else 1,
                        block_m=128 if head_dim == 64 else 64,
                        launch_order="ascending" if kind == "ascending" else "descending",
                    )
                    speed = fake_speed(mask, head_dim, seq_len, kind)
                    rows.append(fake_row(problem, base, speed, gpu))
                    rows.append(
                        fake_row(problem, base.with_(num_stages=3), round(speed * 0.97, 1), gpu)
                    )
                if mask == "full":
                    rows.append(
                        fake_row(
                            problem,
                            Config(
                                schedule="ascending",
                                launch_order="ascending",
                                heads_interleaved=4,
                                block_m=128 if head_dim == 64 else 64,
                            ),
                            round(fake_speed(mask, head_dim, seq_len, "ascending") * 1.09, 1),
                            gpu,
                        )
                    )
                atomics = Config(
                    schedule="descending", policy="unordered", block_m=128 if head_dim == 64 else 64
                )
                best = max(fake_speed(m, head_dim, seq_len, k) for m, k in FACTOR if m == mask)
                rows.append(
                    fake_row(problem, atomics, round(best * 1.02, 1), gpu, bits_equal=False)
                )
        problem = fake_problem(mask, 128, 1024)
        failed = {
            "tflops": None,
            "ms": None,
            "ms_low": None,
            "ms_high": None,
            "samples": None,
            "bits_equal": None,
        }
        for number, (status, error) in enumerate(
            (
                ("constraints", "needs 250000 bytes of shared memory; the limit is 232448"),
                ("compile", "ptxas: <b>registers</b> exhausted"),
                ("timeout", "no answer in 30 s; the worker was stopped"),
                ("correctness", "dq[0, 3, 1, 7] is 0.5, expected 0.25"),
            ),
        ):
            config = Config(schedule="descending", num_stages=4 + number)
            rows.append(
                fake_row(
                    problem, config, 1.0, gpu, status=status, error=error, registers=None, **failed
                )
            )
    return [_at(row, index) for index, row in enumerate(rows)]


def _at(row: ResultRow, index: int) -> ResultRow:
    from dataclasses import replace

    return replace(row, created_at=START + timedelta(seconds=index))


def fake_modelled(gpu: str = "h200") -> list[ResultRow]:
    rows = []
    for seq_len in LENGTHS:
        for kind in ("ascending", "shortest_first", "descending"):
            problem = fake_problem("causal", 128, seq_len)
            speed = fake_speed("causal", 128, seq_len, kind) * 1.1
            config = Config(
                schedule=kind, launch_order="ascending" if kind == "ascending" else "descending"
            )
            none = {"tflops": None, "ms": None, "ms_low": None, "ms_high": None, "samples": None}
            row = fake_row(
                problem,
                config,
                1.0,
                gpu,
                source="modelled",
                predicted=problem.tflops(1.0) / speed,
                **none,
            )
            rows.append(row)
    return rows


def fill(store: Store, gpu: str = "h200") -> None:
    """Put the whole fake sweep, and fake predictions, into ``store``."""
    for source, rows in (("measured", fake_rows(gpu)), ("modelled", fake_modelled(gpu))):
        info = RunInfo(
            gpu,
            {"gpu": gpu, "note": "FAKE"},
            {"version": 0},
            "FAKE rows of a test",
            source,
            started=START,
        )
        run = store.start_run(info)
        store.add_many(run, rows)
        store.finish_run(run)
