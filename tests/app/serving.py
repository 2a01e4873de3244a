"""Servers for tests: a real process with the demo model, one in a thread around any pipeline."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import uvicorn

from k3vl.app.engines import EmbeddedEngine
from k3vl.app.server import Server, ServerSettings
from k3vl.config import checkpoint_path, load_media_config
from k3vl.pipeline import Pipeline
from k3vl.types import ChatOptions
from k3vl.vision.processor import MediaProcessor
from k3vl.xtml.tokenizer import load_tokenizer
from tests.timing import until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


class Process:
    """A ``k3vl serve`` process; its log lines are collected."""

    def __init__(self, *options: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "k3vl", "serve", "--port", "0", *options],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._listening = threading.Event()
        self.port = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._listening.wait(180), "\n".join(self.lines)
        assert self.port, "\n".join(self.lines)
        self.url = f"http://127.0.0.1:{self.port}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as log:
            for line in log:
                self.lines.append(line.rstrip())
                if '"listening"' in line:
                    self.port = json.loads(line)["port"]
                    self._listening.set()
        self._listening.set()

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(40)
        finally:
            self.process.kill()
            self._reader.join()


@contextlib.contextmanager
def in_thread(engine: Any, **settings: Any) -> Iterator[tuple[str, Server]]:
    """Serve an engine, or a pipeline as one, from this process; (URL, server)."""
    pipeline = engine if isinstance(engine, Pipeline) else None
    if pipeline is not None:
        engine = EmbeddedEngine(pipeline)
    server = Server(engine, ServerSettings(**settings))
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        server.app, log_level="critical", lifespan="on", timeout_graceful_shutdown=1
    )
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until(lambda: runner.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        runner.should_exit = True
        thread.join(30)
        listener.close()
        if pipeline is not None:
            pipeline.close()


def fake_pipeline(backend: Any, **options: Any) -> Pipeline:
    """The demo model's tokenizer and media rules around a fake engine."""
    directory = checkpoint_path("demo")
    tokenizer = load_tokenizer(directory)
    return Pipeline(
        processor=MediaProcessor(load_media_config(directory), **options),
        tokenizer=tokenizer,
        backend=backend,
        media_pad_id=tokenizer.special_ids["<|media_pad|>"],
        defaults=ChatOptions(thinking=False),
        name="demo",
        context_length=4096,
    )


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(source: bytes | str, **more: Any) -> dict[str, Any]:
    url = source if isinstance(source, str) else data_url(source)
    return {"type": "image_url", "image_url": {"url": url, **more}}


def ask(*parts: Any, model: str = "demo", **fields: Any) -> dict[str, Any]:
    """The body of a request with one user message."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"model": model, "messages": [{"role": "user", "content": content}], **fields}


def post(url: str, body: dict[str, Any], path: str = "/v1/chat/completions", **kw: Any) -> Any:
    return httpx2.post(url + path, json=body, timeout=60, **kw)


def get(url: str, **kw: Any) -> Any:
    return httpx2.get(url, timeout=60, **kw)


def metric(url: str, name: str) -> float:
    """A value on the metrics page."""
    page = get(url + "/metrics").text
    return float(next(line.split()[-1] for line in page.splitlines() if line.startswith(name)))
