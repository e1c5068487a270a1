"""Schedules as data: built once on the host, checked, simulated, drawn, stored, served and executed.

::

    grid = TileGrid(seq_len=4096, seq_len_kv=4096, block_m=64, block_n=128, causal=True)
    schedule = build("shortest_first", grid)
    report = check(schedule, default_launch("shortest_first"))    # raises ScheduleError, or says min_resident
    arrays = pack(schedule, default_launch("shortest_first"))     # what the kernels read

Query heads that share a KV head share its schedule: a CTA walks each visit once for each (``head_group`` of ``check``).
Packed sequences, whose lengths only the device knows, run the kinds of :mod:`dash_kernels.schedules.closed_form`.
How to add a kind: :mod:`dash_kernels.schedules.registry`. Standard library only.
"""

from __future__ import annotations

from dash_kernels.schedules import monotone, shift, symmetric_shift  # noqa: F401  (they register their kinds)
from dash_kernels.schedules.check import CheckReport, check
from dash_kernels.schedules.closed_form import CLOSED_FORMS
from dash_kernels.schedules.grid import TileGrid
from dash_kernels.schedules.launch import Launch
from dash_kernels.schedules.pack import Packed, pack
from dash_kernels.schedules.registry import SCHEDULES, Kind, build, default_launch, register
from dash_kernels.schedules.schedule import Schedule, ScheduleError, from_rules

__all__ = [
    "CLOSED_FORMS",
    "SCHEDULES",
    "CheckReport",
    "Kind",
    "Launch",
    "Packed",
    "Schedule",
    "ScheduleError",
    "TileGrid",
    "build",
    "check",
    "default_launch",
    "from_rules",
    "pack",
    "register",
]
