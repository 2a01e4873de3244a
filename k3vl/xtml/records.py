"""JSON records in, JSON records out: what ``k3vl inspect render`` and ``parse`` do to one line.

Pure functions. A record that makes no sense gives ``{"error": ...}``, never an exception. Messages
and options are read as the released encoder reads them (see ``released``); pictures come as
``options.image_prompts``, its own interface.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from k3vl.errors import RequestError
from k3vl.types import ChatOptions
from k3vl.xtml.parser import StreamParser, collect
from k3vl.xtml.released import released_messages, released_tools
from k3vl.xtml.render import ImagePrompts, render
from k3vl.xtml.tokens import Piece


def render_record(record: Any) -> dict[str, Any]:
    """Render ``{"messages", "tools", "options"}``.

    Returns:
        ``{"segments": [{"text", "allow_special"}, ...]}`` or ``{"error": message}``.
    """
    try:
        fields = _fields(record, ("messages", "tools", "options"))
        options = _options(fields.get("options"))
        segments = render(
            released_messages(fields.get("messages")),
            tools=released_tools(fields.get("tools")),
            options=_chat_options(options),
            media=_prompts(options.get("image_prompts")),
        )
    except RequestError as exc:
        return {"error": str(exc)}
    return {
        "segments": [{"text": s.text, "allow_special": s.allow_special} for s in segments],
    }


def parse_record(record: Any) -> dict[str, Any]:
    """Parse ``{"pieces": [[text, is_control], ...], "options"}``.

    Returns:
        ``{"reasoning", "content", "tool_calls": [{"name", "arguments"}], "finish"}``, arguments as
        JSON text; or ``{"error": message}``.
    """
    try:
        fields = _fields(record, ("pieces", "options"))
        options = _options(fields.get("options"))
        pieces = _pieces(fields.get("pieces"))
        engine_finish = _engine_finish(options.get("engine_finish"))
    except RequestError as exc:
        return {"error": str(exc)}
    parser = StreamParser(
        thinking=_flag(options, "thinking"), tool_choice=options.get("tool_choice")
    )
    answer = collect([*parser.feed(pieces), *parser.flush(engine_finish)])
    return {
        "reasoning": answer.reasoning,
        "content": answer.content,
        "tool_calls": [
            {
                "name": call.name,
                "arguments": call.arguments
                if isinstance(call.arguments, str)
                else json.dumps(call.arguments, ensure_ascii=False),
            }
            for call in answer.tool_calls
        ],
        "finish": answer.finish,
    }


def _fields(record: Any, known: tuple[str, ...]) -> Mapping[str, Any]:
    """The record itself, if it is an object with the first known field; others may be absent."""
    if not isinstance(record, Mapping):
        raise RequestError(f"a record must be an object, not a {type(record).__name__}")
    if known[0] not in record:
        raise RequestError(f"the record has no '{known[0]}'")
    return record


def _options(options: Any) -> Mapping[str, Any]:
    """The options; those that the release does not know are ignored, as there."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise RequestError(f"options must be an object, not a {type(options).__name__}")
    return options


def _flag(options: Mapping[str, Any], name: str) -> bool:
    """A switch that is on unless it is set to something false; null is as good as absent."""
    value = options.get(name)
    return value is None or bool(value)


def _chat_options(options: Mapping[str, Any]) -> ChatOptions:
    """Values of a type that means nothing to the release are left out, as there."""
    thinking = _flag(options, "thinking")
    effort = options.get("thinking_effort") if thinking else None
    if effort is not None and not isinstance(effort, str):
        raise RequestError(f"options.thinking_effort cannot be a {type(effort).__name__}")
    choice, wanted = options.get("tool_choice"), options.get("response_format")
    schema = options.get("response_schema")
    if schema is None and "response_schema" in options and isinstance(wanted, Mapping):
        wanted = wanted.get("type")  # a null schema overrides the one in the format
    return ChatOptions(
        thinking=thinking,
        thinking_effort=effort,
        tool_choice=choice if isinstance(choice, str) else None,
        response_format=wanted if isinstance(wanted, str | Mapping) else None,
        response_schema=schema,
        add_generation_prompt=_flag(options, "add_generation_prompt"),
    )


def _prompts(prompts: Any) -> ImagePrompts:
    if prompts is None:
        return ImagePrompts(None)
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("options.image_prompts must be a list of strings")
    return ImagePrompts(tuple(prompts))


def _engine_finish(word: Any) -> Literal["stop", "length"]:
    if word is None or word == "stop":
        return "stop"
    if word == "length":
        return "length"
    raise RequestError("options.engine_finish must be stop or length")


def _pieces(pieces: Any) -> list[Piece]:
    if not isinstance(pieces, list):
        raise RequestError(f"pieces must be a list, not a {type(pieces).__name__}")
    checked = []
    for index, piece in enumerate(pieces):
        match piece:
            case [str() as text, bool() as control]:
                checked.append(Piece(text, control))
            case _:
                raise RequestError(f"pieces[{index}] must be [text, is_control]")
    return checked
