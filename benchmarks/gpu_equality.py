"""Whether two ways to run the engine say the same: tokens, and log-probabilities to the bit."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeAlias

from k3vl.app.evaluation.labels import read_labels
from k3vl.demo.heldout import QUICK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k3vl.app.evaluation.labels import Question
    from k3vl.types import Prompt, SamplingParams

Answer: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]
"""Token ids and their log-probabilities."""


def questions_about_pictures(count: int) -> list[Question]:
    """Of those that come with the package: the first of every split, then the second, and so on.

    Those with a clip anywhere are left out.
    """
    splits: defaultdict[str, list[Question]] = defaultdict(list)
    for question in read_labels(QUICK):
        files = [*question.files, *(path for turn in question.history for path in turn.files)]
        if all(path.suffix != ".mp4" for path in files):
            splits[question.split].append(question)
    longest = max(map(len, splits.values()))
    turns = [own[i] for i in range(longest) for own in splits.values() if i < len(own)]
    return turns[:count]


class Recorder:
    """A backend that keeps what passes through: answers by their prompts."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self.answers: dict[str, Answer] = {}

    def submit(self, prompt: Prompt, sampling: SamplingParams, sink: Callable[[Any], None]) -> int:
        key, ids, logprobs = prompt_key(prompt), [], []

        def note(token: Any) -> None:
            if getattr(token, "id", None) is not None:
                ids.append(token.id)
                logprobs.append(token.logprobs.logprob)
                if token.finish is not None:
                    with self._lock:
                        self.answers[key] = tuple(ids), tuple(logprobs)
            sink(token)

        return self._backend.submit(prompt, sampling, note)

    def cancel(self, request_id: int) -> None:
        self._backend.cancel(request_id)


def prompt_key(prompt: Prompt) -> str:
    """Equal for equal prompts in any process."""
    digest = hashlib.sha256(repr(prompt.token_ids).encode())
    for span in prompt.spans:
        digest.update(f" {span.offset} {span.item.digest}".encode())
    return digest.hexdigest()


def compare(
    first: dict[str, Answer],
    second: dict[str, Answer],
    text_of: Callable[[Sequence[int]], str],
    *,
    shown: int = 5,
) -> dict[str, Any]:
    """What two runs over the same prompts have in common.

    Returns:
        ``items``; ``same_tokens`` and ``same_bits`` of them (the latter: log-probabilities too);
        ``largest_difference`` of a log-probability over the tokens before answers part, and
        ``largest_margin``: where they part, how far the two chosen tokens' own log-probabilities
        lie apart, at most; ``differences``, the first few of them.
    """
    assert first.keys() == second.keys(), "the runs answered different questions"
    same_tokens = same_bits = 0
    largest = margin = 0.0
    differences = []
    for key, (ids, logprobs) in first.items():
        other_ids, other_logprobs = second[key]
        same_tokens += ids == other_ids
        same_bits += (ids, logprobs) == (other_ids, other_logprobs)
        at = parting(ids, other_ids)
        pairs = zip(logprobs[:at], other_logprobs[:at], strict=True)
        largest = max(largest, max((abs(a - b) for a, b in pairs), default=0.0))
        if ids != other_ids:
            chosen = logprobs[at : at + 1] + other_logprobs[at : at + 1]
            margin = max(margin, abs(chosen[0] - chosen[-1]))
            differences.append(
                {
                    "token": at,
                    "texts": [text_of(ids), text_of(other_ids)],
                    "logprobs_there": list(chosen),
                }
            )
    return {
        "items": len(first),
        "same_tokens": same_tokens,
        "same_bits": same_bits,
        "share_same_tokens": same_tokens / max(1, len(first)),
        "largest_difference": largest,
        "largest_margin": margin,
        "differences": differences[:shown],
    }


def parting(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two answers begin with in common."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
