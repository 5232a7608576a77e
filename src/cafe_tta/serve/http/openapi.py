"""The OpenAPI description of the server, /openapi.json: made from the handlers, and what their code does not say."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from cafe_tta.serve.http.plain import FIELDS, FILES, FORM

_FILE = {"schema": {"type": "string", "format": "binary"}}
_INFERENCE = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string"},
        "parameters": {"type": "object"},
        "inputs": {"type": "array", "minItems": 1, "maxItems": 1, "items": {"type": "object"}},
        "outputs": {"type": "array", "items": {"type": "object"}},
    },
}
_INFER = {
    "requestBody": {
        "required": True,
        "description": "JSON of the Open Inference Protocol, with or without binary tensors; an image file; a form.",
        "content": {
            "application/json": {"schema": _INFERENCE},
            "application/octet-stream": _FILE,
            **dict.fromkeys(FILES, _FILE),
            FORM: {"schema": {"type": "object", "properties": {"images": {"type": "array", "items": _FILE["schema"]}}}},
        },
    },
    "parameters": [
        {"name": name, "in": "query", "description": f"{meaning} For image files.", "schema": {"type": "string"}}
        for name, meaning in FIELDS.items()
    ],
}
_ERROR = {
    "description": 'What was expected, and what to do: {"error": text}.',
    "content": {
        "application/json": {
            "schema": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
        }
    },
}


def describe(method: str, path: str, handler: Callable[..., Any]) -> dict[str, Any]:
    """What FastAPI is told of a route, beside its path and its handler."""
    words = [part.strip("{}").partition(":")[0] for part in path.split("/") if part]
    guarded = method == "POST" or path in ("/api/standing", "/api/snapshot")
    extra = _INFER if path.endswith("/infer") else {"security": [{"token": []}]} if guarded else {}
    return {
        "response_model": None,
        "summary": (handler.__doc__ or "").strip().partition("\n")[0].rstrip("."),
        "operation_id": "_".join([method.lower(), *words]) if words else "page",
        "openapi_extra": extra if not path.startswith("/v2/repository") else {},
    }


def install(app: FastAPI) -> None:
    """Serves the description; its errors are those of this server, not FastAPI's."""

    def description() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title="cafe-tta", version=app.version, routes=app.routes)
            for operation in (operation for path in made["paths"].values() for operation in path.values()):
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = _ERROR
            made.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            made["components"].pop("schemas", None)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = description  # type: ignore[method-assign]
