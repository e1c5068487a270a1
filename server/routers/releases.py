"""/releases: frozen lookup tables, numbered and immutable, and what changes from one to the next."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Response
from pydantic import BeforeValidator

from dash_kernels.lookup import LookupTable
from dashboard.releases import before, compared, described
from server.caching import FOREVER
from server.deps import Context, StrictJson
from server.errors import ApiError, invalid
from server.models import Problem, ReleaseBody, ReleaseDiff, ReleaseInfo
from server.params import LARGEST_ID, DiffQuery, GpuQuery, NoQuery, digits
from server.routers.best import FAILURES, UNCHANGED, table_response
from server.routers.results import WRITE_FAILURES
from server.security import writer
from tuner.export import check_release_name, freeze, lookup_table
from tuner.results.queries import DRAFT
from tuner.results.rows import Release, StoreError, StoreUnavailable

Number = Annotated[
    int,
    Path(ge=1, le=LARGEST_ID, description="The release's number."),
    BeforeValidator(digits),
]


def create(context: Context) -> APIRouter:
    router = APIRouter(tags=["releases"])

    @router.get(
        "/releases",
        response_model=list[ReleaseInfo],
        responses={**UNCHANGED, 422: {"model": Problem}},
    )
    def get_releases(query: Annotated[GpuQuery, Query()]) -> StrictJson:
        """Every release, newest first, each with what it changed against the one before it."""
        gpu = context.gpu(query.gpu) if query.gpu is not None else None
        return StrictJson(_listed(context, context.store.releases(gpu)))

    @router.post(
        "/releases",
        response_model=ReleaseInfo,
        status_code=201,
        responses={**WRITE_FAILURES, 409: {"model": Problem, "description": "The name is taken."}},
        dependencies=[Depends(writer(context.tokens, context.store.read_only))],
    )
    def post_release(body: ReleaseBody) -> StrictJson:
        """Freeze the winners of a GPU as they are now. What is frozen never changes.

        To go back to an older release, name its number (`release=3`, or the address of its table), or pin the server
        to it with DASH_SERVE_RELEASE.
        """
        gpu = context.gpu(body.gpu)
        snapshot = context.snapshots.of(gpu)
        if not snapshot.cells:
            raise invalid(
                "gpu", f"{gpu} has no measured winner to freeze; run dash-tune --gpu {gpu} first"
            )
        if body.name is not None:
            try:
                check_release_name(body.name)
            except StoreError as error:
                raise invalid("name", str(error)) from None
        try:
            release = freeze(
                context.store,
                gpu,
                body.notes,
                body.name,
                cells=snapshot.cells,
                until_id=snapshot.last_id,
            )
        except StoreUnavailable:
            raise
        except StoreError as error:
            if "exists" not in str(error):
                raise
            raise ApiError(409, f"{error}; choose another name", parameter="name") from None
        finally:
            context.fresh.expire()
        (made,) = (
            r for r in _listed(context, context.store.releases(gpu)) if r["id"] == release.id
        )
        return StrictJson(made, 201, headers={"Location": f"releases/{release.id}"})

    @router.get("/releases/diff", response_model=ReleaseDiff, responses={**FAILURES, **UNCHANGED})
    def get_diff(query: Annotated[DiffQuery, Query()]) -> StrictJson:
        """What changes from `old` to `new`: which cells run another config, by how much, and which change bits.

        By default: what a release of the rows as they are now would change.
        """
        gpu = context.gpu(query.gpu)
        known = context.store.releases(gpu)
        if query.new == DRAFT:
            newer: Release | None = None
            older = known[0] if known else None
            snapshot = context.snapshots.of(gpu)
            if not snapshot.cells:
                raise ApiError(404, f"{gpu} has no measured winner; there is nothing to compare")
            table = LookupTable.from_dict(lookup_table(context.store, gpu, cells=snapshot.cells))
        else:
            newer = context.release(gpu, query.new)
            assert newer is not None
            older = before(known, newer)
            table = LookupTable.from_dict(newer.to_dict())
        if query.old is not None:
            older = context.release(gpu, query.old)
        found = compared(older, table)
        body = {
            "gpu": gpu,
            "old": _side(older) if older else None,
            "new": _side(newer) if newer else {"id": None, "name": DRAFT, "digest": table.digest},
            "summary": found.summary(),
            **found.to_dict(),
        }
        return StrictJson(body)

    @router.get(
        "/releases/{release_id}", response_model=ReleaseInfo, responses={**FAILURES, **UNCHANGED}
    )
    def get_release(release_id: Number, _: Annotated[NoQuery, Query()]) -> StrictJson:
        """One release: its digest, its notes, and what it changed against the one before it."""
        release = _found(context, release_id)
        listed = _listed(context, context.store.releases(release.gpu))
        return StrictJson(next(info for info in listed if info["id"] == release_id))

    @router.get("/releases/{release_id}/table.json", responses={**FAILURES, **UNCHANGED})
    def get_release_table(release_id: Number, _: Annotated[NoQuery, Query()]) -> Response:
        """The lookup table of a release, byte for byte the same for ever."""
        release = _found(context, release_id)
        return table_response(release.table, release.digest, FOREVER)

    return router


def _found(context: Context, number: int) -> Release:
    release = context.store.get_release(number)
    if release is None:
        raise ApiError(404, f"there is no release {number}; GET /releases lists them")
    return release


def _side(release: Release) -> dict[str, Any]:
    return {"id": release.id, "name": release.name, "digest": release.digest}


def _listed(context: Context, releases: list[Release]) -> list[dict[str, Any]]:
    of_gpu: dict[str, list[Release]] = {}
    for release in releases:
        of_gpu.setdefault(release.gpu, []).append(release)
    found: dict[int | None, dict[str, Any]] = {}
    for gpu, known in of_gpu.items():
        answering = context.answering_release(gpu)
        for info in described(context.store, known, answering.id if answering else None):
            found[info["id"]] = info
    return [found[release.id] for release in releases]
