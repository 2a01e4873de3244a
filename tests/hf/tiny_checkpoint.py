"""Tiny random checkpoints on disk, with the demo's vocabulary."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import TYPE_CHECKING

from k3vl.checkpoint_writer import save_checkpoint
from k3vl.config import DEMO_CHECKPOINT, TextConfig
from k3vl.lm.weights import stored_tensors
from k3vl.vision.weights import placements
from tests.tiny import TINY, tiny_model
from tests.vision.tiny_vision import TINY as TINY_VISION
from tests.vision.tiny_vision import tiny_models

if TYPE_CHECKING:
    from pathlib import Path

    import torch

TEXT = dataclasses.replace(TINY, vocab_size=4096)
VISION = dataclasses.replace(TINY_VISION, text_hidden_size=TEXT.hidden_size)
VOCABULARY = ("tokenizer.json", "tokenizer_config.json")


def config_json(text: TextConfig = TEXT) -> dict[str, object]:
    """A ``config.json`` with the demo's special ids."""
    demo = json.loads((DEMO_CHECKPOINT / "config.json").read_text())
    ids = {name: demo[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "model_type": "kimi_k3",
        "text_config": {"model_type": "kimi_linear", **dataclasses.asdict(text)},
        "vision_config": dataclasses.asdict(VISION),
        "media_placeholder_token_id": demo["media_placeholder_token_id"],
        **ids,
    }


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    tower, projector = tiny_models(VISION)
    places = placements(tower, projector)
    return stored_tensors(tiny_model(TEXT, seed)) | {n: p.target for n, p in places.items()}


def write_tiny(directory: Path, seed: int = 0) -> Path:
    media = json.loads((DEMO_CHECKPOINT / "preprocessor_config.json").read_text())
    files = {
        "config.json": config_json(),
        "preprocessor_config.json": media,
        "generation_config.json": {"eos_token_id": [2, 1], "pad_token_id": 11},
    }
    save_checkpoint(directory, tensors(seed), json_files=files)
    for name in VOCABULARY:
        shutil.copyfile(DEMO_CHECKPOINT / name, directory / name)
    return directory
