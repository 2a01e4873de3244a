"""Tokenizers and golden vectors that several files need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from k3vl.xtml import Tokenizer, load_tokenizer
from k3vl.xtml.tiktoken_model import load_tiktoken_model

ROOT = Path(__file__).resolve().parents[2]

# The first example loads a vocabulary, and machines are shared: time is not what is tested.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def k3_path() -> Path:
    named = os.environ.get("K3VL_TIKTOKEN_MODEL")
    places = [Path(named)] if named else [ROOT.parent / "shared" / "golden" / "tiktoken.model"]
    for place in places:
        if place.is_file():
            return place
    pytest.skip("no tiktoken.model; set K3VL_TIKTOKEN_MODEL")


@pytest.fixture(scope="session")
def k3(k3_path: Path) -> Tokenizer:
    return load_tiktoken_model(k3_path)


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return load_tokenizer(ROOT / "tests" / "golden" / "sglang_tiny")
