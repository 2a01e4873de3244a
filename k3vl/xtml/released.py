"""JSON messages as K3's released encoder reads them: what it stringifies, ignores and lets pass.

``messages`` reads what clients send and refuses what can only be a mistake. This reader refuses
nothing that the release renders, so that its behaviour can be reproduced and compared: null text
becomes ``None``, a picture needs no source, any type with a ``text`` is text. Never use it to
serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from k3vl.errors import TemplateError
from k3vl.types import MediaPart, Message, Part, TextPart, ToolCall
from k3vl.xtml.messages import parse_arguments
from k3vl.xtml.render import RENDERED_ROLES

_DROPPED: Final = Message(role="")
"""An item that is no message: not rendered, but it ends a run of tool results."""


def released_messages(data: Any) -> tuple[Message, ...]:
    """Read a conversation; every item keeps its place, also those that are not rendered.

    ``partial`` is this project's addition to the format: only the value true means it.

    Raises:
        TemplateError: what the release fails on too; ``param`` names the field.
    """
    if not isinstance(data, list):
        raise TemplateError(f"messages must be a list, not a {_kind(data)}", param="messages")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(data))


def released_tools(data: Any, *, param: str = "tools") -> tuple[Any, ...]:
    """Read tool declarations, whatever the list holds; anything empty declares nothing.

    Raises:
        TemplateError: neither empty nor a list.
    """
    if not data:
        return ()
    if not isinstance(data, list):
        raise TemplateError(f"{param} must be a list, not a {_kind(data)}", param=param)
    return tuple(data)


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping):
        return _DROPPED
    role = _required(item, "role", where)
    if role not in RENDERED_ROLES:
        return _DROPPED
    if role == "system" and item.get("tools"):
        return Message(role=role, tools=released_tools(item["tools"], param=f"{where}.tools"))
    parts = _content(item.get("content"), f"{where}.content")
    if role == "tool":
        return Message(
            role=role,
            parts=parts,
            tool_call_id=_word(item.get("tool_call_id", item.get("id"))),
            tool_name=_word(item.get("tool", item.get("name"))),
        )
    is_assistant = role == "assistant"
    return Message(
        role=role,
        parts=parts,
        name=_word(item.get("name") or None),
        reasoning=_word(item.get("reasoning_content") or item.get("reasoning")),
        tool_calls=_tool_calls(item.get("tool_calls"), where) if is_assistant else (),
        partial=item.get("partial") is True,
    )


def _content(content: Any, where: str) -> tuple[Part, ...]:
    if content is None or content == {}:
        return ()
    if isinstance(content, str):
        return (TextPart(content),)
    if not isinstance(content, list):
        raise TemplateError(
            f"{where} must be a string or a list of parts, not a {_kind(content)}", param=where
        )
    return tuple(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> Part:
    if _required(part, "type", where) in ("image", "image_url"):
        return MediaPart("image", "")
    return TextPart(str(_required(part, "text", where)))


def _tool_calls(calls: Any, where: str) -> tuple[ToolCall, ...]:
    if not calls:
        return ()
    where = f"{where}.tool_calls"
    if not isinstance(calls, list):
        raise TemplateError(f"{where} must be a list, not a {_kind(calls)}", param=where)
    return tuple(_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls))


def _tool_call(call: Any, where: str) -> ToolCall:
    nested = isinstance(call, Mapping) and "function" in call
    function, at = (call["function"], f"{where}.function") if nested else (call, where)
    return ToolCall(
        name=str(_required(function, "name", at)),
        arguments=parse_arguments(function.get("arguments"), f"{at}.arguments"),
        id=_word(call.get("id")),
    )


def _required(item: Any, key: str, where: str) -> Any:
    """A field that must be there; null is there."""
    if not isinstance(item, Mapping):
        raise TemplateError(f"{where} must be an object, not a {_kind(item)}", param=where)
    if key not in item:
        raise TemplateError(f"{where}.{key} is missing", param=f"{where}.{key}")
    return item[key]


def _word(value: Any) -> str | None:
    return None if value is None else str(value)


def _kind(value: Any) -> str:
    return type(value).__name__
