"""A list of questions, many in flight, to rows of figures."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from k3vl.app.evaluation.scores import Said, Value, score, summarise
from k3vl.errors import K3VLError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from k3vl.app.evaluation.ask import Asked, Told
    from k3vl.app.evaluation.labels import Question

BLANK = "blank picture"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a question; ``told`` is None where ``error`` says why there is no answer."""

    question: Question
    told: Told | None = None
    blank: Told | None = None
    error: str | None = None

    @property
    def said(self) -> Said:
        """The answer; no answer is a wrong one."""
        return self.told.said if self.told else Said("")

    def record(self) -> dict[str, Any]:
        """One line of ``--answers``."""
        question = self.question
        out: dict[str, Any] = {
            "split": question.split,
            "files": [path.name for path in question.files],
            "prompt": question.prompt,
            "answers": list(question.answers),
        }
        if question.history:
            out["history"] = [
                {"files": [path.name for path in turn.files]}
                | {"prompt": turn.prompt, "answer": turn.answer}
                for turn in question.history
            ]
        if self.error is not None:
            out["error"] = self.error
        if self.told is not None:
            out |= {"said": self.told.said.text, "finish": self.told.finish}
            if self.told.said.calls:
                out["calls"] = [dict(call) for call in self.told.said.calls]
            if self.told.confidence is not None:
                out["confidence"] = round(self.told.confidence, 4)
            out["scores"] = {
                name: score(name, self.said, question.answers).got for name in question.metrics
            }
        if self.blank is not None:
            out["said_blank"] = self.blank.said.text
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric of one split.

    Attributes:
        baselines: the same metric over what answers without seeing, or without a network.
        finished: share of answers that ended by themselves, none of them an error.
        errors: how often which error came in place of an answer.
    """

    split: str
    metric: str
    value: Value
    baselines: Mapping[str, Value]
    finished: float
    errors: Mapping[str, int]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        out = asdict(self)
        if not self.errors:
            del out["errors"]
        return out


def ask_all(
    questions: Sequence[Question], asked: Asked, *, blanks: int, in_flight: int
) -> Iterator[Result]:
    """Answers in the order of the questions.

    Args:
        questions: of any number of splits.
        asked: who is asked.
        blanks: of each split, how many are also asked about grey pictures.
        in_flight: questions in the works at once.
    """
    seen: Counter[str] = Counter()
    order = []
    for question in questions:
        seen[question.split] += 1
        order.append((question, seen[question.split] <= blanks))

    def one(pair: tuple[Question, bool]) -> Result:
        question, blank = pair
        try:
            told, grey = asked.ask(question, blank=blank)
        except K3VLError as exc:
            return Result(question=question, error=str(exc))
        return Result(question=question, told=told, blank=grey)

    with ThreadPoolExecutor(in_flight, thread_name_prefix="k3vl-eval") as pool:
        yield from pool.map(one, order)


def rows_of(results: Sequence[Result]) -> list[Row]:
    """The table: a row for every metric of every split, in order of appearance."""
    splits: defaultdict[str, list[Result]] = defaultdict(list)
    for result in results:
        splits[result.question.split].append(result)
    return [
        _row(split, metric, [r for r in own if metric in r.question.metrics])
        for split, own in splits.items()
        for metric in dict.fromkeys(name for r in own for name in r.question.metrics)
    ]


def _row(split: str, metric: str, results: Sequence[Result]) -> Row:
    baselines = {}
    blank = [r for r in results if r.blank is not None]
    if blank:
        baselines[BLANK] = _value(metric, blank, lambda r: r.blank.said if r.blank else Said(""))
    for name in dict.fromkeys(name for r in results for name in r.question.baselines):
        own = [r for r in results if name in r.question.baselines]
        baselines[name] = _value(metric, own, _baseline(name))
    return Row(
        split=split,
        metric=metric,
        value=_value(metric, results, lambda r: r.said),
        baselines=baselines,
        finished=sum(r.told is not None and r.told.finish != "length" for r in results)
        / len(results),
        errors=Counter(r.error for r in results if r.error is not None),
    )


def _baseline(name: str) -> Callable[[Result], Said]:
    return lambda result: Said(str(result.question.baselines[name]))


def _value(metric: str, results: Sequence[Result], said: Callable[[Result], Said]) -> Value:
    scores = [score(metric, said(r), r.question.answers) for r in results]
    groups = [json.dumps(r.question.answers) for r in results]
    return summarise(metric, scores, groups)
