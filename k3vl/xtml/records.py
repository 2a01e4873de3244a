"""JSON records in, JSON records out: what ``k3vl inspect render`` and ``parse`` do to one line.

Pure functions. A record that makes no sense gives ``{"error": ...}``, never an exception. Pictures
come as ``options.image_prompts``, the released encoder's own interface.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from k3vl.errors import RequestError
from k3vl.types import ChatOptions
from k3vl.xtml.messages import parse_messages, parse_tools
from k3vl.xtml.parser import StreamParser, collect
from k3vl.xtml.render import ImagePrompts, render
from k3vl.xtml.tokens import Piece

_OPTION_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "thinking": (bool,),
    "thinking_effort": (str,),
    "tool_choice": (str, Mapping),
    "response_format": (str, Mapping),
    "response_schema": (object,),
    "add_generation_prompt": (bool,),
    "image_prompts": (list,),
}
_PARSE_OPTION_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "thinking": (bool,),
    "tool_choice": (str, Mapping),
    "engine_finish": (str,),
}


def render_record(record: Any) -> dict[str, Any]:
    """Render ``{"messages", "tools", "options"}``.

    Returns:
        ``{"segments": [{"text", "allow_special"}, ...]}`` or ``{"error": message}``.
    """
    try:
        fields = _fields(record, ("messages", "tools", "options"))
        options = _options(fields.get("options"), _OPTION_TYPES)
        prompts = _prompts(options.pop("image_prompts", None))
        segments = render(
            parse_messages(fields.get("messages")),  # type: ignore[arg-type] # checks its input
            tools=parse_tools(fields.get("tools")),
            options=ChatOptions(**options),
            media=prompts,
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
        options = _options(fields.get("options"), _PARSE_OPTION_TYPES)
        pieces = _pieces(fields.get("pieces"))
        engine_finish = _engine_finish(options.get("engine_finish", "stop"))
    except RequestError as exc:
        return {"error": str(exc)}
    parser = StreamParser(
        thinking=options.get("thinking", True), tool_choice=options.get("tool_choice")
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


def _options(options: Any, types: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """The options that are set; null is as good as absent."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise RequestError(f"options must be an object, not a {type(options).__name__}")
    for name, value in options.items():
        if name not in types:
            raise RequestError(f"options.{name} is not known; there are {', '.join(types)}")
        if value is not None and not isinstance(value, types[name]):
            raise RequestError(f"options.{name} cannot be a {type(value).__name__}")
    return {name: value for name, value in options.items() if value is not None}


def _prompts(prompts: list[Any] | None) -> ImagePrompts:
    if prompts is None:
        return ImagePrompts(None)
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("options.image_prompts must hold strings")
    return ImagePrompts(tuple(prompts))


def _engine_finish(word: str) -> Literal["stop", "length"]:
    words: dict[str, Literal["stop", "length"]] = {"stop": "stop", "length": "length"}
    if word not in words:
        raise RequestError(f"options.engine_finish is '{word}', must be stop or length")
    return words[word]


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
