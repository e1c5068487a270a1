"""/schedules: the kinds there are, and one of them as arrays with its simulated Gantt chart."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from dash_kernels.critical_path import DeadlockError, simulate
from dash_kernels.schedules import SCHEDULES, Launch, ScheduleError, TileGrid, build, check
from server.caching import HOUR
from server.deps import StrictJson
from server.errors import ApiError, invalid
from server.models import Kind, Problem
from server.params import NoQuery, ScheduleQuery

MAX_STEPS = 50_000
"""(KV, Q) tiles times heads that one answer simulates: about a second of one core."""


def create() -> APIRouter:
    router = APIRouter(tags=["schedules"])

    @router.get("/schedules", response_model=list[Kind], responses={422: {"model": Problem}})
    def get_schedules(_: Annotated[NoQuery, Query()]) -> StrictJson:
        """Every kind of schedule."""
        return StrictJson(
            [
                {
                    "name": kind.name,
                    "summary": kind.summary,
                    "masks": kind.masks,
                    "takes_group": kind.takes_group,
                    "launch_order": kind.default_launch.order,
                }
                for kind in SCHEDULES.values()
            ],
            headers={"Cache-Control": HOUR},
        )

    @router.get("/schedules/{name}", responses={404: {"model": Problem}, 422: {"model": Problem}})
    def get_schedule(
        name: Annotated[str, Path(examples=["shortest_first"])],
        query: Annotated[ScheduleQuery, Query()],
    ) -> StrictJson:
        """A schedule for one head as data: its arrays, what `check` proved, and how the model runs it."""
        if name not in SCHEDULES:
            raise ApiError(
                404, f"schedule {name[:60]!r} does not exist; there is {', '.join(SCHEDULES)}"
            )
        grid = TileGrid(
            query.seq_len,
            query.seq_len_kv or query.seq_len,
            query.block_m,
            query.block_n,
            query.mask == "causal",
        )
        if grid.num_m * grid.num_n * query.heads > MAX_STEPS:
            raise invalid(
                "seq_len",
                f"{grid.num_m} x {grid.num_n} tiles x {query.heads} heads are more than the {MAX_STEPS} one answer "
                "simulates; use a shorter seq_len, larger blocks or fewer heads",
            )
        return StrictJson(_describe(name, grid, query), headers={"Cache-Control": HOUR})

    return router


def _describe(name: str, grid: TileGrid, query: ScheduleQuery) -> dict[str, Any]:
    try:
        schedule = build(name, grid, query.group)
        order = query.launch_order or SCHEDULES[name].default_launch.order
        launch = Launch(order, query.heads_interleaved)
        report = check(schedule, launch, query.heads)
    except ScheduleError as error:
        parameter = "group" if "group" in str(error) else "mask"
        raise invalid(parameter, str(error)) from None
    body: dict[str, Any] = {
        "schedule": name,
        "mask": query.mask,
        "grid": {
            "seq_len": grid.seq_len,
            "seq_len_kv": grid.seq_len_kv,
            "block_m": grid.block_m,
            "block_n": grid.block_n,
            "num_m": grid.num_m,
            "num_n": grid.num_n,
        },
        "group": query.group,
        "launch": {"order": order, "heads_interleaved": query.heads_interleaved},
        "min_resident": report.min_resident,
        "monotone": report.monotone,
        "items": schedule.items,
        "visit": schedule.visit,
        "turn": schedule.turn,
    }
    costs = {"slots": query.slots, "c": query.c, "r": query.r, "l": query.l, "heads": query.heads}
    try:
        run = simulate(schedule, launch=launch, **costs)  # type: ignore[arg-type]
    except DeadlockError as error:
        return body | {"simulation": {**costs, "deadlock": str(error)}}
    return body | {
        "simulation": {
            **costs,
            "makespan": run.makespan,
            "utilisation": run.utilisation,
            "stalls": run.stalls,
            "columns": ["slot", "head", "n_block", "m_block", "start", "reduce_start", "end"],
            "gantt": run.rows,
        }
    }
