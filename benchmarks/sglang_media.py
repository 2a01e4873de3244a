"""SGLang alone beside SGLang with the plugin: do they answer, and how many requests a second.

    python benchmarks/sglang_media.py --model DIR [--output r.json] [--parity] [--size 896x672] \
        [--clients 8] [--requests 96] [--rounds 8] -- --mem-fraction-static 0.4 [more of SGLang's]

Both are started at once from one command line, on one machine. Each is asked about one picture
first, one server after the other: that compiles what later rounds run, and the second finds most
of it compiled, and tuned, by the first (together they would tune side by side, each its own way).
Their chat formats differ in length, so the one with the shorter prompt gets words before its
picture until both count as many tokens (``padding``). Then every request has a picture of its own,
so no cache answers, and asks for one token, so that media and prefill are what is measured. The
servers take turns, round by round (A B, B A, ...), and get the same pictures; the first ``WARM``
rounds do not count. Clips come last: the plugin alone has them, and what they break has been
measured.

What is known is written as it becomes known. A server that fails is told in ``errors``, and the
other one goes on. ``seconds`` says how long each stage took.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from k3vl.app.sglang_guard import end_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Future

STOP_SECONDS = 30.0
MEASURED: Mapping[str, tuple[str, ...]] = {"image": ("plain", "plugin"), "video": ("plugin",)}
"""Who takes what: SGLang has no clips of its own."""
ERRORS = (OSError, http.client.HTTPException)
"""Of a request."""
WARM = 2
"""Rounds that do not count: batches of other sizes are compiled in the first."""
QUESTION = "What is this?"
FILLER = "These words only make the prompt as long as the other server's. "


class Failed(Exception):  # noqa: N818 - what it says
    """A server did not start or did not answer; the text says what it logged last."""


class Server:
    """SGLang in a process group of its own, with the plugin or without."""

    def __init__(self, name: str, flags: argparse.Namespace) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self.log = Path(f"{flags.logs}/sglang-{name}.log")
        plugins = [*flags.plugins, *(["k3vl"] if name == "plugin" else [])]
        line = [sys.executable, "-m", "sglang.launch_server", "--model-path", flags.model]
        line += ["--port", str(port), "--reasoning-parser", "kimi_k3", "--enable-cache-report"]
        line += flags.sglang
        if name == "plugin":
            settings = {"k3vl": {"parity": flags.parity}}
            line += ["--mm-process-config", json.dumps(settings)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                line,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    # An empty list would mean all of them.
                    "SGLANG_PLUGINS": ",".join(plugins) or "none",
                    # What one has tuned the other takes over: both run the same kernels.
                    "TRITON_CACHE_AUTOTUNING": "1",
                },
            )

    def wait(self, seconds: float) -> None:
        """Until it takes requests; what these need may still have to be compiled.

        Raises:
            Failed: it has ended, or does not.
        """
        end = time.monotonic() + seconds
        while True:
            if self._process.poll() is not None or time.monotonic() > end:
                raise Failed(f"{self.log}: not ready\n" + self.tail())
            try:
                with urllib.request.urlopen(self.url + "/model_info", timeout=5):  # noqa: S310 - ours
                    return
            except ERRORS:
                time.sleep(0.5)

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]

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
    """An MP4 of two frames a second, all of which K3's rule takes; a camera over a picture."""
    import av

    step = 4
    margin = step * (frames - 1)
    wide = Image.open(io.BytesIO(picture(seed, width + margin, height + margin)))
    buffer = io.BytesIO()
    with wide, av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            at = step * index
            shown = wide.crop((at, at, at + width, at + height))
            for packet in stream.encode(av.VideoFrame.from_image(shown)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


def body(media: str, kind: str, model: str, padding: int = 0) -> bytes:
    """A request about a medium in base64, with so many characters of filler before it."""
    url = f"data:application/octet-stream;base64,{media}"
    content: list[dict[str, Any]] = [{"type": f"{kind}_url", f"{kind}_url": {"url": url}}]
    if padding:
        filler = (FILLER * (padding // len(FILLER) + 1))[:padding]
        content.insert(0, {"type": "text", "text": filler})
    content.append({"type": "text", "text": QUESTION})
    request = {"model": model, "max_tokens": 1, "temperature": 0}
    return json.dumps({**request, "messages": [{"role": "user", "content": content}]}).encode()


def ask(url: str, data: bytes) -> tuple[float, int, int]:
    """Seconds, tokens of the prompt, and how many of these were in the prefix cache."""
    request = urllib.request.Request(f"{url}/v1/chat/completions", data=data)  # noqa: S310
    request.add_header("Content-Type", "application/json")
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as response:  # noqa: S310 - our own URL
        usage = json.load(response)["usage"]
    seconds = time.perf_counter() - start
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return seconds, usage["prompt_tokens"], cached


def said(exc: Exception) -> str:
    """An error and what the server wrote about it, which its log does not have."""
    if isinstance(exc, urllib.error.HTTPError):
        with exc:
            return f"{exc}: {exc.read(2000).decode(errors='replace')}"
    return str(exc)


def one_round(url: str, bodies: list[bytes], clients: int) -> dict[str, Any]:
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda data: ask(url, data), bodies))
    seconds = time.perf_counter() - start
    times = sorted(took for took, _, _ in answers)
    return {
        "requests_per_second": round(len(bodies) / seconds, 2),
        "median_seconds": round(statistics.median(times), 3),
        "p95_seconds": round(times[-(-95 * len(times) // 100) - 1], 3),
        "prompt_tokens": round(statistics.mean(tokens for _, tokens, _ in answers), 1),
        "cached_tokens": round(statistics.mean(cached for _, _, cached in answers), 1),
    }


class Record:
    """What is known so far; a file has it at once."""

    def __init__(self, about: dict[str, Any], path: str | None) -> None:
        self.result: dict[str, Any] = {**about, "seconds": {}, "errors": {}, "answers": []}
        self._path = path
        self._lock = threading.Lock()  # servers are waited for by threads

    def tell(self, **line: Any) -> None:
        """To whoever watches; whatever was noted is written."""
        with self._lock:
            print(json.dumps(line), flush=True)
            if self._path:
                Path(self._path).write_text(json.dumps(self.result, indent=1) + "\n")

    def note(self, where: str, what: str, value: float | str) -> None:
        """Keep one of ``seconds`` or ``errors``."""
        with self._lock:
            self.result[where][what] = value
        self.tell(**{where: {what: value}})

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note how long it takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.note("seconds", name, round(time.perf_counter() - start, 1))


class Media:
    """Pictures and clips of every round in base64, made on threads while servers start."""

    def __init__(self, made: Mapping[str, Callable[[int], bytes]], flags: Any) -> None:
        self._pool = ThreadPoolExecutor(flags.media_threads)
        self._made = made
        self.rounds = {"image": flags.rounds, "video": flags.video_rounds}
        requests = {"image": flags.requests, "video": flags.video_requests}
        self._first = {kind: self._submit(kind, 2**20) for kind in made}
        self._rounds = {
            (kind, number): [
                self._submit(kind, number * requests[kind] + i) for i in range(requests[kind])
            ]
            for kind in made
            for number in range(WARM + self.rounds[kind])
        }

    def wait(self) -> None:
        """Until all are there: making them would take from what is measured."""
        wait_for([future for futures in self._rounds.values() for future in futures])

    def first(self, kind: str) -> str:
        """One that no round has."""
        return self._first[kind].result()

    def round(self, kind: str, number: int) -> list[str]:
        """Those of a round."""
        return [future.result() for future in self._rounds[kind, number]]

    def close(self) -> None:
        """Make no more."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, kind: str, seed: int) -> Future[str]:
        return self._pool.submit(lambda: base64.b64encode(self._made[kind](seed)).decode())


def start(flags: Any, record: Record, stack: ExitStack) -> dict[str, Server]:
    """Those of both servers that come up, started at once."""
    pool = stack.enter_context(ThreadPoolExecutor(2))  # which ends when what it waits for has
    begun: dict[str, Server] = {}
    for name in MEASURED["image"]:
        begun[name] = Server(name, flags)
        stack.callback(begun[name].stop)

    def wait(server: Server) -> Server | None:
        try:
            with record.stage(f"start {server.name}"):
                server.wait(flags.start_seconds)
        except Failed as exc:
            record.note("errors", server.name, str(exc))
            return None
        return server

    return {server.name: server for server in pool.map(wait, begun.values()) if server}


def first_answers(
    servers: Mapping[str, Server], kind: str, media: Media, flags: Any, record: Record
) -> dict[str, int]:
    """Tokens of the prompt, from those that answer; what the others say is in ``errors``."""
    tokens: dict[str, int] = {}
    for name in MEASURED[kind]:
        if name not in servers:
            continue
        data = body(media.first(kind), kind, flags.model)
        try:
            with record.stage(f"first {kind}, {name}"):
                seconds, tokens[name], _ = ask(servers[name].url, data)
        except ERRORS as exc:
            record.note("errors", f"{kind}, {name}", f"{said(exc)}\n{servers[name].tail()}")
            continue
        row = {"server": name, "kind": kind, "prompt_tokens": tokens[name]}
        record.result["answers"].append({**row, "first_seconds": round(seconds, 3)})
        record.tell(**record.result["answers"][-1])
    return tokens


def even_out(
    servers: Mapping[str, Server], tokens: Mapping[str, int], media: Media, flags: Any, rec: Record
) -> dict[str, int]:
    """Characters of filler for each server, with which both count as many tokens.

    The tokenizer is not known here, so the server is asked, at most five times, each time with as
    many characters as those before say; what is left of the difference is recorded.
    """
    padding = dict.fromkeys(tokens, 0)
    if len(set(tokens.values())) < 2:
        return padding
    short, target = min(tokens, key=lambda name: tokens[name]), max(tokens.values())
    best, step, count = tokens[short], 1.0, target - tokens[short]
    for _ in range(5):
        data = body(media.first("image"), "image", flags.model, count)
        try:
            _, found, _ = ask(servers[short].url, data)
        except ERRORS as exc:
            rec.note("errors", f"image, {short}", f"{said(exc)}\n{servers[short].tail()}")
            break
        if abs(found - target) <= abs(best - target):
            padding[short], best = count, found
        if found in (target, tokens[short]):
            break
        step = (found - tokens[short]) / count
        count = max(1, count + round((target - found) / step))
    rec.result["padding"] = {"server": short, "characters": padding[short], "prompt_tokens": best}
    rec.tell(padding=rec.result["padding"])
    return padding


def measure(
    servers: Mapping[str, Server],
    kind: str,
    padding: Mapping[str, int],
    media: Media,
    flags: Any,
    record: Record,
) -> None:
    """Rounds of requests to each server in turn; who fails in one has no more."""
    rows: list[dict[str, Any]] = []
    found = record.result[kind] = {"rounds": rows}
    names = list(padding)
    for number in range(WARM + media.rounds[kind] if padding else 0):
        inputs = media.round(kind, number)
        for name in names if number % 2 else names[::-1]:
            if f"{kind}, {name}" in record.result["errors"]:
                continue
            bodies = [body(medium, kind, flags.model, padding[name]) for medium in inputs]
            row = {"server": name, "round": number - WARM}
            try:
                row |= one_round(servers[name].url, bodies, flags.clients)
            except ERRORS as exc:
                record.note("errors", f"{kind}, {name}", f"{said(exc)}\n{servers[name].tail()}")
                continue
            if number >= WARM:
                rows.append(row)
                found |= summary(rows)
            record.tell(kind=kind, **row)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Each server's requests a second, and the plugin's over SGLang's alone.

    ``spread`` is (largest - smallest) / median of a server's rounds. ``of_rounds`` are the smallest
    and the largest ratio of two rounds with the same pictures, ``standard_error`` that of the mean
    of these ratios: a difference below two of it is none.
    """
    speeds: dict[str, dict[int, float]] = {}
    for row in rows:
        speeds.setdefault(row["server"], {})[row["round"]] = row["requests_per_second"]
    best = {name: max(own.values()) for name, own in speeds.items()}
    median = {name: statistics.median(own.values()) for name, own in speeds.items()}
    found: dict[str, Any] = {
        "best_requests_per_second": best,
        "median_requests_per_second": {name: round(value, 2) for name, value in median.items()},
        "spread": {
            name: round((best[name] - min(own.values())) / median[name], 4)
            for name, own in speeds.items()
        },
    }
    if len(speeds) == 2:
        plain, plugin = speeds["plain"], speeds["plugin"]
        ratios = [plugin[number] / plain[number] for number in plain.keys() & plugin.keys()]
        found["plugin_to_plain"] = {
            "best": round(best["plugin"] / best["plain"], 4),
            "median": round(median["plugin"] / median["plain"], 4),
        }
        if len(ratios) > 1:
            error = statistics.stdev(ratios) / len(ratios) ** 0.5
            found["plugin_to_plain"] |= {
                "of_rounds": [round(min(ratios), 4), round(max(ratios), 4)],
                "standard_error": round(error, 4),
            }
    return found


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
    parser.add_argument("--requests", type=int, default=96, help="of a round")
    parser.add_argument("--rounds", type=int, default=8, help=f"that count; {WARM} more do not")
    parser.add_argument("--video-requests", type=int, default=24)
    parser.add_argument("--video-rounds", type=int, default=3)
    parser.add_argument("--media-threads", type=int, default=8, help="that make pictures and clips")
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
    # A limit on time ends it as an error would: with the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    record = Record({"settings": {**vars(flags), "output": None}, **where()}, flags.output)
    media = Media(made, flags)
    with ExitStack() as stack:
        stack.callback(media.close)
        servers = start(flags, record, stack)
        with record.stage("media"):
            media.wait()
        for kind in MEASURED:
            tokens = first_answers(servers, kind, media, flags, record)
            padding = even_out(servers, tokens, media, flags, record)
            with record.stage(f"rounds {kind}"):
                measure(servers, kind, padding, media, flags, record)
    for kind in MEASURED:
        print(f"{kind}: {json.dumps({**record.result[kind], 'rounds': None})}")
    sys.exit(bool(record.result["errors"]))


if __name__ == "__main__":
    main()
