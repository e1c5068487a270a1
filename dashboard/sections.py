"""The lower sections of the page as values: how a schedule runs, and what became of each configuration of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dash_kernels.schedules import SCHEDULES
from dashboard import filters as state
from dashboard.filters import Filters
from dashboard.model import chart
from dashboard.points import schedule_of

SHOWN_RUNS = 6


@dataclass(frozen=True)
class RunReport:
    """What became of the configurations of one run."""

    run_id: int
    started: str
    command: str
    source: str
    counts: Mapping[str, int]
    failures: Sequence[Mapping[str, str]]


def gantt(filters: Filters, kind: str) -> dict[str, Any]:
    """The form and the numbers around the Gantt chart."""
    own = schedule_of(kind)
    fallback = own if own.split("(")[0] in SCHEDULES else "shortest_first"
    drawn = chart(filters, fallback, str(filters.mask or "causal"))
    known = drawn.kind.split("(")[0] in SCHEDULES
    stats, note = [], ""
    if drawn.simulation is not None:
        sim = drawn.simulation
        waits = sum(sim.stalls)
        note = f"{sim.utilisation:.0%} busy"
        stats = [
            {"name": "ends at", "value": f"{sim.makespan:g}", "unit": "c"},
            {"name": "slots busy", "value": f"{sim.utilisation * 100:.0f}", "unit": "%"},
            {"name": "waiting for a turn", "value": f"{waits:.4g}", "unit": "c, all slots"},
        ]
    shape = {k: v for k, v in vars(filters).items() if k in ("gpu", *state.SLICE, "run")}
    fields = [
        {
            "name": "tiles",
            "label": "tiles a side",
            "low": 1,
            "high": 32,
            "step": 1,
            "value": filters.tiles,
        },
        {"name": "heads", "label": "heads", "low": 1, "high": 8, "step": 1, "value": filters.heads},
        {
            "name": "slots",
            "label": "slots",
            "low": 1,
            "high": 132,
            "step": 1,
            "value": filters.slots,
        },
        {
            "name": "r",
            "label": "reduce cost r",
            "low": 0,
            "high": 3,
            "step": 0.05,
            "value": f"{filters.r:g}",
        },
    ]
    summary = SCHEDULES[drawn.kind.split("(")[0]].summary if known else ""
    return {
        "kind": drawn.kind,
        "mask": drawn.mask,
        "kinds": state.gantt_kinds(),
        "masks": ["causal", "full"],
        "summary": f"{drawn.kind}: {summary}." if summary else "",
        "error": drawn.error,
        "stats": stats,
        "note": note,
        "fields": fields,
        "hidden": [(k, v) for k, v in shape.items() if v is not None],
    }


def run_section(
    filters: Filters, report: RunReport | None, runs: Sequence[tuple[int, str]]
) -> dict[str, Any]:
    """The run that is shown, how to get to the others, and the failed configurations with what was said."""
    if report is None:
        return {"note": "No run of this GPU is stored.", "options": [], "failures": []}
    total = sum(report.counts.values())
    failed = total - report.counts.get("ok", 0)
    note = f"Run {report.run_id} of {report.started}, {report.source}: {total} configurations, {failed} not usable."
    options = [
        {
            "id": f"run-{run}",
            "label": f"run {run}",
            "href": filters.url(run=run),
            "current": run == report.run_id,
        }
        for run, _ in runs[:SHOWN_RUNS]
    ]
    return {"note": note, "options": options, "failures": list(report.failures)}
