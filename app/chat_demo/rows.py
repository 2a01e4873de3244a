"""A conversation as rows of a chat view: plain mappings, as Gradio's chatbot takes them.

Every row knows which turn it belongs to. Text of the model goes out as Markdown, which the view
sanitises; names and reasons that come from files are escaped here.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k3vl.app.chat_demo.history import Answer, CallDraft, ToolResult, Turn

_FINISH_NOTES = {"length": "The answer reached its limit of tokens."}


@dataclass(frozen=True, slots=True)
class Row:
    """One row; ``turn`` is the index of the turn, ``value`` what the chatbot takes."""

    turn: int
    value: dict[str, Any]

    @property
    def asked(self) -> bool:
        """Whether it is the visitor's."""
        return bool(self.value["role"] == "user")


def chat_rows(turns: Sequence[Turn]) -> list[Row]:
    """All rows of a conversation, in order."""
    return [Row(index, value) for index, turn in enumerate(turns) for value in _turn_rows(turn)]


def _turn_rows(turn: Turn) -> Iterator[dict[str, Any]]:
    for result in turn.results:
        yield _result(result)
    for file in turn.usable:
        path = str(file.shown or file.path)
        yield {"role": "user", "content": {"path": path, "alt_text": file.path.name}}
    if turn.text:
        yield {"role": "user", "content": turn.text}
    elif turn.attachments and not turn.usable:
        yield {"role": "user", "content": ", ".join(_code(f.path.name) for f in turn.attachments)}
    for file in turn.attachments:
        if file.problem:
            yield _note(
                f"<b>{html.escape(file.path.name)}</b> was left out: {html.escape(file.problem)}. "
                "The chat goes on without it.",
                "problem",
            )
    yield from _answer_rows(turn.answer)


def _answer_rows(answer: Answer) -> Iterator[dict[str, Any]]:
    if answer.reasoning.strip():
        yield _thinking(answer)
    if answer.content:
        yield {"role": "assistant", "content": answer.content}
    for draft in answer.calls:
        yield _tool_call(draft, ended=answer.ended_at is not None)
    if answer.error:
        yield _note(html.escape(answer.error), "problem")
    elif answer.stopped:
        yield _note("Stopped.", "quiet")
    elif answer.finish in _FINISH_NOTES:
        yield _note(_FINISH_NOTES[answer.finish], "quiet")
    elif answer.finish and not (answer.content.strip() or answer.calls):
        yield _note("The model gave an empty answer.", "quiet")
    elif answer.finish and (sure := answer.confidence) is not None and sure < answer.unsure_below:
        yield _note(f"The model is not sure: its confidence is {sure:.0%}.", "quiet")


def _thinking(answer: Answer) -> dict[str, Any]:
    metadata: dict[str, Any] = {"title": "Thinking", "status": "pending"}
    if answer.thought_at is not None and answer.thinking_at is not None:
        seconds = round(answer.thought_at - answer.thinking_at, 2)
        metadata = {"title": "Thought", "status": "done", "duration": seconds}
    return {"role": "assistant", "content": answer.reasoning, "metadata": metadata}


def _tool_call(draft: CallDraft, *, ended: bool) -> dict[str, Any]:
    """A card with the call's arguments; half-written JSON is shown as it stands."""
    arguments = draft.arguments
    if draft.call is not None and not isinstance(draft.call.arguments, str):
        arguments = json.dumps(dict(draft.call.arguments), indent=2, ensure_ascii=False)
    elif draft.call is not None:
        arguments = str(draft.call.arguments)
    # No status "done": the view would fold the card away.
    state = {} if draft.call is not None or ended else {"status": "pending"}
    return {
        "role": "assistant",
        "content": _fenced(arguments, "json"),
        "metadata": {"title": f"Tool call: {draft.name}", **state},
    }


def _result(result: ToolResult) -> dict[str, Any]:
    """A card with what the visitor gave."""
    return {
        "role": "assistant",
        "content": _fenced(result.text, "text"),
        "metadata": {"title": f"Result of {result.call.name}"},
    }


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, _longest_run(text, "`") + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _note(inner: str, kind: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f'<div class="k3-note k3-{kind}">{inner}</div>'}


def _code(name: str) -> str:
    """A file's name as inline code, whatever it is made of."""
    fence = "`" * (_longest_run(name, "`") + 1)
    return f"{fence} {name} {fence}" if "`" in name else f"`{name}`"


def _longest_run(text: str, character: str) -> int:
    longest = run = 0
    for each in text:
        run = run + 1 if each == character else 0
        longest = max(longest, run)
    return longest
