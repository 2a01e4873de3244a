"""What stands behind a URL: the endpoint is asked for its models before anything is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3vl.app.upstream.client import ask_models, require_model
from k3vl.app.upstream.endpoint import Endpoint
from k3vl.app.upstream.engine import UpstreamEngine, VideoForm
from k3vl.config import K3_MEDIA, checkpoint_path, load_config, load_media_config
from k3vl.errors import BackendUnavailableError, ConfigError
from k3vl.load import load_chat_defaults
from k3vl.prompt import PromptWriter
from k3vl.types import ChatOptions
from k3vl.vision.processor import MediaProcessor
from k3vl.xtml.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from k3vl.vision.source import FetchPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A model of an endpoint."""

    name: str
    context_length: int | None = None


def open_endpoint(
    url: str,
    *,
    api_key: str | None,
    model: str | None,
    checkpoint: str | None,
    video: VideoForm,
    policy: FetchPolicy,
) -> tuple[UpstreamEngine, str]:
    """Get an endpoint ready to answer.

    Args:
        url: up to and including ``/v1``.
        api_key: sent as a bearer token; None sends none.
        model: the name that the endpoint knows; None: its only one.
        checkpoint: a directory whose media settings, tokenizer and defaults are the model's; None
            takes K3's published media settings, and counts no tokens.
        video: how clips go out.
        policy: what requests may fetch.

    Returns:
        The engine, and the model's name.

    Raises:
        ConfigError: the URL, the model or the directory is not usable.
    """
    endpoint = Endpoint(url, api_key=api_key)
    found = find_model(url, api_key=api_key, name=model)
    media, defaults = K3_MEDIA, ChatOptions(thinking=True, thinking_effort="max")
    context_length, writer = found.context_length, None
    if checkpoint is not None:
        directory = checkpoint_path(checkpoint)
        config = load_config(directory)
        media, defaults = load_media_config(directory), load_chat_defaults(directory)
        writer = PromptWriter(load_tokenizer(directory), config.media_placeholder_token_id)
        context_length = context_length or config.text.max_position_embeddings
    engine = UpstreamEngine(
        endpoint,
        model=found.name,
        processor=MediaProcessor(media, policy=policy),
        defaults=defaults,
        video=video,
        context_length=context_length,
        writer=writer,
    )
    return engine, found.name


def find_model(url: str, *, api_key: str | None, name: str | None) -> Found:
    """Ask an endpoint for its models. One that is named need not answer yet.

    Raises:
        ConfigError: no name was given and the endpoint does not list exactly one, it has none of
            that name, or it refuses the key.
    """
    try:
        models = ask_models(url, api_key)
    except BackendUnavailableError as exc:
        if name is not None:
            return Found(name=name)
        raise ConfigError(f"{exc}; --backend-model lets it come later") from exc
    if name is None:
        if len(models) != 1:
            listed = ", ".join(list(models)[:10]) or "no model"
            raise ConfigError(f"{url} lists {listed}; choose one with --backend-model")
        (name,) = models
    require_model(url, models, name)
    return Found(name=name, context_length=models.get(name))
