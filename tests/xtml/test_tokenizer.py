"""Both vocabularies, the trust border, and the way back to text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3vl.errors import ConfigError
from k3vl.types import MediaGroup, MediaLayout, MediaPart, Message
from k3vl.xtml import Detokenizer, Segment, decode, encode, load_tokenizer, media_spans, render
from k3vl.xtml.tiktoken_model import cut, load_tiktoken_model
from k3vl.xtml.tokenizer import assert_control_count
from k3vl.xtml.tokens import CONTROL_MARKERS, K3_SPECIAL_IDS, MEDIA_PAD

TINY = Path(__file__).resolve().parents[1] / "golden" / "sglang_tiny" / "tokenizer.json"


def write_tiny(directory, **changes):
    data = json.loads(TINY.read_text(encoding="utf-8")) | changes
    (directory / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return directory


def added(without=(), **extra):
    tokens = json.loads(TINY.read_text(encoding="utf-8"))["added_tokens"]
    kept = [token for token in tokens if token["content"] not in without]
    return kept + [
        tokens[0] | {"content": name, "id": i} | more for name, (i, more) in extra.items()
    ]


@pytest.mark.parametrize("name", ["k3", "tiny"])
def test_markers_are_control_ids_only_in_trusted_text(name, request):
    tokenizer = request.getfixturevalue(name)
    for marker in [*tokenizer.special_ids][:40] + list(CONTROL_MARKERS):
        text = f"a{marker} b"
        trusted = tokenizer.encode_segment(text, allow_special=True)
        plain = tokenizer.encode_segment(text, allow_special=False)
        assert [i for i in trusted if tokenizer.is_control(i)] == [tokenizer.special_ids[marker]]
        assert not any(map(tokenizer.is_control, plain))
        for ids in (trusted, plain):
            assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_added_tokens_that_are_not_special_are_inert_in_plain_text(tmp_path):
    tokenizer = load_tokenizer(
        write_tiny(
            tmp_path, added_tokens=added(tool=(269, {"content": "<tool>", "special": False}))
        )
    )
    assert tokenizer.encode_segment("<tool>", allow_special=True) == [269]
    assert 269 not in tokenizer.encode_segment("<tool>", allow_special=False)


def test_a_vocabulary_that_merges_text_into_a_marker_is_refused(tmp_path):
    model = json.loads(TINY.read_text(encoding="utf-8"))["model"]
    vocab = model["vocab"] | {"<|": 300, "[EOS]": 301}
    model = model | {"vocab": vocab, "ignore_merges": True}
    tokens = added(eos=(301, {"content": "[EOS]"}))
    with pytest.raises(ConfigError, match=r"the text '\[EOS\]' is tokenised as the special token"):
        load_tokenizer(write_tiny(tmp_path, model=model, added_tokens=tokens))


def test_stop_ids(k3, tiny):
    assert k3.stop_ids == (163586, 163585)
    assert tiny.stop_ids == (258,)


def test_sizes_and_ids_outside(k3, tiny):
    assert (k3.vocab_size, tiny.vocab_size) == (163840, 269)
    for tokenizer in (k3, tiny):
        for token_id in (-1, tokenizer.vocab_size, 10**9):
            assert tokenizer.token_bytes(token_id) == b""
            assert not tokenizer.is_control(token_id)
        assert tokenizer.token_bytes(tokenizer.vocab_size - 1)


@pytest.mark.parametrize("name", ["k3", "tiny"])
@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(text=st.text())
def test_text_survives_and_streams_character_by_character(name, request, text):
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode_segment(text, allow_special=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [piece for i in ids for piece in detokenizer.feed(i)] + detokenizer.flush()
    assert "".join(piece.text for piece in pieces) == text
    assert not any(piece.control for piece in pieces)


@pytest.mark.parametrize("name", ["k3", "tiny"])
def test_half_surrogates_become_the_replacement_character(name, request):
    tokenizer = request.getfixturevalue(name)
    for trusted in (False, True):
        ids = tokenizer.encode_segment("a\ud800b", trusted)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "a\ufffdb"


def test_an_unfinished_character_waits_and_is_replaced_before_a_control_token(tiny):
    first, second = tiny.encode_segment("é", allow_special=False)
    detokenizer = Detokenizer(tiny)
    assert detokenizer.feed(first) == []
    assert [p.text for p in detokenizer.feed(second)] == ["é"]
    assert detokenizer.feed(first) == []
    broken = detokenizer.feed(tiny.special_ids["<|sep|>"])
    assert [(p.text, p.control) for p in broken] == [("\ufffd", False), ("<|sep|>", True)]
    assert detokenizer.feed(first) == []
    assert [p.text for p in detokenizer.flush()] == ["\ufffd"]
    assert detokenizer.flush() == []


def test_decode_joins_text_between_control_tokens(tiny):
    ids = tiny.encode_segment("ab<|sep|>c<|open|>", allow_special=True)
    assert decode([], tiny) == []
    assert [p.text for p in decode([*ids[2:3]] * 2, tiny)] == ["<|sep|>"] * 2
    assert [p.text for p in decode(ids[:-1], tiny)] == ["ab", "<|sep|>", "c"]
    assert [(p.text, p.control) for p in decode(ids, tiny)] == [
        ("ab", False),
        ("<|sep|>", True),
        ("c", False),
        ("<|open|>", True),
    ]


def test_long_pad_runs_are_not_cut(k3):
    ids = k3.encode_segment(MEDIA_PAD * 40_000, allow_special=True)
    assert ids == [163605] * 40_000


@pytest.mark.parametrize("unit", ["x", " ", "ab cd\n"])
def test_cutting_loses_nothing_and_bounds_every_run(unit):
    text = unit * 170_000
    pieces = cut(text)
    assert "".join(pieces) == text
    assert all(pieces)
    assert max(map(len, pieces)) <= 400_000
    if len(unit) == 1:
        assert max(map(len, pieces)) == 25_000


def test_cuts_follow_runs_and_start_anew_in_each_chunk():
    assert [*map(len, cut("ab " + "x" * 25_001 + " " * 25_001))] == [25_003, 25_001, 1]
    assert [*map(len, cut("a" * 390_000 + "b" * 20_000))][-3:] == [25_000, 25_000, 10_000]
    assert cut("") == []


def test_spans_of_every_group_in_order(tiny):
    picture = MediaLayout("image", 8, 8, (MediaGroup(3),))
    clip = MediaLayout(
        "video", 8, 8, (MediaGroup(2, "00:00:00.000"), MediaGroup(1, "00:00:01.000"))
    )
    message = Message(
        role="user", parts=(MediaPart("image", ""), MediaPart("video", ""), MediaPart("image", ""))
    )
    media = (picture, clip, picture)
    ids = encode(render([message], media=media), tiny)
    pad = tiny.special_ids[MEDIA_PAD]
    spans = media_spans(ids, pad, media)
    assert [length for _, length in spans] == [3, 2, 1, 3]
    for offset, length in spans:
        assert ids[offset : offset + length] == [pad] * length
        assert pad not in (ids[offset - 1], ids[offset + length])
    with pytest.raises(AssertionError, match="no media pad after position 0"):
        media_spans([1, 2], pad, media)
    for wrong in ((picture, clip), (picture,) * 4, (picture, picture, clip)):
        with pytest.raises(AssertionError):
            media_spans(ids, pad, wrong)


def test_control_ids_are_counted(tiny):
    sep = tiny.special_ids["<|sep|>"]
    assert_control_count(Segment("<|sep|>", allow_special=True), [sep], tiny)
    for segment, ids in [
        (Segment("<|sep|>", allow_special=True), []),
        (Segment("<|sep|>", allow_special=True), [sep, sep]),
        (Segment("<|sep|>", allow_special=False), [sep]),
    ]:
        with pytest.raises(AssertionError):
            assert_control_count(segment, ids, tiny)


def test_a_directory_without_a_vocabulary_names_both_files(tmp_path):
    with pytest.raises(ConfigError, match=r"neither tiktoken\.model nor tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="neither"):
        load_tokenizer(tmp_path / "missing")


@pytest.mark.parametrize("content", [b"", b"hello", b"!!!! 0\n", b"YQ== x\n", b"YQ== 0\nYg== 1\n"])
def test_a_broken_tiktoken_file_is_refused(tmp_path, content):
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tiktoken\.model"):
        load_tokenizer(tmp_path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tiktoken_model(tmp_path)


def test_another_familys_names_beside_the_ranks_are_refused(k3, k3_path, tmp_path):
    link = tmp_path / "tiktoken.model"
    link.symlink_to(k3_path)
    decoder = {str(i): {"content": name} for name, i in K3_SPECIAL_IDS.items()}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert load_tiktoken_model(link).special_ids == k3.special_ids
    decoder["163587"] = {"content": "<|im_user|>"}
    config.write_text(json.dumps({"added_tokens_decoder": decoder}))
    with pytest.raises(ConfigError, match=r"163587 is named '<\|im_user\|>', .* '<\|open\|>'"):
        load_tokenizer(tmp_path)
    for harmless in ("[]", "{}"):
        config.write_text(harmless)
        assert load_tiktoken_model(link).vocab_size == 163840
    config.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"added_tokens": added(without=["<|sep|>", "<|open|>"])},
            r"no special token <\|open\|>, <\|sep",
        ),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "not ByteLevel"),
        ({"pre_tokenizer": None}, "not ByteLevel"),
        ({"model": {"type": "WordPiece"}}, "not BPE"),
        ({"model": {"type": "BPE", "vocab": 3}}, "not understood"),
        ({"added_tokens": [{}]}, "not understood"),
        (
            {"model": {"type": "BPE", "vocab": {"\u4e2d": 0}, "merges": []}},
            "token 0 is not made of byte letters",
        ),
    ],
)
def test_a_tokenizer_json_of_another_kind_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(write_tiny(tmp_path, **changes))


def test_a_tokenizer_json_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"\xff{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_tokenizer(tmp_path)


def test_byte_level_inside_a_sequence_is_accepted(tmp_path, tiny):
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    split = {"type": "Digits", "individual_digits": True}
    sequence = {"type": "Sequence", "pretokenizers": [split, level]}
    tokenizer = load_tokenizer(write_tiny(tmp_path, pre_tokenizer=sequence))
    assert tokenizer.encode_segment("a1", allow_special=False) == tiny.encode_segment(
        "a1", allow_special=False
    )
