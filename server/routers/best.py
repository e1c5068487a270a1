"""/best, /table and /curves: what is fastest."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from dash_kernels.lookup import TABLES, LookupTable, TableError
from dashboard.figures import by_kind
from dashboard.filters import PLAIN, Filters
from dashboard.points import Point
from server.deps import Answers, Context, StrictJson
from server.errors import ApiError, invalid
from server.models import BestAnswer, Curves, Problem
from server.params import BestQuery, CurvesQuery, GpuQuery
from tuner.results.queries import NotMeasured, Question, best

FAILURES: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "Nothing is measured for this; `detail` says what is."},
    422: {
        "model": Problem,
        "description": "A parameter is unknown, wrong or given twice; it is named.",
    },
    503: {"model": Problem, "description": "The database does not answer; see Retry-After."},
}


def create(context: Context) -> APIRouter:
    router = APIRouter(tags=["lookup"])
    answers = Answers()

    @router.get("/best", response_model=BestAnswer, responses=FAILURES)
    def get_best(request: Request, query: Annotated[BestQuery, Query()]) -> Response:
        """The fastest configuration for a mask and head_dim, over all measured lengths and at each of them.

        `best` has the highest geometric mean over the measured lengths; with `seq_len`, it is the winner at that
        length or at the nearest. Everything but lengths, batch and heads must match exactly.
        """
        if query.dim is None:
            raise invalid("head_dim", "head_dim is missing; give head_dim or d")
        if query.heads_kv is not None:
            if query.heads is None:
                raise invalid("heads_kv", "heads_kv needs heads: their ratio is the head group")
            if query.heads % query.heads_kv:
                raise invalid(
                    "heads_kv",
                    f"heads ({query.heads}) is not a multiple of heads_kv ({query.heads_kv})",
                )
        head_dim = query.dim

        def compute() -> dict[str, Any]:
            try:
                return best(context.store, _question(query, context.gpu(query.gpu), head_dim))
            except NotMeasured as error:
                raise ApiError(404, str(error)) from None

        body = answers.get(context.store.state(), request.url.query, compute)
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-cache"})

    @router.get(
        "/table", responses={**FAILURES, 304: {"description": "Unchanged since If-None-Match."}}
    )
    def get_table(request: Request, query: Annotated[GpuQuery, Query()]) -> Response:
        """The lookup table that the dispatcher loads: the newest release of the GPU, else the one shipped for it."""
        gpu = context.gpu(query.gpu)
        release = context.store.get_release(gpu=gpu)
        if release is not None:
            text, digest = release.table, release.digest
        else:
            text, digest = _shipped(gpu)
        return table_response(request, text, digest, "no-cache")

    @router.get("/curves", response_model=Curves, responses=FAILURES)
    def get_curves(query: Annotated[CurvesQuery, Query()]) -> StrictJson:
        """Speed-up over ascending order by seq_len, one series a schedule: its fastest configuration at each."""
        if query.dim is None:
            raise invalid("head_dim", "head_dim is missing; give head_dim or d")
        gpu = context.gpu(query.gpu)
        snapshot = context.snapshots.of(gpu, query.source)
        shown = Filters(
            gpu=gpu,
            mask=query.mask,
            head_dim=query.dim,
            dtype=query.dtype,
            head_group=query.head_group,
            options=PLAIN,
            direction=query.direction,
        )
        points = snapshot.points_of(shown)
        if not points:
            known = sorted({(c.mask, c.head_dim, c.dtype, c.head_group) for c in snapshot.cells})
            has = "; ".join(f"{m} d={d} {t} head group {g}" for m, d, t, g in known) or "nothing"
            raise ApiError(
                404,
                f"{gpu} has no {query.source} rows for {query.mask} d={query.dim} {query.dtype}; it has: {has}",
            )
        body = {
            **{
                k: getattr(shown, k)
                for k in ("gpu", "mask", "head_dim", "dtype", "head_group", "direction")
            },
            "matmul_tflops": snapshot.ceiling,
            "series": _series(points),
        }
        return StrictJson(body, headers={"Cache-Control": "no-cache"})

    return router


def _question(query: BestQuery, gpu: str, head_dim: int) -> Question:
    return Question(
        gpu=gpu,
        mask=query.mask,
        head_dim=head_dim,
        dtype=query.dtype,
        seq_len=query.length,
        batch=query.batch,
        heads=query.heads,
        heads_kv=query.heads_kv,
        direction=query.direction,
        source=query.source,
        release=query.release,
    )


def _series(points: list[Point]) -> list[dict[str, Any]]:
    return [
        {
            "schedule": kind,
            "source": source,
            **{
                name: [getattr(p, name) for p in line]
                for name in ("seq_len", "speedup", "tflops", "registers", "spill_bytes")
            },
        }
        for (kind, source), line in by_kind(points).items()
    ]


def _shipped(gpu: str) -> tuple[str, str]:
    path = TABLES / f"{gpu}.json"
    try:
        return path.read_text(encoding="utf-8"), LookupTable.load(path).digest
    except (OSError, TableError):
        raise ApiError(
            404,
            f"{gpu} has no release and no shipped lookup table; freeze one with: dash-tune release --gpu {gpu}",
        ) from None


def table_response(request: Request, text: str, digest: str, cache: str) -> Response:
    """The table's bytes under its digest as a strong ETag, or 304 for a client that has them."""
    tag = f'"{digest}"'
    headers = {"ETag": tag, "Cache-Control": cache}
    asked = request.headers.get("if-none-match", "")
    if asked.strip() == "*" or tag in [
        part.strip().removeprefix("W/") for part in asked.split(",")
    ]:
        return Response(status_code=304, headers=headers)
    return Response(text, media_type="application/json", headers=headers)
