"""/best, /table and /curves: what is fastest."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from dash_kernels.lookup import TABLES, LookupTable, TableError
from dashboard.figures import by_kind
from dashboard.filters import PLAIN, Filters
from dashboard.points import Point
from server.caching import LIVE
from server.deps import Context, StrictJson
from server.errors import ApiError, invalid
from server.ladder import climb
from server.models import BestAnswer, Curves, Problem
from server.params import BestQuery, CurvesQuery, TableQuery
from tuner.results.queries import Question

FAILURES: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "Nothing is measured for this; `detail` says what is."},
    422: {
        "model": Problem,
        "description": "A parameter is unknown, wrong or given twice; it is named.",
    },
    503: {"model": Problem, "description": "The database does not answer; see Retry-After."},
}
UNCHANGED: dict[int | str, dict[str, Any]] = {
    304: {"description": "Unchanged since If-None-Match."}
}


def create(context: Context) -> APIRouter:
    router = APIRouter(tags=["lookup"])

    @router.get("/best", response_model=BestAnswer, responses={**FAILURES, **UNCHANGED})
    def get_best(query: Annotated[BestQuery, Query()]) -> StrictJson:
        """The fastest configuration for a mask and head_dim, over all measured lengths and at each of them.

        `best` has the highest geometric mean over the measured lengths; with `seq_len`, it is the winner at that
        length or at the nearest. Everything but lengths, batch and heads must match exactly; `ladder` says which rung
        answered and why those above it did not. The newest release of the GPU answers; a draft only who asks for it.
        """
        return StrictJson(climb(context, _question(context, query), **_allowed(query)))

    @router.get("/table", responses={**FAILURES, **UNCHANGED})
    def get_table(query: Annotated[TableQuery, Query()]) -> Response:
        """The lookup table that the dispatcher loads: the newest release of the GPU, or the one named; else the shipped one."""
        gpu = context.gpu(query.gpu)
        release = context.release(gpu, query.release)
        if release is None:
            text, digest = _shipped(gpu)
            return table_response(text, digest, LIVE)
        answer = table_response(release.table, release.digest, LIVE)
        answer.headers["Content-Location"] = f"releases/{release.id}/table.json"
        return answer

    @router.get("/curves", response_model=Curves, responses={**FAILURES, **UNCHANGED})
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
        return StrictJson(body)

    return router


def _question(context: Context, query: BestQuery) -> Question:
    """Checks what the parameters say together, first of all, and then asks what GPUs there are."""
    head_dim = query.dim
    if head_dim is None:
        raise invalid("head_dim", "head_dim is missing; give head_dim or d")
    if query.heads_kv is not None:
        if query.heads is None:
            raise invalid("heads_kv", "heads_kv needs heads: their ratio is the head group")
        if query.heads % query.heads_kv:
            raise invalid(
                "heads_kv",
                f"heads ({query.heads}) is not a multiple of heads_kv ({query.heads_kv})",
            )
    mask, right = query.mask, query.window_right
    if mask == "full" and right == 0:  # a Problem takes a left window with right 0 as causal
        if query.window_left < 0:
            raise invalid("window_right", "window_right is 0 with mask full: ask for mask causal")
        mask = "causal"
    return Question(
        gpu=context.gpu(query.gpu),
        mask=mask,
        head_dim=head_dim,
        dtype=query.dtype,
        seq_len=query.length,
        batch=query.batch,
        heads=query.heads,
        heads_kv=query.heads_kv,
        direction=query.direction,
        window_left=query.window_left,
        window_right=-1 if mask == "causal" else right,
        head_dim_v=query.head_dim_v or 0,
        softcap=query.softcap,
        varlen=query.varlen,
        source=query.source,
        release=query.release,
    )


def _allowed(query: BestQuery) -> dict[str, Any]:
    names = ("triton", "allow_family", "allow_compiler", "allow_default")
    return {name: getattr(query, name) for name in names}


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


def table_response(text: str, digest: str, cache: str) -> Response:
    """The table's bytes under its digest as their tag."""
    headers = {"ETag": f'"{digest}"', "Cache-Control": cache}
    return Response(text, media_type="application/json", headers=headers)
