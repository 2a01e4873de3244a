"""One answer in the making: token ids in, events out, with stop strings and token counts.

:class:`Generation` is the whole of it, without threads or loops; :class:`Answer` brings it to an
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from k3vl.errors import K3VLError
from k3vl.types import Content, Finish, Reasoning, TextLogprob
from k3vl.xtml.parser import StreamParser
from k3vl.xtml.tokenizer import Detokenizer
from k3vl.xtml.tokens import CLOSE, OPEN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from k3vl.lm.backend import Token
    from k3vl.types import Event, Request, TokenLogprob, Usage
    from k3vl.xtml.tokenizer import Tokenizer


BATCH_SECONDS = 0.004
"""Shortest time between two batches of one answer. No eye sees it, no token of a slower model waits
for it, and it bounds what a stream costs, however fast the model is: 250 wake-ups a second."""


class StopStrings:
    """Cuts a stream of text at the first stop string; holds back what may become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """Start with nothing seen."""
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """More text; returns what is certain to stay, and whether a stop string was met."""
        self._held += text
        cuts = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if cuts:
            sure, self._held = self._held[: min(cuts)], ""
            return sure, True
        return self._release(len(self._held) - self._longest_beginning()), False

    def flush(self) -> str:
        """The end of the text: what was held back stays."""
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        sure, self._held = self._held[:count], self._held[count:]
        return sure

    def _longest_beginning(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


class Generation:
    """Steps 5 and 6 of a request; ``done`` once the last event is out."""

    def __init__(self, tokenizer: Tokenizer, request: Request, usage: Usage) -> None:
        """Start behind the prompt.

        Args:
            tokenizer: the checkpoint's.
            request: its options say which channel the prompt opened.
            usage: the prompt's share of the counts.
        """
        self.done = False
        partial = bool(request.messages) and request.messages[-1].partial
        self._thinking = request.options.thinking and not partial
        self._parser = StreamParser(
            thinking=self._thinking, tool_choice=request.options.tool_choice
        )
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(request.sampling.stop)
        self._usage = usage
        self._completion = 0
        self._reasoning = 0
        self._stops_between = bool(request.sampling.stop)
        self._in_header = False
        self._logprobs: list[TokenLogprob] = []

    def feed(self, item: Token | K3VLError) -> list[Event]:
        """Take what the backend delivered.

        Raises:
            K3VLError: the backend's error, as it came.
        """
        if isinstance(item, K3VLError):
            self.done = True
            raise item
        events: list[Event] = []
        if item.cached_tokens != self._usage.cached_tokens:
            self._usage = replace(self._usage, cached_tokens=item.cached_tokens)
        if item.id is not None:
            self._completion += 1
            self._reasoning += self._thinking
            self._note(item)
            events = self._through_stops(self._parser.feed(self._detokenizer.feed(item.id)))
        if item.finish is not None and not self.done:
            events += self._through_stops(self._parser.feed(self._detokenizer.flush()))
        if item.finish is not None and not self.done:
            events += self._finish(item.finish)
        return events

    def feed_run(self, token_ids: Sequence[int]) -> list[Event]:
        """Take ordinary tokens in a row, at the price of one; :meth:`in_run` says which."""
        was_thinking = self._thinking
        self._completion += len(token_ids)
        data = b"".join(map(self._tokenizer.token_bytes, token_ids))
        events = self._through_stops(self._parser.feed(self._detokenizer.feed_bytes(data)))
        self._reasoning += was_thinking + self._thinking * (len(token_ids) - 1)
        return events

    def feed_all(self, items: Iterable[Token | K3VLError]) -> tuple[list[Event], K3VLError | None]:
        """Take several; their events, and the error that came behind them."""
        events: list[Event] = []
        run: list[int] = []
        for item in items:
            token_id = self.in_run(item)
            if token_id is not None and not self.done:
                run.append(token_id)
                continue
            if run:
                events += self.feed_run(run)
                run = []
            if self.done:
                break
            try:
                events += self.feed(item)
            except K3VLError as exc:
                return events, exc
        return events + (self.feed_run(run) if run else []), None

    def in_run(self, item: Token | K3VLError) -> int | None:
        """The token's id if it is one of those that :meth:`feed_run` takes.

        Not those with something of their own to tell, and none where a stop string may end the
        answer between them.
        """
        if self._stops_between or isinstance(item, K3VLError) or item.id is None:
            return None
        if item.finish is not None or item.logprobs is not None:
            return None
        return None if self._tokenizer.is_control(item.id) else item.id

    def _note(self, item: Token) -> None:
        """Keep the log-probabilities of text; those of markers and tag names are nobody's."""
        text = "" if item.id is None else self._control_name(item.id)
        if text:
            self._in_header = text in (OPEN, CLOSE)
            self._logprobs.clear()
        elif item.logprobs is not None and not self._in_header:
            self._logprobs.append(item.logprobs)

    def _control_name(self, token_id: int) -> str:
        """A control token's marker, or nothing."""
        is_control = self._tokenizer.is_control(token_id)
        return self._tokenizer.token_bytes(token_id).decode() if is_control else ""

    def _take_logprobs(self) -> tuple[TextLogprob, ...]:
        data = self._tokenizer.token_bytes
        taken = tuple(
            TextLogprob(
                data(item.token_id),
                item.logprob,
                tuple((data(token_id), logprob) for token_id, logprob in item.top),
            )
            for item in self._logprobs
        )
        self._logprobs.clear()
        return taken

    def _through_stops(self, events: Iterable[Event]) -> list[Event]:
        """Pass events on until a stop string ends the content."""
        passed: list[Event] = []
        for event in events:
            self._thinking = self._thinking and isinstance(event, Reasoning)
            if not isinstance(event, Content):
                passed += self._held_content() if not isinstance(event, Reasoning) else []
                passed.append(event)
                self._logprobs.clear()
                continue
            text, stopped = self._stops.feed(event.text)
            if text or event.replaces_reasoning:
                logprobs = self._take_logprobs()
                as_it_is = text == event.text and not logprobs
                passed.append(event if as_it_is else replace(event, text=text, logprobs=logprobs))
            if stopped:
                return passed + self._finish("stop")
        return passed

    def _held_content(self) -> list[Event]:
        held = self._stops.flush()
        return [Content(held, logprobs=self._take_logprobs())] if held else []

    def _finish(self, reason: str) -> list[Event]:
        """The parser's last events, with the counts on the very last."""
        self.done = True
        last = self._parser.flush("length" if reason == "length" else "stop")
        usage = replace(
            self._usage, completion_tokens=self._completion, reasoning_tokens=self._reasoning
        )
        events: list[Event] = []
        for event in last:
            if isinstance(event, Finish):
                events += self._held_content()
                event = replace(event, usage=usage)
            elif isinstance(event, Content):
                text, _ = self._stops.feed(event.text)
                event = replace(event, text=text)
            events.append(event)
        return events


def confidence_of(events: Iterable[Event]) -> float | None:
    """Geometric mean of the probabilities of the content's tokens; None where none are told."""
    logprobs = [
        token.logprob for event in events if isinstance(event, Content) for token in event.logprobs
    ]
    return math.exp(sum(logprobs) / len(logprobs)) if logprobs else None


class Delivery:
    """Carries items from the backend's thread to one that waits for them.

    Args:
        whole: all together, when the last has come: to wake a thread for every token costs more
            than to read it.
        send: takes them, on the backend's thread; it must not block.
    """

    def __init__(self, *, whole: bool, send: Callable[[list[Token | K3VLError]], object]) -> None:
        self._whole, self._send = whole, send
        self._held: list[Token | K3VLError] = []

    def put(self, item: Token | K3VLError) -> None:
        """Add an item, on the backend's thread."""
        self._held.append(item)
        if not self._whole or isinstance(item, K3VLError) or item.finish is not None:
            held, self._held = self._held, []
            self._send(held)


class Inbox:
    """Carries items from the backend's thread to an event loop, many with one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing is there yet."""
        self._loop = loop
        self._items: deque[Token | K3VLError] = deque()
        self._filled = asyncio.Event()
        self._is_waking = False

    def put(self, item: Token | K3VLError) -> None:
        """Add an item; safe on any thread."""
        self._items.append(item)
        if not self._is_waking:
            self._is_waking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._filled.set)

    async def take(self) -> list[Token | K3VLError]:
        """Wait for items; all that are there (none after a wake-up that came late)."""
        await self._filled.wait()
        self._filled.clear()
        self._is_waking = False  # before the items are taken: a later one wakes again
        return [self._items.popleft() for _ in range(len(self._items))]


class Answer:
    """A generation on an event loop: an asynchronous iterator over lists of events.

    Raises:
        K3VLError: while iterating, whatever went wrong, behind the events before it.
    """

    def __init__(self, generation: Generation, inbox: Inbox, cancel: Callable[[], None]) -> None:
        """Join what :meth:`k3vl.pipeline.Pipeline.answer` has started."""
        self._generation, self._inbox, self._cancel = generation, inbox, cancel

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        """Lists of the events that have come up since the last."""
        while not self._generation.done:
            events, error = self._generation.feed_all(await self._inbox.take())
            if events:
                yield events
            if error is not None:
                raise error
            if not self._generation.done:
                await asyncio.sleep(BATCH_SECONDS)

    def close(self) -> None:
        """Cancel the generation, unless it has ended."""
        self._cancel()
