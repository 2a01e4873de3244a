"""From the options of ``k3vl serve --engine sglang`` to a running SGLang."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from k3vl.app.launch import fetch_policy, launch, read_keys
from k3vl.app.server import LOCAL_ADDRESSES
from k3vl.app.sglang_engine import SGLangCommand, run
from k3vl.errors import ConfigError
from k3vl.sglang.settings import PluginSettings
from k3vl.vision.workers import num_workers_here

if TYPE_CHECKING:
    from k3vl.app.launch import ServeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The command line's options that choose and start the engine, under their own names."""

    engine: Literal["embedded", "sglang"]
    direct: bool
    parity: bool
    start_seconds: float
    engine_args: tuple[str, ...]


def launch_sglang(options: ServeOptions, engine: EngineOptions) -> None:
    """Start SGLang with our plugin, and our server in front of it unless it is to answer itself.

    Raises:
        ConfigError: an option, the checkpoint or the installation is not usable.
        BackendError: SGLang does not start, ended, or runs without the plugin.
    """
    command = sglang_command(options, engine)
    if engine.direct and options.host not in LOCAL_ADDRESSES and command.api_key is None:
        click.echo(
            f"warning: {options.host} can be reached from other machines, and no --api-key is set",
            err=True,
        )

    def front() -> None:
        launch(replace(options, backend=f"{command.url}/v1", backend_video="native"))

    run(
        command,
        start_seconds=engine.start_seconds,
        shutdown_seconds=options.shutdown_seconds,
        say=lambda line: click.echo(line, err=True),
        front=None if engine.direct or not command.answers_chats else front,
    )


def sglang_command(options: ServeOptions, engine: EngineOptions) -> SGLangCommand:
    """What SGLang is started with.

    Behind our server it listens to this machine only, and has no key.

    Raises:
        ConfigError: options that SGLang has no place for.
    """
    if options.model is None or options.model == "demo":
        raise ConfigError("--engine sglang needs --model DIR, a checkpoint of Kimi K3")
    if options.backend is not None:
        raise ConfigError("--backend names another engine than --engine sglang")
    keys, names = read_keys(options), options.served_model_name
    if engine.direct and (len(keys) > 1 or len(names) > 1):
        raise ConfigError("with --direct there is one --api-key and one --served-model-name")
    policy = fetch_policy(options)
    return SGLangCommand(
        model=Path(options.model),
        host=options.host if engine.direct else "127.0.0.1",
        port=options.port if engine.direct else _free_port(),
        api_key=keys[0] if engine.direct and keys else None,
        served_model_name=names[0] if names else Path(options.model).resolve().name,
        max_images=options.max_images,
        max_videos=options.max_videos,
        settings=PluginSettings(
            parity=engine.parity,
            max_media_bytes=policy.max_bytes,
            media_root=None if policy.file_root is None else str(policy.file_root.resolve()),
            allow_private_networks=policy.allow_private_networks,
            media_workers=options.media_workers or num_workers_here(),
            media_seconds=options.media_seconds,
            media_memory=options.media_memory_mib * 2**20,
        ),
        arguments=engine.engine_args,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
