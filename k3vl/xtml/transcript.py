"""The inverse of rendering: a whole transcript -> messages, tools, options and media slots.

For logs, replays and offline batches. The contract is strict: what ``parse_*`` returns renders to
exactly the segments or ids that were given, or a :class:`TemplateError` says where it does not. A
model's own output need not have that form (``parser`` reads that one).

Not in a transcript, hence not recovered: ids of tool calls and of the results' calls, sources of
media, the pixel size of a clip, roles that are never rendered, empty text parts, blank reasoning
and reasoning hidden by thinking off, options that write nothing (``auto``), a schema's name and
``strict`` flag, and whether a schema came with the format or overrode it. A clip that directly
follows another one, with a later timestamp, counts as its continuation; a message to be continued
that is still empty, with thinking off, is the generation stub.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from k3vl.errors import TemplateError
from k3vl.types import (
    ChatOptions,
    MediaGroup,
    MediaLayout,
    MediaPart,
    Message,
    Part,
    TextPart,
    ToolCall,
)
from k3vl.xtml import tokens, wording
from k3vl.xtml.recover import recover_segments
from k3vl.xtml.render import ImagePrompts, media_segments, render
from k3vl.xtml.tokenizer import encode
from k3vl.xtml.tokens import Piece, Segment
from k3vl.xtml.values import parse_header

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3vl.xtml.tokenizer import Tokenizer

TIMESTAMP: Final = re.compile(r"(?:\d+:)?\d\d:\d\d(?:\.\d{3})?")
_IMAGE_HEADER: Final = re.compile(r"image ([0-9]{1,9})x([0-9]{1,9})")
_READY_IMAGES: Final = (tokens.MEDIA_PAD, tokens.IMAGE_PLACEHOLDER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The arguments of ``render``; media parts are open slots (their source is empty)."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    options: ChatOptions
    media: tuple[MediaLayout, ...] | ImagePrompts


def parse_ids(token_ids: Sequence[int], tokenizer: Tokenizer) -> Transcript:
    """Read a transcript from token ids.

    Raises:
        TemplateError: malformed, or not what the template writes; with the position.
    """
    transcript = _Reader(recover_segments(token_ids, tokenizer)).read()
    again = encode(_render(transcript), tokenizer)
    _check_same(list(token_ids), again, "token")
    return transcript


def parse_segments(segments: Sequence[Segment]) -> Transcript:
    """Read a transcript from the segments that ``render`` made.

    Raises:
        TemplateError: malformed, or not what the template writes; with the position.
    """
    transcript = _Reader(segments).read()
    _check_same(list(segments), _render(transcript), "segment")
    return transcript


def _render(transcript: Transcript) -> list[Segment]:
    return render(
        transcript.messages,
        tools=transcript.tools,
        options=transcript.options,
        media=transcript.media,
    )


def _check_same(given: list[Any], again: list[Any], unit: str) -> None:
    if given == again:
        return
    pairs = zip(given, again, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(given), len(again)))
    raise TemplateError(
        f"{unit} {same} of {len(given)} is not what the template writes for this conversation "
        f"({len(again)} {unit}s)",
        code="not_canonical",
    )


_Unit = Piece | str
"""A control token, plain text, or (``str``) a ready image prompt."""


def _units(segments: Sequence[Segment]) -> list[_Unit]:
    pattern = re.compile(f"({'|'.join(map(re.escape, tokens.CONTROL_MARKERS))})")
    units: list[_Unit] = []
    for segment in segments:
        if not segment.allow_special:
            units.append(Piece(segment.text, control=False))
        elif segment.text in _READY_IMAGES:
            units.append(segment.text)
        else:
            units += [
                Piece(text, control=text in tokens.CONTROL_MARKERS)
                for text in pattern.split(segment.text)
                if text
            ]
    return units


class _Reader:
    """Recursive descent over the units of one transcript."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._units = _units(segments)
        self._at = 0
        self._media: list[MediaLayout | str] = []
        self._messages: list[Message] = []
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._options: dict[str, Any] = {"add_generation_prompt": False}
        self._closing = False  # a message that only stands at the end has been read
        self._num_results = 0

    def read(self) -> Transcript:
        """Read everything."""
        while self._at < len(self._units):
            self._read_message()
        return Transcript(
            messages=tuple(self._messages),
            tools=self._tools,
            options=ChatOptions(**self._options),
            media=self._read_media(),
        )

    def _read_media(self) -> tuple[MediaLayout, ...] | ImagePrompts:
        layouts = tuple(item for item in self._media if isinstance(item, MediaLayout))
        if len(layouts) == len(self._media):
            return layouts
        prompts = tuple(
            item if isinstance(item, str) else media_segments(item)[-1].text for item in self._media
        )
        sizes_unknown = all(prompt == tokens.IMAGE_PLACEHOLDER for prompt in prompts)
        return ImagePrompts(None if sizes_unknown else prompts)

    # ------------------------------------------------------------------ units

    def _error(self, problem: str) -> TemplateError:
        position = sum(len(u if isinstance(u, str) else u.text) for u in self._units[: self._at])
        return TemplateError(
            f"transcript: {problem} (character {position}, message {len(self._messages)})",
            code="malformed_transcript",
        )

    def _peek(self) -> _Unit | None:
        return self._units[self._at] if self._at < len(self._units) else None

    def _is_control(self, marker: str) -> bool:
        unit = self._peek()
        return isinstance(unit, Piece) and unit.control and unit.text == marker

    def _expect_control(self, marker: str) -> None:
        if not self._is_control(marker):
            raise self._error(f"expected {marker}")
        self._at += 1

    def _read_text(self) -> str:
        """Text up to the next control token, whatever its segments."""
        texts: list[str] = []
        while isinstance(unit := self._peek(), Piece) and not unit.control:
            texts.append(unit.text)
            self._at += 1
        return "".join(texts)

    def _read_open(self, expected: str) -> dict[str, str]:
        """An opening tag and its attributes."""
        self._expect_control(tokens.OPEN)
        tag, attributes = parse_header(self._read_text())
        if tag != expected:
            raise self._error(f"expected an opening '{expected}', found '{tag[:40]}'")
        self._expect_control(tokens.SEP)
        return attributes

    def _read_close(self, expected: str) -> None:
        self._expect_control(tokens.CLOSE)
        tag = self._read_text()
        if tag != expected:
            raise self._error(f"expected a closing '{expected}', found '{tag[:40]}'")
        self._expect_control(tokens.SEP)

    def _opens(self, tag: str) -> bool:
        """The next unit opens this tag."""
        following = self._units[self._at + 1] if self._at + 1 < len(self._units) else None
        return (
            self._is_control(tokens.OPEN)
            and isinstance(following, Piece)
            and following.text.split(" ", 1)[0] == tag
        )

    # ------------------------------------------------------------------ messages

    def _read_message(self) -> None:
        """One message; one that is left open takes all that is left."""
        attributes = self._read_open("message")
        role = attributes.get("role")
        if role == "assistant":
            self._read_assistant(attributes.get("name"))
            return
        if role == "system" and "type" in attributes:
            self._read_internal(attributes["type"])
        elif role in ("system", "user", "tool"):
            self._refuse_late()
            parts = self._read_parts()
            if role == "tool":
                message = self._result(attributes, parts)
            else:
                message = Message(role=role, parts=parts, name=attributes.get("name"))
            self._messages.append(message)
        else:
            raise self._error(f"unknown role '{(role or '')[:40]}'")
        self._read_close("message")
        self._expect_control(tokens.END_OF_MSG)

    def _refuse_late(self) -> None:
        if self._closing:
            raise self._error("a message follows tool-choice or response-format")

    def _result(self, attributes: Mapping[str, str], parts: tuple[Part, ...]) -> Message:
        self._num_results += 1
        if "tool" not in attributes or attributes.get("index") != str(self._num_results):
            raise self._error(
                f"tool result {self._num_results} has index '{attributes.get('index', '')[:40]}' "
                f"and {'a' if 'tool' in attributes else 'no'} tool name"
            )
        return Message(role="tool", parts=parts, tool_name=attributes["tool"])

    def _read_assistant(self, name: str | None) -> None:
        """A finished message, the generation stub, or one that is to be continued."""
        reasoning = None
        if self._opens("think"):
            self._set_thinking(thinking=True)
            self._read_open("think")
            if self._peek() is None and name is None:
                self._options["add_generation_prompt"] = True
                return
            reasoning = self._read_text() or None
            self._read_close("think")
        else:
            self._set_thinking(thinking=False)
        self._read_open("response")
        if self._peek() is None and name is None and not self._options["thinking"]:
            self._options["add_generation_prompt"] = True
            return
        parts = self._read_parts()
        is_open = self._peek() is None
        calls: tuple[ToolCall, ...] = ()
        if not is_open:
            self._refuse_late()
            self._read_close("response")
            calls = self._read_calls() if self._opens("tools") else ()
            self._read_close("message")
            self._expect_control(tokens.END_OF_MSG)
        self._num_results = 0
        self._messages.append(
            Message(
                role="assistant",
                parts=parts,
                name=name,
                reasoning=reasoning,
                tool_calls=calls,
                partial=is_open,
            )
        )

    def _set_thinking(self, *, thinking: bool) -> None:
        if self._options.setdefault("thinking", thinking) is not thinking:
            raise self._error("some assistant messages have a think channel, others have none")

    # ------------------------------------------------------------------ content

    def _read_parts(self) -> tuple[Part, ...]:
        parts: list[Part] = []
        while (unit := self._peek()) is not None:
            if isinstance(unit, str):
                self._at += 1
                self._media.append(unit)
                parts.append(MediaPart("image", ""))
            elif not unit.control:
                self._at += 1
                parts.append(TextPart(unit.text))
            elif unit.text == tokens.MEDIA_BEGIN:
                self._read_block(parts)
            else:
                break
        return tuple(parts)

    def _read_block(self, parts: list[Part]) -> None:
        """A picture, or a group that begins a clip or belongs to the clip before it."""
        self._at += 1
        header = self._read_text()
        self._expect_control(tokens.MEDIA_CONTENT)
        start = self._at
        while self._is_control(tokens.MEDIA_PAD):
            self._at += 1
        num_tokens = self._at - start
        self._expect_control(tokens.MEDIA_END)
        size = _IMAGE_HEADER.fullmatch(header)
        if size is None and header != "video":
            raise self._error(f"unknown media header '{header[:40]}'")
        if size is not None:
            group = MediaGroup(num_tokens)
            self._media.append(MediaLayout("image", int(size[1]), int(size[2]), (group,)))
            parts.append(MediaPart("image", ""))
            return
        timestamp = None
        if parts and isinstance(last := parts[-1], TextPart) and TIMESTAMP.fullmatch(last.text):
            timestamp = last.text
            parts.pop()
        self._add_group(parts, MediaGroup(num_tokens, timestamp))

    def _add_group(self, parts: list[Part], group: MediaGroup) -> None:
        """Time runs forward inside a clip: a group that is not later begins another one."""
        clip = self._media[-1] if self._media else None
        if (
            parts
            and isinstance(parts[-1], MediaPart)
            and isinstance(clip, MediaLayout)
            and clip.kind == "video"
            and (clip.groups[-1].timestamp or "") < (group.timestamp or "")
        ):
            self._media[-1] = MediaLayout("video", 0, 0, (*clip.groups, group))
            return
        self._media.append(MediaLayout("video", 0, 0, (group,)))
        parts.append(MediaPart("video", ""))

    # ------------------------------------------------------------------ tool calls

    def _read_calls(self) -> tuple[ToolCall, ...]:
        self._read_open("tools")
        calls: list[ToolCall] = []
        while self._is_control(tokens.OPEN):
            attributes = self._read_open("call")
            if "tool" not in attributes or attributes.get("index") != str(len(calls) + 1):
                raise self._error(
                    f"call {len(calls) + 1} has index '{attributes.get('index', '')[:40]}' "
                    f"and {'a' if 'tool' in attributes else 'no'} tool name"
                )
            calls.append(ToolCall(name=attributes["tool"], arguments=self._read_arguments()))
            self._read_close("call")
        self._read_close("tools")
        return tuple(calls)

    def _read_arguments(self) -> dict[str, Any] | str:
        if self._opens("json"):
            self._read_open("json")
            raw = self._read_text()
            self._read_close("json")
            return raw
        arguments: dict[str, Any] = {}
        while self._is_control(tokens.OPEN):
            attributes = self._read_open("argument")
            if "key" not in attributes or "type" not in attributes:
                raise self._error("an argument lacks its key or its type")
            text = self._read_text()
            is_string = attributes["type"] == "string"
            arguments[attributes["key"]] = text if is_string else self._json(text)
            self._read_close("argument")
        return arguments

    def _json(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise self._error("expected JSON") from exc

    # ------------------------------------------------------------------ the template's own

    def _read_internal(self, kind: str) -> None:
        body = self._read_text()
        if kind == "tool-declare":
            self._read_declaration(body)
        elif kind == "thinking-effort":
            if self._messages or self._closing:
                raise self._error("thinking-effort stands behind the conversation")
            effort = _between(body, wording.EFFORT_HEAD, wording.EFFORT_TAIL)
            if effort not in wording.THINKING_EFFORTS:
                raise self._error("a thinking-effort message of unknown form")
            self._options["thinking_effort"] = effort
            self._set_thinking(thinking=True)
        elif kind == "tool-choice":
            choices = {text: word for word, text in wording.TOOL_CHOICES.items()}
            if body not in choices:
                raise self._error("a tool-choice message of unknown form")
            self._options["tool_choice"] = choices[body]
            self._closing = True
        elif kind == "response-format":
            self._options["response_format"] = self._response_format(body)
            self._closing = True
        else:
            raise self._error(f"unknown internal message '{kind[:40]}'")

    def _read_declaration(self, body: str) -> None:
        first = _between(body, wording.TOOLS_HEAD, wording.FENCE_END)
        later = _between(body, wording.NEW_TOOLS_HEAD, wording.FENCE_END)
        declared = self._json(later or first or "null")
        if not isinstance(declared, list) or not all(isinstance(t, dict) for t in declared):
            raise self._error("a tool-declare message of unknown form")
        if later is not None:
            self._refuse_late()
            self._messages.append(Message(role="system", tools=tuple(declared)))
        elif self._messages or self._tools or "thinking" in self._options or self._closing:
            raise self._error("the request's tools are declared behind something else")
        else:
            self._tools = tuple(declared)

    def _response_format(self, body: str) -> dict[str, Any]:
        if body == wording.JSON_OBJECT:
            return {"type": "json_object"}
        schema = _between(body, wording.JSON_SCHEMA_HEAD, wording.FENCE_END)
        if schema is None:
            raise self._error("a response-format message of unknown form")
        return {"type": "json_schema", "json_schema": {"schema": self._json(schema)}}


def _between(text: str, head: str, tail: str) -> str | None:
    if not text.startswith(head) or not text.endswith(tail) or len(text) < len(head) + len(tail):
        return None
    return text[len(head) : -len(tail)]
