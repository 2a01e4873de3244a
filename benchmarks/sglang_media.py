"""SGLang alone beside SGLang with the plugin: do they answer, and how many requests a second.

    python benchmarks/sglang_media.py --model DIR [--output r.json] [--parity] [--size 896x672] \
        [--clients 8] [--requests 64] [--rounds 3] -- --mem-fraction-static 0.4 [more of SGLang's]

Both are started from one command line, on one machine, and asked one after the other: a picture
each, a clip where the plugin is. Then every request has a picture (or clip) of its own, so no cache
answers, and asks for one token, so that media and prefill are what is measured. The servers take
turns, round by round; the same media go to each, and every server's first round is a warm-up that
does not count.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from k3vl.app.sglang_guard import end_group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STOP_SECONDS = 30.0
MEASURED: Mapping[str, tuple[str, ...]] = {"image": ("plain", "plugin"), "video": ("plugin",)}
"""Who takes what: SGLang has no clips of its own."""


class Server:
    """SGLang in a process group of its own, with the plugin or without."""

    def __init__(self, name: str, flags: argparse.Namespace) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = Path(f"{flags.logs}/sglang-{name}.log")
        plugins = [*flags.plugins, *(["k3vl"] if name == "plugin" else [])]
        line = [sys.executable, "-m", "sglang.launch_server", "--model-path", flags.model]
        line += ["--port", str(port), "--reasoning-parser", "kimi_k3", *flags.sglang]
        if name == "plugin":
            settings = {"k3vl": {"parity": flags.parity}}
            line += ["--mm-process-config", json.dumps(settings)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                line,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # An empty list would mean all of them.
                env={**os.environ, "SGLANG_PLUGINS": ",".join(plugins) or "none"},
            )

    def wait(self, seconds: float) -> None:
        """Until it makes tokens."""
        end = time.monotonic() + seconds
        while True:
            if self._process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{self.log}: not ready\n" + self.log.read_text(errors="replace")[-3000:])
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=60):  # noqa: S310 - ours
                    return
            except OSError:
                time.sleep(1.0)

    def stop(self) -> None:
        end_group(self._process.pid, STOP_SECONDS)
        self._process.wait()


def picture(seed: int, width: int, height: int) -> bytes:
    """A JPEG with structure at every scale, as a photograph has."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 255, (height // 56 + 2, width // 56 + 2, 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    noisy = pixels + random.normal(0, 8, pixels.shape)
    buffer = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def clip(seed: int, width: int, height: int, frames: int) -> bytes:
    """An MP4 of two frames a second, all of which K3's rule takes."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            with Image.open(io.BytesIO(picture(seed * 1000 + index, width, height))) as shown:
                for packet in stream.encode(av.VideoFrame.from_image(shown)):
                    container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


def body(media: bytes, kind: str, model: str) -> bytes:
    url = f"data:application/octet-stream;base64,{base64.b64encode(media).decode()}"
    part = {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
    content = [part, {"type": "text", "text": "What is this?"}]
    request = {"model": model, "max_tokens": 1, "temperature": 0}
    return json.dumps({**request, "messages": [{"role": "user", "content": content}]}).encode()


def ask(url: str, data: bytes) -> tuple[float, int]:
    """Seconds, and tokens of the prompt."""
    request = urllib.request.Request(f"{url}/v1/chat/completions", data=data)  # noqa: S310
    request.add_header("Content-Type", "application/json")
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as response:  # noqa: S310 - our own URL
        answer = json.load(response)
    return time.perf_counter() - start, answer["usage"]["prompt_tokens"]


def one_round(url: str, bodies: list[bytes], clients: int) -> dict[str, Any]:
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda data: ask(url, data), bodies))
    seconds = time.perf_counter() - start
    times = sorted(took for took, _ in answers)
    return {
        "requests_per_second": round(len(bodies) / seconds, 2),
        "median_seconds": round(statistics.median(times), 3),
        "p95_seconds": round(times[int(0.95 * (len(times) - 1))], 3),
        "prompt_tokens": answers[0][1],
    }


def measure(
    servers: Mapping[str, Server], kind: str, media: Callable[[int], bytes], flags: Any
) -> dict[str, Any]:
    """Rounds of requests to each server in turn."""
    rows: list[dict[str, Any]] = []
    names = MEASURED[kind]
    for number in range(flags.rounds + 1):
        seeds = range(number * flags.requests, (number + 1) * flags.requests)
        bodies = [body(media(seed), kind, flags.model) for seed in seeds]
        for name in names if number % 2 else names[::-1]:
            row = {"server": name, "round": number}
            row |= one_round(servers[name].url, bodies, flags.clients)
            if number:
                rows.append(row)
                print(json.dumps({"kind": kind, **row}), flush=True)
    best = {
        name: max(row["requests_per_second"] for row in rows if row["server"] == name)
        for name in names
    }
    result: dict[str, Any] = {"rounds": rows, "best_requests_per_second": best}
    if len(names) == 2:
        result["plugin_to_plain"] = round(best["plugin"] / best["plain"], 3)
    return result


def where() -> dict[str, str]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = {name: version(name) for name in ("sglang", "torch", "transformers")}
    return {"machine": platform.platform(), "gpu": gpu, **versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--parity", action="store_true", help="pictures go SGLang's own way")
    parser.add_argument("--size", default="896x672")
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--start-seconds", type=float, default=900.0)
    parser.add_argument(
        "--plugins", nargs="*", default=[], help="other plugins of SGLang's, to both"
    )
    parser.add_argument("--logs", default="/tmp", help="folder of the servers' logs")  # noqa: S108
    parser.add_argument("--output")
    parser.add_argument("sglang", nargs="*", help="behind --: options of SGLang's")
    flags = parser.parse_args()
    width, height = map(int, flags.size.split("x"))
    made: dict[str, Callable[[int], bytes]] = {
        "image": lambda seed: picture(seed, width, height),
        "video": lambda seed: clip(seed, width, height, flags.frames),
    }
    result: dict[str, Any] = {"settings": {**vars(flags), "output": None}, **where()}
    with ExitStack() as stack:
        servers = {}
        # One after the other: each takes its share of the memory that it finds.
        for name in MEASURED["image"]:
            start = time.perf_counter()
            servers[name] = Server(name, flags)
            stack.callback(servers[name].stop)
            servers[name].wait(flags.start_seconds)
            print(json.dumps({"ready": name, "seconds": round(time.perf_counter() - start, 1)}))
        answers = []
        for kind, names in MEASURED.items():
            data = body(made[kind](2**20), kind, flags.model)
            for name in names:
                seconds, tokens = ask(servers[name].url, data)
                row = {"server": name, "kind": kind, "prompt_tokens": tokens}
                answers.append({**row, "first_seconds": round(seconds, 3)})
                print(json.dumps(answers[-1]), flush=True)
        result["answers"] = answers
        for kind in MEASURED:
            result[kind] = measure(servers, kind, made[kind], flags)
            if flags.output:  # what is known survives a limit on time
                Path(flags.output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({kind: result[kind]["best_requests_per_second"] for kind in MEASURED}))
    print(f"plugin to plain: {result['image']['plugin_to_plain']}")


if __name__ == "__main__":
    main()
