"""Messages, tools and media layouts -> segments, exactly as K3's released encoder writes them.

The result is never one string: each segment is tokenised on its own, and only the template's own
markers may become control ids (``tokenizer.encode``). JSON-level rules are in ``messages``, the
inverse is in ``transcript``. Partial mode (a last assistant message that is to be continued) is not
in the released encoder; its layout is the one that NVIDIA Dynamo uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from k3vl.errors import TemplateError
from k3vl.types import ChatOptions, MediaLayout, MediaPart, Message, TextPart, ToolCall
from k3vl.xtml import tokens, wording
from k3vl.xtml.tokens import Segment
from k3vl.xtml.values import argument_text, argument_type, escape_attribute, sorted_json

DEFAULT_OPTIONS: Final = ChatOptions()

RENDERED_ROLES: Final = ("system", "user", "assistant", "tool")
"""Messages of any other role are dropped without an error, as in the release."""


@dataclass(frozen=True, slots=True)
class ImagePrompts:
    """The released encoder's own way of taking pictures: a ready string for each.

    Kept so that its behaviour can be reproduced and inspected; never use it to serve, because text
    that spells ``<|kimi_image_placeholder|>`` takes a prompt that a picture should have had.

    Attributes:
        prompts: one control-bearing string per placeholder, in order. None: sizes are not known,
            every picture is written as the placeholder and text is left alone.
    """

    prompts: tuple[str, ...] | None


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    options: ChatOptions = DEFAULT_OPTIONS,
    media: Sequence[MediaLayout] | ImagePrompts = (),
) -> list[Segment]:
    """Write a conversation in K3's chat format.

    Args:
        messages: the conversation; roles other than system, user, assistant and tool are dropped.
        tools: declarations, written as received with sorted keys.
        options: thinking, effort, tool choice, response format, generation stub. A last assistant
            message with ``partial`` takes the place of the stub.
        media: one layout per :class:`MediaPart`, in order of appearance.

    Raises:
        TemplateError: an unknown effort, too few or too many layouts, a layout of the other kind, a
            tool result without a name, a value that JSON cannot express, or ``partial`` in the
            wrong place.
    """
    feed: _Feed = _PromptFeed(media.prompts) if isinstance(media, ImagePrompts) else _Feed(media)
    writer = _Writer(feed)
    if tools:
        writer.internal("tool-declare", _tool_body(wording.TOOLS_HEAD, tools, "tools"))
    if options.thinking and options.thinking_effort is not None:
        writer.internal("thinking-effort", _effort_body(options.thinking_effort))
    unfinished = _partial_message(messages)
    conversation = messages if unfinished is None else messages[:-1]
    _write_conversation(writer, conversation, thinking=options.thinking)
    if isinstance(options.tool_choice, str) and options.tool_choice in wording.TOOL_CHOICES:
        writer.internal("tool-choice", wording.TOOL_CHOICES[options.tool_choice])
    body = _format_body(options)
    if body is not None:
        writer.internal("response-format", body)
    if unfinished is not None:
        where = f"messages[{len(messages) - 1}]"
        writer.open("message", role="assistant", name=unfinished.name or None)
        _write_reasoning(writer, unfinished, thinking=options.thinking)
        writer.open("response")
        writer.parts(unfinished, where)
    elif options.add_generation_prompt:
        writer.open("message", role="assistant")
        writer.open("think" if options.thinking else "response")
    feed.finish()
    return writer.segments


# ---------------------------------------------------------------------- media


class _Feed:
    """Hands out the layouts in order. User text is never looked into."""

    def __init__(self, layouts: Sequence[MediaLayout]) -> None:
        self._layouts = layouts
        self._num_parts = 0

    def part(self, part: MediaPart, where: str) -> Iterable[Segment]:
        """The segments of one media part."""
        self._num_parts += 1
        if self._num_parts > len(self._layouts):
            # Counted to the end, so that the message can say by how many.
            return ()
        layout = self._layouts[self._num_parts - 1]
        if layout.kind != part.kind:
            raise TemplateError(
                f"{where} is of kind '{part.kind}', its layout of kind '{layout.kind}'",
                param=where,
            )
        return media_segments(layout, where)

    def text(self, text: str) -> Iterable[Segment]:
        """The segments of a piece of client text."""
        return (Segment(text, allow_special=False),) if text else ()

    def finish(self) -> None:
        """Check that parts and layouts came out even."""
        if self._num_parts != len(self._layouts):
            raise TemplateError(
                f"the messages hold {self._num_parts} media parts, "
                f"but {len(self._layouts)} media layouts were given",
                param="messages",
            )


class _PromptFeed(_Feed):
    """The released encoder's behaviour, see :class:`ImagePrompts`."""

    def __init__(self, prompts: tuple[str, ...] | None) -> None:
        super().__init__(())
        self._prompts = prompts

    def part(self, part: MediaPart, where: str) -> Iterable[Segment]:
        """The next ready string."""
        if part.kind != "image":
            raise TemplateError(
                f"{where}: a {part.kind} cannot be written from image prompts", param=where
            )
        return self._next()

    def text(self, text: str) -> Iterable[Segment]:
        """Text, cut at every placeholder that takes a prompt."""
        if self._prompts is None or tokens.IMAGE_PLACEHOLDER not in text:
            return super().text(text)
        first, *rest = text.split(tokens.IMAGE_PLACEHOLDER)
        segments = list(super().text(first))
        for piece in rest:
            segments += self._next()
            segments += super().text(piece)
        return segments

    def finish(self) -> None:
        """Check that every prompt was taken."""
        if self._prompts is not None and self._num_parts != len(self._prompts):
            raise TemplateError(
                f"the messages hold {self._num_parts} image placeholders, "
                f"but {len(self._prompts)} image prompts were given",
                param="messages",
            )

    def _next(self) -> tuple[Segment, ...]:
        self._num_parts += 1
        if self._prompts is None:
            return (Segment(tokens.IMAGE_PLACEHOLDER, allow_special=True),)
        if self._num_parts > len(self._prompts):
            return ()
        prompt = self._prompts[self._num_parts - 1]
        return (Segment(prompt, allow_special=True),) if prompt else ()


def media_segments(layout: MediaLayout, where: str = "media") -> list[Segment]:
    """The placeholder block of a picture, or the timestamps and blocks of a clip.

    Raises:
        TemplateError: a picture with other than one group, a group without tokens.
    """
    is_image = layout.kind == "image"
    if not layout.groups or (is_image and len(layout.groups) != 1):
        raise TemplateError(
            f"{where}: a layout of kind '{layout.kind}' has {len(layout.groups)} groups",
            param=where,
        )
    header = f"image {layout.width}x{layout.height}" if is_image else "video"
    segments: list[Segment] = []
    for group in layout.groups:
        if group.num_tokens < 1:
            raise TemplateError(f"{where}: a group has {group.num_tokens} tokens", param=where)
        if group.timestamp and not is_image:
            segments.append(Segment(group.timestamp, allow_special=False))
        pads = tokens.MEDIA_PAD * group.num_tokens
        block = f"{tokens.MEDIA_BEGIN}{header}{tokens.MEDIA_CONTENT}{pads}{tokens.MEDIA_END}"
        segments.append(Segment(block, allow_special=True))
    return segments


# ---------------------------------------------------------------------- writing


class _Writer:
    """Collects segments; knows tags and escaping, not what they mean."""

    def __init__(self, feed: _Feed) -> None:
        self.segments: list[Segment] = []
        self._feed = feed

    def _control(self, marker: str) -> None:
        self.segments.append(Segment(marker, allow_special=True))

    def _plain(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text, allow_special=False))

    def open(self, tag: str, **attributes: str | None) -> None:
        """An opening tag; attributes that are None are left out."""
        self._control(tokens.OPEN)
        self._plain(tag)
        for key, value in attributes.items():
            if value is not None:
                # Four segments: merges across their joints would change the ids.
                self._plain(f" {key}")
                self._plain('="')
                self._plain(escape_attribute(value))
                self._plain('"')
        self._control(tokens.SEP)

    def close(self, tag: str) -> None:
        """A closing tag."""
        self._control(tokens.CLOSE)
        self._plain(tag)
        self._control(tokens.SEP)

    def end_message(self) -> None:
        """The closing tag of a message and its end marker."""
        self.close("message")
        self._control(tokens.END_OF_MSG)

    def internal(self, kind: str, body: str) -> None:
        """A system message of the template's own."""
        self.open("message", role="system", type=kind)
        self._plain(body.strip())
        self.end_message()

    def client_text(self, text: str) -> None:
        """Text that a client sent: markers in it are characters."""
        self.segments.extend(self._feed.text(text))

    def parts(self, message: Message, where: str) -> None:
        """The content of a message, parts side by side."""
        for index, part in enumerate(message.parts):
            if isinstance(part, TextPart):
                self.client_text(part.text)
            else:
                self.segments.extend(self._feed.part(part, f"{where}.content[{index}]"))


def _write_conversation(writer: _Writer, messages: Sequence[Message], *, thinking: bool) -> None:
    calls: tuple[ToolCall, ...] = ()
    num_results = 0
    for index, message in order_results(messages):
        where = f"messages[{index}]"
        if message.role == "assistant":
            calls, num_results = message.tool_calls, 0
            writer.open("message", role="assistant", name=message.name or None)
            _write_reasoning(writer, message, thinking=thinking)
            writer.open("response")
            writer.parts(message, where)
            writer.close("response")
            if message.tool_calls:
                _write_calls(writer, message.tool_calls, where)
            writer.end_message()
        elif message.role == "tool":
            num_results += 1
            name = message.tool_name
            if name is None and num_results <= len(calls):
                name = calls[num_results - 1].name
            if name is None:
                raise TemplateError(
                    f"{where}: result {num_results} names no tool, and the assistant message "
                    f"before it made {len(calls)} calls",
                    param=where,
                )
            writer.open("message", role="tool", tool=name, index=str(num_results))
            writer.parts(message, where)
            writer.end_message()
        elif message.role == "system" and message.tools:
            body = _tool_body(wording.NEW_TOOLS_HEAD, message.tools, f"{where}.tools")
            writer.internal("tool-declare", body)
        elif message.role in ("system", "user"):
            writer.open("message", role=message.role, name=message.name or None)
            writer.parts(message, where)
            writer.end_message()


def order_results(messages: Sequence[Message]) -> list[tuple[int, Message]]:
    """Bring each run of tool results into the order of the calls that they answer.

    Returns:
        The messages with their places in the input. In a run whose results all match a call of the
        assistant message before, results are sorted by call and take the call's name; a run with
        one stranger in it stays as it is.
    """
    ordered: list[tuple[int, Message]] = []
    table: dict[str, tuple[int, str]] = {}
    run: list[tuple[int, Message]] = []
    for index, message in enumerate(messages):
        if message.role == "tool":
            run.append((index, message))
            continue
        ordered += _sorted_run(run, table)
        run = []
        ordered.append((index, message))
        if message.role == "assistant":
            table = {}
            for position, call in enumerate(message.tool_calls):
                if call.id is not None:
                    table.setdefault(call.id, (position, call.name))
    return ordered + _sorted_run(run, table)


def media_parts(messages: Sequence[Message]) -> list[tuple[str, MediaPart]]:
    """Every media part that :func:`render` will ask a layout for, in that order.

    Returns:
        (place in the request, part); messages that K3's format drops are left out, and tool
        results come in the order of the calls that they answer.
    """
    return [
        (f"messages[{index}].content[{position}]", part)
        for index, message in order_results(messages)
        if message.role in RENDERED_ROLES and not (message.role == "system" and message.tools)
        for position, part in enumerate(message.parts)
        if isinstance(part, MediaPart)
    ]


def _sorted_run(
    run: list[tuple[int, Message]], table: Mapping[str, tuple[int, str]]
) -> list[tuple[int, Message]]:
    if any(message.tool_call_id not in table for _, message in run):
        return run
    matched = [(*table[message.tool_call_id or ""], index, message) for index, message in run]
    matched.sort(key=lambda item: item[0])
    return [(index, replace(message, tool_name=name)) for _, name, index, message in matched]


def _write_reasoning(writer: _Writer, message: Message, *, thinking: bool) -> None:
    if not thinking:
        return
    writer.open("think")
    if message.reasoning and not message.reasoning.isspace():
        writer.client_text(message.reasoning)
    writer.close("think")


def _write_calls(writer: _Writer, calls: Sequence[ToolCall], where: str) -> None:
    writer.open("tools")
    for position, call in enumerate(calls):
        writer.open("call", tool=call.name, index=str(position + 1))
        if isinstance(call.arguments, str):
            writer.open("json", type="object")
            writer.client_text(call.arguments)
            writer.close("json")
        else:
            _write_arguments(writer, call.arguments, f"{where}.tool_calls[{position}].arguments")
        writer.close("call")
    writer.close("tools")


def _write_arguments(writer: _Writer, arguments: Mapping[str, Any], where: str) -> None:
    for key, value in arguments.items():
        try:
            kind, text = argument_type(value), argument_text(value)
        except TemplateError as exc:
            raise TemplateError(f"{where}.{key}: {exc}", param=where) from exc
        writer.open("argument", key=str(key), type=kind)
        writer.client_text(text)
        writer.close("argument")


# ---------------------------------------------------------------------- internal messages


def _tool_body(head: str, tools: Sequence[Mapping[str, Any]], where: str) -> str:
    try:
        return f"{head}{sorted_json(list(tools))}{wording.FENCE_END}"
    except TemplateError as exc:
        raise TemplateError(f"{where}: {exc}", param=where) from exc


def _effort_body(effort: str) -> str:
    if effort not in wording.THINKING_EFFORTS:
        raise TemplateError(
            f"thinking_effort is '{effort}', must be one of {', '.join(wording.THINKING_EFFORTS)}",
            param="options.thinking_effort",
        )
    return f"{wording.EFFORT_HEAD}{effort}{wording.EFFORT_TAIL}"


def _format_body(options: ChatOptions) -> str | None:
    wanted = options.response_format
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if kind == "json_object":
        return wording.JSON_OBJECT
    if kind != "json_schema":
        return None
    schema = options.response_schema
    if schema is None and isinstance(wanted, Mapping):
        schema = wanted.get("json_schema")
        if isinstance(schema, Mapping):
            schema = schema.get("schema", schema.get("json_schema", schema))
    try:
        return f"{wording.JSON_SCHEMA_HEAD}{sorted_json(schema)}{wording.FENCE_END}"
    except TemplateError as exc:
        where = "options.response_format"
        raise TemplateError(f"{where}: {exc}", param=where) from exc


def _partial_message(messages: Sequence[Message]) -> Message | None:
    """The last message, if it is to be continued."""
    for index, message in enumerate(messages):
        if not message.partial:
            continue
        where = f"messages[{index}].partial"
        if index != len(messages) - 1:
            raise TemplateError(
                f"{where}: only the last of {len(messages)} messages can be continued", param=where
            )
        if message.role != "assistant":
            raise TemplateError(
                f"{where}: only an assistant message can be continued, "
                f"this one is from '{message.role}'",
                param=where,
            )
        if message.tool_calls:
            raise TemplateError(
                f"{where}: a message with {len(message.tool_calls)} tool calls is finished",
                param=where,
            )
        return message
    return None
