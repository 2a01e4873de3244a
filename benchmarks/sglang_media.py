"""How many requests with media a second two servers take, side by side.

    python benchmarks/sglang_media.py --url http://A:8000 --url http://B:8001 \
        --kind image --size 896x672 [--clients 8] [--requests 64] [--rounds 3] [--output r.json]

Meant for SGLang alone beside SGLang with the plugin. Every request has a picture (or clip) of its
own, so no cache answers, and asks for one token, so that media and prefill are what is measured.
The servers take turns, round by round; the same media go to each, and every server's first round is
a warm-up that does not count.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import platform
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from PIL import Image


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", action="append", required=True)
    parser.add_argument("--kind", choices=["image", "video"], default="image")
    parser.add_argument("--size", default="896x672")
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--model", default="default")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output")
    flags = parser.parse_args()
    width, height = map(int, flags.size.split("x"))

    def media(seed: int) -> bytes:
        if flags.kind == "image":
            return picture(seed, width, height)
        return clip(seed, width, height, flags.frames)

    rows: list[dict[str, Any]] = []
    for number in range(flags.rounds + 1):
        seeds = range(number * flags.requests, (number + 1) * flags.requests)
        bodies = [body(media(seed), flags.kind, flags.model) for seed in seeds]
        for url in flags.url if number % 2 else flags.url[::-1]:
            row = {"url": url, "round": number, **one_round(url, bodies, flags.clients)}
            if number:
                rows.append(row)
                print(json.dumps(row), flush=True)
    best = {
        url: max(row["requests_per_second"] for row in rows if row["url"] == url)
        for url in flags.url
    }
    result = {
        "settings": {**vars(flags), "output": None},
        "machine": platform.platform(),
        "rounds": rows,
        "best_requests_per_second": best,
        "ratio_of_last_to_first": round(best[flags.url[-1]] / best[flags.url[0]], 3),
    }
    print(json.dumps(best), f"ratio {result['ratio_of_last_to_first']}")
    if flags.output:
        with open(flags.output, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
