"""Our typed request, written back as the OpenAI-style messages that an endpoint takes.

Media parts hold the ``data:`` URLs that the workers made. Clips that are sent as frames become
pictures here, in groups behind their clock text, as K3's own prompt has it for groups of frames.
Pure functions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from k3vl.app.replies import dump
from k3vl.types import MediaLayout, MediaPart, ProcessedMedia, TextPart
from k3vl.xtml.render import media_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from k3vl.types import Message, Part, Request, ToolCall


def with_urls(
    request: Request, media: Sequence[ProcessedMedia], frames_per_group: int | None
) -> tuple[Request, list[ProcessedMedia]]:
    """Put what the workers made in the place of what the client sent.

    Args:
        request: as the client sent it.
        media: one for each of ``media_parts(request.messages)``, with ``urls``.
        frames_per_group: frames of a clip behind one clock text; None: clips go whole.

    Returns:
        The request, and the media of its parts in the order of the prompt.
    """
    by_place: dict[str, list[Part]] = {}
    sent: list[ProcessedMedia] = []
    for (where, _), item in zip(media_parts(request.messages), media, strict=True):
        parts: list[Part] = []
        for part, processed in _parts(item, frames_per_group):
            parts.append(part)
            if processed is not None:
                sent.append(processed)
        by_place[where] = parts
    messages = []
    for index, message in enumerate(request.messages):
        written: list[Part] = []
        for position, part in enumerate(message.parts):
            written += by_place.get(f"messages[{index}].content[{position}]", [part])
        messages.append(replace(message, parts=tuple(written)))
    return replace(request, messages=tuple(messages)), sent


def _parts(
    media: ProcessedMedia, frames_per_group: int | None
) -> Iterator[tuple[Part, ProcessedMedia | None]]:
    """The parts that one media part is sent as, with what the prompt needs to know of each."""
    layout = media.layout
    if layout.kind == "image" or frames_per_group is None:
        yield MediaPart(layout.kind, media.urls[0]), media
        return
    pieces = zip(media.urls, media.items, layout.groups, strict=True)
    for index, (url, item, group) in enumerate(pieces):
        if index % frames_per_group == 0 and group.timestamp:
            yield TextPart(group.timestamp), None
        picture = MediaLayout(
            "image", layout.width, layout.height, (replace(group, timestamp=None),)
        )
        yield MediaPart("image", url), ProcessedMedia(picture, (item,), urls=(url,))


def write_body(fields: Mapping[str, Any], messages: Sequence[Message]) -> bytes:
    """The JSON of a request.

    Media are spliced into the text: writing megabytes of base64 as JSON would search them for
    characters that they do not have, and hold up every other thread for as long.
    """
    mark = uuid4().hex  # nobody can know it, so no text can hold it
    written = [_message_json(message, mark) for message in messages]
    texts = dump({**fields, "messages": written}).split(mark.encode())
    urls = [
        str(part.source).encode("ascii")
        for message in messages
        for part in message.parts
        if isinstance(part, MediaPart)
    ]
    return b"".join(chain.from_iterable(zip_longest(texts, urls, fillvalue=b"")))


def _message_json(message: Message, url: str) -> dict[str, Any]:
    """A message with the same ``url`` in all its media."""
    content = _content_json(message.parts, url)
    written: dict[str, Any] = {"role": message.role, "content": content}
    optional = {
        "name": message.tool_name if message.role == "tool" else message.name,
        "reasoning_content": message.reasoning,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [_call_json(call) for call in message.tool_calls],
        "tools": list(message.tools),
        "partial": message.partial,
    }
    written.update((key, value) for key, value in optional.items() if value)
    if message.tool_calls and not message.parts:
        written["content"] = None
    return written


def _content_json(parts: Sequence[Part], url: str) -> str | list[dict[str, Any]]:
    """A string where there is text alone in one piece."""
    if not parts:
        return ""
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return parts[0].text
    return [_part_json(part, url) for part in parts]


def _part_json(part: Part, url: str) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    field = f"{part.kind}_url"
    return {"type": field, field: {"url": url}}


def _call_json(call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id or "", "type": "function", "function": function}
