"""Captions a second of the demo model on a GPU, beside the CPU and ``transformers``; equal answers.

    python -m benchmarks.gpu_captions [--json benchmarks/gpu_captions.json]
    python -m benchmarks.gpu_captions --smoke          # everything on a CPU, small, about a minute

``speed``: the same picture files of 224 by 224 pixels, all different, are captioned in turns by

- the pipeline on the GPU, bfloat16, with several numbers of requests in flight,
- ``generate()`` of ``transformers`` on the same GPU, bfloat16: Kimi K2.5 with the demo model's
  dimensions and random weights (``transformers`` does not have the demo's architecture), its image
  processor, several batch sizes of which the fastest counts, prompts as long as ours, and as many
  new tokens as our captions have on average; it is spared the tokenizer,
- the pipeline on the same machine's CPU, float32, as it comes, over few of the pictures.

Nothing is kept from one picture or round for another (``reuse`` is off). Each has a process of its
own, which sleeps while another is measured. A first round, in which kernels are compiled and graphs
recorded, is told apart.

``equality``: held-out questions about pictures, greedy, token by token: all in company; of three
one alone, in company with every request decoded by itself, and asked twice of an engine that keeps
states; in float32 and bfloat16 on the GPU, in float32 on the CPU.

``profile``: a second in the middle of captioning: how much of it the device is busy and with what,
and what the engine's thread does.

What fails, or takes more than ``--seconds`` of one call, is told as such in the record, and the
others go on. The record is written after everything that it gains, the GPU's first. ``--only``
measures some parts again and leaves the others as the record has them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import psutil
import torch
from PIL import Image

from benchmarks.gpu_equality import compare
from benchmarks.gpu_rounds import Rounds, in_short
from benchmarks.gpu_subjects import Failed, Ours, Peer, Setting, Subject
from k3vl.config import checkpoint_path
from k3vl.demo.heldout import QUICK
from k3vl.xtml.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "gpu_captions.json"
SIDE = 224
PARTS = ("speed", "equality", "profile")
VERSIONS = ("k3vl", "torch", "triton", "transformers", "torchvision", "numba", "pillow", "numpy")
IN_COMPANY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much is measured, and where.

    Attributes:
        device, dtype: of the pipeline and the peer that are compared; the rest is float32.
        pictures, cpu_pictures: all of them, and those for the CPU.
        first_pictures: of the first round, enough for every size of a pass to come twice.
        rounds: after the first.
        in_flight, cpu_in_flight: requests at once.
        peer_batches: pictures of one ``generate()``; of small ones ``peer_calls`` are enough.
        items: questions whose answers are compared.
        dtypes: in which the GPU answers them.
        profile_seconds: of each of the two profiles.
        engine: fields of the GPU's :class:`~k3vl.lm.engine.EngineConfig`.
        seconds: that one call of a subject may take; None: as many as it needs.
    """

    device: str = "cuda"
    dtype: str = "bfloat16"
    pictures: int = 2000
    first_pictures: int = 2000
    cpu_pictures: int = 32
    rounds: int = 4
    in_flight: tuple[int, ...] = (256,)
    cpu_in_flight: int = 16
    peer_batches: tuple[int, ...] = (64,)
    peer_calls: int = 8
    items: int = 200
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    profile_seconds: float = 1.0
    engine: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None


Keep: TypeAlias = "Callable[[dict[str, Any]], None]"
"""Takes all that a part knows so far."""
SMOKE = Options(
    device="cpu",
    dtype="float32",
    pictures=12,
    first_pictures=8,
    cpu_pictures=4,
    rounds=1,
    in_flight=(2, 4),
    cpu_in_flight=2,
    peer_batches=(1, 4),
    peer_calls=2,
    items=4,
    dtypes=("float32",),
    profile_seconds=0.2,
)


# ------------------------------------------------------------------ pictures


def make_pictures(folder: Path, count: int) -> list[Path]:
    """Held-out drawings and the examples, cropped, mirrored and tinted: no two are the same.

    PNG and JPEG in turns, 224 by 224 pixels.
    """
    rng = random.Random(0)
    drawn = [p for p in QUICK.iterdir() if p.suffix in (".webp", ".jpg")]
    examples = [p for p in (ROOT / "examples").iterdir() if p.suffix in (".png", ".jpg")]
    sources = []
    for path in sorted(drawn) + sorted(examples):
        with Image.open(path) as opened:
            sources.append(opened.convert("RGB"))
    paths: list[Path] = []
    seen = set()
    while len(paths) < count:
        picture = varied(rng.choice(sources), rng)
        digest = hashlib.sha256(picture.tobytes()).digest()
        if digest not in seen:
            seen.add(digest)
            paths.append(folder / f"{len(paths):05d}.{'jpg' if len(paths) % 2 else 'png'}")
            picture.save(paths[-1])
    return paths


def varied(picture: Image.Image, rng: random.Random) -> Image.Image:
    """A part of a picture, perhaps mirrored, in slightly other colours."""
    left, top = (rng.uniform(0, 0.12) * side for side in picture.size)
    right, bottom = (rng.uniform(0.88, 1) * side for side in picture.size)
    picture = picture.resize((SIDE, SIDE), box=(left, top, right, bottom))
    if rng.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    gains = np.array([rng.uniform(0.85, 1) for _ in range(3)])
    return Image.fromarray((np.asarray(picture) * gains).round().astype(np.uint8))


# ------------------------------------------------------------------ speed


def speed(options: Options, paths: list[Path], keep: Keep) -> None:
    """Everybody in turns, round after round."""
    engine = {"reuse": False, "max_requests": max(options.in_flight)} | options.engine
    gpu = Setting(device=options.device, dtype=options.dtype, engine=engine)
    cpu = Setting(device="cpu", dtype="float32", engine={"reuse": False})
    few = paths[: options.cpu_pictures]
    facts: dict[str, Any] = {}
    record: dict[str, Any] = {"pictures": len(paths), "cpu_pictures": len(few), "facts": facts}
    measured = Rounds()

    def take(name: str, subject: Subject, *call: Any) -> None:
        who = name.partition(",")[0]
        if who not in facts and who not in measured.errors:
            facts[who] = measured.ask(who, subject, "facts")
        measured.take(name, subject, "captions", *call)
        keep(record | measured.known(len(few)))

    with (
        Subject(Ours, gpu, seconds=options.seconds) as ours,
        Subject(Ours, cpu, seconds=options.seconds) as ours_on_cpu,
        Subject(Peer, options.device, options.dtype, seconds=options.seconds) as peer,
    ):
        record["prompt_tokens"] = prompt = ours.call("prompt_tokens", paths[0])
        text_tokens = prompt - (SIDE // 28) ** 2
        for number in range(options.rounds + 1):  # the first compiles and records
            every = paths if number else paths[: options.first_pictures]
            for in_flight in options.in_flight:
                take(f"k3vl, {in_flight} in flight", ours, every, in_flight)
            if not number:
                if not measured.first:
                    raise Failed("no captions to measure the others by")
                made = next(iter(measured.first.values()))["new_tokens"]
                record["mean_new_tokens"] = made / len(every)
                record["peer_new_tokens"] = new = round(made / len(every))
            for batch in options.peer_batches:
                some = paths[: batch * options.peer_calls]
                take(f"transformers, batch {batch}", peer, some, batch, text_tokens, new)
            name = f"k3vl on the CPU, {options.cpu_in_flight} in flight"
            take(name, ours_on_cpu, few, options.cpu_in_flight)
            print(f"round {number} of {options.rounds}", flush=True)


# ------------------------------------------------------------------ equality


COMPANY = f"{IN_COMPANY} in flight"
_ONE_BY_ONE = 3
"""Of so many questions one is asked alone: alone every step is bound by its launches."""
_AT_ONCE = 4
"""Engines that answer at a time; nothing is measured here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How an engine is asked.

    Attributes:
        engine: its fields.
        in_flight: questions at once.
        passes: over all of them; the last one counts.
        every: which of the questions.
    """

    engine: dict[str, Any]
    in_flight: int = IN_COMPANY
    passes: int = 1
    every: int = _ONE_BY_ONE


_SEVERAL = {"reuse": False, "max_requests": IN_COMPANY}
WAYS = {
    COMPANY: Way(engine=_SEVERAL, every=1),
    "alone": Way(engine={"reuse": False, "exact_decode": True}, in_flight=1),
    f"{COMPANY}, exact_decode": Way(engine={**_SEVERAL, "exact_decode": True}),
    "warm": Way(engine={"reuse": True}, in_flight=1, passes=2),
}


def equality(options: Options, paths: list[Path], keep: Keep) -> None:
    """Answers of engines that differ in device, dtype, company or what they keep."""
    said: dict[str, Any] = {}
    errors: dict[str, str] = {}
    compared: dict[str, Any] = {}
    kinds = {f"GPU {dtype}": (options.device, dtype) for dtype in options.dtypes}
    kinds["CPU float32"] = ("cpu", "float32")
    pairs = [(f"{kind}, alone", f"{kind}, {way}") for kind in kinds for way in WAYS]
    pairs = [(a, b) for a, b in pairs if a != b]
    pairs += [
        (f"CPU float32, {way}", f"{kind}, {way}")
        for kind in kinds
        for way in (COMPANY, "alone")
        if kind != "CPU float32"
    ]
    tokenizer = load_tokenizer(checkpoint_path("demo"))

    def text_of(ids: Any) -> str:
        return b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")

    def ask(kind: str, way: Way) -> tuple[Any, float]:
        begin, (device, dtype) = time.perf_counter(), kinds[kind]
        setting = Setting(device=device, dtype=dtype, engine=way.engine)
        with Subject(Ours, setting, seconds=options.seconds) as subject:
            call = options.items, way.in_flight, way.passes, way.every
            return subject.call("answers", *call)[-1], time.perf_counter() - begin

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # What tells most comes first, of every kind.
        runs = {
            pool.submit(ask, kind, way): f"{kind}, {name}"
            for name, way in WAYS.items()
            for kind in kinds
        }
        for run in as_completed(runs):
            name = runs[run]
            try:
                said[name], seconds = run.result()
            except Failed as exc:
                errors[name] = str(exc)
                print(f"{name}: {exc}", flush=True)
            else:
                print(f"{name}: {seconds:.0f} s", flush=True)
            for a, b in pairs:
                pair = f"{a} = {b}"
                if pair not in compared and a in said and b in said:
                    compared[pair] = compare(*in_both(said[a], said[b]), text_of)
                    print(f"{pair}: {in_words(compared[pair])}", flush=True)
            keep({"errors": errors, "compared": compared})


def in_both(first: dict[str, Any], second: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Answers to the questions of the one that was asked fewer, which the other was asked too."""
    fewer = min(first, second, key=len)
    return {key: first[key] for key in fewer}, {key: second[key] for key in fewer}


def in_words(found: dict[str, Any]) -> str:
    """A comparison."""
    return (
        f"{found['same_tokens']} of {found['items']} the same, {found['same_bits']} to the bit; "
        f"log-probabilities differ by {found['largest_difference']:.2e} at most"
    )


# ------------------------------------------------------------------ profile


def profile(options: Options, paths: list[Path], keep: Keep) -> None:
    """Device and engine thread, for each number in flight."""
    engine = {"reuse": False, "max_requests": max(options.in_flight)} | options.engine
    setting = Setting(device=options.device, dtype=options.dtype, engine=engine)
    found = []
    with Subject(Ours, setting, seconds=options.seconds) as ours:
        for in_flight in options.in_flight:
            ours.call("captions", paths, in_flight)  # compiles and records
            found.append(ours.call("profile", paths, in_flight, options.profile_seconds))
            keep({"by_in_flight": found})
            share = found[-1]["device"]["busy_share"]
            print(f"{in_flight} in flight: the device is busy {100 * share:.0f} % of the time")


# ------------------------------------------------------------------ record


def provenance() -> dict[str, Any]:
    """Commit, hardware, versions."""
    has_gpu = torch.cuda.is_available()
    return {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
        ).stdout.strip(),
        "hardware": {
            "device": torch.cuda.get_device_name() if has_gpu else "none",
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": psutil.getloadavg(),
        },
        "versions": {name: installed(name) for name in VERSIONS}
        | {"cuda": torch.version.cuda, "python": platform.python_version()},
    }


def processor() -> str:
    """As the system calls it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def installed(name: str) -> str | None:
    """A package's version, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def engine_field(text: str) -> tuple[str, Any]:
    """``name=value`` of the command line; the value as JSON."""
    name, _, value = text.partition("=")
    return name, json.loads(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="on a CPU, small")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--pictures", type=int)
    parser.add_argument("--first-pictures", type=int)
    parser.add_argument("--cpu-pictures", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--items", type=int)
    parser.add_argument("--in-flight", type=int, nargs="+")
    parser.add_argument("--peer-batches", type=int, nargs="+")
    parser.add_argument("--seconds", type=float, help="that one call of a subject may take")
    parser.add_argument("--engine", type=engine_field, nargs="+", metavar="FIELD=VALUE")
    parser.add_argument("--json", type=Path)
    arguments = vars(parser.parse_args())
    smoke, only, record_path = (arguments.pop(name) for name in ("smoke", "only", "json"))
    given = {name: value for name, value in arguments.items() if value is not None}
    if "engine" in given:
        given["engine"] = dict(given["engine"])
    options = replace_fields(SMOKE if smoke else Options(), given)
    path = record_path or (None if smoke else RECORD)
    record = json.loads(path.read_text()) if path and path.exists() and only != PARTS else {}
    with tempfile.TemporaryDirectory() as folder:
        paths = make_pictures(Path(folder), options.pictures)
        for name in only:
            keep = keeper(record, name, path)
            try:
                {"speed": speed, "equality": equality, "profile": profile}[name](
                    options, paths, keep
                )
            except Failed as exc:
                print(exc, flush=True)
                keep({"errors": record[name].get("errors", {}) | {name: str(exc)}})
    if "speed" in only:
        print("\n".join(in_short(record["speed"])))
    if smoke:
        errors = {name: record[name].get("errors") for name in only}
        assert not any(errors.values()), errors


def keeper(record: dict[str, Any], name: str, path: Path | None) -> Keep:
    """Puts what a part knows into the record, and that into its file."""
    about, begin = provenance(), time.perf_counter()
    known: dict[str, Any] = {}

    def keep(found: dict[str, Any]) -> None:
        known.update(found)
        record[name] = about | {"part_seconds": time.perf_counter() - begin} | known
        if path:
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    keep({})
    return keep


def replace_fields(options: Options, given: dict[str, Any]) -> Options:
    """Options with some fields of the command line; lists become tuples."""
    tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return replace(options, **tuples)


if __name__ == "__main__":
    main()
