"""/results: rows out, filtered and paged, and rows in."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from dash_kernels.problem import Config
from dash_kernels.problem import Problem as AttentionProblem
from dash_kernels.schedules import SCHEDULES
from server.deps import Context, StrictJson
from server.errors import invalid
from server.models import Page, Problem, ResultsBody, RowBody, Stored
from server.params import ResultsQuery
from server.security import writer
from tuner.export import rows_csv, rows_parquet
from tuner.results.newest import gpu_of_run, runs_by_id
from tuner.results.rows import ResultFilter, ResultRow, RunInfo

WRITE_FAILURES: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "The token is missing or wrong."},
    403: {"model": Problem, "description": "The server takes no writes: no token is configured."},
    413: {"model": Problem, "description": "The body is larger than the server takes."},
    422: {"model": Problem, "description": "A field is unknown or wrong; it is named."},
    503: {"model": Problem, "description": "The database does not answer; see Retry-After."},
}
FILTER_FIELDS = tuple(f.name for f in fields(ResultFilter))


def create(context: Context) -> APIRouter:
    router = APIRouter(tags=["rows"])

    @router.get(
        "/results",
        response_model=Page,
        responses={
            200: {"content": {"text/csv": {}, "application/vnd.apache.parquet": {}}},
            422: {"model": Problem},
            304: {"description": "Unchanged since If-None-Match."},
            503: {"model": Problem},
        },
    )
    def get_results(request: Request, query: Annotated[ResultsQuery, Query()]) -> Response:
        """Rows in the order in which they were stored. Follow `next_cursor` (or the Link header) to the next page."""
        values = {name: getattr(query, name, None) for name in FILTER_FIELDS}
        values |= {"head_dim": query.dim, "seq_len": query.length}
        rows = context.store.results(
            ResultFilter(**values), limit=query.limit + 1, after_id=query.cursor
        )
        more = len(rows) > query.limit
        rows = rows[: query.limit]
        cursor = rows[-1].id if more else None
        headers = {}
        if cursor is not None:
            following = request.url.include_query_params(cursor=cursor)
            headers["Link"] = f'<?{following.query}>; rel="next"'
        if query.format == "csv":
            headers["Content-Disposition"] = 'attachment; filename="results.csv"'
            text = rows_csv(rows, runs_by_id(context.store, [row.run_id for row in rows]))
            return Response(text, media_type="text/csv", headers=headers)
        if query.format == "parquet":
            headers["Content-Disposition"] = 'attachment; filename="results.parquet"'
            data = rows_parquet(rows, runs_by_id(context.store, [row.run_id for row in rows]))
            return Response(data, media_type="application/vnd.apache.parquet", headers=headers)
        body = {"results": [row.to_dict() for row in rows], "next_cursor": cursor}
        return StrictJson(body, headers=headers)

    @router.post(
        "/results",
        response_model=Stored,
        status_code=201,
        responses=WRITE_FAILURES,
        dependencies=[Depends(writer(context.tokens, context.store.read_only))],
    )
    def post_results(body: ResultsBody) -> StrictJson:
        """Add the rows of one run. A configuration that the run holds already keeps its row."""
        rows = [_row(index, item, body) for index, item in enumerate(body.results)]
        run = body.run
        known = gpu_of_run(context.store, run.uuid) if run.uuid else None
        if known is not None and known != run.gpu:
            raise invalid("run.gpu", f"run {run.uuid} is of {known}, not of {run.gpu}")
        info = RunInfo(
            gpu=run.gpu,
            environment=run.environment,
            measurement_policy=run.measurement_policy,
            command=run.command,
            source=run.source,
            uuid=run.uuid or "",
            started=run.started,
            finished=run.finished,
        )
        try:
            run_id = context.store.start_run(info)
            ids = context.store.add_many(run_id, rows)
        finally:
            context.fresh.expire()
        return StrictJson({"run_id": run_id, "ids": ids}, 201)

    return router


def _row(index: int, item: RowBody, body: ResultsBody) -> ResultRow:
    given = item.model_dump(exclude_none=True, exclude={"problem", "config"})
    try:
        problem = AttentionProblem.from_dict(item.problem.model_dump(exclude_none=True))
        config = Config.from_dict(item.config)
        if config.schedule not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise ValueError(f"config.schedule is {config.schedule!r}; choose one of {known}")
        return ResultRow.of(problem, config, gpu=body.run.gpu, source=body.run.source, **given)
    except (ValueError, TypeError) as error:
        raise invalid(f"results.{index}", f"results.{index}: {error}") from None
