"""The run: a stream of items through many threads, committed in the order of the inputs.

Fetching, decoding and generation overlap because every item has a thread of its own, 32 at a time;
how many decode at once is bounded, so memory is. Only the thread that called touches the journal,
the outputs and the terminal.

What happens to a finished item, in this order, is what makes a kill at any moment harmless:

1. tar sample          cut off again on resume unless 2 happened
2. journal record      from here on the item is done
3. JSON Lines row      added from the journal on resume where it is missing
4. sidecars            written again from the journal on resume; the same content, so no harm
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from k3vl.app.captioning.items import Item, Key, make_key
from k3vl.app.captioning.needs import Needs
from k3vl.app.captioning.rows import Origin, Row, error_row
from k3vl.app.captioning.sidecars import NO_SIDECARS, Sidecars, write_sidecars
from k3vl.app.captioning.tar_output import TarOutput
from k3vl.app.captioning.worker import Outcome, Worker
from k3vl.bulk import only_new_garbage
from k3vl.errors import MediaError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k3vl.app.captioning.engines import Engine
    from k3vl.app.captioning.journal import Journal
    from k3vl.app.captioning.listing import Listing
    from k3vl.app.captioning.media import MediaLoader
    from k3vl.app.captioning.outputs import Output
    from k3vl.app.captioning.prompts import Prompt, Prompts
    from k3vl.app.captioning.sidecars import Policy

_TAR_MEDIA_BYTES = 256 * 2**20


@dataclass(slots=True)
class Counts:
    """How a run goes.

    Attributes:
        captioned, failed: captions made, and not made, by this run.
        skipped: captions that were there before.
        failed_before: failures of earlier runs that were not tried again.
        duplicates: captions taken from an item with the same content.
        tokens: completion tokens.
        seconds: since the first item.
    """

    captioned: int = 0
    failed: int = 0
    skipped: int = 0
    failed_before: int = 0
    duplicates: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> int:
        """Captions that are dealt with."""
        return self.captioned + self.failed + self.skipped + self.failed_before


class Watcher(Protocol):
    """Sees what is done; the terminal, the progress bar, the report."""

    def row(self, row: Row, thumbnail: bytes | None) -> None:
        """A new row."""

    def tick(self, counts: Counts) -> None:
        """Numbers have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run works with.

    Attributes:
        listing: inputs.
        loader: makes media of them.
        prompts: what is asked.
        engine: who answers.
        journal: None where nothing can be resumed: results on a terminal or in a pipe alone.
        outputs: files, opened.
        sidecars: which, and where.
        policy: what is done with captions that exist.
        retry_failed, max_errors, item_seconds: see ``options.RunOptions``.
        reasoning: rows hold the think channel.
        thumbnails: make small pictures for the report.
    """

    listing: Listing
    loader: MediaLoader
    prompts: Prompts
    engine: Engine
    journal: Journal | None = None
    outputs: Sequence[Output] = ()
    sidecars: Sidecars = NO_SIDECARS
    policy: Policy = "skip"
    retry_failed: bool = False
    max_errors: int | None = None
    item_seconds: float | None = None
    reasoning: bool = False
    thumbnails: bool = False


class TooManyErrors(Exception):  # noqa: N818 - an outcome that the caller asked for, not a fault
    """The run was stopped because of ``max_errors``."""


class Run:
    """One run over all items."""

    def __init__(self, plan: Plan, watcher: Watcher) -> None:
        self.counts = Counts()
        self._plan = plan
        self._watcher = watcher
        engine = plan.engine
        self._origin = Origin(
            model=engine.name, revision=engine.revision, with_reasoning=plan.reasoning
        )
        self._seen: set[Key] = set()
        self._pending: deque[Future[Outcome]] = deque()
        self._needs = Needs(
            journal=plan.journal,
            sidecars=plan.sidecars,
            policy=plan.policy,
            retry_failed=plan.retry_failed,
        )
        self._worker = Worker(
            loader=plan.loader,
            prompts=plan.prompts,
            engine=engine,
            sidecars=plan.sidecars,
            origin=self._origin,
            item_seconds=plan.item_seconds,
            thumbnails=plan.thumbnails,
        )
        self._tars = [output for output in plan.outputs if isinstance(output, TarOutput)]

    @only_new_garbage()
    def go(self) -> None:
        """Caption everything.

        Raises:
            ConfigError: an output or the journal cannot be written, or an input not be listed.
            TooManyErrors: there were more errors than allowed.
        """
        plan = self._plan
        start = time.monotonic()
        self._recover()
        threads = plan.engine.parallel
        pool = ThreadPoolExecutor(threads, thread_name_prefix="k3vl-caption")
        pending = self._pending
        try:
            for item, prompts in self._work():
                pending.append(pool.submit(self._worker.caption, item, prompts))
                # A slow item at the head must not keep the threads from starting on later ones.
                while len(pending) > 3 * threads or (pending and pending[0].done()):
                    self._commit(pending.popleft().result())
                    self._tell(start)
            while pending:
                self._commit(pending.popleft().result())
                self._tell(start)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            plan.engine.close()
            raise
        finally:
            self._sync()
            self._tell(start)
        pool.shutdown()

    def _tell(self, start: float) -> None:
        self.counts.seconds = time.monotonic() - start
        self._watcher.tick(self.counts)

    # ------------------------------------------------------------------ what to do

    def _recover(self) -> None:
        """Finish what a killed run had recorded but perhaps not written."""
        journal = self._plan.journal
        if journal is None:
            return
        for output in self._plan.outputs:
            output.recover(journal)
        for record in journal.unsynced():
            write_sidecars(record.get("sidecars", {}))
        journal.begin()
        self._sync()

    def _work(self) -> Iterator[tuple[Item, list[Prompt]]]:
        """Items with the prompts that they still need."""
        for source in self._plan.listing.sources():
            for item in self._plan.loader.expand(source):
                if prompts := self._needed(item):
                    yield item, prompts

    def _needed(self, item: Item) -> list[Prompt]:
        needed = []
        for prompt in self._plan.prompts.chosen(item):
            key = make_key(item.id, prompt.id)
            if key in self._seen:
                if not item.source.repeats:
                    self._refuse_repeat(item, prompt)
                continue
            self._seen.add(key)
            if self._is_needed(item, prompt, key):
                needed.append(prompt)
        return needed

    def _is_needed(self, item: Item, prompt: Prompt, key: Key) -> bool:
        """Whether a caption is to be made; counts it where not."""
        state = self._needs.state(item, prompt)
        if state == "captioned":
            self._complete(item, prompt, key)
        self.counts.skipped += state in ("captioned", "exists")
        self.counts.failed_before += state == "failed"
        return state == "needed"

    def _complete(self, item: Item, prompt: Prompt, key: Key) -> None:
        """Give outputs that were asked for later what an earlier run captioned."""
        journal = self._plan.journal
        assert journal is not None
        paths = self._plan.sidecars.paths(item, prompt.id)
        lacking = [path for path in paths if not path.exists()]
        tars = [tar for tar in self._tars if tar.lacks(key)]
        row = journal.row(key) if lacking or tars else None
        if row is None:
            return
        contents = self._plan.sidecars.contents(item, prompt.id, row, "overwrite")
        write_sidecars({str(path): contents[str(path)] for path in lacking})
        for tar in tars:
            try:
                media = self._plan.loader.fetch(item.source).whole(_TAR_MEDIA_BYTES)
            except MediaError:
                continue  # the caption stays where it is; the file has gone since
            tar.add(row, media)

    def _refuse_repeat(self, item: Item, prompt: Prompt) -> None:
        """Two rows of a table with one id: the second would replace the first."""
        error = RequestError(
            "this id was there before; --column id=COLUMN tells rows apart",
            param="id",
            code="duplicate_id",
        )
        source = replace(item.source, id=f"{item.source.id}#again")
        row = error_row(Item(source, item.piece), prompt.id, error, self._origin)
        refused: Future[Outcome] = Future()
        refused.set_result(Outcome(Item(source, item.piece), ((prompt, row),)))
        self._pending.append(refused)  # it is told in its turn

    # ------------------------------------------------------------------ what is done

    def _commit(self, outcome: Outcome) -> None:
        """Write an item's rows everywhere; see the module's docstring for the order."""
        plan = self._plan
        media = None
        if self._tars and outcome.fetched is not None:
            media = outcome.fetched.whole(_TAR_MEDIA_BYTES)
        for prompt, row in outcome.rows:
            failed = "error" in row
            contents = {}
            if not failed:
                policy = self._policy(outcome.item, prompt)
                contents = plan.sidecars.contents(outcome.item, prompt.id, row, policy)
            for tar in self._tars:
                tar.add(row, media)
            if plan.journal is not None:
                plan.journal.add(outcome.item.id, prompt.id, row, contents)
            for output in plan.outputs:
                if output not in self._tars:
                    output.add(row, media)
            write_sidecars(contents)
            self.counts.failed += failed
            self.counts.captioned += not failed
            self.counts.duplicates += "duplicate_of" in row
            self.counts.tokens += row.get("usage", {}).get("completion_tokens", 0)
            self._watcher.row(row, outcome.thumbnail)
        if plan.journal is not None and plan.journal.is_due():
            self._sync()
        if plan.max_errors is not None and self.counts.failed > plan.max_errors:
            raise TooManyErrors

    def _policy(self, item: Item, prompt: Prompt) -> Policy:
        """A caption that failed while it was to be replaced or added to is so now."""
        journal, policy = self._plan.journal, self._plan.policy
        if policy != "skip" or journal is None:
            return policy
        before = journal.failed_policy(make_key(item.id, prompt.id))
        if before == "append":
            return "append"
        return "prepend" if before == "prepend" else policy

    def _sync(self) -> None:
        for output in self._plan.outputs:
            output.sync()
        if self._plan.journal is not None:
            self._plan.journal.sync()
