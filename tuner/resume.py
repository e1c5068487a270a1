"""What earlier commands have left to go on from: rows that need no second try, and cells whose final round is due."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from dash_kernels.device import software
from dash_kernels.problem import Problem
from tuner.failures import TRANSIENT
from tuner.finals import finalists
from tuner.plan import Item, Summary, SweepSettings
from tuner.results import ResultRow, RunInfo, Store


@dataclass(frozen=True, slots=True)
class Earlier:
    """Of a sweep's items, those that have a row (``known``), of these the usable ones, and every row of the sweep."""

    known: frozenset[str]
    usable: frozenset[str]
    rows: tuple[ResultRow, ...]

    def count(self, summary: Summary) -> None:
        summary.resumed = len(self.known)
        summary.usable = len(self.usable)
        summary.failed_before = len(self.known) - len(self.usable)


def run_info(settings: SweepSettings, environment: dict[str, Any]) -> RunInfo:
    """The run that a sweep with these settings writes its rows into."""
    return RunInfo(
        gpu=settings.gpu,
        environment=environment,
        measurement_policy=settings.policy.to_dict() if settings.source == "measured" else {},
        command=settings.command,
        source=settings.source,
    )


def earlier(store: Store, settings: SweepSettings, run: RunInfo, items: Iterable[Item]) -> Earlier:
    """What is stored under the environment and policy of ``run``; nothing with ``--fresh``."""
    done: set[str] = set()
    if not settings.fresh:
        done = store.done_hashes(
            settings.gpu,
            run.environment_key,
            settings.source,
            policy_key=run.policy_key,
            retry=TRANSIENT if settings.retry else (),
        )
    known = {item.hash for item in items} & done
    rows = rows_of_sweep(store, settings, run)
    mine = [row for row in rows if row.config_hash in known]
    failed = {row.config_hash for row in mine if row.status != "ok"}
    usable = {row.config_hash for row in mine} - failed
    return Earlier(frozenset(known), frozenset(usable), tuple(rows))


def rows_of_sweep(store: Store, settings: SweepSettings, run: RunInfo) -> list[ResultRow]:
    """Rows of this environment and policy that decide who wins, oldest first; also those that failed a gate."""
    found = store.candidates(settings.gpu, source=settings.source, sweep=run.sweep)
    return [row for row, _ in found]


def due_finals(
    problems: Iterable[Problem], rows: Sequence[ResultRow]
) -> list[tuple[Problem, list[ResultRow]]]:
    """The cells among ``problems`` whose final round is due, with who takes part, in a fixed order."""
    wanted = sorted(set(problems), key=astuple)
    return [(problem, chosen) for problem in wanted if (chosen := finalists(problem, rows))]


def remembered_environment(
    store: Store, settings: SweepSettings, driver_name: str
) -> dict[str, Any] | None:
    """The environment that a GPU worker would report, where an earlier run recorded all that can be read without one.

    A worker takes seconds to start. A chip of one name has one number of SMs, which only the GPU itself can tell, so it
    comes from that run; a worker that then starts has the last word.
    """
    here = {
        "gpu": settings.gpu,
        "gpu_name": driver_name,
        "capability": "{}.{}".format(*settings.capability),
        **software(),
    }
    for run in reversed(store.runs(settings.gpu)):
        there = {name: value for name, value in run.environment.items() if name != "sms"}
        if run.source == settings.source and there == here:
            return run.environment
    return None


def nothing_to_do(
    store: Store, settings: SweepSettings, items: Sequence[Item], environment: dict[str, Any]
) -> Summary | None:
    """The summary of a sweep whose every item has a row and whose every final round was held; None where work is left."""
    found = earlier(store, settings, run_info(settings, environment), items)
    if len(found.known) < len({item.hash for item in items}):
        return None
    if settings.source == "measured" and due_finals((item.problem for item in items), found.rows):
        return None
    summary = Summary()
    found.count(summary)
    return summary
