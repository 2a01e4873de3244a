"""What is asked, and what is made of answers."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.app.captioning_kit import EchoBackend, picture, pictures, run, use_echo

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def echo(monkeypatch) -> EchoBackend:
    return use_echo(monkeypatch)


def found(result) -> list[dict]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_variables_of_paths_and_old_captions(tmp_path: Path, echo: EchoBackend) -> None:
    path = picture(tmp_path / "cats" / "tom.png")
    path.with_suffix(".txt").write_text("a cat, sitting\n")
    template = "{folder}/{stem} {name} {{x}} [{caption}]"
    (row,) = found(run(path, "--json", f"--prompt={template}"))
    assert row["prompt"] == "cats/tom tom.png {x} [a cat, sitting]"
    assert "cats/tom tom.png {x} [a cat, sitting]" in echo.prompts[0]


def test_variables_that_nothing_has(tmp_path: Path, echo: EchoBackend) -> None:
    path = picture(tmp_path / "a.png")
    result = run(path, "--prompt=What is {this}?")
    assert result.exit_code == 1
    assert "no variable 'this'" in result.stderr
    table = tmp_path / "t.jsonl"
    table.write_text('{"path": "a.png"}')
    (row,) = found(run(table, "--json", "--prompt=What is {this}?"))
    assert (row["code"], row["error_class"]) == ("prompt_variable_missing", "request")
    assert echo.digests == []
    assert run(path, '--prompt=Answer as {"a": 1}').exit_code == 0, "JSON is no variable"


def test_several_prompts_share_one_picture(tmp_path: Path, echo: EchoBackend) -> None:
    path = picture(tmp_path / "a.png")
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([{"id": "short", "text": "Briefly?"}, "At length?"]))
    rows = found(run(path, "--json", "--prompt-file", file, "--sidecar=txt"))
    assert [row["prompt"] for row in rows] == ["Briefly?", "At length?"]
    assert rows[0]["prompt_id"] == "short"
    assert len(set(echo.digests)) == 1
    names = {p.name for p in tmp_path.glob("*.txt")}
    assert names == {"a.short.txt", f"a.{rows[1]['prompt_id']}.txt"}


def test_prompts_are_drawn_by_weight_and_seed(tmp_path: Path) -> None:
    pictures(tmp_path / "in", 300)
    file = tmp_path / "prompts.json"
    entries = [{"text": "A", "weight": 3}, {"text": "B"}, {"text": "C", "weight": 0}]
    file.write_text(json.dumps(entries))
    flags = ("--json", "--prompt-file", file, "--random-prompt")
    draws = [
        [row["prompt"] for row in found(run(tmp_path / "in", *flags, f"--seed={seed}"))]
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    counts = Counter(draws[0])
    assert set(counts) == {"A", "B"}
    assert 190 < counts["A"] < 260


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected a list of prompts"),
        ("{", "not JSON"),
        ('[{"txt": "a"}]', "expected a string or an object with 'text'"),
        ('[{"text": "a", "wait": 1}]', "unknown field 'wait'"),
        ('[{"text": "a", "weight": -1}]', "weight is not a number from 0"),
        ('[{"text": "a", "id": "a/b"}]', "an id is letters"),
        ('["a", "a"]', "two prompts have the same id"),
        ('[{"text": "a", "weight": 0}]', "no prompt has a weight above 0"),
    ],
)
def test_prompt_files_that_make_no_sense(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(content)
    result = run(picture(tmp_path / "a.png"), "--prompt-file", file)
    assert result.exit_code == 1
    assert message in result.stderr


def test_plain_text_is_one_prompt(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("Two\nlines of {stem}.\n")
    (row,) = found(run(picture(tmp_path / "a.png"), "--json", "--prompt-file", file))
    assert row["prompt"] == "Two\nlines of a."


def test_what_is_put_around_a_caption(tmp_path: Path, monkeypatch) -> None:
    use_echo(
        monkeypatch, EchoBackend(reply=lambda text: " A Sks dog. " if "dog" in text else "A cat.")
    )
    picture(tmp_path / "cat.png", 1)
    picture(tmp_path / "dog.png", 2)
    flags = ("--json", "--prompt={stem}", "--trigger=sks", "--prefix=<", "--suffix=>")
    assert [row["caption"] for row in found(run(tmp_path, *flags))] == [
        "<sks, A cat.>",
        "<A Sks dog.>",
    ]


def test_sampling_reaches_the_engine(tmp_path: Path, echo: EchoBackend) -> None:
    pictures(tmp_path, 2)
    flags = (
        "--temperature=0.5",
        "--top-p=0.9",
        "--top-k=7",
        "--seed=3",
        "--stop=x",
        "--max-tokens=9",
    )
    run(tmp_path, *flags)
    run(tmp_path, *flags)
    first, second, *again = echo.samplings
    assert (first.temperature, first.top_p, first.top_k) == (0.5, 0.9, 7)
    assert (first.max_tokens, first.stop) == (9, ("x",))
    assert first.seed != second.seed, "each item has its own"
    assert {s.seed for s in again} == {first.seed, second.seed}, "in every run the same"
