"""Rows as T4, the results format that Kernel Tuner writes (schema 1.0.0), and back.

A result has the fields of T4: ``configuration`` is problem and config, flat; ``times.runtimes`` are the samples in ms;
``invalidity`` is T4's class of failure, ``measurements`` the other columns by their names. T4 allows more: ``runs`` holds
what each row's run was made with, so that a file that came from here goes back whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from dash_kernels.problem import Config, Problem
from tuner.export import ROW_COLUMNS, column_kind, rfc3339
from tuner.results.rows import DERIVED_COLUMNS, ResultRow, RunInfo

SCHEMA = "1.0.0"
OBJECTIVE = "time"
INVALIDITY = {"ok": "correct", "nondeterministic": "correctness"}  # the other classes are T4's own
UNITS = {"ms_low": "ms", "ms_high": "ms", "predicted": "ms", "tflops": "TFLOPS"}
PROBLEM_NAMES = tuple(f.name for f in fields(Problem))
MEASURED_COLUMNS = tuple(
    name
    for name in ROW_COLUMNS
    if name not in (*PROBLEM_NAMES, *DERIVED_COLUMNS, "config", "samples", "created_at", "run_uuid", "ms")
)  # fmt: skip


def rows_t4(rows: Iterable[ResultRow], runs: Iterable[RunInfo]) -> str:
    """The text of a T4 file: every row, whatever became of it, with the runs that they belong to."""
    results = [_result(row) for row in rows]
    named = {result["run"] for result in results}
    kept = [run for run in runs if run.uuid in named]
    document = {
        "schema_version": SCHEMA,
        "results": results,
        "runs": [_run(run) for run in kept],
        "metadata": {"environment": {"device_query": {run.uuid: run.environment for run in kept}}},
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _result(row: ResultRow) -> dict[str, Any]:
    measurements = [{"name": OBJECTIVE, "value": row.ms, "unit": "ms"}] if row.ms else []
    for name in MEASURED_COLUMNS:
        value = getattr(row, name)
        if value is not None:
            text = json.dumps(value, sort_keys=True) if column_kind(name) == "json" else value
            number = int(text) if isinstance(text, bool) else text
            measurements.append({"name": name, "value": number, "unit": _unit(name)})
    return {
        "timestamp": rfc3339(row.created_at) if row.created_at else "",
        "configuration": {**row.to_problem().to_dict(), **row.config},
        "objectives": [OBJECTIVE],
        "times": {"runtimes": row.samples or []},
        "invalidity": INVALIDITY.get(row.status, row.status),
        "correctness": float(row.status == "ok"),
        "measurements": measurements,
        "run": row.run_uuid,
    }


def _unit(name: str) -> str:
    return "bytes" if name.endswith("_bytes") else UNITS.get(name, "")


def _run(run: RunInfo) -> dict[str, Any]:
    return {
        "uuid": run.uuid,
        "gpu": run.gpu,
        "source": run.source,
        "command": run.command,
        "started": run.started and rfc3339(run.started),
        "finished": run.finished and rfc3339(run.finished),
        "environment": run.environment,
        "measurement_policy": run.measurement_policy,
    }


def is_t4(data: Any) -> bool:
    return isinstance(data, dict) and "schema_version" in data and "results" in data


def parse_t4(data: Mapping[str, Any]) -> list[tuple[RunInfo, list[ResultRow]]]:
    """Runs and rows of a T4 file. Raises ValueError naming what is wrong with it."""
    from tuner.importing import run_of

    if data["schema_version"] != SCHEMA:
        raise ValueError(f"T4 schema {data['schema_version']!r}; this release reads {SCHEMA}")
    if not data.get("runs"):
        raise ValueError('no "runs": another program wrote it, and T4 alone does not say what ran')
    runs: dict[str, tuple[RunInfo, list[ResultRow]]] = {
        run["uuid"]: (run_of(run), []) for run in data["runs"]
    }
    for place, result in enumerate(data["results"]):
        if result.get("run") not in runs:
            raise ValueError(f"results[{place}] names no run of this file")
        runs[result["run"]][1].append(_row(result))
    return list(runs.values())


def _row(result: Mapping[str, Any]) -> ResultRow:
    from tuner.importing import time_of

    chosen = dict(result["configuration"])
    problem = Problem.from_dict({n: chosen.pop(n) for n in PROBLEM_NAMES if n in chosen})
    config = Config.from_dict(chosen)
    values = {entry["name"]: entry["value"] for entry in result["measurements"]}
    values["ms"] = values.pop(OBJECTIVE, None)
    unknown = sorted(set(values) - set(ROW_COLUMNS))
    if unknown:
        raise ValueError(f"unknown measurement {unknown[0]!r}")
    for name in values:
        kind = column_kind(name)
        if kind == "json":
            values[name] = json.loads(values[name])
        elif kind == "bool":
            values[name] = bool(values[name])
    return ResultRow.of(
        problem,
        config,
        samples=result["times"]["runtimes"] or None,
        created_at=time_of(result["timestamp"]),
        **values,
    )
