"""The card, the figures, the threshold and the weights belong together."""

import hashlib
import itertools
import json
from pathlib import Path

import pytest

from k3vl.demo import card
from k3vl.demo.heldout import QUICK
from k3vl.demo.pack import CHECKPOINT

FIGURES = Path(__file__).resolve().parents[2] / "benchmarks" / "demo_accuracy.json"


@pytest.fixture(scope="module")
def figures():
    return json.loads(FIGURES.read_text("utf-8"))


def test_the_committed_card_says_what_was_measured(figures):
    quick = len((QUICK / "labels.jsonl").read_text("utf-8").splitlines())
    assert card.CARD.read_text("utf-8") == card.render(figures, quick)


def test_the_figures_are_of_the_committed_weights(figures):
    digest = hashlib.sha256((CHECKPOINT / "model.safetensors").read_bytes())
    assert digest.hexdigest() == figures["weights_sha256"]


def test_the_threshold_in_force_is_the_measured_one(figures):
    config = json.loads((CHECKPOINT / "generation_config.json").read_text("utf-8"))
    assert config["min_confidence"] == figures["confidence"]["threshold"]


def test_every_row_of_the_figures_is_in_the_card(figures):
    text = card.render(figures, 1)
    for row in figures["rows"]:
        assert f"| {row['split']}" in text
    assert "Not a photo captioner" in text


def test_the_rows_in_the_readme_are_rows_of_the_card():
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")
    known = _table(card.CARD.read_text("utf-8"), "| questions | n |")
    shown = _table(readme, "| held-out questions | n |")
    assert shown
    assert [row for row in shown if row not in known] == []
    assert f"All {len(known)} rows" in readme


def _table(text, head):
    """The rows below the line that begins so and its rule."""
    lines = iter(text.splitlines())
    next(line for line in lines if line.startswith(head))
    next(lines)
    return list(itertools.takewhile(lambda line: line.startswith("|"), lines))
