"""``k3vl eval``: labels in, table and JSON out; the model is a stand-in, the files are real."""

from __future__ import annotations

import json
import threading

import pytest
from click.testing import CliRunner
from PIL import Image

from k3vl.app.cli import cli
from k3vl.app.evaluation.ask import LocalAsked
from k3vl.app.evaluation.labels import read_labels
from k3vl.app.evaluation.run import ask_all, rows_of
from k3vl.errors import ConfigError
from k3vl.pipeline import Pipeline
from tests.app.captioning_kit import EchoBackend, echo_pipeline


def label(**fields):
    return {"file": "a.png", "prompt": "What is this?", "answer": "An owl."} | fields


@pytest.fixture
def folder(tmp_path):
    Image.effect_noise((56, 84), 80).save(tmp_path / "a.png")
    return tmp_path


def write(folder, *labels):
    text = "".join(json.dumps(one) + "\n" for one in labels)
    (folder / "labels.jsonl").write_text(text)
    return folder


def ask(folder, backend, blanks=0):
    asked = LocalAsked(echo_pipeline(backend))
    return list(ask_all(read_labels(folder), asked, blanks=blanks, in_flight=4))


# ---------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"file": "b.png"}, "b.png: no such file"),
        ({"files": ["a.png"]}, "files and file exclude each other"),
        ({"answers": ["x"]}, "answers and answer exclude each other"),
        ({"metric": "accuracy"}, "metric must be of exact"),
        ({"metric": []}, "metric must be of exact"),
        ({"prompt": 3}, "prompt and split must be text"),
        ({"options": {"effort": "max"}}, "options must be of thinking"),
        ({"catption": "x"}, "unknown field 'catption'"),
        ({"history": {}}, "history must be a list of turns"),
        ({"history": ["Hello."]}, "history: a turn is an object"),
        ({"history": [{"prompt": "Hello."}]}, "history: prompt and answer must be text"),
        ({"history": [{"prompt": "a", "answer": "b", "tools": []}]}, "history: unknown field"),
        ({"history": [{"file": "c.png", "prompt": "a", "answer": "b"}]}, "c.png: no such file"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(folder, fields, reason):
    write(folder, label(), label(**fields))
    with pytest.raises(ConfigError, match=f"labels.jsonl: line 2: {reason}"):
        read_labels(folder)


def test_no_list_and_an_empty_list_are_errors(folder):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_labels(folder)
    write(folder)
    with pytest.raises(ConfigError, match="holds no question"):
        read_labels(folder)


def test_answer_goes_by_three_names(folder):
    one, two = label(), label(answers=["An owl.", "A bird."])
    del two["answer"]
    three = label(expected="An owl.")
    del three["answer"]
    found = [question.answers for question in read_labels(write(folder, one, two, three))]
    assert found == [("An owl.",), ("An owl.", "A bird."), ("An owl.",)]


# ---------------------------------------------------------------------- asking


def test_rows_hold_model_blank_and_others(folder):
    backend = EchoBackend(reply=lambda text: "An owl." if "What" in text else "A kite.")
    write(
        folder,
        label(split="name", baselines={"floor": "A bus."}),
        label(split="name", prompt="Name it.", baselines={"floor": "An owl."}),
        label(split="other", metric=["contains", "exact"], answer="owl"),
    )
    name, contains, exact = rows_of(ask(folder, backend, blanks=1))
    assert (name.split, name.value.value, name.value.n) == ("name", 0.5, 2)
    assert name.baselines["floor"].value == 0.5
    assert name.baselines["blank picture"].n == 1
    assert (contains.metric, contains.value.value) == ("contains", 1.0)
    assert (exact.metric, exact.value.value) == ("exact", 0.0)


def test_blank_is_the_same_question_without_the_picture(folder):
    backend = EchoBackend()
    ask(write(folder, label()), backend, blanks=1)
    assert len(set(backend.digests)) == 2
    assert len(backend.prompts) == 2
    assert backend.prompts[0] == backend.prompts[1]


def test_history_comes_before_the_question_with_its_own_pictures(folder):
    Image.new("RGB", (28, 28), "red").save(folder / "b.png")
    earlier = [
        {"file": "b.png", "prompt": "And this?", "answer": "Red."},
        {"prompt": "Sure?", "answer": "Yes."},
    ]
    backend = EchoBackend()
    (asked,) = ask(write(folder, label(history=earlier)), backend)
    (prompt,) = backend.prompts
    places = [
        prompt.index(text) for text in ("And this?", "Red.", "Sure?", "Yes.", "What is this?")
    ]
    assert places == sorted(places)
    assert prompt.count("image ") == 2
    assert prompt.index("28x28") < places[0]
    assert places[3] < prompt.index("56x84") < places[4]
    assert [turn["answer"] for turn in asked.record()["history"]] == ["Red.", "Yes."]


def test_questions_without_an_answer_are_wrong_and_counted(folder):
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    write(folder, label(), label(file="broken.png"))
    (row,) = rows_of(ask(folder, EchoBackend(reply=lambda _: "An owl.")))
    assert (row.value.value, row.value.n, row.finished) == (0.5, 2, 0.5)
    assert sum(row.errors.values()) == 1


def test_options_and_tools_reach_the_prompt(folder):
    tool = {"type": "function", "function": {"name": "count_objects", "parameters": {}}}
    write(folder, label(), label(options={"thinking": True}), label(tools=[tool]))
    backend = EchoBackend(reply=lambda _: "An owl.")
    ask(folder, backend)
    plain = next(p for p in backend.prompts if "count_objects" not in p and "think" not in p)
    assert any("count_objects" in prompt for prompt in backend.prompts)
    assert any("think" in prompt for prompt in backend.prompts)
    assert "What is this?" in plain


# ---------------------------------------------------------------------- the command


@pytest.fixture
def backend(monkeypatch):
    backend = EchoBackend(reply=lambda _: "An owl.")
    monkeypatch.setattr(Pipeline, "load", lambda *_, **__: echo_pipeline(backend))
    return backend


def run(*arguments):
    result = CliRunner().invoke(cli, ["eval", *map(str, arguments)])
    assert "Traceback" not in result.output
    return result


def test_command_prints_a_table_and_writes_json(folder, backend, tmp_path):
    write(folder, label(split="owls"), label(split="kites", answer="A kite."))
    out, answers = tmp_path / "figures.json", tmp_path / "answers.jsonl"
    result = run(folder, "--output", out, "--answers", answers)
    assert result.exit_code == 0, result.output
    owls = next(line for line in result.stdout.splitlines() if line.strip().startswith("owls"))
    assert "100.0 %" in owls
    report = json.loads(out.read_text())
    assert {row["split"]: row["value"]["value"] for row in report["rows"]} == {
        "owls": 1.0,
        "kites": 0.0,
    }
    assert report["questions"] == 2
    assert report["seconds"]["ask"] >= 0
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["said"] for line in lines] == ["An owl.", "An owl."]
    assert [line["scores"]["exact"] for line in lines] == [True, False]


def test_only_takes_the_splits_that_begin_so(folder, backend):
    write(folder, label(split="owls"), label(split="kites"))
    assert "kites" not in run(folder, "--only", "owl").stdout
    nothing = run(folder, "--only", "bus")
    assert nothing.exit_code == 1
    assert "no split begins with 'bus'" in nothing.output


def test_exit_code_tells_of_questions_without_answer(folder, backend):
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert run(write(folder, label(), label(file="broken.png"))).exit_code == 2


def test_sources_exclude_each_other(folder, backend):
    result = run(folder, "--quick")
    assert result.exit_code == 1
    assert "exclude each other" in result.output


def test_an_endpoint_is_asked_by_the_captioners_client(folder, tmp_path):
    from tests.app.test_caption_remote import Endpoint

    write(
        folder,
        label(split="colour", metric="contains", answer="("),
        label(split="pair", file="a.png", options={"thinking": True}),
    )
    with Endpoint() as endpoint:
        threading.Thread(target=endpoint.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{endpoint.server_address[1]}/v1"
        result = run(folder, "--base-url", url, "--model", "kimi-k3")
        endpoint.shutdown()
    assert result.exit_code == 2, "options are not sent"
    assert len(endpoint.bodies) == 2, "the picture, and a grey one"
    row = next(line for line in result.stdout.splitlines() if line.strip().startswith("pair"))
    assert "0.0 %" in row
