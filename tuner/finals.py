"""Who goes into a cell's final round: the baselines, the default, and the leaders that one pass cannot tell apart."""

from __future__ import annotations

from collections.abc import Sequence

from dash_kernels.problem import Problem
from tuner.results import ResultRow
from tuner.space import BASELINE
from tuner.winners import default_of, is_final, is_plain, resident

CLOSE = 0.03  # clocks move by several per cent between samples taken minutes apart
MOST_SERVABLE = 4
MOST_OTHERS = 2


def finalists(problem: Problem, rows: Sequence[ResultRow]) -> list[ResultRow]:
    """The configs of ``problem`` to sample in turn, the ascending baseline first; [] when no round is due.

    ``rows`` are the sweep's, oldest first. A round is due when the cell has a row newer than its last
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
    servable = _close([row for row in others if resident(row) == 1])
    waiting = _close([row for row in others if row not in servable])
    if not baseline or not others:
        return []
    leaders = servable[:MOST_SERVABLE] + waiting[:MOST_OTHERS]
    usual = [row for row in others if row not in leaders and row.config == default_of(row)]
    return baseline[:1] + unordered[:1] + leaders + usual


def _is_baseline(row: ResultRow) -> bool:
    return row.schedule == BASELINE and row.policy == "ordered" and is_plain(row)


def _close(ranked: list[ResultRow]) -> list[ResultRow]:
    best = ranked[0].tflops or 0.0 if ranked else 0.0
    return [row for row in ranked if (row.tflops or 0.0) >= best * (1 - CLOSE)]
