"""The application factory: store and settings in, FastAPI application out. No state at import."""

from __future__ import annotations

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CollectorRegistry
from starlette.middleware.gzip import GZipMiddleware

from dash_kernels import __version__
from dashboard.router import create_router
from dashboard.snapshot import Snapshots
from server import docs, errors, openapi
from server.deps import Context
from server.middleware import Guard, Metrics, UnderPrefix, store_gauges
from server.params import refuse_repeats
from server.routers import best, releases, results, schedules, status
from server.settings import Settings
from tuner.results.store import Store

DESCRIPTION = """Which configuration of deterministic attention is fastest for a shape on a GPU, from measured rows.

Errors are `application/problem+json`: `detail` is one line for a person, `parameter` names the input at fault.
Times are RFC 3339 in UTC. A number that is not known is null."""


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
    context = Context(store, Snapshots(store), settings)
    registry = CollectorRegistry()
    store_gauges(store, registry)
    errors.install(app, settings.retry_after_s)
    for router in (
        best.create(context),
        results.create(context),
        releases.create(context),
        schedules.create(),
        status.create(context, registry),
    ):
        app.include_router(router)
    app.include_router(docs.create(app))
    openapi.install(app, settings.root_path)
    app.include_router(create_router(store, context.snapshots, settings.default_gpu))
    app.add_middleware(GZipMiddleware, minimum_size=2048, compresslevel=5)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET"]
        )
    app.add_middleware(Guard, limit=settings.max_body_bytes)
    app.add_middleware(Metrics, registry=registry)
    if settings.root_path:
        app.add_middleware(UnderPrefix, prefix=settings.root_path)
    app.state.context = context
    return app
