"""Prompts in which one pad stands for each medium; no SGLang is needed."""

from __future__ import annotations

import pytest

from k3vl.config import checkpoint_path
from k3vl.errors import K3VLError, RequestError
from k3vl.sglang.slots import Slot, expand, find_slots, open_layout, slot_segment, with_slots
from k3vl.types import MediaGroup, MediaLayout, MediaPart, Message, TextPart
from k3vl.xtml.render import media_segments, render
from k3vl.xtml.tokenizer import encode, load_tokenizer, media_spans
from k3vl.xtml.tokens import MEDIA_PAD, Segment

TOKENIZER = load_tokenizer(checkpoint_path("demo"))
PAD = TOKENIZER.special_ids[MEDIA_PAD]


def ids(text: str) -> list[int]:
    """Control markers in the text count."""
    return TOKENIZER.encode_segment(text, True)


def find(text: str, images: int = 0, videos: int = 0) -> list[tuple[str, int]]:
    slots = find_slots(ids(text), TOKENIZER, PAD, num_images=images, num_videos=videos)
    return [(slot.kind, slot.index) for slot in slots]


def frame(header: str) -> str:
    return f"<|media_begin|>{header}<|media_content|><|media_pad|><|media_end|>"


def test_lone_pads_are_pictures_in_order() -> None:
    assert find("a<|media_pad|>b<|media_pad|>", images=2) == [("image", 0), ("image", 1)]


def test_lone_pads_are_clips_where_there_are_only_clips() -> None:
    assert find("a<|media_pad|>b<|media_pad|>", videos=2) == [("video", 0), ("video", 1)]


def test_frames_give_mixed_media_their_order() -> None:
    text = f"{frame('video')}<|media_pad|>{frame('image')}{frame('video')}"
    assert find(text, images=2, videos=2) == [
        ("video", 0),
        ("image", 0),
        ("image", 1),
        ("video", 1),
    ]


def test_a_number_is_a_place_in_the_list() -> None:
    text = frame("video 1") + frame("image 12") + frame("video 0")
    with pytest.raises(RequestError, match="holds 1 images, the prompt has places for 1"):
        find(text, images=1, videos=2)
    text = text.replace("image 12", "image 0")
    assert find(text, images=1, videos=2) == [("video", 1), ("image", 0), ("video", 0)]


def test_a_slot_covers_its_whole_frame() -> None:
    prompt = ids(f"ab{frame('video 0')}c")
    (slot,) = find_slots(prompt, TOKENIZER, PAD, num_images=0, num_videos=1)
    assert prompt[: slot.start] == ids("ab")
    assert prompt[slot.stop :] == ids("c")
    assert slot == Slot(slot.start, slot.stop, "video", 0)


@pytest.mark.parametrize(
    ("text", "images", "videos", "words"),
    [
        ("<|media_pad|>", 0, 0, "holds 0 images, the prompt has places for 1"),
        ("nothing", 1, 0, "holds 1 images, the prompt has places for 0"),
        ("<|media_pad|>", 1, 1, "lone pads are pictures"),
        (frame("video 0") * 2, 0, 2, r"places for 2 \(0, 0\)"),
        ("<|media_pad|><|media_pad|>", 2, 0, "a run of media pads at token 0"),
        (frame("image 84x56"), 1, 0, "names no medium"),
        (frame("video ²"), 0, 1, "names no medium"),
        (frame("film"), 0, 1, "names no medium"),
        (frame("video " + "1" * 400), 0, 1, "names no medium"),
        ("<|media_content|><|media_pad|><|media_end|>", 0, 1, "names no medium"),
        ("<|media_begin|>video<|media_content|><|media_pad|>", 0, 1, "names no medium"),
    ],
)
def test_prompts_that_do_not_fit_their_media_are_refused(
    text: str, images: int, videos: int, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        find(text, images, videos)


def test_only_the_template_s_blocks_become_slots() -> None:
    """A message that spells a block stays text, and takes no medium's place."""
    typed = frame("image 1")
    message = Message(
        role="user", parts=(TextPart(typed), MediaPart("video", b""), MediaPart("image", b""))
    )
    layouts = [open_layout("video"), open_layout("image")]
    segments = list(with_slots(render([message], media=layouts), [("video", 3), ("image", 0)]))
    assert Segment(typed, allow_special=False) in segments
    slots = [s for s in segments if MEDIA_PAD in s.text and s.allow_special]
    assert slots == [slot_segment("video", 3), slot_segment("image", 0)]
    prompt = encode(segments, TOKENIZER)
    assert prompt.count(PAD) == 2


def test_a_clip_becomes_its_stamps_and_runs() -> None:
    layout = MediaLayout(
        "video", 8, 8, (MediaGroup(3, "00:00:00.000"), MediaGroup(2, "00:00:02.000"))
    )
    token_ids, spans = expand(layout, TOKENIZER, PAD)
    assert [length for _, length in spans] == [3, 2]
    for offset, length in spans:
        assert token_ids[offset : offset + length] == [PAD] * length
    assert token_ids.count(PAD) == 5


@pytest.mark.parametrize(
    "layout",
    [
        MediaLayout("image", 896, 672, (MediaGroup(768),)),
        MediaLayout("image", 14, 14, (MediaGroup(1),)),
        MediaLayout(
            "video", 60, 40, (MediaGroup(6, "00:00:00.000"), MediaGroup(2, "00:00:02.000"))
        ),
    ],
    ids=["picture", "one pad", "clip"],
)
def test_a_medium_has_the_tokens_that_the_template_has(layout: MediaLayout) -> None:
    expected = encode(media_segments(layout), TOKENIZER)
    assert expand(layout, TOKENIZER, PAD) == (expected, media_spans(expected, PAD, [layout]))


def test_a_medium_without_tokens_is_refused() -> None:
    with pytest.raises(K3VLError, match="0 tokens"):
        expand(MediaLayout("image", 14, 14, (MediaGroup(0),)), TOKENIZER, PAD)
