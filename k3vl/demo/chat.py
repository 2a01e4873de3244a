"""Token rows of training conversations, in K3's chat format.

The format itself is ``k3vl.xtml``'s; a test holds every row made here against its renderer. This
module exists because training needs a thousand rows a second and knows where the answers lie: the
pieces between the answers are encoded once and kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from k3vl.demo.geometry import SPECIAL_ID, SPECIALS
from k3vl.xtml.values import argument_text, argument_type
from k3vl.xtml.wording import EFFORT_HEAD, EFFORT_TAIL, FENCE_END, TOOLS_HEAD

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from k3vl.demo.turns import Call, Turn

_BOS, _EOS, _END, _OPEN, _CLOSE, _SEP, _BEGIN, _CONTENT, _MEDIA_END, _PAD = (
    SPECIAL_ID[name] for name in SPECIALS[:10]
)
MEDIA_PAD, ROW_PAD, CLOSE = _PAD, SPECIAL_ID["<|pad|>"], _CLOSE
# The pieces between which no merge of the demo's vocabulary crosses, so that they can be kept.
_WORD = re.compile(r" ?[^\W\d_]+|\d| ?[^\s\w]+|_+|\s+")

# The answer and the token that ends it count fully; what must follow it is learned at once.
_FULL, _FORM = 1.0, 0.1


@dataclass(frozen=True, slots=True)
class Media:
    """A picture or one 4-frame group as the prompt sees it.

    Attributes:
        header: ``image 640x480`` or ``video``.
        tokens: visual tokens.
        timestamp: text in front of a video group.
    """

    header: str
    tokens: int
    timestamp: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a conversation is laid out.

    Attributes:
        thinking: with a think channel.
        effort: value of the effort preamble; None leaves it out. Only with ``thinking``.
        system: text of a system message; "" for none.
        tools: JSON of the declared tools; "" for none.
        media_last: the media follow the question that they come with.
    """

    thinking: bool = False
    effort: str | None = None
    system: str = ""
    tools: str = ""
    media_last: bool = False


@dataclass(slots=True)
class Row:
    """A conversation as tokens.

    Attributes:
        ids: all tokens.
        targets: positions in ``ids`` that are to be predicted.
        weights: weight of each target.
        owners: turn that each target belongs to.
        media: position of the first pad of every media item.
        answers: start and end of every answer's text, without what closes it; a turn that ends
            with tool calls has an empty one.
        turns: the turns that fitted.
    """

    ids: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    media: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)


@dataclass(slots=True)
class _Part:
    """Tokens of one turn; what the assistant says is predicted."""

    first: int
    ids: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Position in the row behind the last token."""
        return self.first + len(self.ids)

    def hear(self, tokens: Sequence[int]) -> None:
        """Tokens that are given."""
        self.ids += tokens

    def say(self, tokens: Sequence[int], full: int) -> None:
        """Tokens of the assistant, of which the first ``full`` are the answer proper."""
        self.targets += range(self.end, self.end + len(tokens))
        self.weights += [_FULL] * full + [_FORM] * (len(tokens) - full)
        self.ids += tokens


def _ends(turn: Turn) -> bool:
    return turn.notice is not None or bool(turn.calls and not turn.results)


class Chat:
    """Encodes conversations with one vocabulary.

    Args:
        tokenizer: path of the checkpoint's ``tokenizer.json``.
    """

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._tokenizer.encode_special_tokens = True
        self._word = lru_cache(200_000)(self._encode_word)
        self._attribute = lru_cache(512)(self._encode_attribute)
        self._kept = lru_cache(64)(self._encode_text)
        self._opening = lru_cache(512)(self._encode_opening)
        self._close = lru_cache(64)(self._encode_close)

    def text(self, text: str) -> list[int]:
        """Ordinary text; control markers in it stay text."""
        return [i for word in _WORD.findall(text) for i in self._word(word)]

    def decode(self, ids: Sequence[int]) -> str:
        """Ordinary tokens back to text."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def row(
        self, media: Sequence[Sequence[Media]], turns: Sequence[Turn], style: Style, limit: int
    ) -> Row:
        """Lay out a conversation.

        A turn with a notice or with unanswered tool calls is the last one, because the template
        writes notices behind the last message only.

        Args:
            media: what each turn's question brings; turns beyond its end bring nothing.
            turns: questions and answers; those that exceed ``limit`` tokens are left out, with
                what they bring.
            style: layout.
            limit: tokens.
        """
        row = Row()
        if style.tools:
            self._internal(row, "tool-declare", f"{TOOLS_HEAD}{style.tools}{FENCE_END}")
        if style.thinking and style.effort:
            self._internal(row, "thinking-effort", f"{EFFORT_HEAD}{style.effort}{EFFORT_TAIL}")
        if style.system:
            row.ids += [*self._message("system"), *self.text(style.system), *self._end()]
        for index, turn in enumerate(turns):
            self._turn(row, media[index] if index < len(media) else (), turn, style, limit)
            if row.turns and _ends(row.turns[-1]):
                break
        return row

    # ------------------------------------------------------------------ parts

    def _turn(self, row: Row, media: Sequence[Media], turn: Turn, style: Style, limit: int) -> None:
        question, answer = self.text(turn.question), self.text(turn.answer)
        user = self._message("user")
        places, block = self._media(media)
        before = len(row.ids) + len(user) + (len(question) if style.media_last else 0)
        part = _Part(len(row.ids))
        first, second = (question, block) if style.media_last else (block, question)
        part.hear([*user, *first, *second])
        part.hear(self._end())
        if turn.notice is not None:
            part.hear(self._notice(*turn.notice))
        if turn.calls:
            self._open_reply(part, turn.thought, style)
            part.say(self._close("response"), 1)
            calls = self._calls(turn.calls)
            part.say([*calls, *self._end()], len(calls))
            for index, (call, result) in enumerate(zip(turn.calls, turn.results, strict=False), 1):
                part.hear(self._opening("message", role="tool", tool=call.tool, index=str(index)))
                part.hear([*self.text(result), *self._end()])
        start = part.end
        if turn.results or not turn.calls:
            self._open_reply(part, "" if turn.calls else turn.thought, style)
            start = part.end
            part.say([*answer, *self._close("response"), *self._end()], len(answer) + 1)
        if part.end > limit:
            return
        row.media += [before + at for at in places]
        row.ids += part.ids
        row.targets += part.targets
        row.weights += part.weights
        row.owners += [len(row.turns)] * len(part.targets)
        row.answers.append((start, start + len(answer)))
        row.turns.append(turn)

    def _open_reply(self, part: _Part, thought: str, style: Style) -> None:
        """What comes before the text of a reply."""
        part.hear(self._message("assistant"))
        if style.thinking:
            thinking = self.text(thought)
            part.hear([_OPEN, *self.text("think"), _SEP])
            part.say([*thinking, *self._close("think")], len(thinking) + 1)
            part.say([_OPEN, *self.text("response"), _SEP], 0)
        else:
            part.hear([_OPEN, *self.text("response"), _SEP])

    def _calls(self, calls: Sequence[Call]) -> list[int]:
        ids = [_OPEN, *self.text("tools"), _SEP]
        for index, call in enumerate(calls, 1):
            ids += self._opening("call", tool=call.tool, index=str(index))
            for key, value in call.arguments.items():
                ids += self._opening("argument", key=key, type=argument_type(value))
                ids += [*self.text(argument_text(value)), *self._close("argument")]
            ids += self._close("call")
        return [*ids, *self._close("tools")]

    def _media(self, media: Sequence[Media]) -> tuple[list[int], list[int]]:
        places: list[int] = []
        ids: list[int] = []
        for item in media:
            ids += [*self.text(item.timestamp), _BEGIN, *self.text(item.header), _CONTENT]
            places.append(len(ids))
            ids += [_PAD] * item.tokens + [_MEDIA_END]
        return places, ids

    def _internal(self, row: Row, kind: str, text: str) -> None:
        row.ids += self._notice(kind, text)

    def _notice(self, kind: str, text: str) -> list[int]:
        opening = self._opening("message", role="system", type=kind)
        return [*opening, *self._kept(text), *self._end()]

    def _message(self, role: str) -> tuple[int, ...]:
        return self._opening("message", role=role)

    def _encode_opening(self, tag: str, **attributes: str) -> tuple[int, ...]:
        ids = [_OPEN, *self.text(tag)]
        for name, value in attributes.items():
            ids += self._attribute(name, value)
        return (*ids, _SEP)

    def _encode_close(self, tag: str) -> tuple[int, ...]:
        return (_CLOSE, *self.text(tag), _SEP)

    def _end(self) -> tuple[int, ...]:
        return (*self._close("message"), _END)

    def _encode_attribute(self, name: str, value: str) -> tuple[int, ...]:
        pieces = (f" {name}", '="', value, '"')
        return tuple(i for piece in pieces for i in self.text(piece))

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self.text(text))

    def _encode_word(self, word: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(word, add_special_tokens=False).ids)
