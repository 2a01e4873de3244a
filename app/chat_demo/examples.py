"""Questions that run at a click on the demo model: the pictures in the repository's ``examples/``.

An installed package comes without that folder, and then without examples.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradio.components.chatbot import ExampleMessage

_SHOWN = (
    "fox-kite-bus.png",
    "three-strawberries.jpg",
    "tall-rocket-above-turtle.png",
    "owl-transparent.png",
    "sign.jpg",
    "sailboat.mp4",
)


def example_folder() -> Path:
    """Where the examples are, in a checkout."""
    return Path(__file__).resolve().parents[2] / "examples"


def chat_examples(folder: Path) -> list[ExampleMessage]:
    """Examples as a chatbot takes them; empty when the folder is not there."""
    labels = folder / "labels.jsonl"
    if not labels.is_file():
        return []
    records = map(json.loads, labels.read_text(encoding="utf-8").splitlines())
    prompts = {record["file"]: record["prompt"] for record in records}
    return [
        {"text": prompts[name], "files": [str(folder / name)]}
        for name in _SHOWN
        if name in prompts and (folder / name).is_file()
    ]
