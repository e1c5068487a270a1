"""The application factory: store and settings in, FastAPI application out. No state at import."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware

from dash_kernels import __version__
from dashboard.router import create_router
from dashboard.snapshot import Snapshots
from server import docs, errors, openapi
from server.caching import Cacheable
from server.deps import Context
from server.fresh import Fresh
from server.metrics import Metrics
from server.middleware import Guard, UnderPrefix
from server.params import refuse_repeats
from server.routers import best, releases, results, schedules, status
from server.security import Tokens
from server.settings import Settings
from tuner.results.store import Store

DESCRIPTION = """Which configuration of deterministic attention is fastest for a shape on a GPU, from measured rows.

Every call is at its short path and under /v1, where it will stay as it is when a /v2 comes.

Errors are `application/problem+json`: `detail` is one line for a person, `parameter` names the input at fault.
Times are RFC 3339 in UTC. A number that is not known is null."""
VERSION_PREFIX = "/v1"


def create_app(store: Store, settings: Settings | None = None) -> FastAPI:
    """The service over ``store``: API, pages and their assets, nothing fetched from elsewhere."""
    settings = settings or Settings()
    app = FastAPI(
        title="DASH",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        dependencies=[Depends(refuse_repeats)],
    )
    snapshots = Snapshots(store)
    fresh = Fresh(store, replaced=lambda: _forget(store, snapshots))
    snapshots.last_id = lambda: fresh.now().row
    context = Context(store, snapshots, settings, fresh, Tokens.of(settings))
    metrics = Metrics(store, snapshots)
    errors.install(app, settings.retry_after_s)
    reading = [Depends(context.answering)]
    api: list[tuple[APIRouter, list[Any]]] = [
        (best.create(context), reading),
        (results.create(context), reading),
        (releases.create(context), reading),
        (status.create_gpus(context), reading),
        (schedules.create(), []),
    ]
    for router, needs in api:
        app.include_router(router, dependencies=needs)
    app.include_router(status.create(context, metrics))
    for router, needs in api:
        app.include_router(router, prefix=VERSION_PREFIX, dependencies=needs)
    app.include_router(docs.create(app))
    openapi.install(app, settings.root_path)
    pages = create_router(store, snapshots, context.release, settings.default_gpu, reading)
    app.include_router(pages)
    app.add_middleware(Cacheable, state=fresh.current)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET"],
            expose_headers=["ETag", "Link", "X-Request-ID"],
        )
    app.add_middleware(
        Guard,
        limit=settings.max_body_bytes,
        metrics=metrics,
        every_request=settings.log_requests,
    )
    if settings.root_path:
        app.add_middleware(UnderPrefix, prefix=settings.root_path)
    app.state.context = context
    return app


def _forget(store: Store, snapshots: Snapshots) -> None:
    store.forget()
    snapshots.forget()
