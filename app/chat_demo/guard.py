"""A guard in front of Gradio: nothing is fetched, neither by it nor by the visitor's browser.

Gradio fetches a file whose path in a call is a URL, with a filter against internal addresses. The
demo fetches nothing for anybody, so such a call is refused before Gradio sees it. Uploads have a
route of their own and pass through.

An answer is Markdown, which may hold pictures of other hosts: a text in a photo could talk a model
into telling such a host what was said. The page's policy keeps the browser from asking for them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_POLICY = (
    b"default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; object-src 'none'; "
    b"base-uri 'self'; form-action 'self'"
)
"""Gradio's page has scripts of its own in it and compiles some."""
MAX_CALL_BYTES = 4 * 2**20
"""A call holds a question and the drawer's values; files are uploaded before."""


class UploadsOnly:
    """ASGI middleware; see the module."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer 400 (a URL, no JSON) or 413 (too long)."""
        send = _with_policy(send)
        if scope["type"] != "http" or scope["method"] != "POST" or _is_upload(scope["path"]):
            await self._app(scope, receive, send)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > MAX_CALL_BYTES:
                await _refuse(send, 413, "the call is too long")
                return
        if _is_json(scope):
            try:
                named = names_url(json.loads(body or b"null"))
            except (ValueError, RecursionError):
                await _refuse(send, 400, "the call is not JSON")
                return
            if named:
                await _refuse(send, 400, "only uploaded files are taken")
                return
        await self._app(scope, _replay(body, receive), send)


def _with_policy(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            header = (b"content-security-policy", CONTENT_POLICY)
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return sending


def names_url(data: Any) -> bool:
    """Whether any file in a decoded call is named by a URL."""
    if isinstance(data, dict):
        path = data.get("path")
        if isinstance(path, str) and "://" in path:
            return True
        return any(map(names_url, data.values()))
    return isinstance(data, list) and any(map(names_url, data))


def _is_upload(path: str) -> bool:
    return path.rstrip("/").endswith("/upload")


def _is_json(scope: Scope) -> bool:
    """Bodies of forms (the login) are not calls; anything else is read as one."""
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    return not kind.lower().startswith((b"application/x-www-form-urlencoded", b"multipart/"))


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once more, then whatever else comes (a disconnect)."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again


async def _refuse(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"detail": reason}).encode()
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
