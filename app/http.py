"""What stands between the socket and the routes: access, body limits, request log, error shape.

Pure ASGI. No body, header value, query or media ever reaches a log.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import io
import json
import logging
import time
from typing import TYPE_CHECKING
from uuid import uuid4

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from k3vl.app.replies import dump, error_json
from k3vl.app.sse import event
from k3vl.errors import (
    BackendAnswerError,
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    Cancelled,
    CapacityError,
    K3VLError,
    RequestError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from k3vl.app.metrics import Metrics

log = logging.getLogger("k3vl.server")
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json"})
BODY_SECONDS = 60.0
DRAIN_SECONDS = 0.8
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})


# ---------------------------------------------------------------------- errors


def error_response(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error in the one shape that clients know."""
    body = dump(error_json(message, kind, param=param, code=code))
    return Response(body, status, headers, media_type="application/json")


def describe(exc: Exception) -> Response:
    """Any error as an answer; what went wrong inside stays in the log."""
    match exc:
        case ClientDisconnect():
            return Response(status_code=499)  # nobody will read it
        case RequestError():
            return error_response(400, str(exc), param=exc.param, code=exc.code)
        case CapacityError(retry_after=None):
            return error_response(400, str(exc), code="exceeds_engine_capacity")
        case CapacityError(retry_after=seconds):
            return error_response(
                429,
                str(exc),
                kind="rate_limit_error",
                code="engine_overloaded",
                headers={"Retry-After": str(max(1, round(seconds or 1)))},
            )
        case Cancelled():
            return error_response(
                503, "the server is stopping", kind="server_error", code="stopping"
            )
        case BackendAnswerError() | BackendUnavailableError() | BackendTimeoutError():
            status, code = _BACKEND[type(exc)]  # its words stay out of the log: they may quote
            log.error(json.dumps({"event": "backend_error", "error": code}))
            return error_response(status, str(exc), kind="server_error", code=code)
        case BackendError():
            log.error(json.dumps({"event": "backend_error", "error": type(exc.__cause__).__name__}))
            return error_response(
                500, "the engine failed on this request", kind="server_error", code="backend_error"
            )
        case HTTPException(status_code=status, headers=headers):
            return error_response(
                status, _HTTP.get(status, exc.detail), code=_CODES.get(status), headers=headers
            )
        case _:
            log.error(json.dumps({"event": "bug", "error": type(exc).__name__}), exc_info=exc)
            return error_response(500, "internal error", kind="server_error", code="internal_error")


_HTTP = {404: "There is no such path.", 405: "This path does not take this method."}
_CODES = {
    404: "unknown_url",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
}


_BACKEND = {
    BackendAnswerError: (502, "backend_failed"),
    BackendUnavailableError: (503, "backend_unavailable"),
    BackendTimeoutError: (504, "backend_timeout"),
}


def error_event(exc: Exception) -> bytes:
    """The same, as an event in a stream that has begun."""
    return event(bytes(describe(exc).body))


async def handle(_: Request, exc: Exception) -> Response:
    """Starlette's exception handler."""
    return describe(exc)


HANDLERS = {K3VLError: handle, ClientDisconnect: handle, HTTPException: handle, Exception: handle}


# ---------------------------------------------------------------------- access


class Access:
    """Checks the key, and that a keyless local server is not reached by another name."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], hosts: Sequence[str]) -> None:
        """Guard an application.

        Args:
            app: what is guarded.
            api_keys: any of them opens; none: no key is needed.
            hosts: names that may stand in ``Host`` beside the local ones; empty: any may. A web
                page that points its own name at this machine (DNS rebinding) is stopped by it.
        """
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._hosts = frozenset(hosts) | _LOCAL_HOSTS if hosts else frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            refusal = self._refuse(scope, headers)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refuse(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Response | None:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if self._hosts and name not in self._hosts:
            return error_response(
                403, "this server answers to local names only", code="host_not_allowed"
            )
        if not self._digests or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() == b"bearer" and any(matches):
            return None
        return error_response(
            401,
            "The API key is missing or not known. Send it as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


# ---------------------------------------------------------------------- request log


class RequestLog:
    """Gives every request a number, counts it, and writes one line of JSON about it."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, paths: Sequence[str]) -> None:
        """Watch an application; only ``paths`` are named in metrics and log."""
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid4().hex}"
        status, begun = 499, time.monotonic()
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._metrics.responses.labels(path, status).inc()
            if path not in OPEN_PATHS:
                line = {
                    "event": "request",
                    "id": request_id,
                    "method": scope["method"],
                    "path": path,
                    "status": status,
                    "seconds": round(time.monotonic() - begun, 4),
                }
                log.info(json.dumps(line))


# ---------------------------------------------------------------------- bodies


class Bodies:
    """Reads request bodies within a limit for each and one for all together."""

    def __init__(self, *, max_bytes: int, max_total: int) -> None:
        """Nothing is held yet."""
        self._max_bytes, self._max_total = max_bytes, max_total
        self._held = 0

    async def read(self, request: Request) -> bytes:
        """Read a JSON body; :meth:`release` it when it is no longer held.

        Raises:
            HTTPException: wrong content type (415), too large (413), too slow (408).
            CapacityError: all bodies together are too large.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Also keeps web pages out: they can send other types without being asked first.
            raise HTTPException(415, "The content type must be application/json.")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await _drain(request)
            raise self._too_large()
        body = io.BytesIO()  # hands out what it holds without a copy
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    self._held += len(chunk)
                    body.write(chunk)
                    self._check(body.tell())
        except TimeoutError:
            self._held -= body.tell()
            raise HTTPException(
                408, f"The body did not arrive within {BODY_SECONDS:.0f} seconds."
            ) from None
        except HTTPException:
            self._held -= body.tell()
            body.close()
            await _drain(request)
            raise
        except BaseException:
            self._held -= body.tell()
            raise
        return body.getvalue()

    def release(self, body: bytes) -> None:
        """The body is no longer held."""
        self._held -= len(body)

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise self._too_large()
        if self._held > self._max_total:
            raise CapacityError("too many large requests at once", retry_after=2.0)

    def _too_large(self) -> HTTPException:
        return HTTPException(
            413, f"The body is too large, at most {self._max_bytes} bytes are accepted."
        )


async def _drain(request: Request) -> None:
    """Read on for a moment and forget: a client that is still sending reads no answer."""
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while (await request.receive()).get("more_body"):
                pass
    except TimeoutError:
        return
