"""HTTP to an OpenAI-compatible endpoint: one streamed request, and its failures in our own terms.

Unless whoever asks says otherwise, nothing in a message tells of the endpoint's address.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, cast

import httpx2

from k3vl.app.upstream.client import Refusal, open_client
from k3vl.errors import (
    BackendAnswerError,
    BackendTimeoutError,
    BackendUnavailableError,
    CapacityError,
    RequestError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

READ_SECONDS = 600.0
"""Longest silence; a long prompt may wait and be read for minutes before its first token."""
PROBE_SECONDS = 5.0
_MAX_ERROR_BYTES = 1 << 16
_DONE = "[DONE]"
_CALLERS_FAULT = frozenset({400, 413, 422})


class Endpoint:
    """A place that is asked; belongs to one event loop.

    Args:
        url: up to and including ``/v1``.
        api_key: sent as a bearer token; None sends none.
        read_seconds: longest silence.
        refused: the error behind a refusal; None: one that a client may read who is not to know
            of the endpoint.

    Raises:
        ConfigError: the URL is none, or the key cannot be sent.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        read_seconds: float = READ_SECONDS,
        refused: Callable[[Refusal], Exception] | None = None,
    ) -> None:
        self._client = open_client(httpx2.AsyncClient, url, api_key, seconds=read_seconds)
        self._refused = refused or for_strangers

    @contextlib.asynccontextmanager
    async def stream(self, body: bytes) -> AsyncIterator[AsyncIterator[str]]:
        """Post a request that asks for a stream; entered once the endpoint has taken it.

        Yields:
            The data of the events, up to the end mark or the end of the stream.

        Raises:
            BackendError: a subclass says how the endpoint failed.
            CapacityError: it has too much to do.
            RequestError: it refuses this request.
        """
        with _in_our_terms():
            context = self._client.stream(
                "POST",
                "chat/completions",
                content=body,
                headers={"Content-Type": "application/json", "Accept": "text/event-stream"},
            )
            response = await context.__aenter__()
        try:
            if response.status_code != 200:
                with _in_our_terms():
                    text = await _head(response)
                raise self._refused(Refusal.read(response.status_code, response.headers, text))
            kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "text/event-stream":
                raise BackendAnswerError("the backend sent what is no stream of events")
            yield _events(response)
        finally:
            with contextlib.suppress(httpx2.HTTPError):
                await context.__aexit__(None, None, None)

    async def is_alive(self) -> bool:
        """Whether it lists its models."""
        try:
            response = await self._client.get("models", timeout=PROBE_SECONDS)
        except httpx2.HTTPError:
            return False
        return response.status_code == 200

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


async def _events(response: httpx2.Response) -> AsyncIterator[str]:
    """The data of each event, until the end mark."""
    items = aiter(httpx2.EventSource(response))
    async with contextlib.aclosing(cast("AsyncGenerator[httpx2.ServerSentEvent]", items)):
        with _in_our_terms():
            async for item in items:
                if item.data == _DONE:
                    return
                if item.data:
                    yield item.data


@contextlib.contextmanager
def _in_our_terms() -> Iterator[None]:
    """The client library's errors as ours; the longest names first."""
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as exc:
        raise BackendUnavailableError("the backend cannot be reached") from exc
    except httpx2.TimeoutException as exc:
        raise BackendTimeoutError("the backend did not answer in time") from exc
    except httpx2.SSEError as exc:
        raise BackendAnswerError("the backend sent what is no stream of events") from exc
    except httpx2.HTTPError as exc:
        raise BackendAnswerError("the connection to the backend broke") from exc


async def _head(response: httpx2.Response) -> bytes:
    """The beginning of an error's body."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) >= _MAX_ERROR_BYTES:
            break
    return bytes(body[:_MAX_ERROR_BYTES])


def for_strangers(refusal: Refusal) -> Exception:
    """A refusal in the words that our own clients may read."""
    status = refusal.status
    if status == 429:
        seconds = max(refusal.retry_after or 1.0, 1.0)
        return CapacityError("the backend has too much to do", retry_after=seconds)
    if status in _CALLERS_FAULT:
        return RequestError(
            f"the backend refuses this: {refusal.words or 'without a word'}",
            code=refusal.code or "refused_by_backend",
        )
    if status == 503:
        return BackendUnavailableError("the backend takes no requests now")
    if status in (408, 504):
        return BackendTimeoutError("the backend did not answer in time")
    if status in (401, 403):
        return BackendAnswerError("the backend refuses this server's key")
    return BackendAnswerError(f"the backend answered with status {status}")
