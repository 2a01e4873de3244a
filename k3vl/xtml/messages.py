"""JSON messages as clients send them -> :class:`k3vl.types.Message`.

Rules of the JSON border live here: which fields count, what is stringified, what is an error and
where. What the messages look like to the model is ``render``'s business. Follows the released
encoder's reading of OpenAI-style messages; ``developer`` and other unknown roles are kept as they
are (the renderer drops them; a server that wants them as ``system`` renames them first).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Final

from k3vl.errors import TemplateError
from k3vl.types import MediaPart, Message, TextPart, ToolCall

if TYPE_CHECKING:
    from k3vl.types import Detail, MediaKind, MediaSource, Part

_MEDIA_TYPES: Final[Mapping[str, MediaKind]] = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
}


def parse_messages(data: Sequence[Any]) -> tuple[Message, ...]:
    """Read a conversation.

    Typed messages are kept as they are; other items that are not mappings are skipped. A part
    ``{"type": "image"}`` (or ``video``) without a source is an open slot: its ``source`` is the
    empty string, and it can be rendered with a layout but not loaded.

    Raises:
        TemplateError: ``param`` names the field, e.g. ``messages[2].content[0].text``.
    """
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Sequence):
        raise TemplateError(f"messages must be a list, not {_kind(data)}", param="messages")
    return tuple(
        item if isinstance(item, Message) else _message(item, f"messages[{index}]")
        for index, item in enumerate(data)
        if isinstance(item, Message | Mapping)
    )


def parse_tools(data: Any, *, param: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """Read tool declarations; None and an empty list declare nothing.

    Raises:
        TemplateError: not a list of objects.
    """
    if data is None:
        return ()
    if not isinstance(data, list | tuple):
        raise TemplateError(f"{param} must be a list, not {_kind(data)}", param=param)
    for index, tool in enumerate(data):
        if not isinstance(tool, Mapping):
            where = f"{param}[{index}]"
            raise TemplateError(f"{where} must be an object, not {_kind(tool)}", param=where)
    return tuple(data)


def _message(item: Mapping[str, Any], where: str) -> Message:
    role = item.get("role")
    if not isinstance(role, str):
        problem = "is missing" if role is None else f"must be a string, not {_kind(role)}"
        raise TemplateError(f"{where}.role {problem}", param=f"{where}.role")
    if role not in ("system", "user", "assistant", "tool"):
        return Message(role=role)
    name = _word(item.get("name") or None, f"{where}.name")
    if role == "system" and item.get("tools"):
        # The format has no room for text beside a dynamic declaration: K3 drops it.
        return Message(role=role, tools=parse_tools(item["tools"], param=f"{where}.tools"))
    parts = _content(item.get("content"), f"{where}.content")
    if role == "tool":
        return Message(
            role=role,
            parts=parts,
            tool_call_id=_first_present(item, ("tool_call_id", "id"), where),
            tool_name=_first_present(item, ("tool", "name"), where),
        )
    if role != "assistant":
        _refuse_partial(item, where)
        return Message(role=role, parts=parts, name=name)
    return Message(
        role=role,
        parts=parts,
        name=name,
        reasoning=_reasoning(item, where),
        tool_calls=_tool_calls(item.get("tool_calls"), f"{where}.tool_calls"),
        partial=_flag(item.get("partial"), f"{where}.partial"),
    )


def _first_present(item: Mapping[str, Any], keys: tuple[str, str], where: str) -> str | None:
    """The first key that is there counts, even when it holds null."""
    for key in keys:
        if key in item:
            return _word(item[key], f"{where}.{key}")
    return None


def _reasoning(item: Mapping[str, Any], where: str) -> str | None:
    """``reasoning_content`` unless it is empty; blanks are not empty and hide ``reasoning``."""
    for key in ("reasoning_content", "reasoning"):
        if item.get(key):
            return _word(item[key], f"{where}.{key}")
    return None


# ---------------------------------------------------------------------- content


def _content(content: Any, where: str) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(content),) if content else ()
    if not isinstance(content, list | tuple):
        raise TemplateError(
            f"{where} must be a string or a list of parts, not {_kind(content)}", param=where
        )
    return tuple(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> Part:
    if not isinstance(part, Mapping):
        raise TemplateError(f"{where} must be an object, not {_kind(part)}", param=where)
    kind = part.get("type")
    if not isinstance(kind, str):
        raise TemplateError(f"{where}.type is missing or not a string", param=f"{where}.type")
    if kind in _MEDIA_TYPES:
        return MediaPart(
            _MEDIA_TYPES[kind], _source(part, kind, where), _detail(part.get(kind), kind, where)
        )
    text = _word(part.get("text"), f"{where}.text")
    if text is None:
        raise TemplateError(
            f"{where} is of type '{kind}' and must carry 'text'", param=f"{where}.text"
        )
    return TextPart(text)


def _source(part: Mapping[str, Any], kind: str, where: str) -> MediaSource:
    if kind not in part and not kind.endswith("_url"):
        return ""
    field = f"{where}.{kind}"
    source: Any = part.get(kind)
    if isinstance(source, Mapping):
        field, source = f"{field}.url", source.get("url")
        if not isinstance(source, str):
            raise TemplateError(f"{field} must be a string, not {_kind(source)}", param=field)
    if isinstance(source, str):
        if not source:
            raise TemplateError(f"{field} is empty", param=field)
        return source
    if not kind.endswith("_url") and _is_opened(source):
        return source  # type: ignore[no-any-return] # checked just above
    raise TemplateError(f"{field} cannot be {_kind(source)}", param=field)


def _detail(source: Any, kind: str, where: str) -> Detail | None:
    """OpenAI's wish for a resolution; it stands beside the URL."""
    detail = source.get("detail") if isinstance(source, Mapping) else None
    if detail is None or detail in ("low", "high", "auto", "original"):
        return detail
    field = f"{where}.{kind}.detail"
    raise TemplateError(f"{field} must be low, high, auto or original", param=field)


def _is_opened(source: Any) -> bool:
    """Bytes, a path or a PIL image, without importing PIL: an image exists only if it is loaded."""
    if isinstance(source, bytes | PathLike):
        return True
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(source, pil.Image)


# ---------------------------------------------------------------------- tool calls


def _tool_calls(calls: Any, where: str) -> tuple[ToolCall, ...]:
    if not calls:
        return ()
    if not isinstance(calls, list | tuple):
        raise TemplateError(f"{where} must be a list, not {_kind(calls)}", param=where)
    return tuple(_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls))


def _tool_call(call: Any, where: str) -> ToolCall:
    """One call, nested under ``function`` or flat; other keys, ours included, are not trusted."""
    if not isinstance(call, Mapping):
        raise TemplateError(f"{where} must be an object, not {_kind(call)}", param=where)
    function, at = call, where
    if "function" in call:
        function, at = call["function"], f"{where}.function"
        if not isinstance(function, Mapping):
            raise TemplateError(f"{at} must be an object, not {_kind(function)}", param=at)
    name = _word(function.get("name"), f"{at}.name")
    if name is None:
        raise TemplateError(f"{at}.name is missing", param=f"{at}.name")
    arguments = parse_arguments(function.get("arguments"), f"{at}.arguments")
    return ToolCall(name=name, arguments=arguments, id=_word(call.get("id"), f"{where}.id"))


def parse_arguments(arguments: Any, where: str) -> Mapping[str, Any] | str:
    """The decoded object; the raw text where it is not JSON at all.

    Raises:
        TemplateError: JSON, but no object.
    """
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        return arguments
    if not isinstance(arguments, str):
        raise TemplateError(
            f"{where} must be an object or a string with one, not {_kind(arguments)}", param=where
        )
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)  # lenient on purpose: history may hold NaN
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(parsed, dict):
        raise TemplateError(f"{where} must hold a JSON object, not {_kind(parsed)}", param=where)
    return parsed


# ---------------------------------------------------------------------- scalars


def _word(value: Any, where: str) -> str | None:
    """Text; numbers and truth values are stringified as Python does."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(value)
    raise TemplateError(f"{where} must be a string, not {_kind(value)}", param=where)


def _flag(value: Any, where: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise TemplateError(f"{where} must be true or false, not {_kind(value)}", param=where)


def _refuse_partial(item: Mapping[str, Any], where: str) -> None:
    if _flag(item.get("partial"), f"{where}.partial"):
        raise TemplateError(
            f"{where}.partial: only an assistant message can be continued, "
            f"this one is from '{item['role']}'",
            param=f"{where}.partial",
        )


def _kind(value: Any) -> str:
    """What a value is, in JSON's words where it has one."""
    names = {type(None): "null", dict: "an object", list: "a list", str: "a string"}
    names |= {bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")
