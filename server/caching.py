"""ETag, 304, gzip and Vary, the same for every answer: one place decides what a cache may keep and compare."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cached_property

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LIVE = "no-cache"
"""Kept, but asked for again: the answer changes with the database."""
FOREVER = "public, max-age=31536000, immutable"
HOUR = "public, max-age=3600"
"""Changes with the version of the package only."""
NEVER = "no-store"
SMALLEST = 1024
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


class Cacheable:
    """Tags, compares and packs every whole 200 answer to GET that has no Content-Encoding yet; HEAD is GET without a body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        head = scope["method"] == "HEAD"
        if head:
            scope = {**scope, "method": "GET"}
        started: Message | None = None
        parts: list[bytes] = []

        async def send_cacheable(message: Message) -> None:
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
            start, data = _finish(scope, started, b"".join(parts))
            await send(start)
            await send({"type": "http.response.body", "body": b"" if head else data})

        await self.app(scope, receive, send_cacheable)


def _finish(scope: Scope, start: Message, data: bytes) -> tuple[Message, bytes]:
    headers = MutableHeaders(scope=start)
    cache = headers.get("cache-control")
    if start["status"] != 200:
        headers.setdefault("Cache-Control", NEVER)
        return start, data
    if cache is None:
        headers["Cache-Control"] = cache = LIVE
    if "content-encoding" in headers or cache == NEVER:
        return start, data
    asked = Headers(scope=scope)
    tag = headers.get("etag", "").removeprefix("W/").strip('"')
    body = Body(data, headers.get("content-type", "application/octet-stream"), tag)
    packed = body.packed if takes_gzip(asked.get("accept-encoding", "")) else None
    for name, value in headers_of(body, packed is not None, cache).items():
        headers[name] = value
    if matches(asked.get("if-none-match", ""), body.tag):
        for name in ("content-length", "content-type", "content-encoding", "content-disposition"):
            del headers[name]
        start["status"] = 304
        return start, b""
    sent = data if packed is None else packed
    headers["Content-Length"] = str(len(sent))
    return start, sent
