"""Around every request: body limit, security headers, metrics. Plain ASGI, so that it costs microseconds."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import problem_response
from tuner.results.rows import StoreError
from tuner.results.store import Store

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
    "Referrer-Policy": "same-origin",
}


class UnderPrefix:
    """Tells the application the prefix under which a proxy offers it, so that its links carry it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app, self.prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "root_path": self.prefix}
        await self.app(scope, receive, send)


class Guard:
    """Adds the security headers and refuses a body larger than ``limit`` bytes, announced or not."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self.limit:
            await self._too_large()(scope, receive, send_guarded)
            return
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send_guarded)
            return
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message.get("body", b"")
            if len(body) > self.limit:
                await self._too_large()(scope, receive, send_guarded)
                return
            if not message.get("more_body"):
                break
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def receive_whole() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, receive_whole, send_guarded)

    def _too_large(self) -> ASGIApp:
        return problem_response(
            413, f"the body is larger than the {self.limit} bytes this server takes"
        )


class Metrics:
    """Counts requests and their seconds by route (the path's template, so that labels stay few) and status."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self.app = app
        self.requests = Counter(
            "dash_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "dash_request_seconds",
            "Time to answer.",
            ["route"],
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10),
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, begin = 500, time.perf_counter()

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_counted)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            method = (
                scope["method"]
                if scope["method"] in ("GET", "HEAD", "POST", "OPTIONS")
                else "other"
            )
            self.requests.labels(method, route, str(status)).inc()
            self.seconds.labels(route).observe(time.perf_counter() - begin)


def store_gauges(store: Store, registry: CollectorRegistry) -> None:
    """The newest row's id and whether the database answers, read when /metrics is."""

    def last_row() -> float:
        try:
            return float(store.last_result_id())
        except StoreError:
            return float("nan")

    def up() -> float:
        try:
            store.ping()
        except StoreError:
            return 0.0
        return 1.0

    Gauge("dash_last_result_id", "Id of the newest row.", registry=registry).set_function(last_row)
    Gauge("dash_database_up", "1 while the database answers.", registry=registry).set_function(up)
