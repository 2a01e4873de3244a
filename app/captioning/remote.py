"""Captions from any OpenAI-compatible endpoint: retries, backoff, the same rows.

Media are decoded here first, so a bad file is the same error as with the embedded engine and never
reaches the server; ``k3vl.app.sent_media`` says in which form they go out.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import httpx2

from k3vl.app.captioning.media import chosen_frames
from k3vl.app.captioning.rows import Answer, Ask, ItemTimeoutError
from k3vl.app.sent_media import frames_url, image_url, png_url, video_url
from k3vl.app.upstream.answers import read_usage
from k3vl.app.upstream.client import Refusal, check_model, open_client
from k3vl.errors import BackendError, Cancelled, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k3vl.app.captioning.media import Loaded
    from k3vl.types import Usage
    from k3vl.vision.processor import MediaProcessor

_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0


class RemoteEngine:
    """An :class:`~k3vl.app.captioning.engines.Engine` over HTTP.

    Args:
        base_url: up to and including ``/v1``.
        model: the name that the endpoint knows.
        processor: checks media before they are sent.
        api_key: sent as a bearer token; None sends none.
        parallel: requests at once.
        retries: further attempts after a transient failure.
        request_seconds: longest wait for one answer.

    Raises:
        ConfigError: ``base_url`` is no URL, or the key cannot be sent.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        processor: MediaProcessor,
        *,
        api_key: str | None = None,
        parallel: int = 8,
        retries: int = 6,
        request_seconds: float = 600.0,
    ) -> None:
        self.name = model
        self.revision = ""
        self.processor = processor
        self.parallel = parallel
        self._retries = retries
        self._closed = threading.Event()
        self._jitter = random.Random()  # noqa: S311 - only spreads retries
        self._where = (base_url, api_key)
        self._client = open_client(
            httpx2.Client, base_url, api_key, seconds=request_seconds, connections=parallel
        )

    def check(self) -> None:
        """Ask the endpoint for its models, before any work.

        Raises:
            ConfigError: it does not answer, refuses the key, or has no such model.
        """
        check_model(*self._where, self.name)

    def answer(self, loaded: Loaded, ask: Ask, seconds: float | None) -> Answer:
        """See :class:`~k3vl.app.captioning.engines.Engine`."""
        start = time.monotonic()
        end = None if seconds is None else start + seconds
        data = self._send(self._body(loaded, ask), end, seconds)
        answer = _parse(data)
        return Answer(
            text=answer["text"],
            reasoning=answer["reasoning"],
            finish=answer["finish"],
            usage=_usage(data.get("usage"), loaded),
            latency=time.monotonic() - start,
            revision=data.get("system_fingerprint") or None,
        )

    def close(self) -> None:
        """See :class:`~k3vl.app.captioning.engines.Engine`."""
        self._closed.set()
        self._client.close()

    # ------------------------------------------------------------------ one request

    def _body(self, loaded: Loaded, ask: Ask) -> dict[str, Any]:
        sampling = ask.sampling
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        _media_part(loaded, self.processor),
                        {"type": "text", "text": ask.text},
                    ],
                }
            ],
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if ask.schema is not None:
            body["response_format"] = ask.schema.response_format
        return body

    def _send(
        self, body: Mapping[str, Any], end: float | None, seconds: float | None
    ) -> dict[str, Any]:
        """Post until there is an answer, a permanent error, or no attempt left."""
        failure = _Failure("")
        for attempt in range(self._retries + 1):
            if attempt:
                self._wait(attempt, failure.wait, end)
            if self._closed.is_set():
                raise Cancelled("the run was stopped")
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                reason = f" ({failure.why})" if failure.why else ""
                raise ItemTimeoutError(f"no answer within {seconds:g} s{reason}")
            result = self._attempt(body, left)
            if isinstance(result, dict):
                return result
            failure = result
        raise BackendError(f"no answer after {self._retries + 1} attempts: {failure.why}")

    def _attempt(self, body: Mapping[str, Any], left: float | None) -> dict[str, Any] | _Failure:
        """One post; a transient failure is a value, a permanent one an error."""
        timeout = self._client.timeout if left is None else left
        try:
            response = self._client.post("chat/completions", json=body, timeout=timeout)
        except (httpx2.TransportError, RuntimeError) as exc:
            if self._closed.is_set():
                raise Cancelled("the run was stopped") from exc
            return _Failure(f"connection failed ({type(exc).__name__})")
        status = response.status_code
        if status != 200:
            refusal = Refusal.read(status, response.headers, response.content)
            if status in _TRANSIENT:
                return _Failure(f"HTTP {status}", refusal.retry_after)
            raise RequestError(
                f"the endpoint refused it: HTTP {status}: {refusal.said}", code=f"http_{status}"
            )
        try:
            data = response.json()
        except ValueError:
            return _Failure("the answer is not JSON")
        if isinstance(data, dict) and _has_text(data):
            return data
        return _Failure("the answer holds no message")

    def _wait(self, attempt: int, asked: float | None, end: float | None) -> None:
        """Longer each time, never in step with other threads, and at least what was asked for."""
        wait = min(_FIRST_WAIT * 2 ** (attempt - 1), _LONGEST_WAIT)
        wait *= self._jitter.uniform(0.5, 1.0)
        wait = max(wait, min(asked or 0.0, _LONGEST_WAIT))
        if end is not None:
            wait = min(wait, max(end - time.monotonic(), 0.0))
        self._closed.wait(wait)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why an attempt failed, and how long the server wants to be left alone."""

    why: str
    wait: float | None = None


def _has_text(data: dict[str, Any]) -> bool:
    try:
        return isinstance(data["choices"][0]["message"], dict)
    except (KeyError, IndexError, TypeError):
        return False


def _parse(data: dict[str, Any]) -> dict[str, str]:
    choice = data["choices"][0]
    message = choice["message"]
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return {
        "text": str(message.get("content") or ""),
        "reasoning": str(reasoning),
        "finish": str(choice.get("finish_reason") or "stop"),
    }


def _usage(usage: object, loaded: Loaded) -> Usage:
    """The endpoint's counts; media tokens are our own plan's where it tells none."""
    counts = read_usage(usage)
    if counts.image_tokens or counts.video_tokens:
        return counts
    planned = sum(item.num_tokens for item in loaded.media.items)
    is_image = loaded.seen.kind == "image"
    return replace(counts, image_tokens=planned * is_image, video_tokens=planned * (not is_image))


def _media_part(loaded: Loaded, processor: MediaProcessor) -> dict[str, Any]:
    """The message's part; its data are made anew for every item, so none is held meanwhile."""
    kind = loaded.seen.kind
    return {"type": f"{kind}_url", f"{kind}_url": {"url": _url(loaded, processor)}}


def _url(loaded: Loaded, processor: MediaProcessor) -> str:
    data, piece = loaded.fetched.data, loaded.piece
    if piece.animated or piece.start is not None:
        frames = chosen_frames(loaded.fetched, piece, processor)
        return frames_url(frames, processor.config.transparent_bg_config)
    if loaded.seen.kind == "video":
        return video_url(data)
    assert isinstance(data, bytes)
    return image_url(data) if loaded.page is None else png_url(loaded.page)
