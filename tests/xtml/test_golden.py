"""The released encoder's and tokenizer's own results, and the output rules' vectors."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from k3vl.xtml import Segment, encode, parse_record, render_record
from k3vl.xtml.tokens import K3_SPECIAL_IDS

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
XTML = json.loads((GOLDEN / "xtml_cases.json").read_text(encoding="utf-8"))["cases"]
OUTPUT = json.loads((GOLDEN / "output_cases.json").read_text(encoding="utf-8"))["cases"]
TOKENIZER = json.loads((GOLDEN / "tokenizer_cases.json").read_text(encoding="utf-8"))
RENDERED = [case for case in XTML if "expected" in case]
REFUSED = [case for case in XTML if "expected" not in case]


def name(case):
    return case["name"]


def test_no_vector_was_lost():
    assert (len(RENDERED), len(REFUSED), len(OUTPUT)) == (110, 13, 69)


@pytest.mark.parametrize("case", RENDERED, ids=name)
def test_segments_are_those_of_the_release(case):
    record = {key: case[key] for key in ("messages", "tools", "options")}
    assert render_record(record) == {"segments": case["expected"]["segments"]}


@pytest.mark.parametrize("case", REFUSED, ids=name)
def test_what_the_release_refuses_is_an_error_record(case):
    record = {key: case[key] for key in ("messages", "tools", "options")}
    assert list(render_record(record)) == ["error"]


@pytest.mark.parametrize("case", RENDERED, ids=name)
def test_token_ids_are_those_of_the_release(case, k3):
    segments = [Segment(**segment) for segment in case["expected"]["segments"]]
    ids = encode(segments, k3)
    assert ids == case["expected"]["token_ids"]
    if case["options"].get("add_generation_prompt", True):
        assert case["expected"]["reported_prompt_tokens"] == len(ids) - 3


@pytest.mark.parametrize("case", OUTPUT, ids=name)
def test_output_is_read_by_the_rules(case):
    found = parse_record({"pieces": case["pieces"], "options": case["options"]})
    expected = case["expected"]
    assert {k: found[k] for k in ("reasoning", "content", "finish")} == {
        k: expected[k] for k in ("reasoning", "content", "finish")
    }
    assert [call["name"] for call in found["tool_calls"]] == [
        call["name"] for call in expected["tool_calls"]
    ]
    for ours, theirs in zip(found["tool_calls"], expected["tool_calls"], strict=True):
        if case["name"].startswith("json_block_broken"):
            assert ours["arguments"] == theirs["arguments"]
        else:
            assert json.loads(ours["arguments"]) == json.loads(theirs["arguments"])


@pytest.mark.parametrize("label", TOKENIZER["texts"])
def test_k3_ids_of_texts(label, k3):
    case = TOKENIZER["texts"][label]
    assert k3.encode_segment(case["text"], allow_special=False) == case["ids_plain"]
    assert k3.encode_segment(case["text"], allow_special=True) == case["ids_special"]


@pytest.mark.parametrize("case", TOKENIZER["segment_boundaries"], ids=lambda c: c["pieces"][1])
def test_k3_segments_are_encoded_apart(case, k3):
    segments = [Segment(piece, allow_special=False) for piece in case["pieces"]]
    assert encode(segments, k3) == case["ids_per_piece"]
    assert k3.encode_segment("".join(case["pieces"]), allow_special=False) == case["ids_joined"]


@pytest.mark.parametrize("case", TOKENIZER["long"], ids=lambda c: f"{c['unit']!r}*{c['count']}")
def test_k3_long_text_is_cut_as_in_the_release(case, k3):
    ids = k3.encode_segment(case["unit"] * case["count"] + case["suffix"], allow_special=False)
    digest = hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()
    assert (len(ids), digest) == (case["num_ids"], case["sha256_of_compact_json"])


def test_k3_special_table():
    assert len(K3_SPECIAL_IDS) == 256
    assert {n: K3_SPECIAL_IDS[n] for n in TOKENIZER["special_tokens"]} == TOKENIZER[
        "special_tokens"
    ]
    named = set(TOKENIZER["special_tokens"].values())
    for token_id in set(range(163584, 163840)) - named:
        assert K3_SPECIAL_IDS[f"<|reserved_token_{token_id}|>"] == token_id
