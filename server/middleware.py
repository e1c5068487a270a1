"""Around every request: its id, the body limit, security headers, metrics, its log line. Plain ASGI: microseconds."""

from __future__ import annotations

import time
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import logs
from server.caching import NEVER
from server.errors import problem_response
from server.metrics import Metrics

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # plotly.js sets styles on the elements that it draws
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
LARGEST_QUERY = 8192
METHODS = ("GET", "HEAD", "POST", "OPTIONS")


class UnderPrefix:
    """Tells the application the prefix under which a proxy offers it, so that its links carry it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app, self.prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "root_path": self.prefix}
        await self.app(scope, receive, send)


class Guard:
    """Gives a request its id and its limits, an answer its security headers, and counts and logs what came of it.

    A body larger than ``limit`` bytes, announced or not, is 413; a query string over LARGEST_QUERY bytes 414.
    """

    def __init__(self, app: ASGIApp, limit: int, metrics: Metrics, every_request: bool) -> None:
        self.app, self.limit, self.metrics = app, limit, metrics
        self.every_request = every_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, begin = 500, time.perf_counter()
        given = {name: value for name, value in scope["headers"] if name in _READ}
        number = logs.request_id(given.get(b"x-request-id", b"").decode("latin-1"))
        known = logs.REQUEST_ID.set(number)

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    *RAW_HEADERS,
                    (b"x-request-id", number.encode()),
                ]
                if scope["method"] != "GET":
                    MutableHeaders(scope=message).setdefault("Cache-Control", NEVER)
            await send(message)

        try:
            await self._admit(scope, receive, send_guarded, given.get(b"content-length", b"0"))
        finally:
            seconds = time.perf_counter() - begin
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.count(method, route, status, seconds)
            writer = scope.get("state", {}).get("writer", "")
            if status >= 500 or writer or self.every_request:
                logs.answered(method, scope["path"][:200], route, status, seconds * 1000, writer)
            logs.REQUEST_ID.reset(known)

    async def _admit(self, scope: Scope, receive: Receive, send: Send, announced: bytes) -> None:
        if len(scope["query_string"]) > LARGEST_QUERY:
            line = f"the query string is longer than the {LARGEST_QUERY} bytes this server takes"
            await problem_response(HTTPStatus.REQUEST_URI_TOO_LONG, line)(scope, receive, send)
            return
        if announced.isdigit() and int(announced) > self.limit:
            await self._too_large()(scope, receive, send)
            return
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message.get("body", b"")
            if len(body) > self.limit:
                await self._too_large()(scope, receive, send)
                return
            if not message.get("more_body"):
                break
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def receive_whole() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, receive_whole, send)

    def _too_large(self) -> ASGIApp:
        return problem_response(
            413,
            f"the body is larger than the {self.limit} bytes this server takes; send fewer rows a call, "
            "or raise DASH_MAX_BODY_BYTES where it runs",
        )


_READ = (b"x-request-id", b"content-length")
