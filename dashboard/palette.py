"""Colours and marks, one a kind of schedule, in both themes. A kind looks the same in every figure and table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Theme:
    """Ink and paper of a theme."""

    name: str
    ink: str
    soft: str
    rule: str
    paper: str
    accent: str
    alarm: str


LIGHT = Theme("light", "#1d1b17", "#6e6a60", "#e2ddd0", "#fffdf8", "#d6401f", "#b3123a")
DARK = Theme("dark", "#efece4", "#a19c8f", "#34322c", "#1c1b18", "#ff7452", "#ff5d7e")


@dataclass(frozen=True)
class Mark:
    """How a kind is drawn: a colour for each theme, a marker and a dash that tell it apart without colour."""

    light: str
    dark: str
    symbol: str
    dash: str = "solid"

    def color(self, theme: Theme) -> str:
        return self.dark if theme.name == "dark" else self.light


MARKS: dict[str, Mark] = {
    "shortest_first": Mark("#d6401f", "#ff7452", "circle"),
    "descending": Mark("#2b66cf", "#77a7ff", "square"),
    "shift": Mark("#0a8068", "#37c6a6", "diamond"),
    "symmetric_shift": Mark("#7c46c4", "#b993ff", "triangle-up"),
    "grouped_shift": Mark("#a66d00", "#e3af42", "cross"),
    "ascending_interleaved": Mark("#0c7796", "#5cc3e0", "triangle-down"),
    "two_pass": Mark("#a23f7a", "#e386bd", "hexagon"),
    "ascending": Mark("#6e6a60", "#a8a396", "line-ew-open"),
    "unordered": Mark("#8d897d", "#7d796e", "x-thin-open", "dot"),
}
OTHER = Mark("#46606b", "#93b1bd", "pentagon")


def theme_named(name: str) -> Theme:
    return DARK if name == "dark" else LIGHT


def mark_of(kind: str) -> Mark:
    """The mark of ``kind``; ``grouped_shift(4)`` looks like ``grouped_shift``; a kind unknown here has one too."""
    return MARKS.get(kind.split("(")[0], OTHER)


def kind_order(kind: str) -> tuple[int, str]:
    """Sort key: kinds in the palette's order, then by name."""
    names = list(MARKS)
    base = kind.split("(")[0]
    return (names.index(base) if base in names else len(names), kind)
