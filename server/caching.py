"""ETag, 304, gzip and Vary, the same for every answer: one place decides what a cache may keep and compare."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tuner.results.rows import StoreError

LIVE = "no-cache"
"""Kept, but asked for again: the answer changes with the database."""
FOREVER = "public, max-age=31536000, immutable"
HOUR = "public, max-age=3600"
"""Changes with the version of the package only."""
NEVER = "no-store"
SMALLEST = 1024
LARGE = 64 << 10
"""Bytes from which packing takes milliseconds, in which nobody else would be answered: a thread does it."""
LEVEL = 5
PACKED_TYPES = ("text/", "application/json", "application/problem+json", "image/svg+xml")


@dataclass(frozen=True)
class Body:
    """An answer's bytes with their tag, packed once where a client takes gzip."""

    plain: bytes
    media_type: str = "application/json"
    digest: str = ""

    @cached_property
    def tag(self) -> str:
        return self.digest or hashlib.sha256(self.plain).hexdigest()[:32]

    @cached_property
    def packed(self) -> bytes | None:
        """None where packing is not worth it."""
        if len(self.plain) < SMALLEST or not self.media_type.startswith(PACKED_TYPES):
            return None
        return gzip.compress(self.plain, LEVEL, mtime=0)


def takes_gzip(accepted: str) -> bool:
    """Whether Accept-Encoding allows gzip; ``gzip;q=0`` does not."""
    for part in accepted.split(","):
        coding, _, weight = part.partition(";")
        if coding.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def matches(asked: str, tag: str) -> bool:
    """If-None-Match, compared weakly as RFC 9110 says."""
    if asked.strip() == "*":
        return True
    tags = (part.strip().removeprefix("W/") for part in asked.split(","))
    return f'"{tag}"' in tags


def headers_of(body: Body, packed: bool, cache: str) -> dict[str, str]:
    """Headers of an answer: a weak tag where the bytes are packed, because the same tag stands for other bytes then."""
    found = {"ETag": f'W/"{body.tag}"' if packed else f'"{body.tag}"', "Cache-Control": cache}
    if body.media_type.startswith(PACKED_TYPES):
        found["Vary"] = "Accept-Encoding"
    if packed:
        found["Content-Encoding"] = "gzip"
    return found


class Held:
    """Whole answers, kept until the database changes: a row or a release makes every one of them old.

    Only answers that went through every check are kept, under the very path and query that they answered.
    """

    MOST = 1024
    MOST_BYTES = 64 << 20

    def __init__(self) -> None:
        self._kept: tuple[Any, dict[Hashable, Answer]] = (None, {})
        self._bytes = 0

    def get(self, state: Any, key: Hashable) -> Answer | None:
        of, answers = self._kept
        return answers.get(key) if of == state else None

    def keep(self, state: Any, key: Hashable, answer: Answer) -> None:
        of, answers = self._kept
        if of != state or len(answers) >= self.MOST or self._bytes > self.MOST_BYTES:
            answers, self._bytes = {}, 0
            self._kept = state, answers  # one assignment: no request sees another state's answers
        answers[key] = answer
        self._bytes += len(answer.body.plain)


@dataclass(frozen=True)
class Answer:
    """A 200: its bytes, the headers that are its own, and the route that made it."""

    body: Body
    cache: str
    headers: dict[str, str]
    route: Any


class Cacheable:
    """Tags, compares and packs every whole 200 answer to GET; HEAD is GET without a body.

    Paths in ``held`` (and under /figures/) depend on their query and the database's state only: once made, they are
    answered from memory until the state changes, without asking anything but the state.
    """

    def __init__(self, app: ASGIApp, state: Callable[[], Awaitable[Any]]) -> None:
        self.app, self._state = app, state
        self._held = Held()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        head = scope["method"] == "HEAD"
        if head:
            scope["method"] = "GET"
        key, state = None, None
        if _is_held(scope):
            key = (scope["path"], scope["query_string"])
            with contextlib.suppress(StoreError):  # the application says it better
                state = await self._state()
            found = self._held.get(state, key) if state is not None else None
            if found is not None:
                scope["route"] = found.route
                await _answer(scope, found, head, send)
                return
        started: Message | None = None
        parts: list[bytes] = []

        async def collect(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = message
                return
            if message["type"] != "http.response.body" or started is None:
                await send(message)
                return
            parts.append(message.get("body", b""))
            if message.get("more_body"):
                return
            data = b"".join(parts)
            made = _made(scope, started, data)
            if made is None:
                await send(started)
                await send({"type": "http.response.body", "body": b"" if head else data})
                return
            if state is not None and key is not None:
                self._held.keep(state, key, made)
            await _answer(scope, made, head, send)

        await self.app(scope, receive, collect)


HELD = frozenset(
    f"{version}{path}"
    for path in ("/best", "/table", "/curves", "/gpus", "/releases", "/releases/diff")
    for version in ("", "/v1")
) | {"/", "/docs", "/openapi.json"}


def _is_held(scope: Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
    return path in HELD or path.startswith("/figures/")


def _made(scope: Scope, start: Message, data: bytes) -> Answer | None:
    """The answer in parts; None for one that is not 200, not to be kept by anybody, or packed already."""
    headers = MutableHeaders(scope=start)
    cache = headers.get("cache-control")
    if start["status"] != 200:
        headers.setdefault("Cache-Control", NEVER)
        return None
    if cache is None:
        cache = LIVE
    if "content-encoding" in headers or cache == NEVER:
        return None
    tag = headers.get("etag", "").removeprefix("W/").strip('"')
    body = Body(data, headers.get("content-type", "application/octet-stream"), tag)
    own = {name: value for name, value in headers.items() if name not in _OURS}
    return Answer(body, cache, own, scope.get("route"))


_OURS = ("content-length", "etag", "cache-control", "vary")
_OF_A_BODY = ("content-type", "content-disposition")


async def _answer(scope: Scope, answer: Answer, head: bool, send: Send) -> None:
    asked = {name: value for name, value in scope["headers"] if name in _ASKED}
    body = answer.body
    accepted = asked.get(b"accept-encoding", b"").decode("latin-1")
    packed = None
    if takes_gzip(accepted):
        large = len(body.plain) > LARGE and "packed" not in vars(body)
        packed = await run_in_threadpool(lambda: body.packed) if large else body.packed
    headers = {**answer.headers, **headers_of(body, packed is not None, answer.cache)}
    status, sent = 200, body.plain if packed is None else packed
    if matches(asked.get(b"if-none-match", b"").decode("latin-1"), body.tag):
        status, sent = 304, b""
        headers = {
            name: value
            for name, value in headers.items()
            if name not in (*_OF_A_BODY, "Content-Encoding")
        }
    else:
        headers["Content-Length"] = str(len(sent))
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": b"" if head else sent})


_ASKED = (b"accept-encoding", b"if-none-match")
