"""What a model is not sure of is not told as if it were: captions, rows, the chat."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace

import pytest

from k3vl.app.chat_demo.history import Answer, Turn
from k3vl.app.chat_demo.rows import chat_rows
from k3vl.app.chat_demo.session import ChatSettings, Session
from k3vl.config import ConfigError
from k3vl.load import load_min_confidence
from k3vl.types import Content, Finish, TokenLogprob
from tests.app.captioning_kit import EchoBackend, picture, rows, run, use_echo
from tests.app.chat_fakes import scripted


class Doubtful(EchoBackend):
    """Every token has the probability ``sure``."""

    def __init__(self, sure: float) -> None:
        super().__init__(reply=lambda _: "A kite.")
        self.sure = sure

    def submit(self, prompt, sampling, sink) -> int:
        def tell(token) -> None:
            if sampling.logprobs is not None and token.id is not None:
                told = TokenLogprob(token.id, math.log(self.sure))
                token = replace(token, logprobs=told)
            sink(token)

        return super().submit(prompt, sampling, tell)


def caption(monkeypatch, tmp_path, sure, *flags, own=None):
    backend = use_echo(monkeypatch, Doubtful(sure))
    from k3vl.app import caption as module

    load = module.Pipeline.load

    def with_own(*args, **kwargs):
        pipeline = load(*args, **kwargs)
        pipeline.min_confidence = own
        return pipeline

    monkeypatch.setattr(module.Pipeline, "load", with_own)
    out = tmp_path / "out.jsonl"
    result = run(picture(tmp_path / "a.png"), "--output", out, *flags)
    return result, rows(out)[0] if out.exists() else {}, backend


def test_a_doubtful_caption_says_so_and_keeps_the_guess(monkeypatch, tmp_path):
    result, row, _ = caption(monkeypatch, tmp_path, 0.3, "--min-confidence", "0.5")
    assert result.exit_code == 0
    assert "a.png: I am not sure." in result.stdout
    assert (row["caption"], row["guess"]) == ("I am not sure.", "A kite.")
    assert row["confidence"] == pytest.approx(0.3)


def test_a_sure_caption_stays(monkeypatch, tmp_path):
    _, row, _ = caption(monkeypatch, tmp_path, 0.9, "--min-confidence", "0.5")
    assert row["caption"] == "A kite."
    assert row["confidence"] == pytest.approx(0.9)
    assert "guess" not in row


def test_the_checkpoints_own_threshold_holds_unless_another_is_given(monkeypatch, tmp_path):
    _, row, _ = caption(monkeypatch, tmp_path / "own", 0.3, own=0.5)
    assert row["caption"] == "I am not sure."
    _, row, backend = caption(monkeypatch, tmp_path / "off", 0.3, "--min-confidence", "0", own=0.5)
    assert row["caption"] == "A kite."
    assert "confidence" not in row
    assert backend.samplings[0].logprobs is None, "nobody pays for what nobody asked for"


def test_json_captions_cannot_say_that_they_are_not_sure(monkeypatch, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "string"}))
    backend = use_echo(monkeypatch, Doubtful(0.3))
    backend.reply = lambda _: '"a kite"'
    out = tmp_path / "out.jsonl"
    run(
        picture(tmp_path / "a.png"), "--output", out, "--json-schema", schema, "--min-confidence=.5"
    )
    assert rows(out)[0]["data"] == "a kite"


def test_an_endpoint_tells_no_confidence(tmp_path):
    result = run(
        picture(tmp_path / "a.png"),
        *("--base-url", "http://127.0.0.1:9/v1", "--min-confidence", "0.5"),
    )
    assert result.exit_code == 1
    assert "an endpoint's confidence is not known" in result.output


@pytest.mark.parametrize(("sure", "marked"), [(0.3, True), (0.9, False)])
def test_the_chat_marks_what_the_model_is_not_sure_of(sure, marked):
    answer = Answer(started=0.0, unsure_below=0.5)
    logprobs = (TokenLogprob(1, math.log(sure)),)
    answer.feed(Content("A kite.", logprobs=logprobs), 1.0)
    assert not any(
        "not sure" in str(row.value) for row in chat_rows([Turn(text="?", answer=answer)])
    )
    answer.feed(Finish("stop"), 2.0)
    told = [str(row.value["content"]) for row in chat_rows([Turn(text="?", answer=answer)])]
    assert any(f"The model is not sure: its confidence is {sure:.0%}." in t for t in told) == marked


def test_threshold_of_a_checkpoint(tmp_path):
    path = tmp_path / "generation_config.json"
    assert load_min_confidence(tmp_path) is None
    path.write_text('{"min_confidence": 0.6}')
    assert load_min_confidence(tmp_path) == 0.6
    for wrong in ("true", '"high"', "1.5"):
        path.write_text(f'{{"min_confidence": {wrong}}}')
        with pytest.raises(ConfigError, match="min_confidence"):
            load_min_confidence(tmp_path)


@pytest.mark.parametrize(("own", "asked"), [(0.5, 0), (None, None)])
def test_the_chat_asks_for_log_probabilities_where_a_threshold_is_set(own, asked):
    pipeline = scripted("A kite.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>")
    pipeline.min_confidence = own
    session = Session(pipeline)

    async def ask() -> None:
        async for _ in session.send("What is this?", [], ChatSettings()):
            pass

    asyncio.run(ask())
    assert pipeline.backend.sampling[-1].logprobs == asked
    assert session.turns[-1].answer.unsure_below == (own or 0.0)
