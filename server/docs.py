"""/docs: the OpenAPI document as a page of our own, with every asset local and no inline script."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response

from dashboard.router import prefix, templates_with


def create(app: FastAPI) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    templates = templates_with(prefix)

    @router.get("/docs")
    def docs(request: Request) -> Response:
        schema = app.openapi()
        page = {"info": schema["info"], "operations": operations(schema)}
        return templates.TemplateResponse(request, "docs.html", page)

    return router


def operations(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """What the template prints for each call, in the document's order; those under /v1 are the same again."""
    return [
        {
            "id": f"{method}-{path.strip('/').replace('/', '-').replace('{', '').replace('}', '') or 'root'}",
            "method": method.upper(),
            "path": path,
            "description": operation.get("description", operation.get("summary", "")),
            "secured": bool(operation.get("security")),
            "parameters": sorted(
                (_parameter(p, schema) for p in operation.get("parameters", [])),
                key=lambda p: not p["required"],
            ),
            "body": _body(operation, schema),
            "responses": [
                {
                    "status": code,
                    "description": answer.get("description", ""),
                    "types": ", ".join(answer.get("content", {})),
                }
                for code, answer in operation.get("responses", {}).items()
            ],
        }
        for path, item in schema["paths"].items()
        if not path.startswith("/v1/")
        for method, operation in item.items()
    ]


def _resolve(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in node:
        node = schema["components"]["schemas"][node["$ref"].rsplit("/", 1)[1]]
    return node


def _parameter(parameter: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    kind = _resolve(parameter.get("schema", {}), schema)
    options = [kind, *(_resolve(o, schema) for o in kind.get("anyOf", []))]
    inner = next((o for o in options if o.get("type") not in (None, "null")), kind)
    low, high = inner.get("minimum"), inner.get("maximum")
    bounds = f"{low} to {high:,}" if low is not None and high is not None and high < 10**6 else ""
    default, words = kind.get("default"), inner.get("enum") or []
    if inner.get("type") == "boolean":
        words, default = ["true", "false"], None if default is None else str(default).lower()
    examples = kind.get("examples") or inner.get("examples") or []
    return {
        "name": parameter["name"],
        "place": parameter["in"],
        "required": parameter.get("required", False),
        "description": parameter.get("description", kind.get("description", "")),
        "type": inner.get("format", inner.get("type", "")),
        "enum": words,
        "default": default,
        "bounds": bounds,
        "example": examples[0] if examples else "",
    }


def _body(operation: dict[str, Any], schema: dict[str, Any]) -> str:
    """An example body, made from the schema; empty where the call takes none."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    return json.dumps(_example(content["schema"], schema), indent=2) if content else ""


def _example(node: dict[str, Any], schema: dict[str, Any]) -> Any:
    node = _resolve(node, schema)
    if node.get("examples"):
        return node["examples"][0]
    if "enum" in node:
        return node["enum"][0]
    if "anyOf" in node:
        return _example(node["anyOf"][0], schema)
    if node.get("type") == "object":
        wanted = node.get("required", [])
        return {name: _example(node["properties"][name], schema) for name in wanted}
    if node.get("type") == "array":
        return [_example(node["items"], schema)]
    return {"integer": 1, "number": 1.0, "boolean": True}.get(node.get("type", ""), "")
