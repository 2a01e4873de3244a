"""Tokenizers and golden vectors that several files need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from k3vl.xtml import Tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def k3_file() -> Path | None:
    named = os.environ.get("K3VL_TIKTOKEN_MODEL")
    places = [Path(named)] if named else [ROOT.parent / "shared" / "golden" / "tiktoken.model"]
    return next((place for place in places if place.is_file()), None)


@pytest.fixture(scope="session")
def k3() -> Tokenizer:
    path = k3_file()
    if path is None:
        pytest.skip("no tiktoken.model; set K3VL_TIKTOKEN_MODEL")
    from k3vl.xtml.tiktoken_model import load_tiktoken_model

    return load_tiktoken_model(path)


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return load_tokenizer(ROOT / "tests" / "golden" / "sglang_tiny")
