"""``dash-serve``: the results service and its dashboard."""

from __future__ import annotations

import errno
import gc
import logging
import os
import socket
import tempfile
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from server import logs

if TYPE_CHECKING:
    from server.deps import Context
    from server.settings import Settings
    from tuner.results.store import Store

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
log = logging.getLogger("dash.server")

MEMORY = "sqlite://"
GRACE_SECONDS = 10
SQLITE_BUSY = "DASH_SQLITE_BUSY_S"
BUSY_SECONDS = 5  # a request waits this long for another writer, then it is 503 with Retry-After
SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for every one.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    db: Annotated[
        str | None,
        typer.Option(help="Path or URL. Default: DASH_DB, else SQLite in the user's data folder."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that answer.")] = 1,
    root_path: Annotated[
        str | None,
        typer.Option(help="Prefix under which a proxy offers this server, such as /dash."),
    ] = None,
    read_only: Annotated[
        bool, typer.Option(help="Open the database without writing a byte.")
    ] = False,
) -> None:
    """Serve the API and the dashboard.

    Settings are DASH_* variables: DASH_TOKEN allows writes, and DASH_TOKENS_FILE those of named holders
    (python -m server.tokens NAME makes one); DASH_DEFAULT_GPU answers calls that name no GPU, DASH_SERVE_RELEASE pins
    GPUs to a release ('{"h200": 3}'); DASH_ROOT_PATH is the prefix of a proxy, DASH_CORS_ORIGINS a JSON list of sites
    that may read, DASH_MAX_BODY_BYTES, DASH_QUERY_SECONDS and DASH_RETRY_AFTER_S the limits of a write, a query and a
    wait; DASH_LOG=json and DASH_LOG_REQUESTS=1 say what is logged and how. docs/operations.md has more.
    """
    if db is not None:
        os.environ["DASH_DB"] = db
    if root_path is not None:
        os.environ["DASH_ROOT_PATH"] = root_path
    if read_only:
        os.environ["DASH_READ_ONLY"] = "1"
    listener = _listen(host, port)
    settings = read_settings()
    logs.configure(as_json=settings.log == "json")
    os.environ.setdefault(SQLITE_BUSY, str(BUSY_SECONDS))
    where = _prepare(settings)
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"dash-serve: http://{shown}:{listener.getsockname()[1]} serves {where}", err=True)
    _run(listener, workers)


def read_settings() -> Settings:
    """The settings, with the tokens read once, or one line and exit 2."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from server.errors import describe
    from server.security import TokenFileError, Tokens
    from server.settings import Settings

    forms = {"serve_release": '{"h200": 3}', "cors_origins": '["https://example.org"]'}
    try:
        settings = Settings()
        Tokens.of(settings)
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        _, line = describe(error.errors())
        how = f"; write it as {forms[field]}" if field in forms else ""
        _stop(f"DASH_{field.upper()}{line.removeprefix(field)}{how}")
    except SettingsError as error:  # not JSON; the field stands in quotes
        field = str(error).split('"')[1] if '"' in str(error) else ""
        form = forms.get(field)
        _stop(f"DASH_{field.upper()} is not JSON; write it as {form}" if form else str(error))
    except TokenFileError as error:
        _stop(str(error))
    return settings


def _prepare(settings: Settings) -> str:
    """Open the database once before any worker does, and load the shipped rows and releases that it has not.

    A database that exists but cannot be written is served as it is, with a warning; where none was named and the user
    has no folder to hold one, the shipped results are served from memory.
    """
    from tuner.results.rows import StoreError

    try:
        return _open(settings, settings.db, settings.read_only)
    except StoreError as error:
        if settings.read_only:
            _stop(str(error))
        try:
            where = _open(settings, settings.db, read_only=True)
            log.warning("%s; serving it read-only", error)
        except StoreError:
            if settings.db is not None or _default_exists():
                _stop(str(error))
            _open(settings, MEMORY, read_only=False)
            where, os.environ["DASH_DB"] = "what ships with the package, read-only", MEMORY
            log.warning("%s, to keep results", error)
        os.environ["DASH_READ_ONLY"] = "1"
        return where


def _open(settings: Settings, db: str | None, read_only: bool) -> str:
    from tuner.results.store import Store

    with Store.open(db, read_only=read_only) as store:
        added = 0 if read_only else store.load_shipped()
        if added:
            log.info("loaded %d measured rows that ship with the package", added)
        check_names(settings, store)
        return store.where


def check_names(settings: Settings, store: Store) -> None:
    """Stop where a setting names a GPU that neither the package nor the database knows; a known one needs no rows yet.

    A pinned release that is not there is a warning: other GPUs are answered, and it may be imported later.
    """
    from dash_kernels.device import GPUS

    known = [*GPUS, *sorted(set(store.gpus()) - set(GPUS))]
    named = [("DASH_SERVE_RELEASE", gpu) for gpu in settings.serve_release]
    if settings.default_gpu is not None:
        named.append(("DASH_DEFAULT_GPU", settings.default_gpu))
    for variable, gpu in named:
        if gpu not in known:
            _stop(
                f"{variable} names GPU {gpu!r}, which is unknown and has no rows in this database; "
                f"choose one of {', '.join(known)}, or leave it out until its rows are stored"
            )
    for gpu, number in settings.serve_release.items():
        if number not in {release.id for release in store.releases(gpu)}:
            log.warning(
                "DASH_SERVE_RELEASE pins %s to release %d, which is not there: its calls are 404",
                gpu,
                number,
            )


def _default_exists() -> bool:
    """Whether the user's own database is there, however broken: it is never passed over in silence."""
    from tuner.results.database import resolve_url
    from tuner.results.rows import StoreError

    try:
        return os.path.lexists(str(resolve_url(None).database))
    except StoreError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
    except socket.gaierror:
        _stop(f"host {host!r} is not an address of this machine; use 127.0.0.1 or 0.0.0.0")
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            _stop(
                f"port {port} of {host} is taken; choose another with --port, or 0 for a free one"
            )
        if error.errno == errno.EACCES:
            _stop(f"port {port} needs more rights; choose one from 1024 up with --port")
        _stop(f"cannot listen on {host} port {port}: {error.strerror}")
    return listener


def _run(listener: socket.socket, workers: int) -> None:
    import uvicorn

    options: dict[str, Any] = {
        "factory": True,
        "http": "h11",  # httptools is quicker and keeps headers of any size in memory
        "log_level": "warning",
        "log_config": None,
        "server_header": False,
        "timeout_graceful_shutdown": GRACE_SECONDS,
    }
    if workers == 1:
        config = uvicorn.Config("server.cli:application", **options)
        uvicorn.Server(config).run(sockets=[listener])
        return
    host, port = listener.getsockname()[:2]
    listener.close()
    with shared_metrics() as folder:
        os.environ[SHARED_METRICS] = folder
        uvicorn.run("server.cli:application", host=host, port=port, workers=workers, **options)


def shared_metrics() -> AbstractContextManager[str]:
    """The folder in which workers put their counts together: the one that is named, else one that goes when they do."""
    named = os.environ.get(SHARED_METRICS)
    if named:
        return nullcontext(named)
    try:
        return tempfile.TemporaryDirectory(prefix="dash-metrics-")
    except OSError as error:
        _stop(
            f"--workers needs a folder for the counts that workers share, and none can be made ({error}); "
            f"set {SHARED_METRICS}, or TMPDIR, to one that can be written, or use one worker"
        )


def application() -> object:
    """The application of one worker, from the environment that ``serve`` prepared."""
    from server.app import create_app
    from server.settings import Settings
    from tuner.results.limits import limit_queries
    from tuner.results.store import Store

    settings = Settings()
    logs.configure(as_json=settings.log == "json")
    in_memory = settings.db == MEMORY
    store = Store.open(settings.db, read_only=settings.read_only and not in_memory)
    if in_memory:
        store.load_shipped()
        store.read_only = settings.read_only
    limit_queries(store, settings.query_seconds)
    app = create_app(store, settings)
    threading.Thread(target=warm, args=(app.state.context,), daemon=True).start()
    return app


def warm(context: Context) -> None:
    """Take every GPU's snapshot before somebody asks for it, the default one first: of a large database that takes seconds.

    What is held then stays, so the garbage collector is told to pass over it: a full collection of a million rows'
    snapshots stops every answer for 200 ms.
    """
    from tuner.results.rows import StoreError

    try:
        first = context.snapshots.default_gpu()
        for gpu in sorted(context.snapshots.gpus(), key=lambda gpu: gpu != first):
            context.snapshots.of(gpu)
    except StoreError as error:
        log.warning("%s", error)
    gc.collect()
    gc.freeze()


def _stop(line: str) -> NoReturn:
    typer.echo(f"dash-serve: {line}", err=True)
    raise typer.Exit(2)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
