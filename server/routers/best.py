"""/best, /table and /curves: what is fastest."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from dash_kernels.lookup import TABLES, LookupTable, TableError
from dashboard.figures import by_kind
from dashboard.filters import PLAIN, Filters
from dashboard.points import Point
from server.caching import LIVE, Body, headers_of, matches, takes_gzip
from server.deps import Answers, Context, StrictJson
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


def held_route(peek: Callable[[Request], Response | None]) -> type[APIRoute]:
    """A route that asks ``peek`` first: an answer that is held was checked when it was made, by the same query string."""

    class HeldRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            compute = super().get_route_handler()

            async def handler(request: Request) -> Response:
                held = peek(request)
                return await compute(request) if held is None else held

            return handler

    return HeldRoute


def create(context: Context) -> APIRouter:
    router = APIRouter(tags=["lookup"])
    answers = Answers()

    def peek(request: Request) -> Response | None:
        state = context.fresh.peek()
        body = answers.peek(state, request.scope["query_string"]) if state else None
        return None if body is None else _send(request, body)

    async def get_best(request: Request, query: Annotated[BestQuery, Query()]) -> Response:
        """The fastest configuration for a mask and head_dim, over all measured lengths and at each of them.

        `best` has the highest geometric mean over the measured lengths; with `seq_len`, it is the winner at that
        length or at the nearest. Everything but lengths, batch and heads must match exactly; `ladder` says which rung
        answered and why those above it did not. The newest release of the GPU answers; a draft only who asks for it.
        """
        question, allowed = _question(context, query), _allowed(query)
        state = await run_in_threadpool(context.fresh.now)

        def compute() -> dict[str, Any]:
            return climb(context, question(), **allowed)

        key = request.scope["query_string"]
        body = await run_in_threadpool(answers.get, state, key, compute)
        return _send(request, body)

    router.add_api_route(
        "/best",
        get_best,
        response_model=BestAnswer,
        responses={**FAILURES, **UNCHANGED},
        route_class_override=held_route(peek),
    )

    @router.get("/table", responses={**FAILURES, **UNCHANGED})
    def get_table(request: Request, query: Annotated[TableQuery, Query()]) -> Response:
        """The lookup table that the dispatcher loads: the newest release of the GPU, or the one named; else the shipped one."""
        context.fresh.now()
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


def _question(context: Context, query: BestQuery) -> Callable[[], Question]:
    """Checks what the parameters say together; answers what makes the question, which may ask the database."""
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
    return lambda: Question(
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


def _send(request: Request, body: Body) -> Response:
    """A held answer as it is: its tag and its packed bytes were made once."""
    packed = body.packed if takes_gzip(request.headers.get("accept-encoding", "")) else None
    headers = headers_of(body, packed is not None, LIVE)
    if matches(request.headers.get("if-none-match", ""), body.tag):
        return Response(status_code=304, headers=headers)
    content = body.plain if packed is None else packed
    return Response(content, media_type=body.media_type, headers=headers)


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
