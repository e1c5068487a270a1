"""/releases: frozen lookup tables, numbered and immutable."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from server.deps import Context, StrictJson
from server.errors import ApiError, invalid
from server.models import Problem, ReleaseBody, ReleaseInfo
from server.params import LARGEST_ID, GpuQuery, NoQuery
from server.routers.best import table_response
from server.routers.results import WRITE_FAILURES
from server.security import writer
from tuner.export import freeze
from tuner.results.rows import Release, StoreError, StoreUnavailable

FOREVER = "public, max-age=31536000, immutable"


def create(context: Context) -> APIRouter:
    router = APIRouter(tags=["releases"])

    @router.get("/releases", response_model=list[ReleaseInfo], responses={422: {"model": Problem}})
    def get_releases(query: Annotated[GpuQuery, Query()]) -> StrictJson:
        """Every release, newest first."""
        gpu = context.gpu(query.gpu) if query.gpu is not None else None
        return StrictJson([_info(release) for release in context.store.releases(gpu)])

    @router.post(
        "/releases",
        response_model=ReleaseInfo,
        status_code=201,
        responses={**WRITE_FAILURES, 409: {"model": Problem, "description": "The name is taken."}},
        dependencies=[Depends(writer(context.settings, context.store.read_only))],
    )
    def post_release(body: ReleaseBody) -> StrictJson:
        """Freeze the winners of a GPU as they are now. What is frozen never changes."""
        gpu = context.gpu(body.gpu)
        if not context.snapshots.of(gpu).cells:
            raise invalid(
                "gpu", f"{gpu} has no measured winner to freeze; run dash-tune --gpu {gpu} first"
            )
        try:
            release = freeze(context.store, gpu, body.notes, body.name)
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise ApiError(409, str(error), parameter="name") from None
        return StrictJson(
            _info(release), 201, headers={"Location": f"releases/{release.id}/table.json"}
        )

    @router.get(
        "/releases/{release_id}/table.json",
        responses={
            304: {"description": "Unchanged."},
            404: {"model": Problem},
            422: {"model": Problem},
        },
    )
    def get_release_table(
        request: Request,
        release_id: Annotated[int, Path(ge=1, le=LARGEST_ID)],
        _: Annotated[NoQuery, Query()],
    ) -> Response:
        """The lookup table of a release, byte for byte the same for ever."""
        release = context.store.get_release(release_id)
        if release is None:
            raise ApiError(404, f"there is no release {release_id}; GET /releases lists them")
        return table_response(request, release.table, release.digest, FOREVER)

    return router


def _info(release: Release) -> dict[str, Any]:
    return {
        "id": release.id,
        "gpu": release.gpu,
        "name": release.name,
        "digest": release.digest,
        "notes": release.notes,
        "cells": len(release.to_dict()["cells"]),
        "created_at": release.created_at,
        "table": f"releases/{release.id}/table.json",
    }
