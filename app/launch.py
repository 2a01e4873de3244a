"""From the options of ``k3vl serve`` to a running server."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from k3vl.app.engines import EmbeddedEngine
from k3vl.app.openai import Limits
from k3vl.app.server import LOCAL_ADDRESSES, ServerSettings, serve
from k3vl.app.upstream.discovery import open_endpoint
from k3vl.config import checkpoint_path
from k3vl.errors import ConfigError
from k3vl.load import load_sampling_defaults
from k3vl.pipeline import Pipeline
from k3vl.types import SamplingParams
from k3vl.vision.source import FetchPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k3vl.app.engines import Engine
    from k3vl.app.upstream.engine import VideoForm
    from k3vl.load import Device

SMALLEST_KEY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The command line's options, under their own names."""

    model: str | None
    backend: str | None
    backend_key: str | None
    backend_model: str | None
    backend_video: VideoForm
    device: Device
    tensor_parallel: int
    host: str
    port: int
    api_key: tuple[str, ...]
    api_key_file: Path | None
    served_model_name: tuple[str, ...]
    allowed_media_path: Path | None
    allow_private_networks: bool
    cors_origin: tuple[str, ...]
    max_running: int
    max_waiting: int
    media_prefills: int
    max_images: int
    max_videos: int
    max_choices: int
    max_body_mib: int
    max_media_mib: int
    default_max_tokens: int
    media_workers: int | None
    media_seconds: float
    media_memory_mib: int
    shutdown_seconds: int


def launch(options: ServeOptions) -> None:
    """Load the model, or reach the endpoint, and serve it.

    Raises:
        ConfigError: an option, the checkpoint or the endpoint is not usable.
    """
    keys = read_keys(options)
    if options.host not in LOCAL_ADDRESSES and not keys:
        click.echo(
            f"warning: {options.host} can be reached from other machines, and no --api-key is set",
            err=True,
        )
    with open_engine(options) as (engine, name, sampling):
        serve(engine, server_settings(options, keys, name, sampling))


@contextlib.contextmanager
def open_engine(options: ServeOptions) -> Iterator[tuple[Engine, str, SamplingParams]]:
    """What answers, its name, and how it samples where a request says nothing.

    Raises:
        ConfigError: the checkpoint or the endpoint is not usable.
        WeightError: the checkpoint's tensors are not.
    """
    policy = fetch_policy(options)
    if options.backend is None:
        checkpoint = options.model or "demo"
        name = checkpoint if checkpoint == "demo" else Path(checkpoint).resolve().name
        sampling = load_sampling_defaults(checkpoint_path(checkpoint))
        with Pipeline.load(
            checkpoint,
            device=options.device,
            tensor_parallel=options.tensor_parallel,
            policy=policy,
        ) as pipeline:
            yield EmbeddedEngine(pipeline), name, sampling
        return
    engine, name = open_endpoint(
        options.backend,
        api_key=options.backend_key,
        model=options.backend_model,
        checkpoint=options.model,
        video=options.backend_video,
        policy=policy,
    )
    yield engine, name, SamplingParams()


def server_settings(
    options: ServeOptions, keys: tuple[str, ...], name: str, sampling: SamplingParams
) -> ServerSettings:
    """The server's settings among the options."""
    return ServerSettings(
        host=options.host,
        port=options.port,
        model_names=options.served_model_name or (name,),
        api_keys=keys,
        cors_origins=options.cors_origin,
        limits=Limits(
            max_images=options.max_images,
            max_videos=options.max_videos,
            max_choices=options.max_choices,
            default_max_tokens=options.default_max_tokens,
        ),
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        media_prefills=options.media_prefills,
        max_body_bytes=options.max_body_mib * 2**20,
        media_workers=options.media_workers or ServerSettings().media_workers,
        media_seconds=options.media_seconds,
        media_memory=options.media_memory_mib * 2**20,
        shutdown_seconds=options.shutdown_seconds,
        sampling=sampling,
    )


def fetch_policy(options: ServeOptions) -> FetchPolicy:
    """What requests may fetch.

    Raises:
        ConfigError: the media path is not a directory.
    """
    root = options.allowed_media_path
    if root is not None and not root.is_dir():
        raise ConfigError(f"--allowed-media-path {root}: not a directory")
    schemes = {"data", "http", "https"} | ({"file"} if root is not None else set())
    return FetchPolicy(
        schemes=frozenset(schemes),
        file_root=root,
        max_bytes=options.max_media_mib * 2**20,
        allow_private_networks=options.allow_private_networks,
    )


def read_keys(options: ServeOptions) -> tuple[str, ...]:
    """The keys of the command line, the environment and the file.

    Raises:
        ConfigError: the file cannot be read or holds none, or a key is too short.
    """
    keys = list(options.api_key)
    if options.api_key_file is not None:
        try:
            lines = options.api_key_file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{options.api_key_file}: cannot be read") from exc
        if not lines:
            raise ConfigError(f"{options.api_key_file}: holds no key")
        keys += lines
    if any(len(key) < SMALLEST_KEY or not key.isascii() for key in keys):
        raise ConfigError(f"an API key must have at least {SMALLEST_KEY} characters, all ASCII")
    return tuple(dict.fromkeys(keys))
