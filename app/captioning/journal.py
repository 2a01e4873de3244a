"""The journal: what a captioning run has done, so that none is lost and none is done twice.

JSON Lines, only ever appended to:

    {"type": "run", "settings", "policy"}    a run begins; the same settings go on with it
    {"type": "item", "id", "prompt_id", "row", "sidecars"}   a caption, or why there is none
    {"type": "sync"}                          all before this line is on the disk, sidecars too
    {"type": "end", "items", "seconds"}       the run came to its end

A record is one ``write`` before any output sees the row, so a process that is killed at any moment
has either the whole record or, at the tail, a piece of one, which is ignored and its item done
again. ``fsync`` follows at least every second: after a power cut the captions of the last second
may be made again, none is doubled. The journal is also the list of failures, whatever sidecars
exist.

In memory it costs some 200 bytes for each caption: a key and the place of its record.
"""

from __future__ import annotations

import json
import os
import time
from typing import IO, TYPE_CHECKING, Any

from k3vl.app.captioning.durable import cannot_write, sync_file, write_all
from k3vl.app.captioning.items import Key, make_key
from k3vl.app.output import json_line, printable
from k3vl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

Record = dict[str, Any]
SYNC_SECONDS = 1.0
_FAILED = -1


class Journal:
    """A journal that this process holds alone; use it as a context manager.

    Attributes:
        resumed: the last run did not end and had the same settings, so this one goes on with it.
        changed: names of settings that differ from the last run's.
        seconds_per_item: of the last run that ended; None where there is none.
    """

    def __init__(self, path: Path, settings: Record, policy: str) -> None:
        """Open or begin a journal and read what it holds.

        Args:
            path: the file.
            settings: what captions depend on; compared with the last run's.
            policy: what is done with existing captions.

        Raises:
            ConfigError: it cannot be written, or another process holds it.
        """
        self.path = path
        self.resumed = False
        self.changed: tuple[str, ...] = ()
        self.seconds_per_item: float | None = None
        self._end, self._torn = 0, False  # a killed process may leave a piece of a record
        self._places: dict[Key, int] = {}
        self._last_good: dict[Key, int] = {}
        self._policies: dict[Key, str] = {}
        self._run: set[Key] = set()
        self._unsynced: list[int] = []
        self._synced = time.monotonic()
        self._ended = True
        try:
            self._file = _open(path)
        except OSError as exc:
            raise cannot_write(path, exc) from exc
        try:
            _lock(self._file, path)
            self._read({"settings": settings, "policy": policy})
        except BaseException:
            self._file.close()
            raise

    # ------------------------------------------------------------------ reading

    def _read(self, run: Record) -> None:
        last: Record | None = None
        self._end = os.fstat(self._file.fileno()).st_size
        if self._end:
            self._file.seek(self._end - 1)
            self._torn = self._file.read(1) != b"\n"
        for place, record in self._records():
            kind = record.get("type")
            if kind == "run":
                same = last is not None and last == _body(record)
                if self._ended or not same:
                    self._run = set()
                last, self._ended = _body(record), False
            elif kind == "item":
                self._note(place, record, str((last or run)["policy"]))
            elif kind == "sync":
                self._unsynced.clear()
            elif kind == "end":
                self._ended, self._unsynced = True, []
                if record.get("items"):
                    self.seconds_per_item = record["seconds"] / record["items"]
        self.resumed = not self._ended and last == run
        if not self.resumed:
            self._run = set()
        old = (last or run)["settings"]
        self.changed = tuple(
            sorted(k for k, value in run["settings"].items() if old.get(k) != value)
        )
        self._begin = run

    def _records(self) -> Iterator[tuple[int, Record]]:
        """Places and records; pieces of records are left out."""
        place = 0
        with self.path.open("rb") as lines:
            for line in lines:
                try:
                    record = json.loads(line)
                    readable = line.endswith(b"\n") and isinstance(record, dict)
                except ValueError:
                    readable = False
                if readable:
                    yield place, record
                place += len(line)

    def _note(self, place: int, record: Record, policy: str) -> None:
        key = make_key(record["id"], record["prompt_id"])
        failed = "error" in record["row"]
        self._places[key] = _FAILED if failed else place
        if failed:
            self._policies[key] = policy
        else:
            self._last_good[key] = place
            self._policies.pop(key, None)
        self._run.add(key)
        self._unsynced.append(place)

    def _record_at(self, place: int) -> Record:
        self._file.seek(place)
        record = json.loads(self._file.readline())
        assert isinstance(record, dict)
        return record

    # ------------------------------------------------------------------ asking

    def in_this_run(self, key: Key) -> bool:
        """Whether this run, or the one it goes on with, has dealt with it."""
        return key in self._run

    def is_captioned(self, key: Key) -> bool:
        """Whether the last that was heard of it is a caption."""
        return self._places.get(key, _FAILED) != _FAILED

    def has_failed(self, key: Key) -> bool:
        """Whether the last that was heard of it is an error."""
        return self._places.get(key) == _FAILED

    def failed_policy(self, key: Key) -> str | None:
        """What was to be done with existing captions when it failed."""
        return self._policies.get(key)

    def row(self, key: Key) -> Record | None:
        """The last caption's row; None where there is none."""
        place = self._last_good.get(key)
        return None if place is None else dict(self._record_at(place)["row"])

    def rows(self) -> Iterator[Record]:
        """The rows that count, in the order in which they were made.

        That is the last caption of an item and a prompt, or else the error.
        """
        winners = set(self._last_good.values())
        shown: set[Key] = set()
        for place, record in self._records():
            if record.get("type") != "item":
                continue
            key = make_key(record["id"], record["prompt_id"])
            lost = key not in self._last_good and key not in shown
            if place in winners or lost:
                shown.add(key)
                yield record["row"]

    def unsynced(self) -> Iterator[Record]:
        """Item records behind the last sync: their outputs may be missing or incomplete."""
        for place in self._unsynced:
            yield self._record_at(place)

    def __len__(self) -> int:
        """Captions and failures that are known."""
        return len(self._places)

    # ------------------------------------------------------------------ writing

    def begin(self) -> None:
        """Mark the start of this run."""
        self._append({"type": "run", **self._begin})
        self._ended = False

    def adopt(self, rows: Iterator[Record]) -> int:
        """Take over captions that were made without a journal; returns how many."""
        count = 0
        for row in rows:
            self.add(str(row["id"]), str(row["prompt_id"]), row, {})
            count += 1
        self.sync()  # the outputs have them
        self._run.clear()
        return count

    def add(self, item_id: str, prompt_id: str, row: Record, sidecars: dict[str, str]) -> None:
        """Record a row before anything else is written of it.

        Args:
            item_id, prompt_id: make the key.
            row: what the outputs get.
            sidecars: whole contents of the sidecars that follow.
        """
        record: Record = {"type": "item", "id": item_id, "prompt_id": prompt_id, "row": row}
        if sidecars:
            record["sidecars"] = sidecars
        place = self._append(record)
        self._note(place, record, str(self._begin["policy"]))

    def is_due(self) -> bool:
        """Whether a second has passed since the last :meth:`sync`."""
        return time.monotonic() - self._synced >= SYNC_SECONDS

    def sync(self) -> None:
        """Put everything on the disk; call it when the outputs are there."""
        if self._unsynced:
            sync_file(self._file, self.path)
            self._append({"type": "sync"})
            self._unsynced.clear()
        self._synced = time.monotonic()

    def end(self, items: int, seconds: float) -> None:
        """Mark the end of this run."""
        self.sync()
        self._append({"type": "end", "items": items, "seconds": round(seconds, 3)})
        sync_file(self._file, self.path)
        self._ended = True

    def _append(self, record: Record) -> int:
        """One record by one write; returns its place."""
        data = json_line(record).encode()
        place = self._end
        if self._torn:  # never to become whole by the line end alone
            data, place = b"!\n" + data, place + 2
        try:
            write_all(self._file.fileno(), data)
        except OSError as exc:
            raise cannot_write(self.path, exc) from exc
        self._end, self._torn = self._end + len(data), False
        return place

    def __enter__(self) -> Journal:
        """Nothing to do; it is open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close it; a run without an end can be gone on with."""
        self._file.close()


def _body(record: Record) -> Record:
    return {"settings": record.get("settings", {}), "policy": record.get("policy", "skip")}


def _open(path: Path) -> IO[bytes]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    return os.fdopen(descriptor, "rb")


def _lock(file: IO[bytes], path: Path) -> None:
    """Hold the file alone, until this process ends however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows has no such lock
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        raise ConfigError(f"{printable(path)}: another run is using this journal") from exc
