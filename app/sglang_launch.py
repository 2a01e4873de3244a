"""From the options of ``k3vl serve --engine sglang`` to a running SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from k3vl.app.launch import fetch_policy, read_keys
from k3vl.app.server import LOCAL_ADDRESSES
from k3vl.app.sglang_engine import SGLangCommand, run
from k3vl.errors import ConfigError
from k3vl.sglang.settings import PluginSettings

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
    """Start SGLang with our plugin and stay with it until it ends.

    Raises:
        ConfigError: an option, the checkpoint or the installation is not usable.
        BackendError: SGLang does not start, ended, or runs without the plugin.
    """
    command = sglang_command(options, engine)
    if options.host not in LOCAL_ADDRESSES and command.api_key is None:
        click.echo(
            f"warning: {options.host} can be reached from other machines, and no --api-key is set",
            err=True,
        )
    run(
        command,
        start_seconds=engine.start_seconds,
        shutdown_seconds=options.shutdown_seconds,
        say=lambda line: click.echo(line, err=True),
    )


def sglang_command(options: ServeOptions, engine: EngineOptions) -> SGLangCommand:
    """What SGLang is started with.

    Raises:
        ConfigError: options that SGLang has no place for.
    """
    if options.model in (None, "demo"):
        raise ConfigError("--engine sglang needs --model DIR, a checkpoint of Kimi K3")
    keys = read_keys(options)
    if len(keys) > 1 or len(options.served_model_name) > 1:
        raise ConfigError("SGLang takes one --api-key and one --served-model-name")
    policy = fetch_policy(options)
    return SGLangCommand(
        model=Path(options.model),
        host=options.host,
        port=options.port,
        api_key=keys[0] if keys else None,
        served_model_name=options.served_model_name[0] if options.served_model_name else None,
        max_images=options.max_images,
        max_videos=options.max_videos,
        settings=PluginSettings(
            parity=engine.parity,
            max_media_bytes=policy.max_bytes,
            media_root=None if policy.file_root is None else str(policy.file_root.resolve()),
            allow_private_networks=policy.allow_private_networks,
            media_workers=options.media_workers,
            media_seconds=options.media_seconds,
        ),
        arguments=engine.engine_args,
    )
