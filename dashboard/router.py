"""Routes of the pages: the dashboard, its figures as JSON, its static files. Thin: read, build, answer."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import plotly
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.templating import Jinja2Templates

from dashboard import figures, gantt, model, releases, sections, views
from dashboard import filters as state
from dashboard.filters import Filters
from dashboard.palette import theme_named
from dashboard.points import Point
from dashboard.snapshot import Snapshot, Snapshots
from tuner.results import newest
from tuner.results.rows import STATUSES, Release, ResultFilter
from tuner.results.store import Store

HERE = Path(__file__).parent
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
STATIC = {
    "app.css": "text/css",
    "app.js": "text/javascript",
    "theme.js": "text/javascript",
    "docs.js": "text/javascript",
    "favicon.svg": "image/svg+xml",
    "plotly.min.js": "text/javascript",
}
SHOWN_FAILURES = 12


def templates_with(base: Callable[[Request], str]) -> Jinja2Templates:
    """Templates that know the prefix under which the pages are reached."""
    templates = Jinja2Templates(
        directory=HERE / "templates",
        context_processors=[
            lambda request: {
                "base": base(request),
                "home": base(request) or "./",
                "version": asset_version(),
                "plotly_version": plotly.__version__,
            }
        ],
    )
    templates.env.filters["kind_class"] = views.kind_class
    templates.env.filters["breakable"] = views.breakable
    return templates


def prefix(request: Request) -> str:
    """``/dash/`` where the server was told its prefix; else empty: relative links, right under any proxy."""
    root = str(request.scope.get("root_path", "")).rstrip("/")
    return f"{root}/" if root else ""


FOREVER = "public, max-age=31536000, immutable"


@lru_cache(maxsize=len(STATIC))
def asset(name: str) -> bytes:
    """A static file, read once a process."""
    return (PLOTLY if name == PLOTLY.name else HERE / "static" / name).read_bytes()


@lru_cache(maxsize=1)
def packed_plotly() -> bytes:
    """plotly.js packed once a process: 5 MB, 1.5 MB packed."""
    return gzip.compress(asset(PLOTLY.name), 6, mtime=0)


@lru_cache(maxsize=1)
def asset_version() -> str:
    """Changes whenever a static file of ours does, so that browsers may keep them."""
    own = [asset(name) for name in STATIC if name != PLOTLY.name]
    return hashlib.sha256(b"".join(own)).hexdigest()[:10]


class Board:
    """What the pages read from the store."""

    def __init__(self, store: Store, snapshots: Snapshots, default_gpu: str | None = None) -> None:
        self.store, self.snapshots, self.preferred = store, snapshots, default_gpu

    def gpus(self) -> list[str]:
        """GPUs with rows, the default one first: the preferred one where it has rows."""
        found = self.snapshots.gpus()
        first = self.preferred if self.preferred in found else self.snapshots.default_gpu()
        return sorted(found, key=lambda gpu: (gpu != first, gpu))

    def basis(self, gpu: str) -> Snapshot:
        """Measured where anything was; else what the model predicts; else what was compiled."""
        for source in ("measured", "modelled", "compiled"):
            snapshot = self.snapshots.of(gpu, source)
            if snapshot.cells or snapshot.compiled:
                return snapshot
        return self.snapshots.of(gpu)

    def view(self, request: Request) -> tuple[list[str], Snapshot | None, Filters, list[str]]:
        """(GPUs, snapshot, settled filters, notices) of a request; no snapshot where there are no rows."""
        filters, notices = state.read(request.query_params.multi_items())
        gpus = self.gpus()
        if not gpus:
            return gpus, None, filters, notices
        gpu = filters.gpu or gpus[0]
        if gpu not in gpus:
            notices.append(f"No rows of GPU {gpu[:40]!r}; there are rows of {', '.join(gpus)}.")
            gpu = gpus[0]
        snapshot = self.basis(gpu)
        filters = Filters(**{**vars(filters), "gpu": gpu})
        filters, more = state.settle(filters, state.options(snapshot.cells), snapshot.cells)
        return gpus, snapshot, filters, [*notices, *more]

    def report(
        self, gpu: str, source: str, run_id: int | None
    ) -> tuple[sections.RunReport | None, list[tuple[int, str]]]:
        """The asked run, or the newest of ``source``, and the newest runs of the GPU, those of ``source`` first."""
        runs = newest.recent_runs(self.store, gpu, source, sections.SHOWN_RUNS)
        if not runs:
            return None, []
        asked = newest.runs_by_id(self.store, [run_id])
        shown = asked[0] if asked and asked[0].gpu == gpu else runs[0]
        stored = newest.statuses_of_run(self.store, shown.id or 0)
        counts = {status: stored[status] for status in STATUSES if status in stored}
        failures: list[dict[str, str]] = []
        for status in [s for s in counts if s != "ok"]:
            rows = self.store.results(
                ResultFilter(run_id=shown.id, status=status), limit=SHOWN_FAILURES
            )
            failures += [
                {
                    "status": row.status,
                    "label": f"{row.mask} d {row.head_dim}, {row.seq_len}: {row.to_config().label()}",
                    "error": (row.error or "no message").splitlines()[0],
                }
                for row in rows
            ]
        report = sections.RunReport(
            run_id=shown.id or 0,
            started=f"{shown.started:%Y-%m-%d %H:%M} UTC" if shown.started else "an unknown time",
            command=shown.command,
            source=shown.source,
            counts=counts,
            failures=failures[: 2 * SHOWN_FAILURES],
        )
        return report, [(run.id or 0, run.source) for run in runs]

    def points(self, snapshot: Snapshot, filters: Filters) -> list[Point]:
        """What the curves draw: the shown slice, one shape a seq_len, with predictions when asked for."""
        drawn = snapshot.points_of(filters)
        if filters.predicted and snapshot.source != "modelled":
            drawn += self.snapshots.of(snapshot.gpu, "modelled").points_of(filters)
        return drawn

    def compiled(self, snapshot: Snapshot, filters: Filters) -> list[Point]:
        """Every configuration compiled for the shown mask and head_dim, whether it was timed or not."""
        found = [*snapshot.compiled]
        if snapshot.source != "compiled":
            found += self.snapshots.of(snapshot.gpu, "compiled").compiled
        return [p for p in found if (p.mask, p.head_dim) == (filters.mask, filters.head_dim)]


def create_router(
    store: Store,
    snapshots: Snapshots,
    release_of: Callable[[str], Release | None],
    default_gpu: str | None = None,
    reading: Sequence[Any] = (),
) -> APIRouter:
    """Pages over ``store``. Nothing here is part of the API's schema.

    ``release_of`` answers the release that /best answers from and raises LookupError where the pinned one does not
    exist; ``reading`` are dependencies of what reads the store.
    """
    router = APIRouter(include_in_schema=False)
    board = Board(store, snapshots, default_gpu)
    templates = templates_with(prefix)

    @router.get("/", dependencies=reading)
    def index(request: Request) -> Response:
        gpus, snapshot, filters, notices = board.view(request)
        if snapshot is None:
            return templates.TemplateResponse(request, "empty.html")
        report, runs = board.report(snapshot.gpu, snapshot.source, filters.run)
        if filters.run is not None and (report is None or report.run_id != filters.run):
            notices.append(f"There is no run {filters.run} of {snapshot.gpu}; the newest is shown.")
        release = None
        try:
            release = release_of(snapshot.gpu)
        except LookupError as error:
            notices.append(f"/best answers nothing for {snapshot.gpu}: {error}.")
        page = views.build_page(
            snapshot,
            filters,
            gpus=gpus,
            notices=notices,
            report=report,
            runs=runs,
            has_predicted=bool(snapshots.of(snapshot.gpu, "modelled").cells),
            release=f"{release.id}, {release.name}" if release else None,
            releases=releases.section(store, store.releases(snapshot.gpu), release, snapshot),
        )
        return templates.TemplateResponse(request, "index.html", {"page": page})

    @router.get("/figures/{name}", dependencies=reading)
    def figure(request: Request, name: str) -> Response:
        theme = theme_named(request.query_params.get("theme", "light"))
        _, snapshot, filters, _ = board.view(request)
        if name == "gantt":
            drawn = model.chart(filters, "shortest_first", filters.mask or "causal")
            if drawn.simulation is None:
                raise HTTPException(422, drawn.error)
            return _figure(gantt.gantt_figure(drawn.kind, drawn.simulation, 1.0, theme))
        if snapshot is None:
            raise HTTPException(404, "nothing is stored yet; run dash-tune first")
        if name == "speedup":
            return _figure(figures.speedup_figure(board.points(snapshot, filters), theme))
        if name == "tflops":
            return _figure(
                figures.tflops_figure(board.points(snapshot, filters), snapshot.ceiling, theme)
            )
        if name == "registers":
            return _figure(figures.registers_figure(board.compiled(snapshot, filters), theme))
        if name == "failures":
            report, _ = board.report(snapshot.gpu, snapshot.source, filters.run)
            return _figure(figures.failures_figure(report.counts if report else {}, theme))
        line = f"there is no figure {name[:60]!r}; there are speedup, tflops, registers, gantt and failures"
        raise HTTPException(404, line)

    @router.get("/static/{name}")
    def static(request: Request, name: str) -> Response:
        if name not in STATIC:
            raise HTTPException(404, f"there is no static file {name[:60]!r}")
        version = plotly.__version__ if name == PLOTLY.name else asset_version()
        held = request.query_params.get("v") == version
        headers = {"Cache-Control": FOREVER if held else "no-cache"}
        packed = "gzip" in request.headers.get("accept-encoding", "")
        if name == PLOTLY.name and packed:
            headers |= {
                "Content-Encoding": "gzip",
                "Vary": "Accept-Encoding",
                "ETag": f'W/"{version}"',
            }
            return Response(packed_plotly(), media_type=STATIC[name], headers=headers)
        return Response(asset(name), media_type=STATIC[name], headers=headers)

    return router


def _figure(figure: Any) -> Response:
    return Response(
        figure.to_json(), media_type="application/json", headers={"Cache-Control": "no-cache"}
    )
