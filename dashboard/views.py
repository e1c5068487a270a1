"""The page as values: snapshot, runs and filters in, what the template prints out. No request, no HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup, escape

from dash_kernels.problem import Config
from dashboard import filters as state
from dashboard.filters import Filters
from dashboard.model import strips
from dashboard.palette import MARKS, kind_order
from dashboard.points import geometric_mean, kind_of, schedule_of, tflops_of
from dashboard.sections import RunReport, gantt, run_section
from dashboard.snapshot import Snapshot, one_a_length
from tuner.winners import Cell, Confidence, Winner, cost, overall, resident

UNKNOWN = "–"


MAP_TITLES = {
    "measured": (
        "Winner at every shape",
        "The fastest deterministic schedule that is safe on any number of free SMs; × is against ascending order in "
        "the same run.",
    ),
    "modelled": (
        "Predicted winner at every shape",
        "By the model's times, × against its ascending order. Nothing here is measured.",
    ),
}


SPEED_NOTES = {
    "measured": "Delta pass, main kernel, dQ cast and zeroing together.",
    "modelled": "The main kernel alone: delta pass and dQ cast are not modelled.",
}


@dataclass(frozen=True)
class Page:
    """Everything the template prints."""

    title: str
    source: str
    gpu: str
    dtype: str
    notices: list[str]
    filters: list[dict[str, Any]]
    hero: dict[str, Any]
    strips: Sequence[Any]
    map: dict[str, Any]
    map_title: tuple[str, str]
    subtitle: str
    ceiling_note: str
    table: list[dict[str, Any]]
    table_empty: str
    gantt: dict[str, Any]
    run: dict[str, Any]
    releases: Mapping[str, Any] | None
    figures: dict[str, str]
    links: dict[str, str]
    footer: list[str] = field(default_factory=list)


def kind_class(label: str) -> str:
    """CSS class suffix of a kind: the palette's name, or ``other``."""
    base = label.split("(")[0]
    return base if base in MARKS else "other"


def breakable(name: str) -> Markup:
    """A kind's name that may break after an underscore, where a column is narrow."""
    return escape(name).replace("_", Markup("_<wbr>"))


def length(seq_len: int) -> str:
    return f"{seq_len // 1024}k" if seq_len % 1024 == 0 else str(seq_len)


def times(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}×"


def percent(share: float | None) -> str:
    """A share; a typographic minus where it is below zero, and no minus zero."""
    if share is None:
        return UNKNOWN
    text = f"{share * 100:.1f} %"
    return "0.0 %" if text == "-0.0 %" else text.replace("-", "−")


def winner_of(cell: Cell) -> Winner:
    """What ``choose()`` would run; the best of all where nothing monotone was measured."""
    return cell.served or cell.best


def order_cost(cell: Cell) -> float | None:
    """Share of speed that the winner's fixed order gives up against atomics; negative where order is faster."""
    unordered = cell.baselines.get("unordered")
    own = cost(winner_of(cell).row)
    base = cost(unordered.row) if unordered else None
    return 1 - base / own if own and base else None


def hero(gpu: str, filters: Filters, cells: Sequence[Cell], source: str) -> dict[str, Any]:
    """The answer in one sentence, and three or four numbers that carry it."""
    where = f"{filters.mask} attention at head_dim {filters.head_dim} on {gpu.upper()}"
    if not cells or source == "compiled":
        return {
            "kind": "other",
            "sentence": [(f"No speed has been measured for {where}.", False)],
            "sub": "What was compiled for it is shown below.",
            "stats": [],
        }
    winners = [winner_of(cell) for cell in cells]
    wins = Counter(kind_of(w.row) for w in winners)
    whole = {kind_of(found.rows[0]) for found in overall(cells)}
    kind = min(wins, key=lambda k: (-wins[k], k not in whole, kind_order(k)))
    speedup = geometric_mean(w.speedup_vs_baseline for w in winners)
    costs = [c for cell in cells if (c := order_cost(cell)) is not None]
    ratio = geometric_mean(1 / (1 - c) for c in costs) if costs else None
    mean_cost = 1 - 1 / ratio if ratio else None
    verb = (
        "is the fastest deterministic backward"
        if source == "measured"
        else "should be the fastest backward"
    )
    sub = f"It wins at {wins[kind]} of {len(cells)} sequence lengths"
    ahead = speedup is not None and abs(speedup - 1) >= 0.005
    sub += (
        f"; the winners reach {times(speedup)} ascending order in the geometric mean."
        if ahead
        else "."
    )
    if source == "modelled":
        sub += " This is the model's prediction: nothing has been measured for this chip here."
    elif mean_cost is not None:
        sub += (
            f" Fixing the order of addition costs {mean_cost:.1%} against atomics, whose bits change from run to run."
            if mean_cost > 0
            else f" It is {-mean_cost:.1%} faster than atomics, whose bits change from run to run."
        ).replace("%", " %")
    faster = _fastest_of_all(cells)
    if source == "measured" and faster is not None:
        sub += f" {faster[0]} reaches {times(faster[1])} that, but only while many CTAs are resident (allow_resident)."
    peak = max(cells, key=lambda c: tflops_of(winner_of(c).row) or 0.0)
    spills = [w.row.spill_bytes for w in winners]
    known = [s for s in spills if s is not None]
    stats = [{"name": "speed-up over ascending", "value": times(speedup), "unit": "geometric mean"}]
    if source == "measured":
        stats.append(
            {
                "name": "cost of a fixed order",
                "value": percent(mean_cost),
                "unit": "against atomics",
            }
        )
    stats.append(
        {
            "name": "top speed" if source == "measured" else "predicted top speed",
            "value": f"{tflops_of(winner_of(peak).row) or 0:.0f}",
            "unit": f"TFLOPS at {length(peak.seq_len)}",
        }
    )
    if known:
        stats.append({"name": "spilled by winners", "value": str(max(known)), "unit": "bytes"})
    return {
        "kind": kind,
        "sentence": [(kind, True), (f" {verb} for {where}.", False)],
        "sub": sub,
        "stats": stats,
    }


def _fastest_of_all(cells: Sequence[Cell]) -> tuple[str, float] | None:
    """(kind, factor) of what beats the safe winners by 1 % or more in the geometric mean, None where nothing does."""
    pairs = [(cost(winner_of(cell).row), cost(cell.best.row)) for cell in cells]
    factor = geometric_mean(own / top for own, top in pairs if own and top)
    if factor is None or factor < 1.01:
        return None
    kinds = Counter(kind_of(c.best.row) for c in cells if c.best.row is not winner_of(c).row)
    return min(kinds, key=lambda k: (-kinds[k], kind_order(k))), factor


def winner_map(cells: Sequence[Cell], filters: Filters) -> dict[str, Any]:
    """One row a mask and head_dim, one column a seq_len; the row that the filters show is marked."""
    same = [
        c
        for c in cells
        if (c.dtype, c.head_group, c.direction, state.options_of(c))
        == (filters.dtype, filters.head_group, filters.direction, filters.options)
    ]
    columns = sorted({c.seq_len for c in same})
    rows = []
    for mask, dim in sorted({(c.mask, c.head_dim) for c in same}):
        found = {
            c.seq_len: c
            for c in one_a_length([c for c in same if (c.mask, c.head_dim) == (mask, dim)])
        }
        rows.append(
            {
                "id": f"map-{mask}-{dim}",
                "label": f"{mask}, d {dim}",
                "href": filters.url(mask=mask, head_dim=dim),
                "current": (mask, dim) == (filters.mask, filters.head_dim),
                "cells": [_map_cell(found[s]) if s in found else None for s in columns],
            }
        )
    return {"columns": [length(s) for s in columns], "rows": rows}


def _map_cell(cell: Cell) -> dict[str, Any]:
    winner = winner_of(cell)
    tflops = tflops_of(winner.row)
    value = (
        times(winner.speedup_vs_baseline)
        if winner.speedup_vs_baseline
        else f"{tflops:.0f}"
        if tflops
        else UNKNOWN
    )
    shown = f"{tflops:.0f} TFLOPS, " if tflops else ""
    return {
        "kind": kind_of(winner.row),
        "value": value,
        "title": f"{shown}tile {winner.row.block_m}x{winner.row.block_n}, batch {cell.batch}, heads {cell.heads}",
    }


def _lead(confidence: Confidence | None) -> tuple[str, str]:
    """(what the table shows, the numbers behind it): a lead within the noise, or not above zero for sure, is a tie."""
    if confidence is None:
        return UNKNOWN, "nothing else was measured"
    if confidence.low is None or confidence.high is None:
        return percent(confidence.lead), "interval unknown"
    half = (confidence.high - confidence.low) / 2
    numbers = f"{percent(confidence.lead)} ± {half * 100:.1f}"
    return ("tie" if confidence.tie else numbers), f"{numbers} over the runner-up"


def config_table(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One row a seq_len: the winner, what it leads by, what it uses, and whether something needing every SM is faster."""
    return [_config_row(cell) for cell in cells]


def _config_row(cell: Cell) -> dict[str, Any]:
    winner = winner_of(cell)
    row, config = winner.row, Config.from_dict(dict(winner.row.config))
    tflops = tflops_of(row)
    heads = {0: ", all heads", 1: ""}.get(
        config.heads_interleaved, f", {config.heads_interleaved} heads"
    )
    grouping = f"{config.launch_order}{heads}" if config.policy == "ordered" else "any"
    own, top = cost(row), cost(cell.best.row)
    faster = None
    if own and top and own > top and cell.best.row is not row:
        faster = {
            "kind": kind_of(cell.best.row),
            "gain": times(own / top),
            "needs": resident(cell.best.row) or "all",
        }
    lead, lead_title = _lead(winner.confidence)
    arguments = ", ".join(f"{name}={value!r}" for name, value in config.to_dict().items())
    return {
        "seq_len": cell.seq_len,
        "kind": kind_of(row),
        "schedule": schedule_of(kind_of(row)),
        "tile": f"{row.block_m}x{row.block_n}",
        "launch": grouping,
        "tflops": f"{tflops:.1f}" if tflops else UNKNOWN,
        "speedup": times(winner.speedup_vs_baseline),
        "order_cost": percent(order_cost(cell)),
        "lead": lead,
        "lead_title": lead_title,
        "registers": UNKNOWN if row.registers is None else row.registers,
        "spill": UNKNOWN if row.spill_bytes is None else f"{row.spill_bytes} B",
        "spills": bool(row.spill_bytes),
        "faster": faster,
        "python": f"Config({arguments})",
    }


def _strips(kind: str, mask: str, cells: Sequence[Cell]) -> Sequence[Any]:
    """Ascending order over the winner; where ascending itself won, over what is faster with resident CTAs."""
    rows = [winner_of(cell).row for cell in cells]
    faster = _fastest_of_all(cells)
    if kind == "ascending" and faster is not None:
        kind, rows = faster[0], [cell.best.row for cell in cells]
    configs = [row.config for row in rows if kind_of(row) == kind]
    last = configs[-1] if configs else {}
    return strips(kind, mask, last.get("launch_order"), int(last.get("heads_interleaved", 1)))


def filter_groups(
    filters: Filters, gpus: Sequence[str], available: Mapping[str, list[Any]], predicted: bool
) -> list[dict[str, Any]]:
    """Chips, one group a filter. A filter with a single value that nobody chooses between is left out."""
    plan = [
        ("GPU", "gpu", list(gpus)),
        ("mask", "mask", available["mask"]),
        ("head_dim", "head_dim", available["head_dim"]),
    ]
    optional = (
        ("dtype", "dtype"),
        ("heads per KV head", "head_group"),
        ("options", "options"),
        ("direction", "direction"),
    )
    plan += [(label, name, available[name]) for label, name in optional if len(available[name]) > 1]
    groups = [
        {"name": label, "options": [_chip(filters, name, value, str(value)) for value in values]}
        for label, name, values in plan
        if values
    ]
    if predicted:
        shown = [
            _chip(filters, "predicted", value, text) for value, text in ((0, "hide"), (1, "show"))
        ]
        groups.append({"name": "predicted", "options": shown})
    return groups


def _chip(filters: Filters, name: str, value: Any, label: str) -> dict[str, Any]:
    changes: dict[str, Any] = {name: value}
    if name == "gpu":
        changes["run"] = None
    return {
        "id": f"{name}-{value}".replace(" ", "-").replace(",", "-"),
        "label": label,
        "href": filters.url(**changes),
        "current": getattr(filters, name) == value,
    }


def _short_answer(kind: str, source: str) -> str:
    return {"measured": kind, "modelled": f"{kind} predicted"}.get(source, "not measured")


def build_page(
    snapshot: Snapshot,
    filters: Filters,
    *,
    gpus: Sequence[str],
    notices: Sequence[str] = (),
    report: RunReport | None = None,
    runs: Sequence[tuple[int, str]] = (),
    has_predicted: bool = False,
    release: str | None = None,
    releases: Mapping[str, Any] | None = None,
) -> Page:
    """The whole page. ``filters`` may leave things open; they are settled here from what the snapshot has."""
    available = state.options(snapshot.cells)
    asked = filters
    filters, more = state.settle(filters, available, snapshot.cells)
    cells = snapshot.cells_of(filters)
    answer = hero(snapshot.gpu, filters, cells, snapshot.source)
    subtitle = f"{snapshot.gpu}, {filters.mask}, head_dim {filters.head_dim}, {filters.dtype}"
    tokens = {c.batch * c.seq_len for c in cells}
    if len(tokens) == 1:
        subtitle += f", {tokens.pop()} tokens"
    keep = asked.url(kind=None, gantt_mask=None)
    newest = max((c.best.row.created_at for c in cells if c.best.row.created_at), default=None)
    footer = []
    if release:
        footer.append(f"release {release}")
    elif snapshot.source == "measured" and not (releases and releases["rows"]):
        footer.append("not released yet: dash-tune release freezes these winners")
    if newest:
        footer.append(f"newest winner of {newest:%Y-%m-%d %H:%M} UTC")
    shape = f"mask={filters.mask}&head_dim={filters.head_dim}&gpu={snapshot.gpu}"
    if not release:
        shape += "&release=draft"
    gantt_part = gantt(filters, answer["kind"])
    return Page(
        title=f"DASH: {_short_answer(answer['kind'], snapshot.source)}, {filters.mask}, d {filters.head_dim}, {snapshot.gpu}",
        source=snapshot.source,
        gpu=snapshot.gpu,
        dtype=str(filters.dtype),
        notices=[*notices, *more],
        filters=filter_groups(
            filters, gpus, available, has_predicted and snapshot.source == "measured"
        ),
        hero=answer,
        strips=_strips(answer["kind"], str(filters.mask or "causal"), cells),
        map=winner_map(snapshot.cells, filters),
        subtitle=subtitle,
        map_title=MAP_TITLES.get(snapshot.source, MAP_TITLES["measured"]),
        ceiling_note=(
            f"{snapshot.gpu} reached {snapshot.ceiling:.0f} TFLOPS in a plain matmul."
            if snapshot.ceiling
            else SPEED_NOTES.get(snapshot.source, "")
        ),
        table=config_table(cells),
        table_empty="No cell of this shape has a configuration to serve.",
        gantt=gantt_part,
        run=run_section(filters, report, runs),
        releases=releases,
        figures={
            "speedup": f"figures/speedup{keep}",
            "tflops": f"figures/tflops{keep}",
            "registers": f"figures/registers{keep}",
            "gantt": f"figures/gantt{filters.url(kind=gantt_part['kind'], gantt_mask=gantt_part['mask'])}",
            "failures": f"figures/failures{filters.url(run=report.run_id if report else None)}",
        },
        links={
            "best": f"best?{shape}",
            "table": f"table?gpu={snapshot.gpu}",
            "csv": f"results?gpu={snapshot.gpu}&format=csv&limit=1000",
        },
        footer=footer,
    )
