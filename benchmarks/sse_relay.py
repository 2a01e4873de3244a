"""How many tokens a second the server relays, with an engine that costs nothing.

    python benchmarks/sse_relay.py [--streams 16] [--tokens 2000] [--output result.json]

One process serves; this one reads. The bare relay, in the same server process and run, takes the
same engine's tokens through an asyncio queue and sends a ready frame for each through Starlette's
StreamingResponse: what a relay costs that neither decodes, parses, counts nor writes JSON. Ours
joins tokens that have piled up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import re
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Mount, Route

from k3vl.app.engines import EmbeddedEngine
from k3vl.app.server import Server, ServerSettings
from k3vl.config import checkpoint_path, load_media_config
from k3vl.lm.backend import Token
from k3vl.pipeline import Pipeline
from k3vl.types import ChatOptions, Prompt, SamplingParams
from k3vl.vision.processor import MediaProcessor
from k3vl.xtml.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from k3vl.errors import K3VLError


STEP_SECONDS = 1e-4
"""Between steps the engine leaves the interpreter to others, as one that computes does."""
_TEXT = re.compile(rb'"delta":{"content":"(a+)"}')


class FreeEngine:
    """One thread that hands out tokens as an engine does: step by step, one for every request."""

    def __init__(self, token_id: int) -> None:
        self._token = Token(id=token_id)
        self._last = Token(id=token_id, finish="length")
        self._jobs: dict[int, list[Any]] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        sink: Callable[[Token | K3VLError], None],
    ) -> int:
        """Start a stream of ``max_tokens`` tokens."""
        with self._lock:
            self._count += 1
            self._jobs[self._count] = [sink, sampling.max_tokens]
            return self._count

    def cancel(self, request_id: int) -> None:
        """End a stream."""
        with self._lock:
            self._jobs.pop(request_id, None)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                jobs = list(self._jobs.items())
            for number, job in jobs:
                job[1] -= 1
                if job[1] <= 0:
                    self.cancel(number)
                    job[0](self._last)
                else:
                    job[0](self._token)
            time.sleep(STEP_SECONDS)


def application() -> Starlette:
    """The server under test at the root, the bare relay beside it."""
    directory = checkpoint_path("demo")
    tokenizer = load_tokenizer(directory)
    (token_id,) = tokenizer.encode_segment("a", False)
    engine = FreeEngine(token_id)
    pipeline = Pipeline(
        processor=MediaProcessor(load_media_config(directory)),
        tokenizer=tokenizer,
        backend=engine,
        media_pad_id=tokenizer.special_ids["<|media_pad|>"],
        defaults=ChatOptions(thinking=False),
        name="demo",
    )
    server = Server(EmbeddedEngine(pipeline), ServerSettings(media_workers=1, max_running=256))
    chunk = {
        "id": "chatcmpl-" + "0" * 32,
        "object": "chat.completion.chunk",
        "created": 1_800_000_000,
        "model": "demo",
        "choices": [
            {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}
        ],
    }
    frame = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"

    async def bare(request: Request) -> Response:
        sampling = SamplingParams(max_tokens=(await request.json())["max_tokens"])
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Token] = asyncio.Queue()

        def sink(item: Any) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, item)

        async def frames() -> AsyncIterator[bytes]:
            engine.submit(Prompt((token_id,)), sampling, sink)
            while (await inbox.get()).finish is None:
                yield frame
            yield frame

        return StreamingResponse(frames(), media_type="text/event-stream")

    return Starlette(
        routes=[Route("/bare", bare, methods=["POST"]), Mount("/", server.app)],
        lifespan=server.app.router.lifespan_context,
    )


def run_server(port: int) -> None:
    """The serving process, set up as ``k3vl serve`` does."""
    sys.setswitchinterval(0.001)
    uvicorn.run(application(), port=port, log_level="critical")


async def read_stream(port: int, path: str, tokens: int) -> int:
    """Ask for one stream and count its content frames, at the price of a socket and a search."""
    body = json.dumps(
        {
            "model": "demo",
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": tokens,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    found, rest = 0, b""
    while data := await reader.read(1 << 18):
        lines, _, rest = (rest + data).rpartition(b"\n")
        found += sum(map(len, _TEXT.findall(lines)))
    writer.close()
    return found


async def measure(port: int, path: str, streams: int, tokens: int) -> float:
    """Tokens a second over all streams."""
    begun = time.perf_counter()
    counts = await asyncio.gather(*(read_stream(port, path, tokens) for _ in range(streams)))
    seconds = time.perf_counter() - begun
    assert min(counts) >= tokens - 1, f"tokens were lost: {min(counts)} of {tokens}"
    return sum(counts) / seconds


def benchmark(streams: int, tokens: int, repeats: int = 5) -> dict[str, Any]:
    """Start the server, measure both relays in turn, keep the best of each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_server, args=(port,))
    process.start()
    try:
        wait_for(port)
        rates: dict[str, list[float]] = {"/v1/chat/completions": [], "/bare": []}
        for _ in range(repeats):
            for path, found in rates.items():
                found.append(asyncio.run(measure(port, path, streams, tokens)))
    finally:
        process.terminate()
        process.join()
    ours, bare = (max(found) for found in rates.values())
    return {
        "streams": streams,
        "tokens_per_stream": tokens,
        "tokens_per_second": round(ours),
        "bare_tokens_per_second": round(bare),
        "ratio": round(ours / bare, 3),
        "all": {path: [round(rate) for rate in found] for path, found in rates.items()},
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def wait_for(port: int, seconds: float = 60.0) -> None:
    """Until somebody listens."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--output")
    options = parser.parse_args()
    result = benchmark(options.streams, options.tokens)
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
