"""The dashboard's state, all of it in the URL: read with forgiveness, written with only what differs from the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import urlencode

from dash_kernels.schedules import SCHEDULES
from tuner.winners import Cell

ALIASES = {"d": "head_dim"}
LIMITS = {"tiles": (1, 32), "heads": (1, 8), "slots": (1, 132), "r": (0.0, 3.0), "run": (1, 2**62)}
MAX_STEPS = 3000
"""Tiles that one Gantt chart may draw; more would be neither legible nor quick."""
PLAIN = "plain"
SLICE = ("mask", "head_dim", "dtype", "head_group", "options", "direction")
"""The filters that name a slice of a GPU's cells, in the order in which they are settled."""


@dataclass(frozen=True)
class Filters:
    """What is shown. None takes the default of the data: causal, the largest head_dim, the first of each other."""

    gpu: str | None = None
    mask: str | None = None
    head_dim: int | None = None
    dtype: str | None = None
    head_group: int | None = None
    options: str | None = None
    direction: str | None = None
    predicted: int = 0
    kind: str | None = None
    gantt_mask: str | None = None
    tiles: int = 8
    heads: int = 2
    slots: int = 8
    r: float = 0.3
    run: int | None = None

    def url(self, **changes: Any) -> str:
        """Query string of this state with ``changes``; what is at its default is left out."""
        wanted, default = replace(self, **changes), Filters()
        pairs = {f.name: getattr(wanted, f.name) for f in fields(self)}
        kept = {k: v for k, v in pairs.items() if v is not None and v != getattr(default, k)}
        return "?" + urlencode(kept)


def read(query: Sequence[tuple[str, str]]) -> tuple[Filters, list[str]]:
    """State from a query string's pairs, and a line for each that could not be used."""
    values: dict[str, Any] = {}
    notices: list[str] = []
    kinds = {f.name: str(f.type) for f in fields(Filters)}
    for name, text in query:
        name = ALIASES.get(name, name)
        if name == "theme" or text == "":
            continue
        if name not in kinds:
            notices.append(f"{name[:40]!r} is no filter of this page and was ignored.")
            continue
        try:
            value = _number(kinds[name], text)
        except ValueError:
            notices.append(f"{name} is {text[:40]!r}, which is not a number; the default is shown.")
            continue
        low, high = LIMITS.get(name, (None, None))
        if low is not None and high is not None and not low <= value <= high:
            notices.append(
                f"{name} is {text[:40]}; it must be from {low:g} to {high:g}. The default is shown."
            )
            continue
        values[name] = value
    return Filters(**values), notices


def _number(kind: str, text: str) -> Any:
    if kind.startswith("int"):
        return int(text)
    return float(text) if kind.startswith("float") else text


def options_of(item: Any) -> str:
    """The options of a cell or point in words, ``plain`` where it has none."""
    words = []
    if item.window_left >= 0 or item.window_right >= 0:
        words.append(f"window {item.window_left},{item.window_right}")
    if item.head_dim_v != item.head_dim:
        words.append(f"d_v {item.head_dim_v}")
    words += [name for name in ("softcap", "varlen") if getattr(item, name)]
    return " ".join(words) or PLAIN


def _value(item: Any, name: str) -> Any:
    return options_of(item) if name == "options" else getattr(item, name)


def options(cells: Sequence[Cell]) -> dict[str, list[Any]]:
    """Values of each filter that the cells have, the default first."""

    def distinct(name: str) -> list[Any]:
        return sorted({_value(cell, name) for cell in cells})

    masks = distinct("mask")
    return {
        "mask": sorted(masks, key=lambda m: (m != "causal", m)),
        "head_dim": sorted(distinct("head_dim"), key=lambda d: (d != 128, d)),
        "dtype": sorted(distinct("dtype"), key=lambda t: (t != "bfloat16", t)),
        "head_group": distinct("head_group"),
        "options": sorted(distinct("options"), key=lambda o: (o != PLAIN, o)),
        "direction": sorted(distinct("direction"), key=lambda d: (d != "backward", d)),
    }


def settle(
    filters: Filters, available: Mapping[str, list[Any]], cells: Sequence[Cell]
) -> tuple[Filters, list[str]]:
    """Fill what was left open from what there is; a value that nothing was measured for gives way, with a notice.

    Mask and head_dim stand as asked. The others follow, where they were left open, what that shape was measured with.
    """
    notices: list[str] = []
    chosen: dict[str, Any] = {}
    remaining = list(cells)
    for name in SLICE:
        have = [v for v in available[name] if any(_value(c, name) == v for c in remaining)]
        asked = getattr(filters, name)
        if asked is not None and asked not in available[name]:
            known = ", ".join(str(v) for v in available[name]) or "nothing"
            notices.append(f"Nothing is stored for {name} {str(asked)[:40]!r}; there is {known}.")
            asked = None
        if asked is not None and have and asked not in have:
            notices.append(
                f"Nothing is stored for {name} {asked} with the other filters; {have[0]} is shown."
            )
            asked = None
        chosen[name] = asked if asked is not None else (have[0] if have else None)
        remaining = [c for c in remaining if _value(c, name) == chosen[name]]
    return replace(filters, **chosen), notices


def of_slice(items: Sequence[Any], filters: Filters) -> list[Any]:
    """The cells or points of the slice that the filters name."""
    return [item for item in items if all(_value(item, n) == getattr(filters, n) for n in SLICE)]


def gantt_kinds() -> list[str]:
    """Kinds to choose from; one that takes a group comes with groups of 2 and 4."""
    names: list[str] = []
    for name, kind in SCHEDULES.items():
        names += [f"{name}(2)", f"{name}(4)"] if kind.takes_group else [name]
    return names


def kind_and_group(label: str) -> tuple[str, int]:
    """``grouped_shift(4)`` -> ("grouped_shift", 4). Raises ValueError for a kind that is not known."""
    name, _, rest = label.partition("(")
    digits = rest.removesuffix(")")
    group = 1
    if rest:
        group = int(digits) if digits.isdecimal() and len(digits) < 3 else 0
    if name not in SCHEDULES or not 1 <= group <= 64:
        raise ValueError(f"schedule {label[:40]!r} is not one of {', '.join(gantt_kinds())}")
    return name, group
