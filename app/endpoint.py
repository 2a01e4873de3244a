"""An OpenAI-compatible endpoint from a client's side: how it is reached, and how it is read.

The captioner and the chat demo share this; each has its own way of waiting for answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k3vl.errors import ConfigError
from k3vl.types import Usage

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

CONNECT_SECONDS = 10.0


def need_http_client() -> ModuleType:
    """The optional ``httpx2``; the extras ``caption`` and ``demo`` bring it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import httpx2
    except ImportError as exc:
        raise ConfigError("--base-url needs httpx2: pip install httpx2") from exc
    return httpx2


def open_client(
    kind: Callable[..., Any],
    base_url: str,
    api_key: str | None,
    *,
    seconds: float,
    connections: int | None = None,
) -> Any:
    """A client whose paths are relative to the endpoint.

    Args:
        kind: ``httpx2.Client`` or ``httpx2.AsyncClient``.
        base_url: up to and including ``/v1``.
        api_key: sent as a bearer token; None sends none.
        seconds: longest wait for the next bytes.
        connections: at most this many at once.

    Raises:
        ConfigError: ``base_url`` is no URL, or the key cannot be sent.
    """
    http = need_http_client()
    try:
        return kind(
            base_url=base_url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=http.Timeout(seconds, connect=CONNECT_SECONDS),
            limits=http.Limits(max_connections=connections),
        )
    except UnicodeEncodeError as exc:
        raise ConfigError("--api-key: only ASCII can be sent") from exc
    except (http.InvalidURL, ValueError) as exc:
        raise ConfigError(f"--base-url {base_url}: not a URL") from exc


def check_endpoint(client: Any, model: str) -> None:
    """Ask an endpoint for its models, before any work.

    Raises:
        ConfigError: it does not answer, refuses the key, or has no such model.
    """
    http = need_http_client()
    where = str(client.base_url)
    try:
        response = client.get("models", timeout=CONNECT_SECONDS)
    except http.UnsupportedProtocol as exc:
        raise ConfigError(f"--base-url {where}: not an http: or https: URL") from exc
    except http.TransportError as exc:
        raise ConfigError(f"{where}: no answer ({type(exc).__name__})") from exc
    if response.status_code in (401, 403):
        raise ConfigError(f"{where}: the API key is refused (HTTP {response.status_code})")
    if response.status_code != 200:
        return  # not every endpoint lists its models
    try:
        names = [str(entry["id"]) for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return
    if names and model not in names:
        raise ConfigError(f"{where}: no model '{model}'; there are {', '.join(names[:10])}")


def error_text(response: Any) -> str:
    """The server's words on one line."""
    try:
        error = response.json()["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = str(response.text)
    return " ".join(text.split())[:300]


def read_usage(usage: object, *, image_tokens: int = 0, video_tokens: int = 0) -> Usage:
    """The endpoint's counts; where it tells none of media tokens, those that are given."""
    counts = usage if isinstance(usage, dict) else {}
    prompt = counts.get("prompt_tokens_details") or {}
    completion = counts.get("completion_tokens_details") or {}
    return Usage(
        prompt_tokens=_count(counts.get("prompt_tokens")),
        image_tokens=_count(prompt.get("image_tokens"), image_tokens),
        video_tokens=_count(prompt.get("video_tokens"), video_tokens),
        cached_tokens=_count(prompt.get("cached_tokens")),
        completion_tokens=_count(counts.get("completion_tokens")),
        reasoning_tokens=_count(completion.get("reasoning_tokens")),
    )


def _count(value: object, default: int = 0) -> int:
    return value if isinstance(value, int) else default
