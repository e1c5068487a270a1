"""The OpenAPI document: FastAPI's own, with every failure shown as the problem document that it is."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
ALWAYS = {
    "422": "A parameter is unknown, wrong or given twice; it is named.",
    "503": "The database does not answer; see Retry-After.",
}


def install(app: FastAPI, root_path: str) -> None:
    """Make ``app.openapi`` answer the corrected document, built once. ``root_path`` is where a proxy offers it."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                servers=[{"url": root_path}] if root_path else None,
            )
            for item in schema["paths"].values():
                for operation in item.values():
                    _failures(operation["responses"])
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI documents this way of extending it


def _failures(responses: dict[str, Any]) -> None:
    for status, text in ALWAYS.items():
        responses.setdefault(status, {})
        if responses[status].get("description", "") in (
            "",
            "Validation Error",
            "Unprocessable Content",
        ):
            responses[status]["description"] = text
    for status, answer in responses.items():
        if status >= "400":
            answer["content"] = PROBLEM
