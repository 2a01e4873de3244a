"""Captions from any OpenAI-compatible endpoint: retries, backoff, the same rows.

Media are decoded here first, so a bad file is the same error as with the embedded engine and never
reaches the server. JPEG, PNG and WebP that are upright go out as they are; everything else as PNG.
"""

from __future__ import annotations

import io
import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3vl.app.captioning.rows import Answer, Ask, ItemTimeoutError
from k3vl.errors import BackendError, Cancelled, ConfigError, RequestError
from k3vl.types import Usage
from k3vl.vision.image import load_image, open_image, read_orientation
from k3vl.vision.limits import DEFAULT_LIMITS
from k3vl.vision.portable import IMAGE_TYPES, VIDEO_TYPES, data_url
from k3vl.vision.sniff import HEAD_BYTES, sniff

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from k3vl.app.captioning.media import Loaded
    from k3vl.vision.processor import MediaProcessor

_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0
_MAX_VIDEO_BYTES = 64 * 2**20


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
        ConfigError: no HTTP client is installed.
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
        self._http = need_http_client()
        self.name = model
        self.revision = ""
        self.processor = processor
        self.parallel = parallel
        self._retries = retries
        self._closed = threading.Event()
        self._jitter = random.Random()  # noqa: S311 - only spreads retries
        try:
            self._client = self._http.Client(
                base_url=base_url.rstrip("/") + "/",
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=self._http.Timeout(request_seconds, connect=10.0),
                limits=self._http.Limits(max_connections=parallel),
            )
        except (self._http.InvalidURL, ValueError) as exc:
            raise ConfigError(f"--base-url {base_url}: not a URL") from exc

    def check(self) -> None:
        """Ask the endpoint for its models, before any work.

        Raises:
            ConfigError: it does not answer, refuses the key, or has no such model.
        """
        where = str(self._client.base_url)
        try:
            response = self._client.get("models", timeout=10.0)
        except self._http.UnsupportedProtocol as exc:
            raise ConfigError(f"--base-url {where}: not an http: or https: URL") from exc
        except self._http.TransportError as exc:
            raise ConfigError(f"{where}: no answer ({type(exc).__name__})") from exc
        if response.status_code in (401, 403):
            raise ConfigError(f"{where}: the API key is refused (HTTP {response.status_code})")
        if response.status_code != 200:
            return  # not every endpoint lists its models
        try:
            names = [str(entry["id"]) for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            return
        if names and self.name not in names:
            raise ConfigError(f"{where}: no model '{self.name}'; there are {', '.join(names[:10])}")

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
        kind, url = _media_url(loaded)
        sampling = ask.sampling
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": f"{kind}_url", f"{kind}_url": {"url": url}},
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
        timeout = {} if left is None else {"timeout": left}
        try:
            response = self._client.post("chat/completions", json=body, **timeout)
        except (self._http.TransportError, RuntimeError) as exc:
            if self._closed.is_set():
                raise Cancelled("the run was stopped") from exc
            return _Failure(f"connection failed ({type(exc).__name__})")
        status = response.status_code
        if status in _TRANSIENT:
            return _Failure(f"HTTP {status}", _retry_after(response.headers.get("Retry-After")))
        if status != 200:
            raise RequestError(
                f"the endpoint refused it: HTTP {status}: {_message(response)}",
                code=f"http_{status}",
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
    counts = usage if isinstance(usage, dict) else {}
    prompt = counts.get("prompt_tokens_details") or {}
    completion = counts.get("completion_tokens_details") or {}
    planned = sum(item.num_tokens for item in loaded.media.items)
    is_image = loaded.seen.kind == "image"
    return Usage(
        prompt_tokens=_count(counts.get("prompt_tokens")),
        image_tokens=_count(prompt.get("image_tokens"), planned if is_image else 0),
        video_tokens=_count(prompt.get("video_tokens"), 0 if is_image else planned),
        cached_tokens=_count(prompt.get("cached_tokens")),
        completion_tokens=_count(counts.get("completion_tokens")),
        reasoning_tokens=_count(completion.get("reasoning_tokens")),
    )


def _count(value: object, default: int = 0) -> int:
    return value if isinstance(value, int) else default


def _message(response: Any) -> str:
    """The server's words on one line."""
    try:
        error = response.json()["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = str(response.text)
    return " ".join(text.split())[:300]


def _retry_after(value: str | None) -> float | None:
    try:
        return float(value) if value else None
    except ValueError:  # a date; our own backoff will do
        return None


def _media_url(loaded: Loaded) -> tuple[str, str]:
    """``image`` or ``video``, and the data URL."""
    if loaded.seen.kind == "video":
        return "video", _video_url(loaded)
    data = loaded.fetched.data
    assert isinstance(data, bytes)
    if loaded.page is not None:
        return "image", _png(loaded.page)
    kind = sniff(data[:HEAD_BYTES])
    header = open_image(data, kind)
    plain = header.mode in ("RGB", "L", "RGBA") and read_orientation(header, []) == 1
    if plain and kind.decoder in IMAGE_TYPES:
        return "image", data_url(IMAGE_TYPES[kind.decoder], data)
    return "image", _png(data)


def _video_url(loaded: Loaded) -> str:
    if loaded.piece.start is not None:
        raise RequestError("pieces of a clip cannot be sent to an endpoint", code="unsupported")
    data = loaded.fetched.whole(_MAX_VIDEO_BYTES)
    if data is None:
        raise RequestError(
            f"a clip of more than {_MAX_VIDEO_BYTES} bytes is not sent", code="media_too_large"
        )
    kind = sniff(data[:HEAD_BYTES])
    return data_url(VIDEO_TYPES.get(kind.decoder, "video/mp4"), data)


def _png(picture: Any) -> str:
    """An upright PNG of a file or of a page."""
    image = load_image(picture, DEFAULT_LIMITS).image
    if image.mode not in ("RGB", "L", "RGBA"):
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return data_url("image/png", stream.getvalue())


def need_http_client() -> ModuleType:
    """The optional ``httpx2``.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import httpx2
    except ImportError as exc:
        raise ConfigError("--base-url needs httpx2: pip install 'k3vl[caption]'") from exc
    return httpx2
