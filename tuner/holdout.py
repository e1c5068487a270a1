"""What snapping to the nearest measured shape costs: half of the shapes make a table, the other half asks it.

``python -m tuner.holdout --gpu h200 [--db ...] [--output FILE]``. The answer at a shape that the table lacks is the
config of the nearest one that it has; its measured speed there, against that of the shape's own winner, is the cost.
Every second length of each slice is held out, then the others, so that each shape is asked for once.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dash_kernels.lookup import LookupTable
from tuner.export import lookup_table
from tuner.results import ResultRow, Store, StoreError
from tuner.winners import SLICE_FIELDS, Cell, is_final, winners


@dataclass(frozen=True, slots=True)
class Snapped:
    """One shape that was held out. ``cost`` is the share of speed lost: 0 where the nearest shape's config is its own.

    It may be below zero: two configs that tie, or of which one missed the final round and saw other clocks.
    """

    shape: str
    asked: int
    nearest: int
    same_config: bool
    cost: float | None


def holdout(table: LookupTable, candidates: Iterable[tuple[ResultRow, str]]) -> list[Snapped]:
    """Each served cell of ``table``, asked of the half that lacks it. ``candidates`` are the rows behind the table."""
    pairs = list(candidates)
    speeds = _speeds(winners(pairs), pairs)
    slices: dict[Any, list[Any]] = defaultdict(list)
    for cell in table.cells:
        if cell.served is not None and cell.served.servable:
            kind = cell.problem.mask, cell.problem.head_dim, cell.problem.dtype
            slices[kind, cell.problem.head_group, str(cell.problem.options())].append(cell)
    answers = []
    for cells in slices.values():
        ordered = sorted(cells, key=lambda cell: cell.problem.seq_len)
        for half in (0, 1):
            kept = tuple(ordered[half::2])
            if not kept:
                continue
            part = LookupTable(table.gpu, "half", table.created, kept)
            for cell in ordered[1 - half :: 2]:
                found = part.find(cell.problem)
                assert found is not None
                answers.append(_snapped(cell, found[0], speeds))
    return sorted(answers, key=lambda answer: answer.shape)


def summary(answers: Sequence[Snapped]) -> dict[str, Any]:
    """How many shapes, how many of them took their own config, and the mean (geometric) and the largest cost."""
    costs = [answer.cost for answer in answers if answer.cost is not None]
    logs = [math.log(1 - cost) for cost in costs]
    return {
        "shapes": len(answers),
        "same_config": sum(answer.same_config for answer in answers),
        "without_a_row": len(answers) - len(costs),
        "mean_cost": round(1 - math.exp(sum(logs) / len(logs)), 4) if logs else None,
        "largest_cost": round(max(costs), 4) if costs else None,
    }


def _speeds(
    cells: Sequence[Cell], pairs: Sequence[tuple[ResultRow, str]]
) -> dict[tuple[Any, ...], float]:
    """TFLOPS by shape and config within the sweep that decided the shape, of a final round where there was one."""
    decided = {_place(cell): cell.sweep for cell in cells}
    found: dict[tuple[Any, ...], float] = {}
    final: set[tuple[Any, ...]] = set()
    for row, sweep in pairs:
        key = (_place(row), row.to_config().key())
        if decided.get(_place(row)) != sweep or row.status != "ok" or row.tflops is None:
            continue
        if is_final(row) or key not in final:
            found[key] = row.tflops
        if is_final(row):
            final.add(key)
    return found


def _place(item: Cell | ResultRow) -> tuple[Any, ...]:
    names = [name for name in SLICE_FIELDS if name not in ("gpu", "direction")]
    return tuple(getattr(item, name) for name in (*names, "seq_len", "seq_len_kv"))


def _snapped(cell: Any, nearest: Any, speeds: dict[tuple[Any, ...], float]) -> Snapped:
    problem, own, other = cell.problem, cell.served.config, nearest.served.config
    names = [name for name in SLICE_FIELDS if name not in ("gpu", "direction")]
    place = tuple(getattr(problem, name) for name in (*names, "seq_len", "seq_len_kv"))
    best, there = speeds.get((place, own.key())), speeds.get((place, other.key()))
    cost = None if best is None or there is None else 1 - there / best
    return Snapped(
        problem.label(), problem.seq_len, nearest.problem.seq_len, own == other, cost and round(cost, 4)
    )  # fmt: skip


def report(store: Store, gpu: str) -> dict[str, Any]:
    """The holdout of the rows of ``gpu`` as they are now."""
    table = LookupTable.from_dict(lookup_table(store, gpu))
    answers = holdout(table, store.candidates(gpu))
    return {
        "gpu": gpu,
        "environment": table.environment,
        "digest": table.digest,
        "summary": summary(answers),
        "shapes": [asdict(answer) for answer in answers],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tuner.holdout", description=__doc__)
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--db", help="default: the rows that ship with the package")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    try:
        with Store.open(options.db or "sqlite://") as store:
            if not options.db:
                store.load_shipped()
            found = report(store, options.gpu)
    except StoreError as error:
        print(error, file=sys.stderr)
        return 2
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["summary"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
