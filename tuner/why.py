"""``dash-tune doctor --why``: why this machine runs what it runs for a problem, or why a stored row does not decide here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dash_kernels.device import environment_difference, software
from dash_kernels.problem import DTYPES, MASKS, Problem, retired
from tuner.policy import MeasurementPolicy
from tuner.results import ResultFilter, ResultRow, Store
from tuner.winners import CELL_FIELDS, FAILED_CHECKS, Cell, cost, is_final, resident

NAMES = {"d": "head_dim", "s": "seq_len", "d_v": "head_dim_v"}
FLAGS = ("softcap", "varlen")
NUMBERS = (
    *("head_dim", "seq_len", "batch", "heads", "heads_kv", "seq_len_kv"),
    *("window_left", "window_right", "head_dim_v"),
)


class NotUnderstood(ValueError):
    """What --why was given is neither a row's number nor a problem."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """``about`` is what was asked, ``answer`` what holds, ``reasons`` one line each, from the first that counts on."""

    about: str
    answer: str
    reasons: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"about": self.about, "answer": self.answer, "reasons": self.reasons}


def explain(text: str, store: Store, gpu: str) -> Explanation:
    """Explain a row (``1234``) or a problem (``causal d=128 seq_len=4096``). Raises NotUnderstood or StoreError."""
    if text.isascii() and text.isdecimal():
        return of_row(int(text), store)
    return of_problem(parse_problem(text), gpu)


def parse_problem(text: str) -> Problem:
    """A problem in the words of its label: mask, dtype, name=value, softcap, varlen, window=left,right or left:right."""
    values: dict[str, Any] = {}
    given: dict[str, Any]
    for word in text.split():
        name, equals, value = word.partition("=")
        name = NAMES.get(name, name)
        if word in MASKS:
            given = {"mask": word}
        elif word in DTYPES:
            given = {"dtype": word}
        elif word in FLAGS:
            given = {word: True}
        elif name == "window" and equals:
            sides = _numbers(word, value.replace(":", ","), 2)
            given = dict(zip(("window_left", "window_right"), sides, strict=True))
        elif name == "head_dim" and "/" in value:
            dims = _numbers(word, value.replace("/", ","), 2)
            given = dict(zip(("head_dim", "head_dim_v"), dims, strict=True))
        elif name in NUMBERS and equals:
            given = {name: _numbers(word, value, 1)[0]}
        else:
            raise NotUnderstood(
                f"--why {word!r} is not understood; write a row's number, or a problem such as "
                "'causal d=128 seq_len=4096 window=1023,0'"
            )
        if twice := sorted(given.keys() & values.keys()):
            raise NotUnderstood(f"--why {text!r}: {twice[0]} is given twice; give it once")
        values |= given
    try:
        return Problem(**{"mask": "causal", "head_dim": 128, "seq_len": 4096, **values})
    except ValueError as error:
        raise NotUnderstood(f"--why {text!r}: {error}") from None


def _numbers(word: str, text: str, count: int) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != count:
        raise NotUnderstood(
            f"--why {word!r}: {count} numbers are due"
            if count > 1
            else f"--why {word!r}: a number is due"
        )
    return found


def of_problem(problem: Problem, gpu: str) -> Explanation:
    """The ladder that the dispatcher climbs for this problem, and where its table was made otherwise than here."""
    from dash_kernels.dispatch import choose, source_in_force

    device = gpu or None
    choice = choose(problem, device)
    reasons = [
        f"{rung.name}: {'answers' if rung.answered else 'no'}: {rung.why}" for rung in choice.ladder
    ]
    source = source_in_force(device)
    if source.table is not None:
        differs = environment_difference(software(), _software_of(source.table.environment))
        reasons += [
            f"table {source.release} was made with {name} {_said(there)}; here it is {_said(here)}"
            for name, (here, there) in differs.items()
        ]
    answer = f"{choice.config.label()}, matched {choice.matched}, from {choice.release}"
    return Explanation(problem.label(), answer, reasons)


def _software_of(environment: dict[str, Any]) -> dict[str, Any]:
    return {name: environment.get(name) for name in software()}


def of_row(number: int, store: Store) -> Explanation:
    """What keeps a stored row from deciding its cell, and from sparing a resumed sweep its work."""
    found = store.results(limit=1, after_id=number - 1) if number < 2**63 else []
    if not found or found[0].id != number:
        raise NotUnderstood(f"--why {number}: {store.where} has no row of this number")
    row = found[0]
    about = f"row {number}: {row.gpu} {row.to_problem().label()}: {row.to_config().label()}"
    cells = store.winners(row.gpu, _cell_of(row), source=row.source)
    reasons = [
        *_flaws(row),
        *_standing(row, cells[0] if cells else None, store),
        *_here(row, store),
    ]
    decides = any(_decides(row, cell) for cell in cells)
    return Explanation(
        about, "decides its cell" if decides else "does not decide its cell", reasons
    )


def _cell_of(row: ResultRow) -> ResultFilter:
    return ResultFilter(**{name: getattr(row, name) for name in CELL_FIELDS})


def _decides(row: ResultRow, cell: Cell) -> bool:
    return row.id in {winner.row.id for winner in (cell.served, cell.best) if winner is not None}


def _flaws(row: ResultRow) -> Iterator[str]:
    """What keeps it out whatever the others are."""
    if row.status != "ok":
        yield f"status is {row.status}: {(row.error or '').splitlines()[0] if row.error else ''}"
    elif row.above_peak:
        yield f"{row.tflops:.0f} TFLOPS is above the chip's peak"
    elif cost(row) is None:
        yield "it has no time"
    if gone := retired(row.to_config()):
        yield f"earlier kernels ran it, these refuse it: {gone}"
    if row.policy == "unordered":
        yield "policy is unordered: a yardstick, never a winner"
    if (resident(row) or 0) > 1:
        yield f"it needs {row.min_resident} CTAs resident at once: best of all at most, never served"


def _standing(row: ResultRow, cell: Cell | None, store: Store) -> Iterator[str]:
    """How it stands among the rows of its cell."""
    if cell is None:
        yield "its cell has no winner yet"
        return
    run = next(run for run in store.runs(row.gpu) if run.id == row.run_id)
    if run.sweep != cell.sweep:
        yield "another sweep decides its cell: a newer one, or one that has a config to serve"
        return
    found = store.candidates(row.gpu, _cell_of(row), source=row.source, sweep=run.sweep)
    pairs = [other for other, _ in found]
    same = [other for other in pairs if other.config_hash == row.config_hash]
    if any(other.status in FAILED_CHECKS for other in same):
        yield "another row of this config failed a gate in this sweep"
    if same and same[-1].id != row.id:
        yield f"row {same[-1].id} is a newer one of the same config"
    if any(is_final(other) for other in pairs) and not is_final(row):
        yield "a final round has decided since: its leaders were sampled in turn"
    for name, winner in (("served", cell.served), ("best", cell.best)):
        if winner is None or winner.row.id == row.id:
            continue
        what = winner.row.to_config().label()
        yield f"{name} is row {winner.row.id}, {what}{_lead(winner.row, row)}"


def _lead(winner: ResultRow, row: ResultRow) -> str:
    best, own = cost(winner), cost(row)
    if not best or own is None:
        return ""
    if row.source == "compiled":
        return f": {winner.spill_bytes} spill bytes and {winner.registers} registers against {row.spill_bytes} and {row.registers}"
    what = "in TFLOPS" if row.source == "measured" else "as the model has it"
    return f": {100 * (own / best - 1):+.1f} % {what}"


def _here(row: ResultRow, store: Store) -> Iterator[str]:
    """Where the row was made otherwise than a sweep on this machine would: such a row spares no work."""
    run = next(run for run in store.runs(row.gpu) if run.id == row.run_id)
    differs = environment_difference(software(), _software_of(run.environment))
    for name, (here, there) in differs.items():
        yield f"made with {name} {_said(there)}; here it is {_said(here)}"
    if row.source != "measured":
        return
    mine = MeasurementPolicy().to_dict()
    for name, (here, there) in environment_difference(mine, run.measurement_policy).items():
        yield f"measured with {name} {_said(there)}; a sweep now has {_said(here)}"


def _said(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:12]}..."
