"""One visitor's conversation over a scripted backend, and a stop that frees the real engine."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import av
import numpy as np
import pytest
from PIL import Image

from k3vl.app.chat_demo.rows import chat_rows
from k3vl.app.chat_demo.session import MAX_FILES, ChatSettings, Session, Sessions
from k3vl.errors import BackendError
from k3vl.lm.engine import EngineConfig
from k3vl.pipeline import Pipeline
from k3vl.types import ChatOptions, SamplingParams
from tests.app.chat_fakes import AFTER_CALLS, CALL, CALLS, DIRECTORY, END, THOUGHT, TOOLS, scripted
from tests.timing import until

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = ChatSettings(options=ChatOptions(thinking=False))


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    Image.new("RGB", (56, 28), "red").save(path)
    return path


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "page.png"
    path.write_bytes(b"<html>not here</html>")
    return path


def run(session: Session, progress) -> int:
    """Go through an answer; returns how often there was something to show."""

    async def consume() -> int:
        return len([None async for _ in progress])

    return asyncio.run(consume())


def contents(session: Session) -> list[str]:
    """What is said; pictures left out."""
    rows = [row.value["content"] for row in chat_rows(session.turns)]
    return [content for content in rows if isinstance(content, str)]


def test_a_picture_and_a_follow_up(picture: Path) -> None:
    pipeline = scripted("A cat." + END, "Yes." + END)
    session = Session(pipeline)
    assert run(session, session.send("  What? ", [picture], SETTINGS)) >= 2
    run(session, session.send("Sure?", [], SETTINGS))
    assert contents(session) == ["What?", "A cat.", "Sure?", "Yes."]
    asked = pipeline.backend.asked()
    assert asked.count("<|media_begin|>") == 1
    assert asked.index("What?") < asked.index("A cat.") < asked.index("Sure?")
    assert session.figures is not None
    assert session.figures.usage.image_tokens == 2
    assert not session.busy


def test_what_the_model_sees_is_handed_out_once(picture: Path) -> None:
    session = Session(scripted("A cat." + END))
    run(session, session.send("What?", [picture], SETTINGS))
    [seen] = session.take_seen()
    assert [picture.size for picture, _ in seen.pictures] == [(112, 56)]
    assert session.take_seen() == ()


def test_features_that_the_encoder_holds_are_counted(picture: Path) -> None:
    pipeline = scripted("A cat." + END)
    session = Session(pipeline)
    run(session, session.send("What?", [picture], SETTINGS))
    assert (session.figures.cached_items, session.figures.items) == (0, 1)
    [digest] = session.turns[0].attachments[0].digests
    pipeline.backend.held.add(digest)
    run(session, session.send("Sure?", [], SETTINGS))
    assert (session.figures.cached_items, session.figures.items) == (1, 1)


def test_settings_reach_the_engine() -> None:
    pipeline = scripted("Hm" + THOUGHT + "Yes." + END)
    session = Session(pipeline)
    sampling = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=7, seed=3)
    settings = ChatSettings(
        sampling=sampling, options=ChatOptions(thinking=True, thinking_effort="low")
    )
    run(session, session.send("Hello", [], settings))
    assert pipeline.backend.sampling == [sampling]
    assert "`thinking_effort=low`" in pipeline.backend.asked()
    assert session.turns[0].answer.reasoning == "Hm"


def test_a_question_whose_only_file_failed_is_not_asked(picture: Path, broken: Path) -> None:
    pipeline = scripted("A cat." + END)
    session = Session(pipeline)
    run(session, session.send("What?", [broken], SETTINGS))
    assert pipeline.backend.prompts == []
    assert "page.png" in contents(session)[-1]
    assert "HTML" in contents(session)[-1]
    run(session, session.send("What?", [picture], SETTINGS))
    assert pipeline.backend.asked().count("What?") == 1, "the failed turn is not in the history"
    assert contents(session)[-1] == "A cat."


def test_good_files_are_asked_about_without_the_bad_one(picture: Path, broken: Path) -> None:
    pipeline = scripted("A cat." + END)
    session = Session(pipeline)
    run(session, session.send("What?", [broken, picture], SETTINGS))
    assert pipeline.backend.asked().count("<|media_begin|>") == 1
    assert contents(session)[-1] == "A cat."


def test_a_file_that_vanishes_later_does_not_end_the_chat(picture: Path) -> None:
    pipeline = scripted("A cat." + END)
    session = Session(pipeline)
    run(session, session.send("What?", [picture], SETTINGS))
    picture.unlink()
    run(session, session.send("Sure?", [], SETTINGS))
    assert session.turns[1].answer.content == "A cat."
    assert session.turns[0].attachments[0].problem
    assert "<|media_begin|>" not in pipeline.backend.asked()


def test_too_many_files_are_said(picture: Path) -> None:
    session = Session(scripted("Red." + END))
    run(session, session.send("What?", [picture] * (MAX_FILES + 2), SETTINGS))
    assert len(session.turns[0].usable) == MAX_FILES
    assert sum("a message takes 16 files" in content for content in contents(session)) == 2


def test_an_engine_error_is_a_row_and_the_chat_goes_on() -> None:
    pipeline = scripted("Yes." + END)
    session = Session(pipeline)
    pipeline.backend.error = BackendError("the engine stopped")
    run(session, session.send("Hello", [], SETTINGS))
    assert "could not answer: the engine stopped." in contents(session)[-1]
    pipeline.backend.error = None
    run(session, session.send("Again", [], SETTINGS))
    assert contents(session)[-1] == "Yes."
    assert "Hello" not in pipeline.backend.asked()


def test_parameters_that_make_no_sense_are_a_row() -> None:
    pipeline = Pipeline.load(DIRECTORY, device="cpu")
    with pipeline:
        session = Session(pipeline)
        settings = ChatSettings(sampling=SamplingParams(top_p=0.0))
        run(session, session.send("Hello", [], settings))
    assert "could not answer" in contents(session)[-1]


def test_retry_edit_and_undo_keep_the_files(picture: Path) -> None:
    pipeline = scripted("One." + END, "Two." + END, "Three." + END, "Four." + END)
    session = Session(pipeline)
    run(session, session.send("What?", [picture], SETTINGS))
    run(session, session.send("Sure?", [], SETTINGS))
    run(session, session.retry(1, SETTINGS))
    assert contents(session) == ["What?", "One.", "Sure?", "Three."]
    run(session, session.edit(0, "Which colour?", SETTINGS))
    assert contents(session) == ["Which colour?", "Four."]
    assert "<|media_begin|>" in pipeline.backend.asked()
    assert session.undo(0) == ("Which colour?", (picture,))
    assert session.turns == ()


def test_nothing_is_not_a_question() -> None:
    session = Session(scripted("Yes." + END))
    assert run(session, session.send("  ", [], SETTINGS)) == 0
    assert session.turns == ()


TWO_CALLS = CALLS + CALL + CALL.replace("cat", "dog").replace('"1"', '"2"') + AFTER_CALLS


def test_results_of_calls_are_given_one_by_one_and_the_answer_goes_on(picture: Path) -> None:
    pipeline = scripted("Let me look." + TWO_CALLS, "Pets." + END)
    settings = ChatSettings(options=ChatOptions(thinking=False), tools=json.loads(TOOLS))
    session = Session(pipeline)
    assert session.awaited == ()
    run(session, session.send("What are they?", [picture], settings))
    assert [call.arguments for call in session.awaited] == [{"word": "cat"}, {"word": "dog"}]
    assert run(session, session.give("a feline", settings)) == 1
    assert [call.arguments for call in session.awaited] == [{"word": "dog"}]
    assert len(pipeline.backend.prompts) == 1, "it waits for the other"
    run(session, session.give("a canine", settings))
    assert session.turns[1].answer.content == "Pets."
    asked = pipeline.backend.asked()
    assert asked.index("a feline") < asked.index("a canine")
    assert session.awaited == ()
    assert run(session, session.give("too late", settings)) == 0
    run(session, session.retry(1, settings))
    assert pipeline.backend.asked() == asked, "with the same results"
    session.undo(1)
    assert len(session.awaited) == 2, "they can be given anew"
    run(session, session.send("Never mind", [], settings))
    assert "a feline" not in pipeline.backend.asked()
    assert session.awaited == ()


def test_results_that_were_given_go_with_their_turn() -> None:
    settings = ChatSettings(options=ChatOptions(thinking=False), tools=json.loads(TOOLS))
    session = Session(scripted(TWO_CALLS))
    run(session, session.send("What?", [], settings))
    for text in ("one", "two", "three"):
        run(session, session.give(text, settings))
    assert [len(turn.results) for turn in session.turns] == [0, 2]
    assert len(session.awaited) == 1
    session.undo(1)
    assert len(session.awaited) == 2


def test_no_result_is_awaited_of_an_answer_that_failed() -> None:
    pipeline = scripted(TWO_CALLS, delay=0.01)
    session = Session(pipeline)
    pipeline.backend.error = BackendError("gone")
    settings = ChatSettings(options=ChatOptions(thinking=False), tools=json.loads(TOOLS))
    run(session, session.send("What?", [], settings))
    assert session.awaited == ()


def test_older_turns_can_be_looked_at_again(picture: Path, broken: Path) -> None:
    session = Session(scripted("A cat." + END))
    run(session, session.send("What?", [picture, broken], SETTINGS))
    [first] = session.take_seen()
    run(session, session.send("Sure?", [], SETTINGS))
    [again] = asyncio.run(session.look(0))
    assert again.facts == first.facts
    assert [p.tobytes() for p, _ in again.pictures] == [p.tobytes() for p, _ in first.pictures]
    assert asyncio.run(session.look(1)) == ()
    picture.unlink()
    assert asyncio.run(session.look(0)) == ()


def test_what_a_browser_cannot_show_has_a_stand_in(picture: Path, tmp_path: Path) -> None:
    turned = Image.new("CMYK", (40, 20), (0, 255, 255, 0))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "scan.tif", exif=exif)
    reel = tmp_path / "reel.avi"
    with av.open(str(reel), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(8):
            pixels = np.full((48, 64, 3), 200, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        container.mux(stream.encode())
    session = Session(scripted("Red." + END))
    run(session, session.send("What?", [picture, tmp_path / "scan.tif", reel], SETTINGS))
    shown, scan, film = session.turns[0].attachments
    assert shown.shown is None
    with Image.open(scan.shown) as image:
        assert (image.format, image.size) == ("PNG", (20, 40)), "upright"
        assert image.convert("RGB").getpixel((5, 5))[0] > 200
    assert film.shown.read_bytes().startswith(b"\x89PNG")
    rows = [row.value["content"] for row in chat_rows(session.turns)]
    paths = [content["path"] for content in rows if isinstance(content, dict)]
    assert paths == [str(picture), str(scan.shown), str(film.shown)]


def stop_after(session: Session, progress, pieces: int = 8) -> None:
    async def consume() -> None:
        async for _ in progress:
            if session.turns[-1].answer.pieces >= pieces:
                session.stop()

    asyncio.run(consume())


def test_a_second_question_waits_for_the_first() -> None:
    async def both() -> None:
        session = Session(scripted("word " * 400 + END, delay=0.01))
        count = 0
        async for _ in session.send("Hello", [], SETTINGS):
            count += 1
            if count == 2:
                assert [None async for _ in session.send("Me too", [], SETTINGS)] == []
                session.stop()
        assert [turn.text for turn in session.turns] == ["Hello"]

    asyncio.run(both())


def test_stop_keeps_what_was_said_and_cancels_the_request() -> None:
    pipeline = scripted("word " * 400 + END, delay=0.01)
    session = Session(pipeline)
    stop_after(session, session.send("Hello", [], SETTINGS))
    assert session.turns[0].answer.stopped
    assert "word" in session.turns[0].answer.content
    assert pipeline.backend.cancelled == {0}
    assert not session.busy


def test_an_abandoned_answer_is_cancelled() -> None:
    pipeline = scripted("word " * 400 + END, delay=0.01)
    session = Session(pipeline)

    async def leave() -> None:
        progress = session.send("Hello", [], SETTINGS)
        while not pipeline.backend.running:
            await anext(progress)
        await progress.aclose()

    asyncio.run(leave())
    until(lambda: pipeline.backend.cancelled == {0})


def test_stop_frees_the_real_engine() -> None:
    """One slot only: the second question can be answered only if the first gave it back."""
    config = EngineConfig(max_requests=1, num_threads=1)
    with Pipeline.load(DIRECTORY, device="cpu", engine=config) as pipeline:
        engine = pipeline.backend._engine
        session = Session(pipeline)
        endless = ChatSettings(
            sampling=SamplingParams(max_tokens=3500, temperature=1.0, seed=1),
            options=ChatOptions(thinking=False),
        )
        stop_after(session, session.send("Hello", [], endless))
        assert session.turns[0].answer.stopped
        until(lambda: engine.jobs == {})
        short = ChatSettings(
            sampling=SamplingParams(max_tokens=2), options=ChatOptions(thinking=False)
        )
        run(session, session.send("Again", [], short))
        assert session.turns[1].answer.finish is not None


def test_sessions_are_by_tab_and_bounded() -> None:
    pipeline = scripted("word " * 400 + END, delay=0.01)
    sessions = Sessions(pipeline, max_sessions=2)
    first = sessions.get("a")
    assert sessions.get("a") is first
    sessions.get("b")
    sessions.get("a")
    sessions.get("c")
    assert len(sessions) == 2
    assert sessions.get("a") is first, "b was used longest ago"

    async def leave() -> None:
        async for _ in first.send("Hello", [], SETTINGS):
            sessions.drop("a")

    asyncio.run(leave())
    assert first.turns[0].answer.stopped
    assert sessions.get("a") is not first
