"""Lookup tables by address: fetched once, checked, and kept on disk so that a job can start without a network.

A release's table never changes, so its copy answers before the network is asked. A live table (``/table?gpu=...``) is
asked for with If-None-Match, and its copy stands in when the server does not answer.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dash_kernels.lookup import LookupTable, TableError, TableMissing

logger = logging.getLogger("dash_kernels")

ANSWER_SECONDS = 5.0  # for a connection, and for each part of the answer
WHOLE_SECONDS = 20.0
MAX_TABLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Copy:
    """A fetched table on disk: what the server called it, and its bytes."""

    url: str
    etag: str
    text: bytes


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def fetch_table(url: str) -> LookupTable:
    """The table at an http(s) address.

    Raises TableMissing where neither the server nor a copy has it, TableError for an answer that is no sound table;
    with a copy from an earlier start both are warnings, and the copy answers.
    """
    path = _copy_path(url)
    copy = _read_copy(path, url) if path else None
    if copy is not None and "/releases/" in urllib.parse.urlsplit(url).path:
        return LookupTable.from_json(copy.text, url)
    try:
        fresh = _ask(url, copy)
        table = LookupTable.from_json(fresh.text, url)
        _check_tag(fresh, table)
    except TableError as error:
        if copy is None:
            raise
        logger.warning("%s; going on with the copy of an earlier start, %s", error, path)
        return LookupTable.from_json(copy.text, url)
    if path and fresh is not copy:
        _write_copy(path, fresh)
    return table


def cached_tables() -> Iterator[LookupTable]:
    """Every sound table that was fetched on this machine, newest first."""
    folder = cache_folder()
    paths = list(folder.glob("table-*.copy")) if folder else []
    for path in sorted(paths, key=_age, reverse=True):
        copy = _read_copy(path, "")
        if copy is not None:
            yield LookupTable.from_json(copy.text, str(path))


def cache_folder() -> Path | None:
    """Folder of fetched tables: DASH_CACHE, else the user's cache folder; None for a user who has no home."""
    chosen = os.environ.get("DASH_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dash"
    except RuntimeError:
        return None


def _ask(url: str, copy: Copy | None) -> Copy:
    """What the server answers; ``copy`` itself where it says that nothing changed."""
    headers = {"If-None-Match": copy.etag} if copy and copy.etag else {}
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    deadline = time.monotonic() + WHOLE_SECONDS
    try:
        request = urllib.request.Request(url, headers=headers)
        with opener.open(request, timeout=ANSWER_SECONDS) as answer:
            parts: list[bytes] = []
            size = 0
            while part := answer.read1(1 << 20):
                parts.append(part)
                size += len(part)
                if size > MAX_TABLE_BYTES:
                    raise TableError(
                        f"{url}: larger than {MAX_TABLE_BYTES >> 20} MiB; not a lookup table"
                    )
                if time.monotonic() > deadline:
                    raise TableMissing(f"{url}: not whole after {WHOLE_SECONDS:.0f} s")
            announced = answer.headers.get("Content-Length", "")
            if announced.isdigit() and int(announced) != size:
                raise TableError(f"{url}: {size} of {announced} bytes came; the answer was cut off")
            return Copy(url, answer.headers.get("ETag", ""), b"".join(parts))
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 304 and copy is not None:
                return copy
        raise TableMissing(f"{url}: HTTP {error.code}, {error.reason}") from error
    except (urllib.error.URLError, OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, TableError):
            raise
        raise TableMissing(f"{url}: {getattr(error, 'reason', error) or error!r}") from error


def _check_tag(copy: Copy, table: LookupTable) -> None:
    """A tag that is a SHA-256 is the table's digest, as dash-serve sends it: another one belongs to other content."""
    tag = copy.etag.strip().removeprefix("W/").strip('"')
    if len(tag) == 64 and set(tag) <= set("0123456789abcdef") and tag != table.digest:
        raise TableError(
            f"{copy.url}: its ETag says digest {tag[:12]} but the table has {table.digest[:12]}; "
            "something between here and the server mixes answers up"
        )


def _copy_path(url: str) -> Path | None:
    folder = cache_folder()
    return folder and folder / f"table-{hashlib.sha256(url.encode()).hexdigest()[:16]}.copy"


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read_copy(path: Path, url: str) -> Copy | None:
    """The copy at ``path`` (of ``url``, unless empty); None where there is none that is whole and sound."""
    try:
        head, _, text = path.read_bytes().partition(b"\n")
        about = json.loads(head)
        copy = Copy(str(about["url"]), str(about["etag"]), text)
        LookupTable.from_json(text, str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("fetched lookup table %s is damaged and is not used: %s", path, error)
        return None
    return copy if copy.url == url or not url else None


def _write_copy(path: Path, copy: Copy) -> None:
    """Keep ``copy`` at ``path`` whole or not at all; a folder that cannot be written only costs the next fetch."""
    head = json.dumps({"url": copy.url, "etag": copy.etag}).encode()
    name = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".table-")
        with os.fdopen(handle, "wb") as file:
            file.write(head + b"\n" + copy.text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError as error:
        if name and os.path.exists(name):
            os.unlink(name)
        logger.warning(
            "cannot keep the lookup table under %s (%s); it is fetched anew by each process",
            path.parent,
            error,
        )
