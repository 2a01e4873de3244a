"""Who captions in ``gpu_captions.py``: this package's pipeline, and ``transformers``' generate().

Each runs in a process of its own (:class:`Subject`), which sleeps while another is measured.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import threading
import time
import traceback
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

import k3vl.load
from benchmarks.cpu_speed import PEER_IMAGE_ID, kimi_k25_like_the_demo, now
from benchmarks.gpu_equality import Recorder, questions_about_pictures
from benchmarks.gpu_profile import Sampler, device_time
from k3vl.app.evaluation.ask import LocalAsked
from k3vl.app.evaluation.run import ask_all
from k3vl.lm.engine import EngineConfig
from k3vl.load import REUSE_PAGE
from k3vl.pipeline import Pipeline, Reply
from k3vl.types import MediaPart, Message, SamplingParams, TextPart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

    from k3vl.types import Request

PROMPT = "Describe the image."
SAMPLING = SamplingParams(max_tokens=64)
LONGEST_ERROR = 2000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a pipeline is to run.

    Attributes:
        device, dtype: of the model.
        engine: fields of :class:`EngineConfig` that differ from its defaults.
    """

    device: str
    dtype: str
    engine: dict[str, Any] = field(default_factory=dict)

    def pipeline(self) -> Pipeline:
        """Open the demo model so.

        On a CPU the engine has the threads and the pages that it gets without any settings.
        """
        fields: dict[str, Any] = {}
        if self.device == "cpu":
            fields = {"num_threads": 1, "page_size": REUSE_PAGE}
        where = torch.device(self.device), DTYPES[self.dtype]
        k3vl.load.choose_device = lambda device: where  # float32 is not offered on a GPU
        return Pipeline.load(device=self.device, engine=EngineConfig(**fields | self.engine))


class Ours:
    """The pipeline: from picture files to texts."""

    def __init__(self, setting: Setting) -> None:
        self.pipeline = setting.pipeline()

    def facts(self) -> dict[str, Any]:
        """What runs, as JSON."""
        engine = self.pipeline.backend._engine
        kernels = engine.model.kernels
        return {
            "kernels": f"{kernels.name}, because {kernels.reason}",
            "threads": torch.get_num_threads() if engine.config.num_threads is None else 1,
            "engine": asdict(engine.config),
        }

    def prompt_tokens(self, path: Path) -> int:
        """Of one picture with its question."""
        return len(self.pipeline.prepare(self._request(path)).prompt.token_ids)

    def captions(self, paths: list[Path], in_flight: int) -> dict[str, Any]:
        """Caption all; seconds, where they went, and what was said."""
        before = self.pipeline.stats()
        begin = now()
        replies, times = [], [begin[0]]
        for reply in self.pipeline.replies(map(self._request, paths), in_flight=in_flight):
            replies.append(reply)
            times.append(now()[0])
        clock, process = (now() - begin).tolist()
        after = self.pipeline.stats()
        said = [reply for reply in replies if isinstance(reply, Reply)]
        assert len(said) == len(paths), next(r for r in replies if not isinstance(r, Reply))
        stages = {k: v - before.stage_seconds[k] for k, v in after.stage_seconds.items()}
        idle = after.idle_seconds - before.idle_seconds
        steps = after.steps - before.steps
        in_stages = sum(stages.values()) - stages["encode"]  # which is beside the others
        return {
            "seconds": clock,
            "process_seconds": process,
            "captions_per_second": len(paths) / clock,
            "steady_captions_per_second": steady(times, in_flight),
            "captions": len(paths),
            "new_tokens": sum(reply.usage.completion_tokens for reply in said),
            "stage_seconds": stages,
            "engine_between_seconds": clock - in_stages - idle,
            "engine_idle_seconds": idle,
            "steps": steps,
            "mean_running": (after.mean_running * after.steps - before.mean_running * before.steps)
            / max(1, steps),
            "preemptions": after.preemptions - before.preemptions,
            "texts": [reply.content for reply in said],
        }

    def profile(self, paths: list[Path], in_flight: int, seconds: float) -> dict[str, Any]:
        """What device and engine thread do, in the middle of captioning."""
        stop = threading.Event()

        def caption() -> None:
            while not stop.is_set():
                self.captions(paths, in_flight)

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(caption)
            time.sleep(seconds / 2)  # past the first prompts
            found = {"in_flight": in_flight, "device": device_time(seconds)}
            with Sampler("k3vl-engine") as sampler:
                time.sleep(seconds)
            stop.set()
            running.result()
        return found | {"engine_thread": sampler.report()}

    def answers(self, count: int, in_flight: int, passes: int, every: int) -> list[dict[str, Any]]:
        """Tokens and log-probabilities of every such question, for each pass over all of them."""
        questions = questions_about_pictures(count)[::every]
        asked, backend = LocalAsked(self.pipeline), self.pipeline.backend
        found = []
        for _ in range(passes):
            self.pipeline.backend = recorder = Recorder(backend)
            results = list(ask_all(questions, asked, blanks=0, in_flight=in_flight))
            self.pipeline.backend = backend
            errors = [result.error for result in results if result.error is not None]
            assert not errors, errors[0]
            found.append(recorder.answers)
        return found

    def close(self) -> None:
        """End the engine."""
        self.pipeline.close()

    def _request(self, path: Path) -> Request:
        message = Message(role="user", parts=(MediaPart("image", path), TextPart(PROMPT)))
        return self.pipeline.request([message], sampling=SAMPLING)


def steady(times: list[float], in_flight: int) -> float:
    """Replies a second without the first and the last so many, if others are left.

    Args:
        times: the beginning, then every reply's.
        in_flight: requests at once.
    """
    cut = in_flight if len(times) > 3 * in_flight else 0
    first, last = cut, len(times) - 1 - cut
    return float((last - first) / (times[last] - times[first]))


class Peer:
    """Kimi K2.5 of the demo model's size, by ``generate()`` over batches of pictures.

    It is spared the tokenizer: prompts are given as numbers, answers are left as numbers. Batches
    of pictures are prepared on threads while others are generated.
    """

    def __init__(self, device: str, dtype: str) -> None:
        self.device, self.dtype = device, DTYPES[dtype]
        self.model = kimi_k25_like_the_demo().to(device, self.dtype)
        self.prepare, self.image_processor = image_processor()

    def facts(self) -> dict[str, Any]:
        """What runs, as JSON."""
        config = self.model.config
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "attention": config.text_config._attn_implementation,
            "experts": getattr(config.text_config, "_experts_implementation", None),
            "image_processor": self.image_processor,
        }

    def captions(self, paths: list[Path], batch: int, text_tokens: int, new: int) -> dict[str, Any]:
        """Caption all; seconds."""
        begin = now()
        made = 0
        batches = (paths[i : i + batch] for i in range(0, len(paths), batch))
        for pixels, grids in ahead(self._load, batches):
            made += len(self._generate(pixels, grids, text_tokens, new))
        clock, process = (now() - begin).tolist()
        assert made == len(paths)
        return {
            "seconds": clock,
            "process_seconds": process,
            "captions_per_second": len(paths) / clock,
        }

    def close(self) -> None:
        """Nothing runs."""

    def _load(self, paths: list[Path]) -> tuple[torch.Tensor, torch.Tensor]:
        pictures = []
        for path in paths:
            with Image.open(path) as opened:
                pictures.append(opened.convert("RGB"))
        return self.prepare(pictures)

    @torch.inference_mode()
    def _generate(
        self, pixels: torch.Tensor, grids: torch.Tensor, text_tokens: int, new: int
    ) -> list[list[int]]:
        images = grids.prod(-1) // 4
        assert (images == images[0]).all(), "pictures of one size: nothing is padded"
        text = torch.arange(100, 100 + text_tokens)
        image = torch.full((int(images[0]),), PEER_IMAGE_ID)
        row = torch.cat([text[: text_tokens // 2], image, text[text_tokens // 2 :]])
        ids = row.repeat(len(grids), 1).to(self.device)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=pixels.to(self.device, self.dtype),
            image_grid_thw=grids.to(self.device),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
        )
        assert out.shape == (len(grids), len(row) + new)
        return out[:, len(row) :].tolist()


def image_processor() -> tuple[Callable[[list[Image.Image]], Any], str]:
    """The peer's own, which needs torchvision; or else the least that has the same result."""
    try:
        from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor

        theirs = Kimi_K25ImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    except ImportError:
        return patches_of, "none: torchvision is missing; decoded, normalised and cut by torch"

    def prepare(pictures: list[Image.Image]) -> Any:
        found = theirs(images=pictures, return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"].reshape(-1, 3)

    return prepare, "Kimi_K25ImageProcessor"


def patches_of(pictures: list[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, 3, 14, 14] float32 patches in -1..1 and [P, 3] grids; nothing is resized."""
    patches, grids = [], []
    for picture in pictures:
        rows, columns = picture.height // 14, picture.width // 14
        pixels = torch.from_numpy(np.array(picture)).float().div_(127.5).sub_(1)
        cut = pixels.view(rows, 14, columns, 14, 3).permute(0, 2, 4, 1, 3)
        patches.append(cut.reshape(-1, 3, 14, 14))
        grids.append((1, rows, columns))
    return torch.cat(patches), torch.tensor(grids)


def ahead(load: Callable[[Any], Any], items: Iterable[Any], *, threads: int = 8) -> Iterator[Any]:
    """Results in order, made on threads, twice as many in the works as there are threads."""
    rest = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        works = deque(pool.submit(load, item) for item in itertools.islice(rest, 2 * threads))
        while works:
            yield works.popleft().result()
            works.extend(pool.submit(load, item) for item in itertools.islice(rest, 1))


# ------------------------------------------------------------------ processes


class Failed(Exception):  # noqa: N818 - what it says
    """A subject's process could not do what was asked; the text ends its traceback."""


def serve(make: Callable[..., Any], arguments: tuple[Any, ...], connection: Connection) -> None:
    """Make a subject and call its methods, until told to stop."""
    subject = None
    while (call := connection.recv()) is not None:
        try:
            subject = make(*arguments) if subject is None else subject
            name, args = call
            connection.send((True, getattr(subject, name)(*args)))
        except Exception:  # noqa: BLE001 - whatever it was, it goes into the record
            connection.send((False, traceback.format_exc()[-LONGEST_ERROR:]))
    if subject is not None:
        subject.close()


class Subject:
    """One of the above in a process of its own, made at the first call.

    Args:
        seconds: a call that takes longer, making it included, ends the process.
    """

    def __init__(
        self, make: Callable[..., Any], *arguments: Any, seconds: float | None = None
    ) -> None:
        self._seconds = seconds
        context = multiprocessing.get_context("spawn")
        self._connection, far = context.Pipe()
        self._process = context.Process(target=serve, args=(make, arguments, far), daemon=True)
        self._process.start()
        far.close()

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        with contextlib.suppress(OSError):  # it has died, and whoever asked it last has heard so
            self._connection.send(None)
        self._process.join()

    def call(self, name: str, *args: Any) -> Any:
        """Run a method there.

        Raises:
            Failed: it failed, took too long, or its process died.
        """
        try:
            self._connection.send((name, args))
            if not self._connection.poll(self._seconds):
                self._process.kill()
                raise Failed(f"{name}: more than {self._seconds:g} s")
            fine, value = self._connection.recv()
        except (EOFError, OSError):
            raise Failed(f"{name}: the process died") from None
        if not fine:
            raise Failed(value)
        return value
