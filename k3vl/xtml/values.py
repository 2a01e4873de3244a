"""Attributes, tag headers and typed arguments: text on one side, values on the other.

Both directions live together so that they cannot drift apart. No state, no events, no tokens.
Rules: K3's chat format as released; for reading, strict JSON with the raw string as the fall-back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from k3vl.errors import TemplateError

JSON_WHITESPACE: Final = " \t\r\n"

_MAX_DEPTH: Final = 200

# ---------------------------------------------------------------------- attributes and headers


def escape_attribute(value: str) -> str:
    """Escape an attribute value; only ``&`` and the double quote are special."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape_attribute(text: str) -> str:
    """Undo :func:`escape_attribute`."""
    return text.replace("&quot;", '"').replace("&amp;", "&")


def tag_name(header: str) -> str:
    """The tag of a header such as ``call tool="f"``; white space around it is ignored."""
    words = header.split(None, 1)
    return words[0] if words else ""


def parse_header(header: str) -> tuple[str, dict[str, str]]:
    """Split a header into its tag and its unescaped attributes, in any order.

    Text that is no attribute is skipped; of a repeated attribute the last one counts. Takes time
    linear in the header, whatever the model wrote.
    """
    tag = tag_name(header)
    attributes: dict[str, str] = {}
    position = header.find(tag) + len(tag)
    while (quote := header.find('"', position)) >= 0:
        before = header[position:quote].rstrip()
        position = quote + 1
        if not before.endswith("="):
            continue
        words = before[:-1].split()
        end = header.find('"', position)
        if not words or end < 0:
            continue
        attributes[words[-1]] = unescape_attribute(header[position:end])
        position = end + 1
    return tag, attributes


# ---------------------------------------------------------------------- writing


def argument_type(value: Any) -> str:
    """The ``type`` attribute for a JSON value.

    Raises:
        TemplateError: not a JSON value.
    """
    if isinstance(value, bool):  # before numbers: bool is an int
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    if isinstance(value, Mapping):
        return "object"
    if isinstance(value, list | tuple):
        return "array"
    raise TemplateError(f"a {type(value).__name__} is not a JSON value")


def argument_text(value: Any) -> str:
    """The body of an argument: a string as it is, anything else as JSON with spaces.

    Raises:
        TemplateError: not a JSON value.
    """
    return value if isinstance(value, str) else _dumps(value, (", ", ": "), sort_keys=False)


def sorted_json(value: Any) -> str:
    """Compact JSON with every object sorted by key, as tool declarations and schemas need it.

    Raises:
        TemplateError: not a JSON value.
    """
    return _dumps(value, (",", ":"), sort_keys=True)


def _dumps(value: Any, separators: tuple[str, str], *, sort_keys: bool) -> str:
    try:
        return json.dumps(
            value,
            ensure_ascii=False,
            separators=separators,
            sort_keys=sort_keys,
            default=_plain,
        )
    except (TypeError, ValueError, RecursionError) as exc:
        raise TemplateError(f"cannot be written as JSON ({type(exc).__name__})") from exc


def _plain(value: Any) -> Any:
    """Read-only mappings are objects too."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(type(value).__name__)


# ---------------------------------------------------------------------- reading


def strict_json(text: str) -> Any:
    """Decode JSON that every other JSON reader would accept too.

    Raises:
        ValueError: not JSON: this includes ``NaN``, ``Infinity``, numbers beyond a double, and
            nesting deeper than 200, which would break whoever writes the value again.
    """
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    if text.count("[") + text.count("{") > _MAX_DEPTH and _depth(value) > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    return value


def _depth(value: Any) -> int:
    """How many lists and objects lie inside each other."""
    depth = 0
    level = [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [
            child for item in level for child in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is beyond a double")
    return number


def argument_value(kind: str, text: str) -> Any:
    """The value of an argument that a model wrote: never an error, at worst the raw string."""
    if kind == "string":
        return text
    try:
        return strict_json(text)
    except ValueError:
        return text


def argument_json(kind: str, text: str) -> str:
    """The same value as JSON text, with the model's own spelling of numbers."""
    if kind != "string":
        try:
            strict_json(text)
        except ValueError:
            pass
        else:
            return text
    return json.dumps(text, ensure_ascii=False)


def json_fragment(text: str) -> str:
    """A piece of a JSON string, without the quotes; fragments concatenate."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
