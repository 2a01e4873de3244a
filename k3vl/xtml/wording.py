"""The template's own sentences, word for word as Kimi K3 was trained on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

THINKING_EFFORTS: Final = ("low", "high", "max")

TOOLS_HEAD: Final = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
NEW_TOOLS_HEAD: Final = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n"
)
FENCE_END: Final = "\n```"
EFFORT_HEAD: Final = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort="
)
EFFORT_TAIL: Final = "`."
TOOL_CHOICES: Final[Mapping[str, str]] = {
    "required": (
        "The system is invoked with `tool_choice=required`.\n"
        "You MUST call tools in the next message."
    ),
    "none": (
        "The system is invoked with `tool_choice=none`.\n"
        "You MUST NOT call any tools in the next message."
    ),
}
_JSON_ONLY: Final = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
    "formatting."
)
JSON_OBJECT: Final = f"The system is invoked with `response_format=json_object`.\n{_JSON_ONLY}"
JSON_SCHEMA_HEAD: Final = (
    f"The system is invoked with `response_format=json_schema`.\n{_JSON_ONLY}\n"
    "The JSON data must match the following schema:\n```json\n"
)
