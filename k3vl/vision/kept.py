"""Pictures that were processed lately, by content, so that the next question does not do it again.

What is kept is a function of the file's bytes and of what the key says beside them; a file that
changed has another digest. Safe on any thread; who asks for what another thread is making waits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from k3vl.types import ProcessedMedia


class KeptMedia:
    """Least recently used goes first.

    Args:
        max_bytes: of patches that are kept; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, ProcessedMedia] = OrderedDict()
        self._making: dict[Hashable, Future[ProcessedMedia]] = {}
        self._bytes = 0

    def get(self, key: Hashable, make: Callable[[], ProcessedMedia]) -> ProcessedMedia:
        """What ``make`` returns, of now or of an earlier call with this key.

        Raises:
            Exception: whatever ``make`` raises; a failure is not kept, and is nobody else's: it may
                be of the caller (an interrupt), and an error is told in the caller's words.
        """
        with self._lock:
            if (held := self._held.get(key)) is not None:
                self._held.move_to_end(key)
                return held
            job = self._making.get(key)
            mine = job is None
            if job is None:
                job = self._making[key] = Future()
        if not mine:
            return make() if job.exception() else job.result()
        try:
            job.set_result(make())
        except BaseException as exc:
            job.set_exception(exc)
            raise
        finally:
            with self._lock:
                del self._making[key]
                if not job.exception():
                    self._keep(key, job.result())
        return job.result()

    def _keep(self, key: Hashable, media: ProcessedMedia) -> None:
        if _size(media) > self.max_bytes:
            return
        self._held[key] = media
        self._bytes += _size(media)
        while self._bytes > self.max_bytes:
            _, old = self._held.popitem(last=False)
            self._bytes -= _size(old)


def _size(media: ProcessedMedia) -> int:
    return sum(item.patches.nbytes for item in media.items)
