"""Server-sent events: framing, and work that ends when its client does.

Pure ASGI; nothing here knows what the events hold.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from k3vl.errors import Cancelled

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

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
    send: Send, frames: AsyncGenerator[bytes], *, keep_alive: float = KEEP_ALIVE_SECONDS
) -> None:
    """Answer with a stream of frames; a comment is sent where nothing else is for a while."""
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    loop = asyncio.get_running_loop()
    last = loop.time()

    async def stay_alive() -> None:
        while True:
            await asyncio.sleep(max(last + keep_alive - loop.time(), 0.05))
            if loop.time() >= last + keep_alive:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                await asyncio.sleep(keep_alive)

    keeper = asyncio.create_task(stay_alive())
    try:
        async with contextlib.aclosing(frames):
            async for frame in frames:
                last = loop.time()
                await send({"type": "http.response.body", "body": frame, "more_body": True})
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
