"""Options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    Command = TypeVar("Command", bound=Callable[..., Any])

model_option = click.option(
    "--model",
    default="demo",
    show_default=True,
    metavar="demo|DIR",
    help="Checkpoint directory, or the small model that comes with the package.",
)
device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where the model runs.",
)
base_url_option = click.option(
    "--base-url", help="Ask an OpenAI-compatible endpoint, up to and including /v1."
)
api_key_option = click.option(
    "--api-key", envvar="OPENAI_API_KEY", help="Its key; or OPENAI_API_KEY."
)


def count_option(
    name: str, default: int, text: str, least: int = 1
) -> Callable[[Command], Command]:
    """An option for a positive number."""
    kind = click.IntRange(min=least)
    return click.option(name, default=default, show_default=True, type=kind, help=text)


ranks_option = count_option(
    "--tensor-parallel",
    1,
    "GPUs of this host that share the model, each with a process of its own.",
)
