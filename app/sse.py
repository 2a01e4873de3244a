"""Server-sent events: framing, and work that ends when its client does.

Pure ASGI; nothing here knows what the events hold.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from k3vl.errors import Cancelled, K3VLError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from starlette.types import Receive, Send

    _T = TypeVar("_T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_SECONDS = 15.0
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: bytes) -> bytes:
    """Frame one event; JSON has no line breaks of its own."""
    return b"data: " + data + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Carry out work for a client that has sent its whole request, and stop when it leaves.

    Raises:
        Cancelled: the client went away; the work has been cancelled and has ended.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client went away")
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_events(
    send: Send,
    frames: AsyncGenerator[bytes],
    error_frame: Callable[[K3VLError], bytes],
    *,
    keep_alive: float = KEEP_ALIVE_SECONDS,
) -> None:
    """Answer with a stream of frames; a comment is sent where nothing else is for a while.

    The answer begins with the first frame, or once it has been waited for as long as a comment is;
    until then an error is the caller's to answer, with a status of its own.

    Args:
        send: ASGI's.
        frames: what is sent; closed at the end.
        error_frame: the last frame of a stream that fails after it has begun.
        keep_alive: seconds of silence before a comment.

    Raises:
        K3VLError: of ``frames``, while nothing has been sent.
    """
    async with contextlib.aclosing(frames):
        first = asyncio.ensure_future(anext(frames, b""))
        keeper: asyncio.Task[None] | None = None
        try:
            await asyncio.wait([first], timeout=keep_alive)
            if first.done():
                first.result()
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            stream = _Stream(send, keep_alive)
            keeper = asyncio.create_task(stream.stay_alive())
            try:
                await stream.write(await first)
                async for frame in frames:
                    await stream.write(frame)
            except K3VLError as exc:
                await stream.write(error_frame(exc))
        finally:
            waiting = [task for task in (first, keeper) if task is not None]
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Stream:
    """The body of an answer that has begun."""

    def __init__(self, send: Send, keep_alive: float) -> None:
        self._send, self._keep_alive = send, keep_alive
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time() - keep_alive

    async def write(self, frame: bytes) -> None:
        """Send a frame."""
        self._last = self._loop.time()
        await self._send({"type": "http.response.body", "body": frame, "more_body": True})

    async def stay_alive(self) -> None:
        """Send a comment whenever nothing was sent for a while."""
        while True:
            due = self._last + self._keep_alive
            if self._loop.time() < due:
                await asyncio.sleep(due - self._loop.time())
            else:
                await self.write(KEEP_ALIVE)
