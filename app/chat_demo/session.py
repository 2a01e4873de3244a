"""One visitor's conversation: files are read, the model is asked, answers can be stopped.

Values and time only; how it looks is ``rows.py``, where it is shown is ``page.py``. An answer runs
as a task of its own, so that stopping it is cancelling the task: the stream then cancels the
request in the engine, which frees its slot, or closes the connection to the endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from k3vl.app.chat_demo.figures import Figures, figures
from k3vl.app.chat_demo.history import Answer, Attachment, ToolResult, Turn, remember
from k3vl.app.chat_demo.seen import Seen, see, stand_in
from k3vl.errors import K3VLError, MediaError
from k3vl.types import ChatOptions, SamplingParams
from k3vl.vision.inspect import kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from k3vl.app.chat_demo.model import ChatModel
    from k3vl.types import ToolCall

REFRESH_SECONDS = 0.05
MAX_FILES = 16
_PARAM = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]")
_PREFIX = re.compile(r"^messages\[\d+\]\.content\[\d+\]: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """The drawer's settings."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    options: ChatOptions = field(default_factory=ChatOptions)
    tools: Sequence[Mapping[str, Any]] = ()


class Session:
    """A conversation and, at most, one answer in the making. Belongs to one event loop."""

    def __init__(self, model: ChatModel) -> None:
        """Start empty."""
        self.turns: tuple[Turn, ...] = ()
        self.seen: tuple[Seen, ...] = ()
        self._model = model
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cached_items = self._items = 0
        self._results: list[ToolResult] = []

    @property
    def busy(self) -> bool:
        """Whether an answer is in the making."""
        return self._task is not None and not self._task.done()

    @property
    def figures(self) -> Figures | None:
        """Of the last answer; None before the first."""
        if not self.turns:
            return None
        return figures(
            self.turns[-1].answer,
            time.perf_counter(),
            cached_items=self._cached_items,
            items=self._items,
        )

    # ------------------------------------------------------------------ what a visitor does

    def send(self, text: str, paths: Sequence[Path], settings: ChatSettings) -> AsyncIterator[None]:
        """Ask something; yields whenever there is more to show."""
        return self._ask(len(self.turns), new_turn(text, paths), settings)

    def retry(self, index: int, settings: ChatSettings) -> AsyncIterator[None]:
        """Ask a turn's question again; what came after it is dropped."""
        turn = self.turns[index]
        again = replace(new_turn(turn.text, _paths(turn)), results=turn.results)
        return self._ask(index, again, settings)

    def edit(self, index: int, text: str, settings: ChatSettings) -> AsyncIterator[None]:
        """Ask a turn's question in other words, with the same files."""
        return self._ask(index, new_turn(text, _paths(self.turns[index])), settings)

    @property
    def awaited(self) -> tuple[ToolCall, ...]:
        """The last answer's calls that have no result yet."""
        if self.busy or not self.turns or self.turns[-1].answer.error:
            return ()
        return self.turns[-1].answer.complete_calls[len(self._results) :]

    async def give(self, text: str, settings: ChatSettings) -> AsyncIterator[None]:
        """Give the result of the first awaited call; with the last one the answer goes on."""
        if not self.awaited:
            return
        self._results.append(ToolResult(call=self.awaited[0], text=text))
        if self.awaited:
            yield
            return
        turn = replace(new_turn("", ()), results=tuple(self._results))
        async for _ in self._ask(len(self.turns), turn, settings):
            yield

    async def look(self, index: int) -> tuple[Seen, ...]:
        """What the model sees of a turn's files, once more."""
        seen = []
        for file in self.turns[index].usable:
            with contextlib.suppress(MediaError):  # it was there when it was asked about
                seen.append((await self._read(file))[1])
        return tuple(seen)

    def undo(self, index: int) -> tuple[str, tuple[Path, ...]]:
        """Take a turn and what came after it back; returns its text and files."""
        self.stop()
        turn = self.turns[index]
        self.turns = self.turns[:index]
        self._results.clear()
        return turn.text, _paths(turn)

    def clear(self) -> None:
        """Start over."""
        self.stop()
        self.turns = self.seen = ()
        self._cached_items = self._items = 0

    def take_seen(self) -> tuple[Seen, ...]:
        """What the model sees of newly read files; they are handed out once and not kept."""
        seen, self.seen = self.seen, ()
        return seen

    def stop(self) -> None:
        """End the answer in the making; safe on any thread."""
        task, loop = self._task, self._loop
        if task is not None and loop is not None and not task.done() and not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    # ------------------------------------------------------------------ how it is answered

    async def _ask(self, index: int, turn: Turn, settings: ChatSettings) -> AsyncIterator[None]:
        if self.busy or not (turn.text or turn.attachments or turn.results):
            return
        answer = turn.answer
        self.turns = (*self.turns[:index], turn)
        self._results.clear()
        self._cached_items = self._items = 0
        self._loop = asyncio.get_running_loop()
        task = self._task = asyncio.create_task(self._answer(settings, answer))
        try:
            shown = None
            while not task.done():
                state = (answer.pieces, self.turns)
                if state != shown:
                    shown = state
                    yield
                await asyncio.wait({task}, timeout=REFRESH_SECONDS)
            if not task.cancelled():
                task.result()  # an error that is not the visitor's is a bug, and is heard of
            yield
        finally:
            task.cancel()

    async def _answer(self, settings: ChatSettings, answer: Answer) -> None:
        try:
            await self._read_files()
            while self.turns[-1].askable:
                try:
                    await self._stream(settings, answer)
                except MediaError as exc:
                    if self._drop(exc):
                        continue
                    answer.end(time.perf_counter(), error=_sentence(exc))
                except K3VLError as exc:
                    answer.end(time.perf_counter(), error=_sentence(exc))
                break
            answer.end(time.perf_counter())
        except asyncio.CancelledError:
            answer.end(time.perf_counter(), stopped=True)
            raise
        finally:
            answer.end(time.perf_counter(), error="Something went wrong; the log says what.")

    async def _read_files(self) -> None:
        """Read the last turn's files: what cannot be used is said, the rest is shown."""
        index, seen = len(self.turns) - 1, []
        for number, file in enumerate(self.turns[index].attachments):
            if file.problem:
                continue
            try:
                read, view = await self._read(file)
            except MediaError as exc:
                read = replace(file, problem=_reason(exc, file))
            else:
                seen.append(view)
            turn = self.turns[index]
            files = (*turn.attachments[:number], read, *turn.attachments[number + 1 :])
            self.turns = (*self.turns[:index], replace(turn, attachments=files))
        if seen:
            self.seen = tuple(seen)

    async def _read(self, file: Attachment) -> tuple[Attachment, Seen]:
        """Process a file, on a thread of its own."""
        processor = self._model.processor

        def read() -> tuple[Attachment, Seen]:
            media = processor.process(file.part)
            digests = tuple(item.digest for item in media.items)
            known = replace(file, digests=digests, shown=file.shown or stand_in(file.path, media))
            return known, see(file.path.name, media, patch=processor.config.patch_size)

        return await asyncio.to_thread(read)

    async def _stream(self, settings: ChatSettings, answer: Answer) -> None:
        remembered = remember(self.turns)
        self._count_cached(set(remembered.owners))
        sampling = settings.sampling
        if self._model.min_confidence:
            sampling = replace(sampling, logprobs=0)
            answer.unsure_below = self._model.min_confidence
        events = self._model.stream(
            remembered.messages,
            tools=settings.tools,
            options=settings.options,
            sampling=sampling,
        )
        async for event in events:
            answer.feed(event, time.perf_counter())

    def _count_cached(self, owners: set[int]) -> None:
        """How many media items of the request the encoder has features of already."""
        digests = [
            digest
            for index in owners
            for file in self.turns[index].usable
            for digest in file.digests
        ]
        held = [known for known in map(self._model.holds_features, digests) if known is not None]
        self._items, self._cached_items = len(held), sum(held)

    def _drop(self, exc: MediaError) -> bool:
        """Leave out the file that an error names, in whatever turn; False when it names none."""
        match = _PARAM.fullmatch(exc.param or "")
        if match is None:
            return False
        owner = remember(self.turns).owners[int(match[1])]
        usable = self.turns[owner].usable
        if int(match[2]) >= len(usable):
            return False
        file = usable[int(match[2])]
        turn = self.turns[owner].without(file, _reason(exc, file))
        self.turns = (*self.turns[:owner], turn, *self.turns[owner + 1 :])
        return True


class Sessions:
    """Conversations by the browser tab's key; a bounded number, the least recently used goes."""

    def __init__(self, model: ChatModel, max_sessions: int = 256) -> None:
        """Start without visitors."""
        self._model = model
        self._max_sessions = max_sessions
        self._held: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: str) -> Session:
        """The tab's conversation; a new one for a new key."""
        session = self._held.pop(key, None) or Session(self._model)
        self._held[key] = session
        while len(self._held) > self._max_sessions:
            self.drop(next(iter(self._held)))
        return session

    def drop(self, key: str) -> None:
        """The tab is gone: end what it was waiting for, and forget it."""
        if (session := self._held.pop(key, None)) is not None:
            session.stop()


def new_turn(text: str, paths: Sequence[Path]) -> Turn:
    """A question that is about to be asked; files beyond the limit are explained."""
    files = [Attachment(path=path, kind=kind_of(path)) for path in paths[:MAX_FILES]]
    files += [
        Attachment(path=path, kind="image", problem=f"a message takes {MAX_FILES} files")
        for path in paths[MAX_FILES:]
    ]
    answer = Answer(started=time.perf_counter())
    return Turn(text=text.strip(), attachments=tuple(files), answer=answer)


def _paths(turn: Turn) -> tuple[Path, ...]:
    return tuple(file.path for file in turn.attachments)


def _reason(exc: MediaError, file: Attachment) -> str:
    """Why, without the file's name, and the place in the request, which a visitor did not write."""
    return _PREFIX.sub("", str(exc)).removeprefix(f"{file.path.name}: ").rstrip(".")


def _sentence(exc: K3VLError) -> str:
    reason = str(exc).rstrip(".")
    return f"The model could not answer: {reason}."
