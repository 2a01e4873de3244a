"""Events to rows and figures, and what a conversation remembers."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3vl.app.chat_demo.figures import figures, figures_html
from k3vl.app.chat_demo.history import Answer, Attachment, ToolResult, Turn, remember
from k3vl.app.chat_demo.rows import chat_rows
from k3vl.types import (
    Content,
    Finish,
    MediaPart,
    Reasoning,
    TextPart,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    Usage,
)

CAT = Attachment(path=Path("/uploads/cat.png"), kind="image")
BAD = Attachment(path=Path("/uploads/<b>bad.png"), kind="image", problem="not a <picture>")


def answered(*events, started: float = 10.0, step: float = 1.0) -> Answer:
    answer = Answer(started=started)
    for number, event in enumerate(events, start=1):
        answer.feed(event, started + number * step)
    return answer


def turn(text: str = "What?", *files: Attachment, answer: Answer | None = None) -> Turn:
    answer = answer or answered(Content("A cat."), Finish("stop"))
    return Turn(text=text, attachments=files, answer=answer)


def values(*turns: Turn) -> list[dict]:
    return [row.value for row in chat_rows(turns)]


def test_files_come_before_the_question_and_every_row_knows_its_turn() -> None:
    rows = chat_rows([turn("What?", CAT), turn("Sure?")])
    assert [(row.turn, row.asked) for row in rows] == [
        (0, True),
        (0, True),
        (0, False),
        (1, True),
        (1, False),
    ]
    assert rows[0].value["content"]["path"] == str(CAT.path)
    assert [row.value["content"] for row in rows[1:]] == ["What?", "A cat.", "Sure?", "A cat."]


def test_thinking_is_a_panel_that_shows_how_long_it_took() -> None:
    thinking = answered(Reasoning("Let "), Reasoning("me see."))
    [row] = values(turn(answer=thinking))[1:]
    assert row["content"] == "Let me see."
    assert row["metadata"] == {"title": "Thinking", "status": "pending"}
    thinking.feed(Content("A cat."), 14.5)
    thought, content = values(turn(answer=thinking))[1:]
    assert thought["metadata"] == {"title": "Thought", "status": "done", "duration": 3.5}
    assert content["content"] == "A cat."


def test_thinking_that_was_stopped_is_over() -> None:
    answer = answered(Reasoning("Hm"))
    answer.end(13.0, stopped=True)
    thought, note = values(turn(answer=answer))[1:]
    assert thought["metadata"]["duration"] == 2.0
    assert "Stopped." in note["content"]


def test_reasoning_that_proves_to_be_the_answer_moves() -> None:
    answer = answered(Reasoning("A cat"), Content("A cat", replaces_reasoning=True), Content("."))
    [row] = values(turn(answer=answer))[1:]
    assert row["content"] == "A cat."
    assert "metadata" not in row


def test_tool_calls_are_cards() -> None:
    begin, half = ToolCallBegin(0, "c1", "look_up"), ToolCallArguments(0, '{"word": "c```at')
    answer = answered(begin, half)
    [card] = values(turn(answer=answer))[1:]
    assert card["metadata"] == {"title": "Tool call: look_up", "status": "pending"}
    assert card["content"].startswith("````json\n"), "a longer fence than the arguments hold"
    call = ToolCall(name="look_up", arguments={"word": "Käse"}, id="c1")
    answer.feed(ToolCallEnd(0, call), 20.0)
    [card] = values(turn(answer=answer))[1:]
    assert card["metadata"] == {"title": "Tool call: look_up"}
    assert card["content"] == '```json\n{\n  "word": "Käse"\n}\n```'
    message = answer.message(with_calls=True)
    assert message is not None
    assert message.tool_calls == (call,)


def test_calls_are_remembered_with_their_results() -> None:
    call = ToolCall(name="look_up", arguments={"word": "cat"}, id="c1")
    begin = ToolCallBegin(0, "c1", "look_up")
    calling = answered(begin, ToolCallEnd(0, call), Finish("tool_calls"))
    given = (ToolResult(call=call, text="an ```animal"),)
    now = Answer(started=0.0)
    first, second = turn(answer=calling), Turn(results=given, answer=now)
    memory = remember([first, second])
    assert [message.role for message in memory.messages] == ["user", "assistant", "tool"]
    assert memory.owners == (0, 0, 1)
    _, reply, result = memory.messages
    assert reply.tool_calls == (call,)
    assert (result.tool_call_id, result.tool_name) == ("c1", "look_up")
    assert result.parts == (TextPart("an ```animal"),)
    assert second.askable
    [card] = [value for value in values(first, second) if "Result" in str(value.get("metadata"))]
    assert card["content"] == "````text\nan ```animal\n````"

    answer = turn(answer=answered(Content("A pet."), Finish("stop")))
    done = Turn(results=given, answer=answer.answer)
    later = turn("Sure?", answer=now)
    roles = [message.role for message in remember([first, done, later]).messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    failed = Answer(started=0.0)
    failed.end(1.0, error="gone")
    for turns in ([first, later], [first, Turn(results=given, answer=failed), later]):
        assert remember(turns).owners == (len(turns) - 1,), "a call without a result is not told"


def test_a_file_that_failed_is_explained_and_what_it_says_is_escaped() -> None:
    rows = values(turn("What?", CAT, BAD))
    assert [row["content"] for row in rows[:2]] == [
        {"path": str(CAT.path), "alt_text": "cat.png"},
        "What?",
    ]
    assert "&lt;b&gt;bad.png" in rows[2]["content"]
    assert "not a &lt;picture&gt;" in rows[2]["content"]
    assert rows[3]["content"] == "A cat."


def test_a_question_of_failed_files_alone_still_has_a_row() -> None:
    name = Attachment(path=Path("/u/a`b.png"), kind="image", problem="no")
    rows = values(turn("", name, answer=answered()))
    assert rows[0] == {"role": "user", "content": "`` a`b.png ``"}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (answered(Content("A"), Finish("length")), "limit of tokens"),
        (answered(Finish("stop")), "empty answer"),
    ],
)
def test_odd_endings_are_said(answer: Answer, text: str) -> None:
    assert text in values(turn(answer=answer))[-1]["content"]


# ---------------------------------------------------------------------- memory


def test_answered_turns_are_remembered_as_typed_messages() -> None:
    first = turn("What?", CAT, answer=answered(Reasoning("Hm"), Content("A cat."), Finish("stop")))
    memory = remember([first, turn("Sure?", answer=Answer(started=0.0))])
    assert [message.role for message in memory.messages] == ["user", "assistant", "user"]
    assert memory.owners == (0, 0, 1)
    question, reply, last = memory.messages
    assert question.parts == (MediaPart("image", CAT.path), TextPart("What?"))
    assert (reply.parts, reply.reasoning) == ((TextPart("A cat."),), "Hm")
    assert last.parts == (TextPart("Sure?"),)


def test_a_bad_file_an_error_and_an_early_stop_are_forgotten() -> None:
    failed = Answer(started=0.0)
    failed.end(1.0, error="The engine is gone.")
    stopped = Answer(started=0.0)
    stopped.end(1.0, stopped=True)
    turns = [
        turn("a", BAD, answer=answered()),
        turn("b", answer=failed),
        turn("c", answer=stopped),
        turn("d", CAT, BAD),
        turn("e", answer=Answer(started=0.0)),
    ]
    memory = remember(turns)
    assert memory.owners == (3, 3, 4)
    assert memory.messages[0].parts == (MediaPart("image", CAT.path), TextPart("d"))


def test_what_was_said_before_a_stop_is_remembered() -> None:
    answer = answered(Content("A ca"))
    answer.end(20.0, stopped=True)
    memory = remember([turn(answer=answer), turn("Go on", answer=Answer(started=0.0))])
    assert memory.messages[1].parts == (TextPart("A ca"),)


def test_a_turn_is_asked_only_with_something_to_go_on() -> None:
    assert turn("What?").askable
    assert turn("", CAT).askable
    assert turn("What?", CAT, BAD).askable
    assert not turn("What?", BAD).askable, "it would be answered by a guess"
    assert not turn("").askable


# ---------------------------------------------------------------------- figures


def test_figures_while_streaming_are_estimates() -> None:
    answer = answered(Content("A"), Content(" cat"), Content("."), step=0.5)
    known = figures(answer, 12.5)
    assert (known.ttft, known.rate, known.completion) == (0.5, 1.0, 3)
    assert not known.exact
    assert "~3" in figures_html(known)


def test_figures_at_the_end_are_the_engines() -> None:
    usage = Usage(
        prompt_tokens=226,
        image_tokens=192,
        video_tokens=16,
        cached_tokens=128,
        completion_tokens=33,
        reasoning_tokens=18,
    )
    answer = answered(Content("A"), Finish("stop", usage))
    known = figures(answer, 99.0, cached_items=1, items=2)
    assert known.rate == 32.0
    text = figures_html(known)
    for value in ("226", "192", "16", "128", "33", "18", "1 of 2", "1.00 s"):
        assert f">{value}<" in text
    assert "~" not in text


def test_figures_of_nothing_are_dashes() -> None:
    assert figures_html(None).count("&ndash;") == 9
