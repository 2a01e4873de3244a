"""What the tests share: the checkpoint as SGLang wants it, the environment, a running server."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GOLDEN = ROOT / "tests" / "golden" / "sglang_tiny"

ENVIRONMENT = {
    "PYTHONPATH": str(HERE / "stand_ins"),
    "SGLANG_USE_CPU_ENGINE": "0",  # that engine wants kernels that are on no package index
    "TRITON_INTERPRET": "1",
    # Else its short convolutions keep their window in bfloat16, whatever the model's dtype.
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
FLAGS = (
    "--device=cpu",
    "--dtype=float32",  # the interpreter computes bfloat16 wrongly
    "--attention-backend=triton",
    "--sampling-backend=pytorch",
    "--grammar-backend=xgrammar",
    "--disable-cuda-graph",
    "--disable-radix-cache",
    "--disable-overlap-schedule",
    "--max-total-tokens=4096",
    "--max-running-requests=8",
    "--context-length=2048",
    "--chunked-prefill-size=512",
    "--mem-fraction-static=0.2",
    "--skip-server-warmup",
)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, **more}


def make_checkpoint(directory: Path) -> Path:
    """The tiny K3 of ``tests/golden`` with the files that a released checkpoint has beside it."""
    directory.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (directory / name).symlink_to(GOLDEN / name)
    for name in ("tokenizer_config.json", "preprocessor_config.json"):
        shutil.copy(GOLDEN / name, directory / name)
    shutil.copy(HERE / "released_processor.py", directory / "processing_tiny_k3.py")
    preprocessor = json.loads((GOLDEN / "preprocessor_config.json").read_text())
    config = json.loads((GOLDEN / "config.json").read_text())
    config["auto_map"] = preprocessor["auto_map"]
    files = {
        "config.json": config,
        "processor_config.json": {
            "auto_map": preprocessor["auto_map"],
            "processor_class": "TinyK3Processor",
        },
        # Without the sentence on effort a prompt of these bytes is five times shorter.
        "generation_config.json": {
            "eos_token_id": config["eos_token_id"],
            "do_sample": False,
            "chat_template_kwargs": {"thinking": True, "thinking_effort": None},
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


# ---------------------------------------------------------------------- media


def picture() -> bytes:
    return (GOLDEN / "img_84x56.png").read_bytes()


def clip(levels: Sequence[int], *, size: tuple[int, int] = (56, 28), rate: int = 2) -> bytes:
    """A lossless clip of as many frames; each has a colour of its own and some structure."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "bgr0"
        for level in levels:
            pixels = np.empty((size[1], size[0], 3), np.uint8)
            pixels[:] = (level, 255 - level, level // 2)
            pixels[: size[1] // 2, :: 1 + level % 5] = 255
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


def data_uri(data: bytes, kind: str = "application/octet-stream") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image_url(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(data)}}


def video_url(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_uri(data)}}


# ---------------------------------------------------------------------- a server


class Server:
    """``k3vl serve --engine sglang`` in a process of its own.

    Attributes:
        url: of SGLang's own server.
        front: of ours before it.
    """

    def __init__(self, checkpoint: Path, log: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.front = f"http://127.0.0.1:{port}"
        self.url = ""
        self.encoded = log.with_suffix(".encoded")
        self.encoded.touch()
        self.log = log
        line = [sys.executable, "-m", "k3vl", "serve", "--engine", "sglang"]
        line += ["--model", str(checkpoint), "--port", str(port)]
        line += ["--served-model-name", "tiny", *options]
        line += ["--", "--trust-remote-code", *FLAGS]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                line,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(K3VL_TEST_ENCODED=str(self.encoded)),
            )

    def wait(self, seconds: float = 600) -> None:
        """Until the launcher has found the plugin active, and our own server listens."""
        end = time.monotonic() + seconds
        while '"listening"' not in (said := self.log.read_text(errors="replace")):
            assert self.process.poll() is None, said[-4000:]
            assert time.monotonic() < end, said[-4000:]
            time.sleep(0.5)
        assert "the plugin is active" in said
        (port,) = re.findall(r"-m sglang.launch_server .* --port (\d+)", said)
        self.url = f"http://127.0.0.1:{port}"

    def post(self, path: str, body: dict[str, Any], *, url: str = "") -> tuple[int, Any]:
        with self._open(path, body, url or self.url) as response:
            return response.status, json.load(response)

    def stream(self, path: str, body: dict[str, Any], *, url: str = "") -> list[dict[str, Any]]:
        with self._open(path, {**body, "stream": True}, url or self.url) as response:
            lines = response.read().decode().splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def grids(self) -> list[list[int]]:
        """grid_thw of every item that the vision tower got so far."""
        return [grid for line in self.encoded.read_text().splitlines() for grid in json.loads(line)]

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(120)

    def _open(self, path: str, body: dict[str, Any], url: str) -> Any:
        request = urllib.request.Request(url + path, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        try:
            return urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as exc:
            return exc
