"""The OpenAPI document, from the wire models."""

from __future__ import annotations

from typing import Any

from k3vl import __version__
from k3vl.app.openai import ChatRequest

_ERROR_STATUSES = {
    "400": "The request cannot be served as it stands.",
    "401": "The API key is missing or not known.",
    "403": "The server was reached under a name that is not its own.",
    "404": "There is no such model or path.",
    "405": "The path does not take this method.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The content type is not application/json.",
    "429": "Too much at once; Retry-After says when to come again.",
    "500": "The server failed.",
    "502": "The endpoint behind this server failed.",
    "503": "The server is stopping, or the engine makes no tokens.",
    "504": "The endpoint behind this server did not answer in time.",
}


def document() -> dict[str, Any]:
    """Build the document."""
    chat = ChatRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas = {**chat.pop("$defs", {}), "ChatRequest": chat, "Error": _error()}
    body = {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ChatRequest"}}},
    }
    stream = {
        "application/json": _any_object(),
        "text/event-stream": {"schema": {"type": "string"}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "k3vl", "version": __version__},
        "paths": {
            "/v1/chat/completions": {
                "post": _operation("Answer a conversation", stream, body),
            },
            "/v1/tokenize": {
                "post": _operation("Count without answering", _json(), body),
            },
            "/v1/models": {"get": _operation("List the models", _json())},
            "/v1/models/{name}": {
                "get": {
                    **_operation("Describe a model", _json()),
                    "parameters": [
                        {
                            "name": "name",
                            "in": "path",
                            "required": True,
                            "schema": {"type": "string"},
                        }
                    ],
                }
            },
            "/health": {"get": _operation("The process answers", _json())},
            "/ready": {"get": _operation("The engine makes tokens", _json())},
            "/metrics": {
                "get": _operation("Counts", {"text/plain": {"schema": {"type": "string"}}})
            },
        },
        "components": {"schemas": schemas},
    }


def _operation(
    summary: str, content: dict[str, Any], body: dict[str, Any] | None = None
) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    for status, text in _ERROR_STATUSES.items():
        responses[status] = {"description": text, "content": error}
    return {
        "summary": summary,
        "responses": responses,
        **({"requestBody": body} if body is not None else {}),
    }


def _any_object() -> dict[str, Any]:
    return {"schema": {"type": "object"}}


def _json() -> dict[str, Any]:
    return {"application/json": _any_object()}


def _error() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    fields = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": text,
        "code": text,
    }
    inner = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "object", "properties": {"error": inner}, "required": ["error"]}
