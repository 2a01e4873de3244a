"""The embedded engine on a CPU against ``transformers``, side by side in one run.

    python benchmarks/cpu_speed.py [--rounds 5] [--pictures 64] [--json benchmarks/cpu_speed.json]

The peer is Kimi K2.5 of ``transformers`` with the demo model's dimensions (layers, widths, experts,
vision tower, vocabulary) and random weights; the demo model itself is of an architecture that
``transformers`` does not have. Both run float32 with the same numbers of tokens: a prompt of 40
text tokens and, for a caption, the 64 tokens of a picture of 224 by 224 pixels; 12 new tokens.

- Decode at batch 1: 72 new tokens less 8 new tokens, divided by 64.
- Captions a second, one at a time. Ours reads the pictures from files; the peer is handed pixels.
- Captions a second of ours with 16 requests in flight. ``generate()`` takes no such stream.

Each library has a process of its own, which sleeps while the other is measured; rounds alternate.
Ours runs the language model on one thread and, where there is another core, the vision tower on a
second, as it does when it is loaded; the peer runs on as many as torch takes (OMP_NUM_THREADS says
otherwise).
``transformers`` must be installed; nothing else here needs it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from PIL import Image

import k3vl
from k3vl.checkpoint import CheckpointReader
from k3vl.config import checkpoint_path, load_config, load_media_config
from k3vl.kernels.choice import choose
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.weights import load_model
from k3vl.load import choose_encoding
from k3vl.types import MediaSpan, Prompt, SamplingParams
from k3vl.vision.encoder import VisionEncoder
from k3vl.vision.processor import MediaProcessor
from k3vl.vision.weights import load_vision

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
TEXT = list(range(100, 140))
NEW = 12
SIDE, IMAGE_TOKENS = 224, 64
PEER_IMAGE_ID = 10


def now() -> np.ndarray:
    """Seconds by the clock and of processor time: on a busy machine the latter tell more."""
    return np.array([time.perf_counter(), time.process_time()])


class Ours:
    """The demo model in an engine that stops at nothing but the length."""

    def __init__(self, pictures: list[Path]) -> None:
        torch.set_num_threads(1)
        directory = checkpoint_path("demo")
        config, media = load_config(directory), load_media_config(directory)
        reader, dtype = CheckpointReader(directory), torch.float32
        kernels = choose(CPU, dtype)
        model = load_model(reader, config.text, kernels, dtype=dtype, device=CPU)
        vision = load_vision(reader, config.vision, media, dtype=dtype, kernels=kernels.vision)
        encoder = VisionEncoder(*vision)
        settings = EngineConfig(reuse=False, num_threads=1)
        self.engine = Engine(
            model, encoder, settings, stop_ids=(), encoding=choose_encoding(CPU, settings)
        )
        self.processor = MediaProcessor(media)
        self.pad, self.pictures, self.number = config.media_placeholder_token_id, pictures, 0

    def decode(self) -> np.ndarray:
        """Seconds a token."""
        times = []
        for new in (8, 72):
            begin = now()
            self._run([Prompt(token_ids=tuple(TEXT), spans=())], new, 1)
            times.append(now() - begin)
        return (times[1] - times[0]) / 64

    def captions(self) -> np.ndarray:
        """Seconds a caption, one at a time."""
        begin = now()
        for path in self.pictures:
            self._run([self._prompt(path)], NEW, 1)
        return (now() - begin) / len(self.pictures)

    def captions_in_flight(self) -> np.ndarray:
        """Seconds a caption with 16 at once."""
        begin = now()
        self._run([self._prompt(path) for path in self.pictures], NEW, 16)
        return (now() - begin) / len(self.pictures)

    def stages(self) -> dict[str, float]:
        """Seconds by the clock of every stage of a caption, over 8 captions one at a time."""
        before = dict(self.engine.times.seconds)
        begin = now()
        prompts = [self._prompt(path) for path in self.pictures[:8]]
        reading = float((now() - begin)[0])
        for prompt in prompts:
            self._run([prompt], NEW, 1)
        after = self.engine.times.seconds
        return {"read": reading / 8} | {k: (after[k] - before[k]) / 8 for k in after}

    def close(self) -> None:
        """End the encoder's thread."""
        self.engine.close()

    def _prompt(self, path: Path) -> Prompt:
        (item,) = self.processor.process(path).items
        assert item.num_tokens == IMAGE_TOKENS
        ids = (*TEXT[:20], *[self.pad] * IMAGE_TOKENS, *TEXT[20:])
        return Prompt(token_ids=ids, spans=(MediaSpan(20, item),))

    def _run(self, prompts: list[Prompt], new: int, in_flight: int) -> None:
        waiting, made = list(prompts), 0

        def sink(token: Any) -> None:
            nonlocal made
            made += 1

        while waiting or self.engine.jobs:
            while waiting and len(self.engine.jobs) < in_flight:
                self.number += 1
                sampling = SamplingParams(max_tokens=new)
                self.engine.add(self.number, waiting.pop(0), sampling, sink)
            self.engine.step()
        assert made == new * len(prompts)


def kimi_k25_like_the_demo() -> Any:
    """Kimi K2.5 of ``transformers``, as large as the demo model, with random float32 weights."""
    from transformers import DeepseekV3Config
    from transformers.models.kimi_k25 import modeling_kimi_k25 as modeling
    from transformers.models.kimi_k25.configuration_kimi_k25 import (
        Kimi_K25Config,
        Kimi_K25VisionConfig,
    )

    torch.manual_seed(0)
    config = load_config(checkpoint_path("demo"))
    t, v = config.text, config.vision
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = DeepseekV3Config(
        vocab_size=t.vocab_size,
        hidden_size=t.hidden_size,
        intermediate_size=t.intermediate_size,
        moe_intermediate_size=t.moe_intermediate_size,
        num_hidden_layers=t.num_hidden_layers,
        num_attention_heads=t.num_attention_heads,
        num_key_value_heads=t.num_attention_heads,
        n_shared_experts=t.num_shared_experts,
        n_routed_experts=t.num_experts,
        num_experts_per_tok=t.num_experts_per_token,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=t.kv_lora_rank,
        q_lora_rank=t.q_lora_rank,
        qk_rope_head_dim=t.qk_rope_head_dim,
        qk_nope_head_dim=t.qk_nope_head_dim,
        v_head_dim=t.v_head_dim,
        max_position_embeddings=t.max_position_embeddings,
        **ids,
    )
    vision = Kimi_K25VisionConfig(
        patch_size=v.patch_size,
        pos_emb_height=v.init_pos_emb_height,
        pos_emb_width=v.init_pos_emb_width,
        num_attention_heads=v.vt_num_attention_heads,
        num_hidden_layers=v.vt_num_hidden_layers,
        hidden_size=v.vt_hidden_size,
        intermediate_size=v.vt_intermediate_size,
    )
    whole = Kimi_K25Config(
        text_config=text,
        vision_config=vision,
        projection_hidden_size=t.hidden_size,
        image_token_id=PEER_IMAGE_ID,
        video_token_id=11,
        vision_start_token_id=12,
        vision_end_token_id=13,
        tie_word_embeddings=False,
    )
    return modeling.Kimi_K25ForConditionalGeneration(whole).eval()


class Peer:
    """Kimi K2.5 of the same dimensions with random weights, by ``generate()``."""

    def __init__(self, pictures: list[Path]) -> None:
        self.model = kimi_k25_like_the_demo()
        self.count = len(pictures)

    def close(self) -> None:
        """Nothing runs."""

    def decode(self) -> np.ndarray:
        """Seconds a token."""
        times = []
        for new in (8, 72):
            begin = now()
            self._generate(torch.tensor([TEXT]), new)
            times.append(now() - begin)
        return (times[1] - times[0]) / 64

    def captions(self) -> np.ndarray:
        """Seconds a caption, one at a time."""
        side = SIDE // 14
        image = torch.full((IMAGE_TOKENS,), PEER_IMAGE_ID)
        ids = torch.cat([torch.tensor(TEXT[:20]), image, torch.tensor(TEXT[20:])])
        begin = now()
        for _ in range(self.count):
            pixels = torch.randn(side * side, 3, 14, 14)
            grid = torch.tensor([[1, side, side]])
            self._generate(ids.unsqueeze(0), NEW, pixel_values=pixels, image_grid_thw=grid)
        return (now() - begin) / self.count

    @torch.inference_mode()
    def _generate(self, ids: torch.Tensor, new: int, **media: torch.Tensor) -> None:
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            **media,
        )
        assert out.shape[1] == ids.shape[1] + new


def serve(kind: type[Ours | Peer], pictures: list[Path], connection: Connection) -> None:
    """Measure what is asked for, until told to stop."""
    subject = kind(pictures)
    connection.send(torch.get_num_threads())
    while (name := connection.recv()) is not None:
        connection.send(getattr(subject, name)())
    subject.close()


class Library:
    """One library in a process of its own."""

    def __init__(self, kind: type[Ours | Peer], pictures: list[Path]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, far = context.Pipe()
        self._process = context.Process(target=serve, args=(kind, pictures, far), daemon=True)
        self._process.start()
        self.threads = self._connection.recv()

    def measure(self, name: str) -> Any:
        """Seconds, by what the process runs."""
        self._connection.send(name)
        return self._connection.recv()

    def close(self) -> None:
        """End the process."""
        self._connection.send(None)
        self._process.join()


def make_pictures(folder: Path, count: int) -> list[Path]:
    """Crops of an example, as PNG."""
    paths = []
    with Image.open(ROOT / "examples" / "fox-kite-bus.png") as opened:
        whole = opened.convert("RGB")
    for number in range(count):
        box = (number % 8, number // 8, whole.width - 10 + number % 8, whole.height - 10)
        path = folder / f"{number:03d}.png"
        whole.resize((SIDE, SIDE), box=box).save(path)
        paths.append(path)
    return paths


def compare(seconds: dict[str, list[list[float]]], which: int) -> dict[str, float]:
    """Medians as rates, and ours over the peer's, printed."""
    rates = {
        name: 1 / statistics.median(times[which] for times in values)
        for name, values in seconds.items()
    }
    for name in ("decode", "captions", "captions_in_flight"):
        theirs = rates[f"transformers_{name.removesuffix('_in_flight')}"]
        rates[f"{name}_ratio"] = rates[f"k3vl_{name}"] / theirs
    unit = "by the clock", "of processor time"
    for name, rate in rates.items():
        print(f"{name}, {unit[which]}: {rate:.2f}" + ("" if "ratio" in name else " a second"))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pictures", type=int, default=64)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "cpu_speed.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pictures = make_pictures(Path(folder), options.pictures)
        ours, peer = Library(Ours, pictures), Library(Peer, pictures)
        for library in (ours, peer):  # compilation and first allocations
            library.measure("decode")
        ours.measure("stages")
        seconds: dict[str, list[list[float]]] = {}
        for _ in range(options.rounds):
            for name in ("decode", "captions", "captions_in_flight"):
                seconds.setdefault(f"k3vl_{name}", []).append(ours.measure(name).tolist())
                if name != "captions_in_flight":
                    found = peer.measure(name).tolist()
                    seconds.setdefault(f"transformers_{name}", []).append(found)
        stages = ours.measure("stages")
        threads = {"k3vl": ours.threads, "transformers": peer.threads}
        for library in (ours, peer):
            library.close()
    summary = {unit: compare(seconds, which) for which, unit in enumerate(("clock", "processor"))}
    print("a caption:", ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in stages.items()))
    record = {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
        ).stdout.strip(),
        "hardware": {
            "processor": platform.processor() or platform.machine(),
            "cores": psutil.cpu_count(),
            "load_average": psutil.getloadavg(),
            "threads": threads,
        },
        "versions": {
            "k3vl": k3vl.__version__,
            "torch": torch.__version__,
            "transformers": _version("transformers"),
            "numba": _version("numba"),
            "python": platform.python_version(),
        },
        "per_second": summary,
        "seconds_of_a_caption": stages,
        "seconds_by_clock_and_of_processor": seconds,
    }
    options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


if __name__ == "__main__":
    main()
