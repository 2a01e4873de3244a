"""What the captioner's tests share: a fake model whose captions depend on the picture."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import av
import numpy as np
from click.testing import CliRunner
from PIL import Image

from k3vl.app import caption as caption_module
from k3vl.app.cli import cli
from k3vl.config import load_media_config
from k3vl.lm.backend import Token
from k3vl.pipeline import Pipeline
from k3vl.types import ChatOptions
from k3vl.vision.processor import MediaProcessor
from tests.test_pipeline import DIRECTORY, PAD, TOKENIZER

if TYPE_CHECKING:
    from pathlib import Path

END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


class EchoBackend:
    """Answers with the digest of the picture, so a wrong caption cannot look right."""

    def __init__(self, seconds: float = 0.0, reply: Any = None) -> None:
        self.seconds = seconds
        self.reply = reply
        self.digests: list[str] = []
        self.prompts: list[str] = []
        self.samplings: list[Any] = []
        self.cancelled: list[int] = []
        self._lock = threading.Lock()

    def submit(self, prompt, sampling, sink) -> int:
        digest = prompt.spans[0].item.digest
        with self._lock:
            self.digests.append(digest)
            ids = [t for t in prompt.token_ids if not TOKENIZER.is_control(t)]
            text = b"".join(map(TOKENIZER.token_bytes, ids)).decode(errors="replace")
            self.prompts.append(text)
            self.samplings.append(sampling)
            number = len(self.digests)
        answer = self.reply(text) if self.reply else f"Picture {digest[:8]}."
        ids = TOKENIZER.encode_segment(answer + END, allow_special=True)

        def send() -> None:
            if self.seconds:
                time.sleep(self.seconds)
            for token in ids[:-1]:
                sink(Token(id=token))
            sink(Token(id=ids[-1], finish="stop"))

        if self.seconds:
            threading.Thread(target=send, daemon=True).start()
        else:
            send()
        return number

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def close(self) -> None:
        pass


def echo_pipeline(backend: EchoBackend) -> Pipeline:
    return Pipeline(
        processor=MediaProcessor(load_media_config(DIRECTORY)),
        tokenizer=TOKENIZER,
        backend=backend,
        media_pad_id=PAD,
        defaults=ChatOptions(thinking=False),
        name="demo",
    )


def use_echo(monkeypatch, backend: EchoBackend | None = None) -> EchoBackend:
    """Put the fake model in the place of every checkpoint."""
    backend = backend or EchoBackend()

    def load(name: str, **settings: Any) -> Pipeline:
        pipeline = echo_pipeline(backend)
        pipeline.processor = MediaProcessor(
            load_media_config(DIRECTORY), limits=settings["limits"], policy=settings["policy"]
        )
        return pipeline

    monkeypatch.setattr(caption_module.Pipeline, "load", load)
    return backend


def run(*args: object, stdin: bytes | str | None = None):
    result = CliRunner().invoke(cli, ["caption", *map(str, args)], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def picture(path: Path, number: int = 0, size: tuple[int, int] = (20, 20)) -> Path:
    """A small picture that no other number makes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = (number % 256, number // 256 % 256, 77)
    Image.new("RGB", size, colour).save(path)
    return path


def pictures(folder: Path, count: int) -> list[Path]:
    return [picture(folder / f"{number:05d}.png", number) for number in range(count)]


def film(path: Path) -> Path:
    """Five seconds at ten frames a second; every second has a grey of its own."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(50):
            pixels = np.full((48, 64, 3), 40 * (number // 10) + 20, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        container.mux(stream.encode())
    return path
