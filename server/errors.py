"""Errors as application/problem+json (RFC 9457): one clear line in ``detail``, the parameter where one is at fault."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DBAPIError, OperationalError
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from server.logs import REQUEST_ID
from tuner.results.rows import StoreError

log = logging.getLogger("dash.server")


class ApiError(Exception):
    """An answer other than 2xx. ``detail`` is one line for a person; ``parameter`` names the input at fault."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        parameter: str | None = None,
        headers: dict[str, str] | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.parameter = status, detail, parameter
        self.headers, self.extra = headers, extra


def invalid(parameter: str, detail: str) -> ApiError:
    return ApiError(422, detail, parameter=parameter)


def problem_response(
    status: int,
    detail: str,
    *,
    parameter: str | None = None,
    headers: dict[str, str] | None = None,
    **extra: Any,
) -> JSONResponse:
    """A problem document: ``{"type", "title", "status", "detail", ["parameter"], ...}``."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
    }
    if parameter is not None:
        body["parameter"] = parameter
    if number := REQUEST_ID.get():
        body["request_id"] = number
    body.update(extra)
    return JSONResponse(body, status, headers=headers, media_type="application/problem+json")


FORMS = {
    "name": "letters, digits, '.', '_' and '-', 100 at most, beginning with a letter or digit",
    "root_path": "a path such as /dash",
    "triton": "a version in digits and points, such as 3.6.0",
    "uuid": "32 hex digits, with or without hyphens",
}
"""What a field with a pattern takes, in words."""


def describe(errors: Sequence[Any]) -> tuple[str | None, str]:
    """(parameter, one line) for the first of pydantic's errors."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part not in ("query", "body", "path")]
    name = ".".join(place) or "body"
    kind, message = first["type"], first["msg"]
    if kind == "extra_forbidden":
        return name, f"unknown parameter {name!r}; /docs lists those of each call"
    if kind == "missing":
        return name, f"{name} is missing"
    if kind == "json_invalid":
        return "body", f"the body is not JSON: {first.get('ctx', {}).get('error', message)}"
    if name == "body":
        return name, "the body is not a JSON object; /docs shows what it holds"
    message = message.removeprefix("Value error, ")
    if kind in ("too_short", "string_too_short"):
        message = "it is empty"
    elif kind == "string_pattern_mismatch" and place[-1] in FORMS:
        message = f"it must be {FORMS[place[-1]]}"
    value = first.get("input")
    shown = f" {str(value)[:60]!r}" if isinstance(value, (str, int, float)) else ""
    if message.startswith(name):
        return name, message
    return name, f"{name}{' is' + shown if shown else ''}: {message[:1].lower()}{message[1:]}"


def install(app: FastAPI, retry_after_s: int) -> None:
    """Make every failure of ``app`` a problem document."""

    def away(error: Exception) -> JSONResponse:
        log.warning("database: %s", error)
        return problem_response(
            503,
            "the results database cannot be reached; try again later",
            headers={"Retry-After": str(retry_after_s)},
        )

    @app.exception_handler(ApiError)
    async def _api(_: Request, error: ApiError) -> JSONResponse:
        return problem_response(
            error.status,
            error.detail,
            parameter=error.parameter,
            headers=error.headers,
            **error.extra,
        )

    @app.exception_handler(RequestValidationError)
    async def _validation(_: Request, error: RequestValidationError) -> JSONResponse:
        parameter, line = describe(error.errors())
        return problem_response(422, line, parameter=parameter)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        status, detail = error.status_code, str(error.detail)
        headers = dict(error.headers or {})
        parameter = None
        if status == 404 and detail == "Not Found":
            detail = f"there is nothing at {request.url.path}; the calls are listed at /docs"
        elif status == 405:
            allowed = ", ".join(sorted(_methods(app, _own_path(request))))
            detail = f"{request.method} is not allowed at {request.url.path}; use {allowed}"
            headers["Allow"] = allowed
        elif status == 400 and request.method == "POST":
            status, parameter, detail = 422, "body", "the body is not JSON in UTF-8"
        return problem_response(status, detail, parameter=parameter, headers=headers)

    @app.exception_handler(StoreError)
    async def _store(_: Request, error: StoreError) -> JSONResponse:
        return away(error)

    @app.exception_handler(OperationalError)
    async def _operational(_: Request, error: OperationalError) -> JSONResponse:
        return away(error)

    @app.exception_handler(DBAPIError)
    async def _dbapi(_: Request, error: DBAPIError) -> JSONResponse:
        return away(error)

    @app.exception_handler(Exception)
    async def _unexpected(_: Request, error: Exception) -> JSONResponse:
        log.error("unexpected failure", exc_info=error)
        return problem_response(500, "the server failed on this request; its log says why")


def _own_path(request: Request) -> str:
    """The path below the prefix of a proxy, whether the proxy took it off or not."""
    return str(request.scope["path"]).removeprefix(request.scope.get("root_path", "").rstrip("/"))


def _methods(app: FastAPI, path: str) -> set[str]:
    """What the calls at ``path`` can be asked with, by the OpenAPI document; pages take GET."""
    found = {
        method.upper()
        for template, item in app.openapi()["paths"].items()
        if compile_path(template)[0].match(path)
        for method in item
    }
    return found or {"GET"}
