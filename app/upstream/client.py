"""An OpenAI-compatible endpoint from a client's side: how it is reached, what it has and refuses.

The captioner, the chat demo and the server share this; each has its own way of waiting.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2

from k3vl.app.upstream.answers import MAX_WORDS, words_of
from k3vl.errors import BackendUnavailableError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_Client = TypeVar("_Client", httpx2.Client, httpx2.AsyncClient)
CONNECT_SECONDS = 10.0
_MAX_WAIT = 3600.0


def open_client(
    kind: type[_Client],
    url: str,
    api_key: str | None,
    *,
    seconds: float,
    connections: int | None = None,
) -> _Client:
    """A client whose paths are relative to the endpoint.

    Args:
        kind: a client with or without an event loop.
        url: up to and including ``/v1``.
        api_key: sent as a bearer token; None sends none.
        seconds: longest wait for the next bytes.
        connections: at most this many at once.

    Raises:
        ConfigError: ``url`` is none, or the key cannot be sent.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: not an http: or https: URL")
    try:
        return kind(
            base_url=url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx2.Timeout(seconds, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=connections),
        )
    except UnicodeEncodeError as exc:
        raise ConfigError("an API key is sent in ASCII; this one cannot be") from exc
    except (httpx2.InvalidURL, ValueError) as exc:
        raise ConfigError(f"{url}: not a URL") from exc


# ---------------------------------------------------------------------- its models


def ask_models(url: str, api_key: str | None) -> dict[str, int | None]:
    """The models that an endpoint lists, with their context lengths where it tells them.

    Returns:
        Nothing where the answer is not understood: not every endpoint lists its models.

    Raises:
        ConfigError: the URL is none, or the key is refused.
        BackendUnavailableError: nobody answers there.
    """
    with open_client(httpx2.Client, url, api_key, seconds=CONNECT_SECONDS) as client:
        try:
            response = client.get("models")
        except httpx2.TransportError as exc:
            raise BackendUnavailableError(f"{url}: no answer ({type(exc).__name__})") from exc
    status = response.status_code
    if status in (401, 403):
        raise ConfigError(f"{url}: the API key is refused (HTTP {status})")
    try:
        entries: Any = response.json()["data"] if status == 200 else []
        return {str(entry["id"]): _context_length(entry) for entry in entries}
    except (ValueError, KeyError, TypeError):
        return {}


def _context_length(entry: Mapping[str, Any]) -> int | None:
    lengths = (entry.get("context_length"), entry.get("max_model_len"))
    return next((length for length in lengths if isinstance(length, int)), None)


def check_model(url: str, api_key: str | None, model: str) -> None:
    """Ask an endpoint for a model, before any work.

    Raises:
        ConfigError: it does not answer, refuses the key, or has no such model.
    """
    try:
        require_model(url, ask_models(url, api_key), model)
    except BackendUnavailableError as exc:
        raise ConfigError(str(exc)) from exc


def require_model(url: str, listed: Mapping[str, int | None], model: str) -> None:
    """See that a model is listed, if any is.

    Raises:
        ConfigError: it is not.
    """
    if listed and model not in listed:
        raise ConfigError(f"{url}: no model '{model}'; there are {', '.join([*listed][:10])}")


# ---------------------------------------------------------------------- its refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An answer that is none.

    Attributes:
        status: HTTP's, not 200.
        words: its own about the error, in OpenAI's form, on one line of bounded length.
        text: the beginning of whatever else came; of some proxy, perhaps, that tells its address.
        param, code: what OpenAI's form says of the error.
        retry_after: seconds for which it wants to be left alone; None: it did not say.
    """

    status: int
    words: str
    text: str = ""
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None

    @property
    def said(self) -> str:
        """All that came, for whoever owns the endpoint or its key."""
        return self.words or self.text or "without a word"

    @classmethod
    def read(cls, status: int, headers: Mapping[str, str], body: bytes) -> Refusal:
        """From an answer's parts; the body may be cut."""
        seconds = _seconds(headers.get("Retry-After"))
        try:
            data: Any = json.loads(body)
        except ValueError:
            text = " ".join(body.decode("utf-8", "replace").split())[:MAX_WORDS]
            return cls(status=status, words="", text=text, retry_after=seconds)
        error = data.get("error", data) if isinstance(data, dict) else {}
        told = error if isinstance(error, dict) else {}
        return cls(
            status=status,
            words=words_of(error),
            param=_string(told.get("param")),
            code=_string(told.get("code")),
            retry_after=seconds,
        )


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _seconds(text: str | None) -> float | None:
    """A date or nonsense is nothing."""
    try:
        return min(float(text), _MAX_WAIT) if text else None
    except ValueError:
        return None
