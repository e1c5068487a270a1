"""Pictures of a simulated schedule: the Gantt chart, and the small strip that shows its bubbles at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from dash_kernels.critical_path import GanttRow, Simulation
from dashboard.figures import MONO, base_layout
from dashboard.palette import LIGHT, Theme, mark_of

TEXT_LIMIT = 600
"""Tiles past which their numbers are left out: they would not be legible and cost a text node each."""


def mix(color: str, other: str, share: float) -> str:
    """``share`` of ``color`` in ``other``; both are #rrggbb."""
    pairs = [(int(color[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in pairs)


def gantt_figure(kind: str, simulation: Simulation, c: float, theme: Theme = LIGHT) -> go.Figure:
    """One lane a slot, the first on top: compute (cost ``c``) in the Q tile's shade, reduces in ink, waits empty."""
    rows, slots = simulation.rows, len(simulation.busy)
    figure = go.Figure()
    figure.update_layout(base_layout(theme, 96 + min(560, max(22 * slots, 120))))
    color = mark_of(kind).color(theme)
    last_q = max((row.m_block for row in rows), default=0) or 1
    depth = [row.m_block / last_q for row in rows]
    numbered = len(rows) <= TEXT_LIMIT
    lanes = {"orientation": "h", "y": [row.slot for row in rows], "width": 0.84}
    tiles = [[row.head, row.n_block, row.m_block, row.reduce_start - row.start - c] for row in rows]
    figure.add_bar(
        **lanes,
        base=[row.start for row in rows],
        x=[c] * len(rows),
        name="compute",
        marker={
            "color": [mix(color, theme.paper, 0.25 + 0.6 * d) for d in depth],
            "line": {"width": 0},
        },
        text=[str(row.m_block) for row in rows] if numbered else None,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        constraintext="none",
        textfont={
            "family": MONO,
            "size": 10,
            "color": [theme.ink if d < 0.6 else theme.paper for d in depth],
        },
        customdata=tiles,
        hovertemplate=(
            "slot %{y}, head %{customdata[0]}<br>KV tile %{customdata[1]}, Q tile %{customdata[2]}<br>"
            "then waits %{customdata[3]:.3~f}<extra>compute</extra>"
        ),
    )
    figure.add_bar(
        **lanes,
        base=[row.reduce_start for row in rows],
        x=[row.end - row.reduce_start for row in rows],
        name="reduce",
        marker={"color": theme.ink, "line": {"width": 0}},
        customdata=tiles,
        hovertemplate=(
            "slot %{y}, head %{customdata[0]}<br>adds KV tile %{customdata[1]} to dQ of Q tile %{customdata[2]}"
            "<extra>reduce</extra>"
        ),
    )
    figure.update_layout(barmode="overlay", showlegend=False, bargap=0)
    end = simulation.makespan * 1.01
    figure.update_xaxes(title_text="time, in the unit of c", range=[0, end], showgrid=False)
    figure.update_yaxes(
        range=[slots - 0.4, -0.6], showgrid=False, title_text="slot", tickformat="d"
    )
    if slots <= 24:
        figure.update_yaxes(tickmode="linear", dtick=1)
    return figure


Box = tuple[float, float, float, float]
"""x, y, width, height."""


@dataclass(frozen=True)
class Strip:
    """A schedule drawn in boxes, 1000 wide: what computes and what adds to dQ. The rest of it is waiting."""

    kind: str
    label: str
    note: str
    height: int
    compute: tuple[Box, ...]
    reduce: tuple[Box, ...]


def strip(kind: str, label: str, simulation: Simulation, c: float, span: float, note: str) -> Strip:
    """``span`` is the time that the whole width stands for, so that two strips can be compared by eye."""
    lane, scale = 20, 1000 / span

    def box(row: GanttRow, start: float, end: float) -> Box:
        return (
            round(start * scale, 2),
            row.slot * lane + 2,
            round((end - start) * scale, 2),
            lane - 4,
        )

    rows: Sequence[GanttRow] = simulation.rows
    return Strip(
        kind,
        label,
        note,
        lane * len(simulation.busy),
        tuple(box(row, row.start, row.start + c * 0.94) for row in rows),
        tuple(box(row, row.reduce_start, row.end) for row in rows),
    )
