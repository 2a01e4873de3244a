"""``labels.jsonl``: questions about files with their right answers, one JSON object a line.

=============  ====================================================================================
``file``       picture or clip, relative to the folder; ``files`` takes several, in order
``prompt``     what is asked about them
``answer``     the right answer: text, or JSON for metrics that compare JSON; ``answers`` takes
               several of which any will do; ``expected`` is read as ``answer``
``metric``     one of :data:`~k3vl.app.evaluation.scores.METRICS`, or a list of them; ``exact``
               where it is left out
``split``      which row of the table the question belongs to; ``all`` where it is left out
``history``    turns before it, each with ``file`` or ``files``, ``prompt`` and ``answer``: what was
               shown, asked and said
``options``    ``thinking``, ``thinking_effort``, ``tool_choice``, ``response_format``
``tools``      tool declarations, as chat completions take them
``baselines``  what others answered, by name: scored and shown beside the model
=============  ====================================================================================
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from k3vl.app.evaluation.scores import METRICS
from k3vl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LABELS = "labels.jsonl"
_OPTIONS = ("thinking", "thinking_effort", "tool_choice", "response_format")
_ANSWERS = ("answer", "answers", "expected")
_SAID = frozenset(("file", "files", "prompt", "answer"))
_FIELDS = frozenset(
    ("file", "files", "prompt", *_ANSWERS, "metric", "split", "history", "options", "tools", "id")
) | {"baselines"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """A turn before the question, and what was answered."""

    files: tuple[Path, ...]
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One line.

    Attributes:
        files: pictures and clips in front of the prompt.
        history: what was shown and said before.
        answers: any of them is right.
        metrics: how an answer is scored; the first one heads the row.
        options: chat options that differ from the checkpoint's.
        baselines: answers of others, by who they are.
    """

    files: tuple[Path, ...]
    prompt: str
    answers: tuple[Any, ...]
    metrics: tuple[str, ...] = ("exact",)
    split: str = "all"
    history: tuple[Earlier, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    baselines: Mapping[str, Any] = field(default_factory=dict)


def read_labels(folder: Path) -> list[Question]:
    """All questions of a folder.

    Raises:
        ConfigError: there is no list, or a line of it cannot be used; it says which.
    """
    path = folder / LABELS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read ({type(exc).__name__})") from exc
    out = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                out.append(_question(folder, json.loads(line)))
            except ValueError as exc:
                raise ConfigError(f"{path}: line {number}: {exc}") from exc
    if not out:
        raise ConfigError(f"{path}: holds no question")
    return out


def _question(folder: Path, record: Any) -> Question:
    """One record.

    Raises:
        ValueError: what is wrong with it.
    """
    _need(isinstance(record, dict), "not an object")
    for name in sorted(set(record) - _FIELDS):
        _need(False, f"unknown field {name!r}")
    files = _files(folder, record)
    answers = _listed(record, "answers", ("answer", "expected"))
    _need(bool(answers), "no answer")
    metric = record.get("metric", "exact")
    metrics = tuple(metric) if isinstance(metric, list) else (metric,)
    _need(
        bool(metrics) and all(name in METRICS for name in metrics),
        f"metric must be of {', '.join(METRICS)}",
    )
    prompt, split = record.get("prompt"), record.get("split", "all")
    _need(isinstance(prompt, str) and isinstance(split, str), "prompt and split must be text")
    options, baselines = record.get("options", {}), record.get("baselines", {})
    _need(
        isinstance(options, dict) and all(name in _OPTIONS for name in options),
        f"options must be of {', '.join(_OPTIONS)}",
    )
    _need(isinstance(baselines, dict), "baselines must be an object")
    return Question(
        files=files,
        prompt=prompt,
        answers=answers,
        metrics=metrics,
        split=split,
        history=tuple(_earlier(folder, turn) for turn in _turns(record)),
        options=options,
        tools=tuple(record.get("tools", ())),
        baselines=baselines,
    )


def _files(folder: Path, record: dict[str, Any]) -> tuple[Path, ...]:
    names = _listed(record, "files", ("file",))
    _need(
        all(isinstance(name, str) and name for name in names),
        "file must be a name, files a list of names",
    )
    files = tuple(folder / name for name in names)
    for path in files:
        _need(path.is_file(), f"{path.name}: no such file")
    return files


def _turns(record: dict[str, Any]) -> list[Any]:
    turns = record.get("history", [])
    _need(isinstance(turns, list), "history must be a list of turns")
    return list(turns)


def _earlier(folder: Path, turn: Any) -> Earlier:
    _need(isinstance(turn, dict), "history: a turn is an object")
    for name in sorted(set(turn) - _SAID):
        _need(False, f"history: unknown field {name!r}")
    prompt, answer = turn.get("prompt"), turn.get("answer")
    _need(
        isinstance(prompt, str) and isinstance(answer, str),
        "history: prompt and answer must be text",
    )
    return Earlier(files=_files(folder, turn), prompt=str(prompt), answer=str(answer))


def _listed(record: dict[str, Any], several: str, single: tuple[str, ...]) -> tuple[Any, ...]:
    """A field that comes as a list under one name, or alone under another."""
    given = [name for name in (several, *single) if name in record]
    _need(len(given) < 2, f"{' and '.join(given)} exclude each other")
    if given == [several]:
        _need(isinstance(record[several], list), f"{several} must be a list")
        return tuple(record[several])
    return (record[given[0]],) if given else ()


def _need(holds: bool, reason: str) -> None:
    if not holds:
        raise ValueError(reason)
