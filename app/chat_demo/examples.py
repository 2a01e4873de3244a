"""Questions that run at a click on the demo model: the pictures in the repository's ``examples/``.

An installed package comes without that folder, and then without examples.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TITLES = {
    "fox-kite-bus.png": "What is in it?",
    "three-strawberries.jpg": "Count them",
    "tall-rocket-above-turtle.png": "Which is above?",
    "owl-transparent.png": "Transparent picture",
    "sign.jpg": "Read a word",
    "sailboat.mp4": "Watch a clip",
}


def example_folder() -> Path:
    """Where the examples are, in a checkout."""
    return Path(__file__).resolve().parents[2] / "examples"


def chat_examples(folder: Path) -> list[dict[str, Any]]:
    """Examples as a chatbot takes them; empty when the folder is not there."""
    labels = folder / "labels.jsonl"
    if not labels.is_file():
        return []
    records = map(json.loads, labels.read_text(encoding="utf-8").splitlines())
    prompts = {record["file"]: record["prompt"] for record in records}
    return [
        {
            "text": prompts[name],
            "display_text": f"{title}\n{prompts[name]}",
            "files": [str(folder / name)],
        }
        for name, title in _TITLES.items()
        if name in prompts and (folder / name).is_file()
    ]
