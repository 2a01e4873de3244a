"""Prompts in which one pad stands for each medium, before its size and length are known.

SGLang reads chat messages in one place and media in another: the first leaves a *slot* in the
prompt for each picture or clip, the second puts the medium's own tokens there. A slot is

- a lone ``<|media_pad|>``: the next picture, or the next clip where there are only clips. This is
  SGLang's own convention for K3, so prompts for its ``/generate`` keep working;
- ``<|media_begin|>video<|media_content|><|media_pad|><|media_end|>``: the next clip (or, with
  ``image``, the next picture), which gives mixed media their order;
- the same with a number behind the word, ``video 2``: the clip with that place, from 0, in the
  request's list. The chat format sorts tool results by their calls, the lists are not sorted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from k3vl.errors import RequestError
from k3vl.types import MediaGroup, MediaLayout
from k3vl.xtml import tokens
from k3vl.xtml.render import media_segments
from k3vl.xtml.tokenizer import encode, media_spans
from k3vl.xtml.tokens import Segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from k3vl.types import MediaKind
    from k3vl.xtml.tokenizer import Tokenizer

_HEADER_TOKENS = 16
"""A slot's header is a word and a number; a longer run between the markers is none."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a medium goes.

    Attributes:
        start, stop: token ids of the prompt that give way to it.
        kind: picture or clip.
        index: its place in the request's list of that kind.
    """

    start: int
    stop: int
    kind: MediaKind
    index: int


def slot_segment(kind: MediaKind, index: int) -> Segment:
    """The slot of the medium with this place in the request's list of its kind."""
    header = f"{tokens.MEDIA_BEGIN}{kind} {index}{tokens.MEDIA_CONTENT}"
    return Segment(f"{header}{tokens.MEDIA_PAD}{tokens.MEDIA_END}", allow_special=True)


def open_layout(kind: MediaKind) -> MediaLayout:
    """A layout to render with where the size is not known yet; see :func:`with_slots`."""
    return MediaLayout(kind, 0, 0, (MediaGroup(1),))


def with_slots(
    segments: Iterable[Segment], slots: Iterable[tuple[MediaKind, int]]
) -> Iterator[Segment]:
    """Replace each block of an :func:`open_layout` by the slot of its medium.

    Only the template writes control segments, so text that spells a block is left alone.
    """
    rest = iter(slots)
    for segment in segments:
        is_block = segment.allow_special and segment.text.startswith(tokens.MEDIA_BEGIN)
        yield slot_segment(*next(rest)) if is_block else segment


def find_slots(
    token_ids: Sequence[int],
    tokenizer: Tokenizer,
    pad_id: int,
    *,
    num_images: int,
    num_videos: int,
) -> list[Slot]:
    """Find every slot of a prompt, and see that each medium has exactly one.

    Raises:
        RequestError: more or fewer slots than media, a run of pads that is already expanded, lone
            pads beside both kinds of media, or a header that names nothing.
    """
    found: list[Slot] = []
    count = {"image": 0, "video": 0}
    only_videos = num_videos > 0 and num_images == 0
    for offset in (i for i, token_id in enumerate(token_ids) if token_id == pad_id):
        if offset + 1 < len(token_ids) and token_ids[offset + 1] == pad_id:
            raise RequestError(
                f"the prompt has a run of media pads at token {offset}; write one pad for each "
                "picture or clip, its length is worked out here",
                code="media_pads_expanded",
            )
        framed = _frame(token_ids, offset, tokenizer)
        if framed is None:
            kind: MediaKind = "video" if only_videos else "image"
            start, stop, index = offset, offset + 1, None
        else:
            start, stop, kind, index = framed
        found.append(Slot(start, stop, kind, count[kind] if index is None else index))
        count[kind] += 1
    _check(found, num_images, num_videos)
    return found


def _frame(
    token_ids: Sequence[int], offset: int, tokenizer: Tokenizer
) -> tuple[int, int, MediaKind, int | None] | None:
    """(start, stop, kind, index) of the frame around a pad; None around a lone one."""
    ids = tokenizer.special_ids
    if offset == 0 or token_ids[offset - 1] != ids[tokens.MEDIA_CONTENT]:
        return None
    begin = offset - 2
    while begin >= 0 and token_ids[begin] != ids[tokens.MEDIA_BEGIN]:
        begin -= 1
        if offset - begin > _HEADER_TOKENS:
            break
    closed = offset + 1 < len(token_ids) and token_ids[offset + 1] == ids[tokens.MEDIA_END]
    header = b"".join(map(tokenizer.token_bytes, token_ids[max(begin, -1) + 1 : offset - 1]))
    word, _, number = header.decode("utf-8", "replace").partition(" ")
    known = word in ("image", "video") and (not number or (number.isascii() and number.isdigit()))
    if begin < 0 or not closed or not known:
        raise RequestError(
            f"the media frame around token {offset} names no medium; its header must be image or "
            "video, with the place in the request's list behind it if need be",
            code="media_frame_invalid",
        )
    kind: MediaKind = "video" if word == "video" else "image"
    return begin, offset + 2, kind, int(number) if number else None


def _check(slots: Sequence[Slot], num_images: int, num_videos: int) -> None:
    """Each medium has one slot."""
    for kind, number in (("image", num_images), ("video", num_videos)):
        places = sorted(slot.index for slot in slots if slot.kind == kind)
        if places != list(range(number)):
            mixed = "; lone pads are pictures where the request has both kinds"
            raise RequestError(
                f"the request holds {number} {kind}s, the prompt has places for {len(places)} "
                f"({', '.join(map(str, places[:8])) or 'none'})"
                + (mixed if num_images and num_videos else ""),
                code="media_count_mismatch",
            )


def expand(
    layout: MediaLayout, tokenizer: Tokenizer, pad_id: int
) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """A medium's own tokens: its ids, and (offset, length) of each group's pads in them.

    One pad of each group is encoded, and stands for the others: this runs in the event loop.
    """
    single = (replace(group, num_tokens=min(group.num_tokens, 1)) for group in layout.groups)
    short = replace(layout, groups=tuple(single))
    encoded = encode(media_segments(short), tokenizer)
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    done = 0
    for (offset, _), group in zip(
        media_spans(encoded, pad_id, [short]), layout.groups, strict=True
    ):
        ids += encoded[done:offset]
        spans.append((len(ids), group.num_tokens))
        ids += [pad_id] * group.num_tokens
        done = offset + 1
    return ids + encoded[done:], tuple(spans)
