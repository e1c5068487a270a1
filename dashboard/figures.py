"""Figures, pure: points or counts in, a plotly Figure out. No database, no request, no state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from dashboard.palette import LIGHT, Theme, kind_order, mark_of
from dashboard.points import Point
from tuner.results.rows import STATUSES

MONO = "ui-monospace, 'SF Mono', 'Cascadia Mono', 'JetBrains Mono', Menlo, Consolas, monospace"
SANS = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
LABEL_CHARACTER = 6.6
"""Pixels that a character of a line's label takes, at most on average, at 12 px."""
MAX_REGISTERS = 255
"""Registers that a thread can address on every architecture here (CUDA programming guide, compute capabilities)."""


def base_layout(theme: Theme, height: int) -> dict[str, Any]:
    """What every figure shares: transparent paper, hairline grid, tabular numbers."""
    axis = {
        "gridcolor": theme.rule,
        "linecolor": theme.rule,
        "zeroline": False,
        "ticks": "",
        "tickfont": {"family": MONO, "size": 12, "color": theme.soft},
        "title": {"font": {"size": 12, "color": theme.soft}, "standoff": 10},
        "automargin": True,
        "fixedrange": True,
    }
    return {
        "height": height,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": SANS, "size": 13, "color": theme.ink},
        "margin": {"l": 8, "r": 8, "t": 12, "b": 8},
        "hoverlabel": {
            "bgcolor": theme.paper,
            "bordercolor": theme.rule,
            "font": {"family": MONO, "size": 12, "color": theme.ink},
        },
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": -0.16,
            "yanchor": "top",
            "font": {"size": 12, "color": theme.ink},
        },
        "template": "none",
        "xaxis": axis,
        "yaxis": axis,
    }


def _figure(theme: Theme, height: int, **layout: Any) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(base_layout(theme, height))
    figure.update_layout(**layout)
    return figure


def _note(figure: go.Figure, theme: Theme, text: str) -> go.Figure:
    """An empty figure that says why it is empty."""
    figure.add_annotation(
        text=text,
        x=0.5,
        y=0.5,
        xref="paper",
        yref="paper",
        showarrow=False,
        font={"size": 14, "color": theme.soft},
    )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure


def by_kind(points: Iterable[Point]) -> dict[tuple[str, str], list[Point]]:
    """(kind, source) -> its points by seq_len, kinds in the palette's order."""
    series: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        series.setdefault((point.kind, point.source), []).append(point)
    keys = sorted(series, key=lambda key: (kind_order(key[0]), key[1]))
    return {key: sorted(series[key], key=lambda p: p.seq_len) for key in keys}


def spread_labels(values: Sequence[float], gap: float) -> list[float]:
    """Places for labels beside ``values``: as near as can be, and at least ``gap`` apart, in the order given.

    Labels that would touch are pooled into a block centred on the mean of its values.
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    blocks: list[list[int]] = []

    def centre(block: list[int]) -> float:
        return sum(values[i] for i in block) / len(block)

    for index in order:
        blocks.append([index])
        while len(blocks) > 1:
            low, high = blocks[-2], blocks[-1]
            if centre(high) - centre(low) >= gap * (len(low) + len(high)) / 2:
                break
            blocks[-2:] = [low + high]
    places = [0.0] * len(values)
    for block in blocks:
        for rank, index in enumerate(block):
            places[index] = centre(block) + (rank - (len(block) - 1) / 2) * gap
    return places


def _seq_axis(figure: go.Figure, points: Sequence[Point]) -> None:
    ticks = sorted({p.seq_len for p in points})
    labels = [f"{t // 1024}k" if t % 1024 == 0 else str(t) for t in ticks]
    figure.update_xaxes(
        type="log",
        tickmode="array",
        tickvals=ticks,
        ticktext=labels,
        showgrid=False,
        title_text="seq_len",
        minor={"ticks": ""},
    )


def _lines(figure: go.Figure, points: Sequence[Point], value: str, theme: Theme, unit: str) -> None:
    """One line a kind (dashed where it is predicted), and its name at the line's end: the measured one's, if any is."""
    only_predicted = all(point.source == "modelled" for point in points)
    ends: list[tuple[str, str, float]] = []
    for (kind, source), line in by_kind(points).items():
        drawn = [p for p in line if getattr(p, value) is not None]
        if not drawn:
            continue
        mark = mark_of(kind)
        color = mark.color(theme)
        predicted = source == "modelled"
        name = f"{kind} (predicted)" if predicted else kind
        figure.add_scatter(
            x=[p.seq_len for p in drawn],
            y=[getattr(p, value) for p in drawn],
            name=name,
            mode="lines+markers",
            legendgroup=kind,
            line={
                "color": color,
                "width": 1.5 if predicted or kind in ("ascending", "unordered") else 2.5,
                "dash": "dash" if predicted else mark.dash,
            },
            marker={
                "symbol": mark.symbol,
                "size": 8,
                "color": color,
                "line": {"width": 1.5, "color": color},
            },
            opacity=0.7 if predicted else 1.0,
            customdata=[
                [p.tile, _or_unknown(p.registers), _or_unknown(p.spill_bytes)] for p in drawn
            ],
            hovertemplate=(
                f"<b>{name}</b>  %{{x}}<br>%{{y:.3~f}} {unit}<br>tile %{{customdata[0]}}, "
                "%{customdata[1]} registers, %{customdata[2]} bytes spilled<extra></extra>"
            ),
        )
        if only_predicted or not predicted:
            ends.append((kind, color, getattr(drawn[-1], value)))
    _label_ends(figure, ends, points, value)


def _label_ends(
    figure: go.Figure, ends: Sequence[tuple[str, str, float]], points: Sequence[Point], value: str
) -> None:
    values = [v for p in points if (v := getattr(p, value)) is not None]
    if not values or not ends:
        return
    span = max(values) - min(0.0 if value == "tflops" else 1.0, min(values))
    places = spread_labels([end[2] for end in ends], 0.062 * (span or 1.0))
    for (kind, color, _), place in zip(ends, places, strict=True):
        figure.add_annotation(
            text=kind,
            x=1.0,
            xref="paper",
            xanchor="left",
            xshift=6,
            y=place,
            yref="y",
            showarrow=False,
            font={"color": color, "size": 12},
            name="line-end",
        )
    longest = max(len(kind) for kind, *_ in ends)
    figure.update_layout(margin_r=16 + LABEL_CHARACTER * longest, showlegend=False)


def _or_unknown(value: object) -> str:
    return "unknown" if value is None else str(value)


def speedup_figure(points: Sequence[Point], theme: Theme = LIGHT) -> go.Figure:
    """Speed-up over ascending order (same run) by seq_len, one line a kind; predicted lines are dashed."""
    figure = _figure(theme, 400)
    drawn = [p for p in points if p.speedup is not None]
    if not drawn:
        return _note(
            figure, theme, "No speed-ups here: ascending order was not measured in these runs"
        )
    _lines(figure, drawn, "speedup", theme, "× ascending")
    _seq_axis(figure, drawn)
    figure.update_yaxes(title_text="× ascending order", tickformat=".2~f", ticksuffix="×")
    return figure


def tflops_figure(
    points: Sequence[Point], ceiling: float | None = None, theme: Theme = LIGHT
) -> go.Figure:
    """TFLOPS by seq_len, one line a kind, under the chip's measured matmul rate where one is stored."""
    figure = _figure(theme, 400)
    drawn = [p for p in points if p.tflops is not None]
    if not drawn:
        return _note(figure, theme, "No TFLOPS here yet")
    _lines(figure, drawn, "tflops", theme, "TFLOPS")
    _seq_axis(figure, drawn)
    figure.update_yaxes(title_text="TFLOPS", rangemode="tozero")
    if ceiling is not None:
        figure.add_hline(
            y=ceiling,
            line={"color": theme.soft, "width": 1, "dash": "longdash"},
            annotation={
                "text": f"measured matmul, {ceiling:.0f}",
                "font": {"size": 12, "color": theme.soft},
                "xanchor": "left",
                "x": 0,
                "yanchor": "bottom",
            },
        )
    return figure


def registers_figure(points: Sequence[Point], theme: Theme = LIGHT) -> go.Figure:
    """Registers a thread of every compiled configuration by kind; one that spills is drawn in alarm, with its bytes.

    Points whose registers are unknown are left out. Where there are two backends, the portable one has rows of its own.
    """
    known = [p for p in points if p.registers is not None]
    both = len({p.config.get("backend") for p in known}) > 1

    def name_of(point: Point) -> str:
        apart = both and point.config.get("backend") == "portable"
        return f"{point.kind}<br>portable" if apart else point.kind

    order = {
        name_of(p): (p.config.get("backend") == "portable", *kind_order(p.kind)) for p in known
    }
    kinds = sorted(order, key=lambda name: order[name], reverse=True)
    figure = _figure(theme, 120 + 34 * max(2, len(kinds)))
    if not known:
        return _note(
            figure, theme, "No configuration here was compiled with its registers recorded"
        )
    for spills in (False, True):
        part = _distinct(p for p in known if bool(p.spill_bytes) is spills)
        if not part:
            continue
        colors = [theme.alarm if spills else mark_of(p.kind).color(theme) for p in part]
        figure.add_scatter(
            x=[p.registers for p in part],
            y=[name_of(p) for p in part],
            mode="markers+text" if spills else "markers",
            name="spills" if spills else "no spill",
            text=_spill_labels([(name_of(p), p) for p in part]) if spills else None,
            textposition="top center",
            cliponaxis=False,
            textfont={"family": MONO, "size": 11, "color": theme.alarm},
            marker={
                "symbol": "x" if spills else [mark_of(p.kind).symbol for p in part],
                "size": 11,
                "color": colors,
                "opacity": 0.85,
                "line": {"width": 1, "color": colors},
            },
            customdata=[[p.tile, _or_unknown(p.spill_bytes), p.head_dim] for p in part],
            hovertemplate=(
                "<b>%{y}</b> tile %{customdata[0]}, d %{customdata[2]}<br>%{x} registers, "
                "%{customdata[1]} bytes spilled<extra></extra>"
            ),
        )
    figure.add_vline(x=MAX_REGISTERS, line={"color": theme.soft, "width": 1, "dash": "longdash"})
    low = min(p.registers for p in known if p.registers is not None)
    span = MAX_REGISTERS - max(0, low - 24)
    room = [
        MAX_REGISTERS - span,
        MAX_REGISTERS + 0.24 * span,
    ]  # for half a label right of the limit
    figure.update_xaxes(title_text="registers a thread", range=room)
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=kinds,
        tickfont={"family": SANS, "size": 12, "color": theme.ink},
    )
    figure.update_layout(showlegend=False)
    return figure


def _distinct(points: Iterable[Point]) -> list[Point]:
    """One point for each place in the register view."""
    seen = {(p.kind, p.registers, p.spill_bytes, p.tile, p.head_dim): p for p in points}
    return list(seen.values())


def _spill_labels(points: Sequence[tuple[str, Point]]) -> list[str]:
    """The bytes at each mark: points on one spot share one label, the span of their bytes."""
    spots: dict[tuple[str, int | None], list[int]] = {}
    for name, point in points:
        spots.setdefault((name, point.registers), []).append(point.spill_bytes or 0)
    labels = []
    for name, point in points:
        held = spots.pop((name, point.registers), [])
        span = sorted({min(held), max(held)}) if held else []
        labels.append(" to ".join(map(str, span)) + " B" if span else "")
    return labels


def failures_figure(counts: Mapping[str, int], theme: Theme = LIGHT) -> go.Figure:
    """Configurations of one run by what became of them: ``counts`` is status -> number."""
    statuses = [s for s in STATUSES if counts.get(s)]
    figure = _figure(theme, 40 + 44 * max(3, len(statuses)))
    if not statuses:
        return _note(figure, theme, "This run has no rows")
    figure.add_bar(
        x=[counts[s] for s in statuses],
        y=statuses,
        orientation="h",
        text=[str(counts[s]) for s in statuses],
        textposition="outside",
        cliponaxis=False,
        textfont={"family": MONO, "color": theme.ink},
        marker={
            "color": [theme.soft if s in ("ok", "constraints") else theme.alarm for s in statuses]
        },
        hovertemplate="%{y}: %{x}<extra></extra>",
    )
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=statuses[::-1],
        tickfont={"family": SANS, "size": 13, "color": theme.ink},
        showgrid=False,
    )
    figure.update_xaxes(visible=False)
    figure.update_layout(showlegend=False, margin_r=48)
    figure.update_traces(width=0.5)
    return figure
