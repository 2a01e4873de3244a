"""From a conversation and its processed media to the token ids that a model reads."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from k3vl.errors import MediaError
from k3vl.types import MediaSpan, Prompt, Usage
from k3vl.xtml.render import render
from k3vl.xtml.tokenizer import encode, media_spans
from k3vl.xtml.tokens import END_OF_MSG, Segment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from k3vl.types import ProcessedMedia, Request
    from k3vl.xtml.tokenizer import Tokenizer

KEPT_SEGMENTS = 512
KEPT_PROMPTS = 64
KEPT_CHARACTERS = 2048
"""Of a segment or a prompt whose ids are kept: the format's own pieces, what every request asks,
and what many ask of pictures of one size."""


class PromptWriter:
    """Steps 2 and 3 of a request (see ``pipeline.py``); needs no model.

    Args:
        tokenizer: the checkpoint's.
        media_pad_id: ``media_placeholder_token_id`` of config.json.
    """

    def __init__(self, tokenizer: Tokenizer, media_pad_id: int) -> None:
        self.tokenizer, self.media_pad_id = tokenizer, media_pad_id

        def ids_of(text: str, allow_special: bool) -> tuple[int, ...]:
            return tuple(encode([Segment(text, allow_special)], tokenizer))

        self._ids_of, self._kept_ids = ids_of, lru_cache(KEPT_SEGMENTS)(ids_of)
        self._kept_encoded = lru_cache(KEPT_PROMPTS)(self._encoded)

    def write(self, request: Request, media: Sequence[ProcessedMedia]) -> tuple[Prompt, Usage]:
        """Render and tokenise.

        Args:
            request: what is asked.
            media: one for each of ``xtml.render.media_parts(request.messages)``, in that order.

        Returns:
            The prompt, and its share of the counts.

        Raises:
            TemplateError: the chat format cannot express the conversation.
        """
        layouts = [item.layout for item in media]
        segments = tuple(
            render(request.messages, tools=request.tools, options=request.options, media=layouts)
        )
        is_short = sum(len(segment.text) for segment in segments) <= KEPT_CHARACTERS
        token_ids, ends = (self._kept_encoded if is_short else self._encoded)(segments)
        offsets = media_spans(token_ids, self.media_pad_id, layouts)
        items = [item for part in media for item in part.items]
        spans = tuple(
            MediaSpan(offset, item) for (offset, _), item in zip(offsets, items, strict=True)
        )
        usage = Usage(
            prompt_tokens=len(token_ids) - _num_uncounted(request),
            image_tokens=count_tokens(media, "image"),
            video_tokens=count_tokens(media, "video"),
        )
        return Prompt(token_ids, spans, ends), usage

    def most_characters(self, num_tokens: int) -> int:
        """No longer text fits into so many tokens, whatever they are."""
        tokenizer = self.tokenizer
        longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
        return num_tokens * longest

    def _encoded(self, segments: tuple[Segment, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids, those of short segments kept, as requests share most of them; and message ends."""
        ids: list[int] = []
        for segment in segments:
            is_short = len(segment.text) <= KEPT_CHARACTERS
            ids += (self._kept_ids if is_short else self._ids_of)(*segment)
        return tuple(ids), self._message_ends(ids)

    def _message_ends(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Depths at which other conversations may part from this one.

        Where the head (the first message: system prompt and tools) ends, and the last two messages
        before the answer.
        """
        marker = self.tokenizer.special_ids[END_OF_MSG]
        ends = [i + 1 for i, token_id in enumerate(token_ids) if token_id == marker]
        return tuple(dict.fromkeys(ends[:1] + ends[-2:]))


def media_of(where: str, made: Future[ProcessedMedia]) -> ProcessedMedia:
    """Step 1 for one part, which a processor has begun; errors say which one."""
    try:
        return made.result()
    except MediaError as exc:
        raise MediaError(f"{where}: {exc}", param=where, code=exc.code) from exc


def _num_uncounted(request: Request) -> int:
    """The stub's channel opener is three tokens that Moonshot's API does not count as prompt."""
    partial = bool(request.messages) and request.messages[-1].partial
    return 3 if request.options.add_generation_prompt and not partial else 0


def count_tokens(media: Sequence[ProcessedMedia], kind: str) -> int:
    """Feature tokens of one kind of media."""
    return sum(
        group.num_tokens
        for item in media
        if item.layout.kind == kind
        for group in item.layout.groups
    )
