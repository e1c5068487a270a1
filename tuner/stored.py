"""The subcommands that look after stored rows: show, export, import, release, verify, and what --why explains."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from dash_kernels.device import resolve_gpu
from dash_kernels.problem import MASKS
from tuner.command import UsageError
from tuner.results import ResultFilter, Store
from tuner.results.rows import SOURCES, StoreError, StoreUnavailable, finite
from tuner.space import SpaceFilter
from tuner.winners import Cell, Winner

PIPED_WIDTH = 200
LISTED_CONFLICTS = 20
FORMATS = (
    ".json.gz",
    ".t4.json",
    ".json",
    ".csv",
    ".parquet",
)  # a longer ending before its own end
COLUMNS = (
    "mask",
    "d",
    "seq_len",
    "dtype",
    "winner",
    "TFLOPS",
    "vs ascending",
    "lead",
    "registers",
    "spill",
    "best of all",
)


def _open(db: str | None) -> Store:
    """The database, with the rows that are shipped."""
    store = Store.open(db)
    store.load_shipped()
    return store


def _open_to_read(db: str | None) -> Store:
    """As :func:`_open`; one that cannot be written, as of another user, is read as it is."""
    try:
        return _open(db)
    except StoreUnavailable:
        raise
    except StoreError as error:
        with suppress(StoreError):
            return Store.open(db, read_only=True)
        raise error from None


def _gpu(store: Store, gpu: str) -> str:
    """The GPU meant: the named one, or the only one that has rows."""
    known = store.gpus()
    if gpu and gpu not in known:
        with suppress(ValueError):
            gpu = resolve_gpu(gpu).name
    if gpu in known:
        return gpu
    if gpu:
        raise UsageError(
            f"nothing is stored for GPU {gpu!r}; stored: {', '.join(known) or 'nothing yet'}"
        )
    if len(known) == 1:
        return known[0]
    if not known:
        raise UsageError(f"{store.where} holds no rows; run dash-tune --gpu auto first")
    raise UsageError(f"several GPUs have rows; say --gpu {' or --gpu '.join(known)}")


def _check_key(store: Store, gpu: str, key: str) -> None:
    """Raises UsageError for a numerics key that no row of this GPU has."""
    if key and not store.results(ResultFilter(gpu=gpu, numerics_key=key), limit=1):
        raise UsageError(
            f"no row of {gpu} in {store.where} has numerics key {key!r}; the keys of its winners are in "
            f"dash-tune show --gpu {gpu} --json, those of all rows in dash-tune export rows.csv --gpu {gpu}"
        )


def show(
    db: str | None,
    gpu: str,
    mask: str | None,
    head_dim: int | None,
    source: str,
    as_json: bool,
    numerics_key: str = "",
) -> None:
    """Print the winners of each cell, of one numerics key where it is given."""
    for option, value, known in (("mask", mask, MASKS), ("source", source, SOURCES)):
        if value is not None and value not in known:
            raise UsageError(f"unknown {option} {value!r}; choose from {', '.join(known)}")
    if numerics_key and source != "measured":
        raise UsageError(f"only measured rows have a numerics key; --source is {source}")
    with _open_to_read(db) as store:
        gpu = _gpu(store, gpu)
        _check_key(store, gpu, numerics_key)
        filters = ResultFilter(mask=mask, head_dim=head_dim, numerics_key=numerics_key or None)
        cells = store.winners(gpu, filters, source=source)
        if as_json:
            print(
                json.dumps(
                    {"gpu": gpu, "source": source, "cells": [cell.to_dict() for cell in cells]}
                )
            )
            return
        if not cells:
            narrower = ", of what --mask, --head-dim and --numerics-key leave"
            asked = mask or head_dim or numerics_key
            others = [
                s for s in SOURCES if s != source and store.count(ResultFilter(gpu=gpu, source=s))
            ]
            elsewhere = f"; --source {' or '.join(others)} has rows" if others else ""
            raise UsageError(
                f"no {source} winner for {gpu} in {store.where}{narrower if asked else ''}{elsewhere}"
            )
        _print_cells(gpu, source, cells)


def _print_cells(gpu: str, source: str, cells: list[Cell]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{gpu}, {source}: winners safe to serve", title_justify="left")
    for name in COLUMNS:
        table.add_column(
            name, justify="left" if name in ("mask", "dtype", "winner", "best of all") else "right"
        )
    for cell in cells:
        table.add_row(*_cell_row(cell))
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    console.print(table)


def _cell_row(cell: Cell) -> list[str]:
    problem = cell.best.row.to_problem()
    words = problem.label().split()
    shape = [cell.mask, words[1].removeprefix("d="), str(cell.seq_len), " ".join(words[3:])]
    if cell.head_group > 1:
        shape[3] += f" head group {cell.head_group}"
    served, best = cell.served, cell.best
    if served is None:
        return [*shape, *["-"] * 6, _named(best)]
    row = served.row
    other = "same" if best.row.config_hash == row.config_hash else _named(best)
    return [
        *shape,
        row.to_config().label(),
        _number(row.tflops, ".1f"),
        _number(served.speedup_vs_baseline, ".2f", "x"),
        _lead(served),
        _number(row.registers, "d"),
        _number(row.spill_bytes, "d"),
        other,
    ]


def _lead(winner: Winner) -> str:
    """The lead over the runner-up; one within the noise, or not above zero for sure, is a tie."""
    lead = winner.confidence
    if lead is None:
        return "-"
    return "tie" if lead.tie else f"{100 * lead.lead:.1f} %"


def _named(winner: Winner) -> str:
    return f"{winner.row.to_config().label()} ({_number(winner.row.tflops, '.1f')})"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit


def export(
    db: str | None, gpu: str, output: Path, name: str | None, numerics_key: str = ""
) -> None:
    """Write a lookup table (.json), rows (.csv, .parquet, .t4.json) or every run with its rows (.json.gz)."""
    from tuner import export as exporting
    from tuner.t4 import rows_t4

    form = next((ending for ending in FORMATS if output.name.endswith(ending)), "")
    if not form:
        raise UsageError(f"{output}: the ending tells the format; use {', '.join(FORMATS)}")
    if name is not None and form != ".json":
        raise UsageError(f"--name is for a lookup table (.json); {output} is none")
    if name is not None:
        exporting.check_release_name(name)
    if numerics_key and form == ".json.gz":
        raise UsageError(f"{output} holds every run; leave --numerics-key out, or write .csv")
    with _open_to_read(db) as store:
        gpu = _gpu(store, gpu)
        _check_key(store, gpu, numerics_key)
        if form == ".json.gz":
            count = _write(output, lambda: exporting.dump_shipped(store, gpu, output))
            print(f"{count} rows of {gpu} in {output}")
            return
        content: str | bytes
        if form == ".json":
            cells = store.winners(gpu, ResultFilter(numerics_key=numerics_key or None))
            table = exporting.lookup_table(store, gpu, name or f"{gpu}-draft", cells=cells)
            content = exporting.table_json(table)
        else:
            only = ResultFilter(gpu=gpu, numerics_key=numerics_key or None)
            make: dict[str, Any] = {
                ".csv": exporting.rows_csv,
                ".parquet": exporting.rows_parquet,
                ".t4.json": rows_t4,
            }
            content = make[form](store.results(only, limit=None), store.runs(gpu))
        data = content.encode() if isinstance(content, str) else content
        _write(output, lambda: output.write_bytes(data))
        print(f"wrote {output} ({gpu})")


def _write(output: Path, action: Any) -> Any:
    try:
        return action()
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}") from None


def import_rows(db: str | None, source: str) -> int:
    """Merge a file of rows, a lookup table or another database.

    1 when the file is none of these, 3 when something there is not as it is here.
    """
    from tuner.importing import NotAnExport, import_file

    with Store.open(db) as store:
        try:
            done = import_file(store, source)
        except NotAnExport as error:
            print(f"dash-tune: {error}", file=sys.stderr)
            return 1
        releases = f" and {done.releases} releases" if done.releases else ""
        print(
            f"{done.added} rows{releases} added to {store.where}, {done.known} were there already"
        )
    if not done.conflicts:
        return 0
    print(f"{len(done.conflicts)} conflicts: what was there stays")
    for line in done.conflicts[:LISTED_CONFLICTS]:
        print(f"  {line}")
    if len(done.conflicts) > LISTED_CONFLICTS:
        print(f"  and {len(done.conflicts) - LISTED_CONFLICTS} more")
    return 3


def release(db: str | None, gpu: str, name: str | None, notes: str) -> None:
    """Freeze the winners; print the release's number, and what it changes against the one before it."""
    from dash_kernels.lookup import LookupTable
    from dash_kernels.table_diff import diff
    from tuner.export import freeze

    with _open(db) as store:
        gpu = _gpu(store, gpu)
        older = store.get_release(gpu=gpu)
        made = freeze(store, gpu, finite(notes), name)
    print(f"release {made.id}: {made.name}, digest {made.digest[:12]}")
    if older is None:
        return
    old, new = (LookupTable.from_dict(each.to_dict()) for each in (older, made))
    found = diff(old, new)
    print(f"against release {older.id}, {older.name}: {found.summary()}")
    for change in found.changes:
        print(f"  {change.line()}")


def explain(db: str | None, gpu: str, about: str, as_json: bool) -> None:
    """Print why a lookup answers as it does, or why a row does not decide here."""
    from dash_kernels.device import NoGpuError
    from tuner.why import explain as explained

    with _open_to_read(db) as store:
        try:
            found = explained(about, store, gpu)
        except (ValueError, NoGpuError) as error:
            raise UsageError(str(error)) from None
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    print(f"{found.about}\n  {found.answer}")
    for reason in found.reasons:
        print(f"  - {reason}")


def verify(filters: SpaceFilter, runs: int, as_json: bool) -> int:
    """Check what the dispatcher serves on this GPU; 0 when every shape passes, 1 when one does not."""
    from dataclasses import asdict

    import dash_kernels
    from dash_kernels.device import NoGpuError
    from tuner.space import problems, validate

    try:
        validate(filters)
        shapes = problems(filters)
        failed = 0
        for problem in shapes:
            answer = dash_kernels.verify(problem, runs=runs)
            failed += not answer.ok
            if as_json:
                print(
                    json.dumps(
                        {"problem": problem.to_dict(), "ok": answer.ok, **_plain(asdict(answer))}
                    )
                )
                continue
            bits = "bits equal" if answer.bits_equal else f"BITS DIFFER: {answer.first_difference}"
            errors = ", ".join(
                f"{gradient} {error.relative:.2e} of {answer.budgets[gradient].relative:.2e}"
                for gradient, error in answer.errors.items()
            )
            within = "in budget" if answer.within_budget else "OVER BUDGET"
            print(f"{problem.label()}: {answer.config.label()}: ", end="")
            print(f"{bits} in {answer.runs} runs; {within} ({errors})", flush=True)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except NoGpuError as error:
        raise UsageError(f"verify runs on a GPU: {error}") from None
    return 1 if failed else 0


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: an error that is not finite is null."""
    from tuner.results.rows import finite

    cleaned: dict[str, Any] = finite(values)
    return cleaned
