"""The chat over HTTP: against our own server, and against endpoints that misbehave."""

from __future__ import annotations

import http.server
import json
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from PIL import Image

from k3vl.app.chat_demo.launch import DemoSettings, open_model
from k3vl.app.chat_demo.remote import RemoteChat
from k3vl.app.chat_demo.session import ChatSettings, Session
from k3vl.app.cli import cli
from k3vl.config import load_media_config
from k3vl.errors import ConfigError
from k3vl.types import (
    ChatOptions,
    SamplingParams,
    ToolCall,
    Usage,
)
from k3vl.vision.processor import MediaProcessor
from k3vl.vision.source import DEFAULT_POLICY
from tests.app.captioning_kit import film
from tests.app.chat_fakes import AFTER_CALLS, CALL, CALLS, DIRECTORY, END, THOUGHT, TOOLS, scripted
from tests.app.serving import in_thread, until
from tests.app.test_demo_session import contents, run, stop_after

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from k3vl.app.server import Server
    from k3vl.pipeline import Pipeline

PROCESSOR = MediaProcessor(load_media_config(DIRECTORY))
PLAIN = ChatSettings(options=ChatOptions(thinking=False))


def remote(url: str, **settings: Any) -> RemoteChat:
    return RemoteChat(f"{url}/v1", "scripted", PROCESSOR, **settings)


def serve(pipeline: Pipeline, **settings: Any) -> AbstractContextManager[tuple[str, Server]]:
    return in_thread(pipeline, model_names=("scripted",), **settings)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    Image.new("RGB", (56, 28), "red").save(path)
    return path


# ---------------------------------------------------------------------- our own server


def test_an_answer_is_the_same_as_in_process(picture: Path) -> None:
    script = "Hm, red." + THOUGHT + "A red card." + END
    sampling = SamplingParams(max_tokens=99, temperature=0.5, top_p=0.9, seed=3)
    settings = ChatSettings(
        sampling=sampling, options=ChatOptions(thinking=True, thinking_effort="low")
    )
    near, far = scripted(script), scripted(script)
    with near, serve(far) as (url, _):
        here, there = Session(near), Session(remote(url))
        for session in (here, there):
            run(session, session.send("What?", [picture], settings))
        assert contents(there) == contents(here) == ["What?", "Hm, red.", "A red card."]
        assert there.turns[0].answer.usage == here.turns[0].answer.usage
        assert there.turns[0].answer.usage.image_tokens == 2
        assert far.backend.asked() == near.backend.asked()
        got = far.backend.sampling[0]
        assert (got.max_tokens, got.temperature, got.top_p, got.seed) == (99, 0.5, 0.9, 3)
        assert there.figures.items == 0, "no endpoint tells of its encoder cache"
        assert [seen.facts for seen in there.take_seen()] == [s.facts for s in here.take_seen()]
        run(there, there.send("Sure?", [], PLAIN))
        run(here, here.send("Sure?", [], PLAIN))
        assert far.backend.asked() == near.backend.asked(), "reasoning and pictures are sent again"


def test_a_tool_call_and_its_result(picture: Path) -> None:
    pipeline = scripted("Let me look." + CALLS + CALL + AFTER_CALLS, "A pet." + END)
    settings = ChatSettings(options=ChatOptions(thinking=False), tools=json.loads(TOOLS))
    with serve(pipeline) as (url, _):
        session = Session(remote(url))
        run(session, session.send("What is a cat?", [picture], settings))
        [call] = session.awaited
        assert (call.name, call.arguments) == ("look_up", {"word": "cat"})
        run(session, session.give('{"kind": "animal"}', settings))
        assert session.turns[1].answer.content == "A pet."
        assert session.awaited == ()
        asked = pipeline.backend.asked()
        assert '{"kind": "animal"}' in asked
        assert asked.count("look_up") == 3, "declared, called, answered"
        run(session, session.send("Thanks", [], settings))
        assert "A pet." in pipeline.backend.asked()


def test_a_clip_is_sent_whole(tmp_path: Path) -> None:
    pipeline = scripted("Grey." + END)
    with serve(pipeline) as (url, _):
        session = Session(remote(url))
        run(session, session.send("What?", [film(tmp_path / "film.mp4")], PLAIN))
        assert contents(session)[-1] == "Grey."
        assert session.figures.usage.video_tokens > 0


def test_stop_closes_the_connection_and_frees_the_server() -> None:
    pipeline = scripted("word " * 400 + END, delay=0.01)
    with serve(pipeline) as (url, _):
        session = Session(remote(url))
        stop_after(session, session.send("Hello", [], PLAIN))
        assert session.turns[0].answer.stopped
        assert "word" in session.turns[0].answer.content
        until(lambda: pipeline.backend.cancelled == {0})


def test_a_file_that_only_the_server_refuses_is_left_out(picture: Path, tmp_path: Path) -> None:
    """Its limits are others than ours; the chat goes on without the file."""
    pipeline = scripted("Red." + END)
    pipeline.processor = MediaProcessor(
        load_media_config(DIRECTORY), policy=replace(DEFAULT_POLICY, max_bytes=100_000)
    )
    large = tmp_path / "large.png"
    Image.effect_noise((600, 600), 60).save(large)
    with serve(pipeline) as (url, _):
        session = Session(remote(url))
        run(session, session.send("What?", [picture, large], PLAIN))
        assert session.turns[0].attachments[1].problem
        assert contents(session)[-1] == "Red."
        assert pipeline.backend.asked().count("<|media_begin|>") == 1


def test_a_file_that_vanishes_later_is_left_out(picture: Path) -> None:
    pipeline = scripted("Red." + END)
    with serve(pipeline) as (url, _):
        session = Session(remote(url))
        run(session, session.send("What?", [picture], PLAIN))
        picture.unlink()
        run(session, session.send("Sure?", [], PLAIN))
        assert session.turns[1].answer.content == "Red."
        assert session.turns[0].attachments[0].problem


def test_a_key_and_a_name_are_checked_before_the_page_is_served() -> None:
    pipeline = scripted("Red." + END)
    with serve(pipeline, api_keys=("right",)) as (url, _):
        base = f"{url}/v1"
        with pytest.raises(ConfigError, match="API key is refused"):
            remote(url, api_key="wrong").check()
        said: list[str] = []
        settings = DemoSettings(model="scripted", base_url=base, api_key="right")
        with open_model(settings, say=said.append) as model:
            session = Session(model)
            run(session, session.send("What?", [], PLAIN))
            assert contents(session)[-1] == "Red."
        refused = CliRunner().invoke(
            cli, ["demo", "--base-url", base, "--api-key", "right", "--model", "other"]
        )
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "no model 'other'; there are" in refused.stderr
    with pytest.raises(ConfigError, match="no answer"):
        remote("http://127.0.0.1:9").check()


# ---------------------------------------------------------------------- odd endpoints


class Odd(http.server.BaseHTTPRequestHandler):
    """Sends what the test has put into ``reply`` (a status, lines of a stream)."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((body, self.headers.get("Authorization")))
        status, lines = self.server.reply
        data = "\n".join(lines).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(data) + self.server.lacking))
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def odd() -> Iterator[Any]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        server.bodies, server.lacking = [], 0
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def chunk(delta: dict[str, Any] | None = None, **more: Any) -> str:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": more.pop("finish", None)}
    return f"data: {json.dumps({'choices': [choice], **more})}\n"


def talk(server: Any, *lines: str, status: int = 200, settings: ChatSettings = PLAIN) -> Session:
    server.reply = (status, lines)
    session = Session(remote(f"http://127.0.0.1:{server.server_port}", api_key="key"))
    run(session, session.send("Hello", [], settings))
    return session


def test_other_dialects_are_understood(odd: Any) -> None:
    """``reasoning``, comments, counts on the last chunk, no ``[DONE]``."""
    details = {"image_tokens": 5, "cached_tokens": 2}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": details}
    session = talk(
        odd,
        ": keep-alive\n",
        chunk({"role": "assistant", "content": None}),
        chunk({"reasoning": "Hm."}),
        chunk({"content": "Hi \u2028there"}, usage=None),
        chunk(finish="content_filter", usage=usage),
        "",
    )
    answer = session.turns[0].answer
    assert (answer.reasoning, answer.content, answer.finish) == ("Hm.", "Hi \u2028there", "stop")
    assert answer.usage == Usage(
        prompt_tokens=7, image_tokens=5, cached_tokens=2, completion_tokens=3
    )
    assert odd.bodies[0][1] == "Bearer key"


@pytest.mark.parametrize(
    ("status", "lines", "said"),
    [
        (500, ['{"error": {"message": "out of\\nluck"}}'], "HTTP 500: out of luck"),
        (429, ["slow down"], "busy: HTTP 429: slow down"),
        (404, ['{"error": "no such model"}'], "refused it: HTTP 404: no such model"),
        (400, ['{"error": {"message": "no", "param": "tools"}}'], "refused it: HTTP 400: no"),
        (502, ["bad", "gateway"], "HTTP 502: bad gateway"),
        (500, [], "HTTP 500: without a word"),
        (200, [chunk({"content": "Hi"}), ""], "broke off"),
        (200, [chunk({"content": "Hi"}), 'data: {"error": {"message": "fire"}}\n', ""], "fire"),
        (200, ["data: {no\n", ""], "no chunk of an answer"),
        (200, ["data: []\n", ""], "no chunk of an answer"),
        (200, ["<html>"], "broke off"),
    ],
)
def test_what_goes_wrong_is_a_row_and_the_chat_goes_on(
    status: int, lines: list[str], said: str, odd: Any
) -> None:
    session = talk(odd, *lines, status=status)
    assert said in contents(session)[-1]
    odd.reply = (200, [chunk({"content": "Yes."}, finish="stop"), "data: [DONE]\n"])
    run(session, session.send("Again", [], PLAIN))
    assert contents(session)[-1] == "Yes."


def test_a_connection_that_breaks_is_a_row(odd: Any) -> None:
    odd.lacking = 100
    session = talk(odd, chunk({"content": "Hi"}), "")
    assert "connection to the backend broke" in contents(session)[-1]
    assert session.turns[0].answer.content == "Hi"


def test_nothing_is_asked_of_an_endpoint_that_it_may_not_know(odd: Any) -> None:
    done = chunk({"content": "Yes."}, finish="stop")
    for options, expected in (
        (ChatOptions(thinking=True), {}),
        (ChatOptions(thinking=True, thinking_effort="high"), {"reasoning_effort": "high"}),
        (ChatOptions(thinking=False), {"chat_template_kwargs": {"thinking": False}}),
    ):
        talk(odd, done, settings=ChatSettings(options=options))
        body = odd.bodies[-1][0]
        asked = {"reasoning_effort", "chat_template_kwargs", "thinking", "tools", "top_p", "seed"}
        assert {name: body[name] for name in asked & body.keys()} == expected


def test_arguments_that_are_an_object_are_one(odd: Any) -> None:
    def piece(index: int, text: str, **more: Any) -> str:
        function = {"arguments": text, **more.pop("function", {})}
        return chunk({"tool_calls": [{"index": index, "function": function, **more}]})

    session = talk(
        odd,
        piece(0, "", id="a", function={"name": "f"}),
        piece(0, '{"x": '),
        piece(1, "no json", id="b", function={"name": "g"}),
        piece(0, "1}"),
        chunk(finish="tool_calls"),
        "",
    )
    assert session.awaited == (
        ToolCall(name="f", arguments={"x": 1}, id="a"),
        ToolCall(name="g", arguments="no json", id="b"),
    )


def test_events_come_as_they_are_sent() -> None:
    """Nothing is held back until the end."""
    pipeline = scripted("word " * 6 + END, delay=0.1)
    with serve(pipeline) as (url, _):
        session = Session(remote(url))
        assert run(session, session.send("Count", [], PLAIN)) >= 5
        answer = session.turns[0].answer
        assert answer.first_at is not None
        assert answer.ended_at is not None
        assert answer.ended_at - answer.first_at > 0.4
