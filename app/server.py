"""The HTTP server: routes, settings, start and stop.

``http.py`` guards, ``openai.py`` reads, ``service.py`` works, ``replies.py`` and ``sse.py`` write.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from k3vl.app.http import (
    HANDLERS,
    Access,
    Bodies,
    RequestLog,
    error_event,
    error_response,
    log,
)
from k3vl.app.memory import return_large_blocks
from k3vl.app.metrics import Metrics
from k3vl.app.openai import Limits
from k3vl.app.openapi import document
from k3vl.app.service import ChatService, ServiceLimits
from k3vl.app.sse import send_events, until_disconnect
from k3vl.errors import Cancelled
from k3vl.types import SamplingParams
from k3vl.vision.limits import DETAIL_PATCHES
from k3vl.vision.workers import DEFAULT_MEMORY, MediaWorkers

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

    from k3vl.app.engines import Engine
    from k3vl.app.openai import ChatCall

LOCAL_ADDRESSES = frozenset({"127.0.0.1", "::1", "localhost"})
PATHS = (
    "/v1/chat/completions",
    "/v1/tokenize",
    "/v1/models",
    "/health",
    "/ready",
    "/metrics",
    "/openapi.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server is run.

    Attributes:
        host, port: where it listens; port 0 lets the system choose.
        model_names: names that it answers to; the first is shown.
        api_keys: any of them opens; none: no key is needed.
        cors_origins: web origins that may call it; ``*`` is all.
        limits: what one request may ask for.
        max_running, max_waiting: requests that generate, and that wait.
        media_prefills: requests with media on the way to their first token at once; more make
            better use of a GPU, fewer keep running streams smooth.
        max_body_bytes, max_bodies_bytes: of one request body, and of all together.
        media_workers: decoding processes.
        media_seconds: longest decoding of one media part.
        media_memory: bytes that one decoding process may have.
        shutdown_seconds: how long running answers may go on once the server is to stop.
        sampling: where a request says nothing.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_names: tuple[str, ...] = ("demo",)
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    max_running: int = 32
    max_waiting: int = 64
    media_prefills: int = 1
    max_body_bytes: int = 40 * 2**20
    max_bodies_bytes: int = 512 * 2**20
    media_workers: int = 2
    media_seconds: float = 60.0
    media_memory: int = DEFAULT_MEMORY
    shutdown_seconds: int = 30
    sampling: SamplingParams = field(default_factory=SamplingParams)


class Server:
    """The application around one engine; ``app`` is ASGI."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        """Build the routes; nothing runs before the lifespan begins."""
        self.engine, self.settings = engine, settings
        self.metrics = Metrics(engine.stats)
        self._bodies = Bodies(
            max_bytes=settings.max_body_bytes, max_total=settings.max_bodies_bytes
        )
        self._created = int(time.time())
        self._service: ChatService | None = None
        local = settings.host in LOCAL_ADDRESSES and not settings.api_keys
        middleware = [
            Middleware(RequestLog, metrics=self.metrics, paths=PATHS),
            Middleware(Access, api_keys=settings.api_keys, hosts=[settings.host] if local else []),
        ]
        if settings.cors_origins:
            cors = Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type"],
            )
            middleware.insert(1, cors)
        self.app = Starlette(
            routes=[
                Route(PATHS[0], self.chat, methods=["POST"]),
                Route(PATHS[1], self.tokenize, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/health", self.health),
                Route("/ready", self.ready),
                Route("/metrics", self.show_metrics),
                Route("/openapi.json", self.openapi),
            ],
            middleware=middleware,
            exception_handlers={**HANDLERS, _UnknownModel: _unknown_model},
            lifespan=self._lifespan,
        )

    @property
    def service(self) -> ChatService:
        """The service of the running server."""
        assert self._service is not None, "the lifespan has not begun"
        return self._service

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        settings = self.settings
        workers = MediaWorkers(
            self.engine.processor,
            form=self.engine.media_form,
            num_workers=settings.media_workers,
            max_seconds=settings.media_seconds,
            max_memory=settings.media_memory,
        )
        limits = ServiceLimits(
            request=settings.limits,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            media_prefills=settings.media_prefills,
        )
        self._service = ChatService(
            self.engine, workers, self.metrics, limits, sampling=settings.sampling
        )
        watch = asyncio.create_task(self.metrics.watch_loop())
        try:
            yield
        finally:
            watch.cancel()
            await self._service.close()

    # ------------------------------------------------------------------ answering

    async def chat(self, _: Request) -> Response:
        """``POST /v1/chat/completions``."""
        return _Chat(self)

    async def tokenize(self, request: Request) -> Response:
        """``POST /v1/tokenize``: as chat, without generating."""
        with self.service.admission():
            call = await self.read(request)
            counted = await until_disconnect(request.receive, self.service.tokenize(call))
            return Response(counted, media_type="application/json")

    async def read(self, request: Request) -> ChatCall:
        """Read and check a body and the model's name in it."""
        body = await self._bodies.read(request)
        try:
            call = await self.service.read(body)
        finally:
            self._bodies.release(body)
        if call.model not in self.settings.model_names:
            raise _UnknownModel(call.model)
        return call

    # ------------------------------------------------------------------ looking

    async def models(self, _: Request) -> Response:
        """``GET /v1/models``."""
        data = [self._describe(name) for name in self.settings.model_names]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/NAME``."""
        name = request.path_params["name"]
        if name not in self.settings.model_names:
            raise _UnknownModel(name)
        return JSONResponse(self._describe(name))

    def _describe(self, name: str) -> dict[str, Any]:
        settings, limits = self.settings, self.settings.limits
        media = self.engine.processor
        budget = media.config.in_patch_limit
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "k3vl",
            "context_length": self.engine.context_length,
            "modalities": {"input": ["text", "image", "video"], "output": ["text"]},
            "limits": {
                "max_images": limits.max_images,
                "max_videos": limits.max_videos,
                "max_choices": limits.max_choices,
                "max_body_bytes": settings.max_body_bytes,
                "max_media_bytes": media.policy.max_bytes,
                "max_image_pixels": media.limits.max_image_pixels,
                "max_video_seconds": media.limits.max_video_seconds,
                "default_max_tokens": limits.default_max_tokens,
                "detail_patches": {
                    detail: min(DETAIL_PATCHES.get(detail, budget), budget)
                    for detail in ("low", "high", "auto", "original")
                },
            },
        }

    async def health(self, _: Request) -> Response:
        """``GET /health``: the process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """``GET /ready``: the engine makes tokens."""
        if await self.service.is_ready():
            return JSONResponse({"status": "ready"})
        return error_response(
            503, "the engine makes no tokens", kind="server_error", code="not_ready"
        )

    async def show_metrics(self, _: Request) -> Response:
        """``GET /metrics``."""
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, _: Request) -> Response:
        """``GET /openapi.json``."""
        return JSONResponse(document())


class _UnknownModel(Exception):  # noqa: N818 - an answer, not a fault
    """The request names a model that is not served."""


async def _unknown_model(_: Request, exc: Exception) -> Response:
    return error_response(
        404,
        f"The model '{str(exc)[:256]}' does not exist.",
        param="model",
        code="model_not_found",
    )


class _Chat(Response):
    """Reads the request only when it answers, so that one object holds the place of both."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; errors before the first byte go to the exception handlers."""
        server = self._server
        with server.service.admission():
            call = await server.read(Request(scope, receive))
            try:
                answer = await until_disconnect(receive, self._answer(call, send))
            except Cancelled:
                server.metrics.cancelled.inc()
                return
        if answer is not None:
            await answer(scope, receive, send)

    async def _answer(self, call: ChatCall, send: Send) -> Response | None:
        service = self._server.service
        ready = await service.prepare(call)
        if call.stream:
            await send_events(send, service.frames(ready), error_event)
            return None
        return Response(await service.whole(ready), media_type="application/json")


class _Uvicorn(uvicorn.Server):
    """Says where it listens, in the log's own form."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                host, port = listener.getsockname()[:2]
                log.info(json.dumps({"event": "listening", "host": host, "port": port}))


def serve(engine: Engine, settings: ServerSettings) -> None:
    """Serve until SIGINT or SIGTERM; answers under way may finish within a limit."""
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    server = Server(engine, settings)
    config = uvicorn.Config(
        server.app,
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=settings.shutdown_seconds,
        lifespan="on",
    )
    return_large_blocks()
    # The engine's thread must not wait the usual 5 ms for an event loop with much to do.
    sys.setswitchinterval(0.001)
    # uvicorn raises the signal again once all is shut down; by then it has had its effect.
    signal.signal(signal.SIGTERM, lambda *_: None)
    _Uvicorn(config).run()
