"""What a sweep shows while it runs: a live table on a terminal, plain lines elsewhere, JSON lines for machines."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, TextIO

from tuner.results import ResultRow

PLAIN_EVERY_S = 10.0
SHOWN_FAILURES = 3


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Progress:
    """Counts that every reporter shows. ``best`` holds the fastest deterministic row of each shape."""

    def __init__(self) -> None:
        self.total = self.resumed = self.elsewhere = self.done = self.failed = 0
        self.best: dict[str, ResultRow] = {}
        self.started, self.budget_s = time.monotonic(), 0.0

    def begin(self, total: int, resumed: int, budget_s: float) -> None:
        """``budget_s`` seconds at most will be spent; 0 for no limit."""
        self.total, self.resumed, self.budget_s = total, resumed, budget_s

    def add(self, row: ResultRow) -> None:
        self.done += 1
        if row.status != "ok":
            self.failed += 1
            return
        shape = row.to_problem().label()
        leader = self.best.get(shape)
        if (
            row.policy != "unordered"
            and row.tflops
            and (leader is None or row.tflops > (leader.tflops or 0))
        ):
            self.best[shape] = row

    def seconds_left(self) -> float | None:
        """At the pace so far, and no more than the budget leaves; None before there is a pace."""
        if not self.done:
            return None
        spent = time.monotonic() - self.started
        done = self.done + self.elsewhere
        left = spent / done * (self.total - done)
        return min(left, max(0.0, self.budget_s - spent)) if self.budget_s else left

    def headline(self) -> str:
        left = self.seconds_left()
        parts = [f"{self.done}/{self.total} configs"]
        if self.resumed:
            parts.append(f"{self.resumed} from before")
        if self.elsewhere:
            parts.append(f"{self.elsewhere} by other processes")
        if self.failed:
            parts.append(f"{self.failed} failed")
        if left is not None and self.done + self.elsewhere < self.total:
            parts.append(f"about {duration(left)} left")
        return ", ".join(parts)


class PlainReporter:
    """A line now and then, and one for each failure."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.progress = Progress()
        self._stream = stream or sys.stdout
        self._last = 0.0

    def begin(self, total: int, resumed: int, budget_s: float = 0.0) -> None:
        self.progress.begin(total, resumed, budget_s)
        self.note(f"{total} configs to do" + (f", {resumed} done before" if resumed else ""))

    def row(self, row: ResultRow) -> None:
        self.progress.add(row)
        if row.status != "ok":
            self.note(failure_line(row))
        first = self.progress.done == 1
        if first or time.monotonic() - self._last >= PLAIN_EVERY_S:
            self._last = time.monotonic()
            self.note(self.progress.headline() + f"; {row_line(row)}")

    def elsewhere(self, count: int) -> None:
        self.progress.elsewhere += count

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


class JsonReporter(PlainReporter):
    """One JSON object a line: ``{"event": "row", ...}``."""

    def begin(self, total: int, resumed: int, budget_s: float = 0.0) -> None:
        self.progress.begin(total, resumed, budget_s)
        self._event("begin", total=total, resumed=resumed)

    def row(self, row: ResultRow) -> None:
        self.progress.add(row)
        values = row.to_dict()
        for name in ("samples", "telemetry", "created_at", "id", "run_id", "run_uuid"):
            values.pop(name, None)
        self._event("row", **values)

    def note(self, text: str) -> None:
        self._event("note", text=text)

    def _event(self, event: str, **values: Any) -> None:
        print(
            json.dumps({"event": event, **values}, allow_nan=False), file=self._stream, flush=True
        )


class LiveReporter:
    """A table of shapes that is redrawn in place, with a bar and the time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self.progress = Progress()
        self._notes: list[str] = []
        self._live = Live(console=Console(), refresh_per_second=4, get_renderable=self._render)
        self._live.start()

    def begin(self, total: int, resumed: int, budget_s: float = 0.0) -> None:
        self.progress.begin(total, resumed, budget_s)

    def row(self, row: ResultRow) -> None:
        self.progress.add(row)
        if row.status != "ok":
            self.note(failure_line(row))

    def elsewhere(self, count: int) -> None:
        self.progress.elsewhere += count

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def tick(self) -> None:
        pass

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table(title="best deterministic config so far", title_justify="left")
        for name in ("shape", "config", "TFLOPS", "against ascending", "registers", "spill bytes"):
            table.add_column(name, justify="left" if name in ("shape", "config") else "right")
        for shape, row in sorted(self.progress.best.items()):
            table.add_row(shape, *_columns(row))
        bar = ProgressBar(
            total=max(1, self.progress.total),
            completed=self.progress.done + self.progress.elsewhere,
            width=60,
        )
        return Group(table, bar, self.progress.headline())


def _columns(row: ResultRow) -> tuple[str, ...]:
    return (
        row.to_config().label(),
        f"{row.tflops:.1f}" if row.tflops else "",
        f"{row.speedup_vs_baseline:.2f}x" if row.speedup_vs_baseline else "",
        "" if row.registers is None else str(row.registers),
        "" if row.spill_bytes is None else str(row.spill_bytes),
    )


def row_line(row: ResultRow) -> str:
    """One row for a person."""
    if row.status != "ok":
        return f"{_name(row)}: {row.status}"
    if row.tflops:
        return f"{_name(row)}: {row.tflops:.1f} TFLOPS"
    return f"{_name(row)}: {row.registers} registers, {row.spill_bytes} spill bytes"


def failure_line(row: ResultRow) -> str:
    """Class, config and the first line of what went wrong."""
    lines = (row.error or "").splitlines() or [""]
    return f"{row.status}: {_name(row)}: {lines[0]}"


def _name(row: ResultRow) -> str:
    return f"{row.to_problem().label()}: {row.to_config().label()}"


def make_reporter(as_json: bool) -> PlainReporter | LiveReporter:
    if as_json:
        return JsonReporter()
    return LiveReporter() if sys.stdout.isatty() else PlainReporter()
