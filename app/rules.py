"""What K3's API refuses in messages and tools before anything is rendered.

These are the rules of Moonshot's own endpoint and its vendor tests; the chat format itself would
let most of these mistakes through silently. Raw JSON in, errors out; nothing is changed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from k3vl.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Json = Mapping[str, Any]

ROLES: Final = ("system", "user", "assistant", "tool")
PART_TYPES: Final = ("text", "image_url", "video_url")
DETAILS: Final = ("low", "high", "auto", "original")
_TOOL_NAME: Final = re.compile(r"[^\W\d@][^@\s]{0,255}")
_CONTENT_FIELDS: Final = ("system", "user", "tool")


def check_tools(tools: Sequence[Json] | None, messages: Sequence[Json]) -> None:
    """Check declarations, the request's and those on system messages, and their names together.

    Raises:
        RequestError: a declaration is malformed, a name is not usable, or there twice.
    """
    seen: set[str] = set()
    for index, tool in enumerate(tools or ()):
        _check_tool(tool, f"tools[{index}]", seen)
    for number, message in enumerate(messages):
        if "tools" not in message or message["tools"] is None:
            continue
        where = f"messages[{number}]"
        if message.get("role") not in ("system", "developer"):
            raise _bad(f"{where}.tools: only a system message declares tools", f"{where}.tools")
        if message.get("content"):
            raise _bad(
                f"{where}: a message that declares tools must have no content", f"{where}.content"
            )
        if not isinstance(message["tools"], list):
            raise _bad(f"{where}.tools must be a list of objects", f"{where}.tools")
        for index, tool in enumerate(message["tools"]):
            _check_tool(tool, f"{where}.tools[{index}]", seen)


def _check_tool(tool: Any, where: str, seen: set[str]) -> None:
    if not isinstance(tool, dict):
        raise _bad(f"{where} must be an object", where)
    if tool.get("type") != "function":
        raise _bad(f"{where}.type must be 'function'", f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _bad(f"{where}.function must be an object", f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise _bad(
            f"{where}.function.name must be 1 to 256 characters without '@' or white space, "
            "the first not a digit",
            f"{where}.function.name",
        )
    if name in seen:
        raise _bad(f"{where}.function.name is declared twice", f"{where}.function.name")
    seen.add(name)
    if not isinstance(function.get("parameters", {}), dict | None):
        raise _bad(f"{where}.function.parameters must be an object", f"{where}.function.parameters")


def check_tool_choice(
    choice: str | Json | None, tools: Sequence[Json] | None, messages: Sequence[Json]
) -> None:
    """Calls can be forced only where there is something to call.

    Raises:
        RequestError: ``required`` without tools, or a name that is not declared.
    """
    declared = [*(tools or ()), *(t for m in messages for t in m.get("tools") or ())]
    if choice == "required" and not declared:
        raise _bad("tool_choice is 'required', but there are no tools", "tool_choice")
    if not isinstance(choice, dict):
        return
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise _bad(
            "tool_choice must be 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    if all(tool["function"]["name"] != name for tool in declared):
        raise _bad("tool_choice names a function that is not among the tools", "tool_choice")


def check_messages(messages: Sequence[Json]) -> None:
    """Check roles, parts, and that tool results answer calls that were made.

    Raises:
        RequestError: ``param`` names message and part.
    """
    calls: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if role not in ROLES:
            raise _bad(
                f"{where}.role must be one of {', '.join(ROLES)} or developer", f"{where}.role"
            )
        _check_content(message, where)
        if role == "assistant":
            calls = {
                call["id"]
                for call in _list(message.get("tool_calls"))
                if isinstance(call, dict) and isinstance(call.get("id"), str)
            }
        elif role == "tool":
            answered = message.get("tool_call_id")
            if not isinstance(answered, str) or not answered:
                raise _bad(f"{where}.tool_call_id is missing", f"{where}.tool_call_id")
            if answered not in calls:
                raise _bad(
                    f"{where}.tool_call_id answers no call of the assistant message before it",
                    f"{where}.tool_call_id",
                )


def _check_content(message: Json, where: str) -> None:
    content = message.get("content")
    if content is None and message["role"] in _CONTENT_FIELDS and not message.get("tools"):
        raise _bad(f"{where}.content is missing", f"{where}.content")
    for index, part in enumerate(_list(content)):
        at = f"{where}.content[{index}]"
        if not isinstance(part, dict):
            raise _bad(f"{at} must be an object", at)
        kind = part.get("type")
        if kind not in PART_TYPES:
            shown = f" '{kind[:64]}'" if isinstance(kind, str) else ""
            raise RequestError(
                f"{at}: content of type{shown} is not supported, only {', '.join(PART_TYPES)}",
                param=at,
                code="unsupported_content_type",
            )
        if kind == "text" and not isinstance(part.get("text"), str):
            raise _bad(f"{at}.text must be a string", f"{at}.text")
        if kind != "text":
            _check_media(part, kind, at)


def _check_media(part: Json, kind: str, at: str) -> None:
    source = part.get(kind)
    if isinstance(source, dict):
        detail = source.get("detail")
        if detail is not None and detail not in DETAILS:
            raise _bad(
                f"{at}.{kind}.detail must be one of {', '.join(DETAILS)}", f"{at}.{kind}.detail"
            )
        source = source.get("url")
    if not isinstance(source, str) or not source:
        raise _bad(f"{at}.{kind} must be a URL, or an object with one", f"{at}.{kind}")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _bad(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")
