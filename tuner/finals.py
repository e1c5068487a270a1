"""Who goes into a cell's final round: the baselines, and the leaders that one pass cannot tell apart."""

from __future__ import annotations

from collections.abc import Sequence

from dash_kernels.problem import Problem
from tuner.results import ResultRow
from tuner.space import BASELINE

CLOSE = 0.03  # clocks move by several per cent between samples taken minutes apart (prototype/README.md)
MOST_SERVABLE = 4
MOST_OTHERS = 2


def is_final(row: ResultRow) -> bool:
    """Whether the row comes from a final round."""
    return (row.telemetry or {}).get("round") == "final"


def finalists(problem: Problem, rows: Sequence[ResultRow]) -> list[ResultRow]:
    """The configs of ``problem`` to sample in turn, the ascending baseline first; [] when no round is due.

    ``rows`` are the sweep's, in the order of their ids. A round is due when the cell has a row newer than its last
    round, its baseline is usable, and there is something to tell apart.
    """
    mine = [
        row for row in rows if row.to_problem() == problem and row.status == "ok" and row.tflops
    ]
    if not mine or is_final(mine[-1]):
        return []
    newest = {row.config_hash: row for row in mine}
    ranked = sorted(newest.values(), key=lambda row: -(row.tflops or 0.0))
    baseline = [row for row in ranked if _is_baseline(row)]
    unordered = [row for row in ranked if row.policy == "unordered"]
    others = [row for row in ranked if row.policy != "unordered" and row not in baseline[:1]]
    servable = _close([row for row in others if row.min_resident == 1 or row.policy == "two_pass"])
    waiting = _close([row for row in others if row not in servable])
    if not baseline or not others:
        return []
    return baseline[:1] + unordered[:1] + servable[:MOST_SERVABLE] + waiting[:MOST_OTHERS]


def _is_baseline(row: ResultRow) -> bool:
    config = row.to_config()
    return (
        config.schedule == BASELINE
        and config.policy == "ordered"
        and config.heads_interleaved == 1
        and config.launch_order == "ascending"
    )


def _close(ranked: list[ResultRow]) -> list[ResultRow]:
    best = ranked[0].tflops or 0.0 if ranked else 0.0
    return [row for row in ranked if (row.tflops or 0.0) >= best * (1 - CLOSE)]
