"""/gpus, /healthz and /metrics: what is known, and whether the service is well."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from prometheus_client import CONTENT_TYPE_LATEST

from dash_kernels import __version__
from dash_kernels.device import GPUS
from server.caching import NEVER
from server.deps import Context, StrictJson
from server.metrics import Metrics
from server.models import Gpu, Health, Problem
from server.params import NoQuery


def create_gpus(context: Context) -> APIRouter:
    router = APIRouter(tags=["lookup"])

    @router.get(
        "/gpus",
        response_model=list[Gpu],
        responses={
            304: {"description": "Unchanged since If-None-Match."},
            422: {"model": Problem},
            503: {"model": Problem},
        },
    )
    def get_gpus(_: Annotated[NoQuery, Query()]) -> StrictJson:
        """GPUs that the package knows or the database has rows of."""
        releases = {release.gpu: release.name for release in reversed(context.store.releases())}
        rows: dict[str, int] = {}
        for (gpu, *_kind), number in context.snapshots.counts().items():
            rows[gpu] = rows.get(gpu, 0) + number
        stored = sorted(rows)
        answer = []
        for name in [*stored, *(name for name in GPUS if name not in stored)]:
            spec = GPUS.get(name)
            answer.append(
                {
                    "gpu": name,
                    "name": spec.aliases[0] if spec else None,
                    "capability": "{}.{}".format(*spec.capability) if spec else None,
                    "sms": spec.sms if spec else None,
                    "peak_tflops": spec.peak_tflops if spec else None,
                    "family": spec.family if spec else None,
                    "rows": rows.get(name, 0),
                    "release": releases.get(name),
                }
            )
        return StrictJson(answer)

    return router


def create(context: Context, metrics: Metrics) -> APIRouter:
    """Calls of whoever runs the server; they have no version."""
    router = APIRouter(tags=["service"])

    @router.get(
        "/healthz",
        response_model=Health,
        responses={422: {"model": Problem}, 503: {"model": Problem}},
    )
    def get_health(_: Annotated[NoQuery, Query()]) -> StrictJson:
        """200 while the database answers."""
        context.fresh.now()
        context.store.ping()
        body = {
            "status": "ok",
            "schema_version": context.store.schema_version(),
            "version": __version__,
        }
        return StrictJson(body, headers={"Cache-Control": NEVER})

    @router.get(
        "/metrics", responses={200: {"content": {"text/plain": {}}}, 422: {"model": Problem}}
    )
    def get_metrics(_: Annotated[NoQuery, Query()]) -> Response:
        """Prometheus metrics of this server, all its workers together."""
        headers = {"Cache-Control": NEVER}
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST, headers=headers)

    return router
