"""The flags of ``k3vl caption``, and the options that they make; imports nothing heavy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3vl.app.flags import api_key_option, base_url_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.app.captioning.options import CaptionOptions, OutputOptions
    from k3vl.app.captioning.prompts import Prompts


class Number(click.FloatRange):
    """A number in a range; click's own lets ``nan`` through, and ``inf`` where there is no end."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read it."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is not finite.", param, ctx)
        return number


_FILE = click.Path(path_type=Path, dir_okay=False)
_INPUT = (
    click.argument("paths", nargs=-1, required=True),
    click.option("--include", multiple=True, metavar="GLOB", help="Of folders, take only these."),
    click.option("--exclude", multiple=True, metavar="GLOB", help="Of folders, leave these out."),
    click.option("--follow-symlinks", is_flag=True, help="Of folders, take links too."),
    click.option(
        "--column",
        "columns",
        multiple=True,
        metavar="FIELD=COLUMN",
        help="Of tables, where id, path, url, bytes or caption is.",
    ),
    click.option(
        "--pages",
        default="first",
        show_default=True,
        metavar="first|all|clip|LIST",
        help="Of files with several pictures: the first, each, animated ones as a clip, or those "
        "with these numbers, such as 1,3-5,8-.",
    ),
    click.option(
        "--clip-seconds",
        type=Number(min=0.1),
        help="Caption clips in pieces of this length.",
    ),
    click.option(
        "--allow-private-networks", is_flag=True, help="Also fetch URLs that are not public."
    ),
)
_PROMPT = (
    click.option(
        "--prompt",
        "prompts",
        multiple=True,
        help="What to ask, with {variables}; repeat it for several captions of each item.",
    ),
    click.option(
        "--prompt-file",
        type=_FILE,
        help="Prompts as a JSON list of texts or of {id, text, weight}, or one as plain text.",
    ),
    click.option("--random-prompt", is_flag=True, help="Draw one prompt for each item, by weight."),
    click.option("--prefix", default="", help="Text in front of every caption."),
    click.option("--suffix", default="", help="Text behind every caption."),
    click.option("--trigger", default="", help="A word that every caption is to hold."),
    click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(min=1)),
    click.option("--temperature", default=0.0, show_default=True, type=Number(0.0, 10.0)),
    click.option("--top-p", default=1.0, show_default=True, type=Number(0.0, 1.0, min_open=True)),
    click.option("--top-k", default=0, show_default=True, type=click.IntRange(min=0)),
    click.option(
        "--min-confidence",
        type=Number(0.0, 1.0),
        help='Below it a caption is "I am not sure."; default: the checkpoint\'s own, 0 is off.',
    ),
    click.option("--stop", multiple=True, help="Text that ends a caption; not part of it."),
    click.option(
        "--json-schema", type=_FILE, help="Captions are JSON that fits the schema in this file."
    ),
    click.option("--seed", type=int, help="Of drawing and of sampling; each item gets its own."),
)
_OUTPUT = (
    click.option(
        "--output",
        "files",
        multiple=True,
        type=click.Path(path_type=Path),
        help="Also write a file: .jsonl, .csv, .parquet, .tar (WebDataset). May be repeated.",
    ),
    click.option(
        "--output-format",
        "form",
        type=click.Choice(["jsonl", "csv", "parquet", "tar"]),
        help="What files with another ending hold; by default JSON Lines.",
    ),
    click.option(
        "--sidecar",
        "sidecars",
        multiple=True,
        type=click.Choice(["txt", "caption", "json"]),
        help="Also write a small file beside each picture. May be repeated.",
    ),
    click.option(
        "--sidecar-name",
        type=click.Choice(["stem", "full"]),
        default="stem",
        show_default=True,
        help="a.txt or a.jpg.txt.",
    ),
    click.option(
        "--sidecar-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Write sidecars into a tree of their own.",
    ),
    click.option(
        "--on-existing",
        type=click.Choice(["skip", "overwrite", "append", "prepend", "error"]),
        default="skip",
        show_default=True,
        help="What to do with captions that exist.",
    ),
    click.option("--journal", type=_FILE, help="Where the journal is, if not beside the output."),
    click.option("--reasoning", is_flag=True, help="Rows hold the think channel too."),
    click.option("--report", type=_FILE, help="Write a contact sheet in HTML."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON Lines instead of text."),
)
_RUN = (
    click.option("--retry-failed", is_flag=True, help="Also try again what failed before."),
    click.option("--dry-run", is_flag=True, help="Only say what would be done."),
    click.option("--strict", is_flag=True, help="Stop at the first error."),
    click.option("--max-errors", type=click.IntRange(min=0), help="Stop after more errors."),
    click.option(
        "--item-seconds",
        type=Number(min=0, min_open=True),
        help="Give an item up after this time.",
    ),
    click.option(
        "--progress",
        type=click.Choice(["auto", "bar", "json", "none"]),
        default="auto",
        show_default=True,
    ),
    click.option("--quiet", is_flag=True, help="No progress bar, no remarks."),
)
_ENDPOINT = (
    base_url_option,
    api_key_option,
    click.option("--concurrency", type=click.IntRange(1, 512), help="Items in the works at once."),
    click.option("--retries", default=6, show_default=True, type=click.IntRange(min=0)),
)


def caption_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all flags, in the order in which its help lists them."""
    for decorate in reversed((*_INPUT, *_PROMPT, *_OUTPUT, *_RUN, *_ENDPOINT)):
        command = decorate(command)
    return command


def options_of(values: dict[str, Any]) -> CaptionOptions:
    """The flags as options.

    Raises:
        ConfigError: a prompt file or a schema cannot be used.
    """
    from k3vl.app.captioning.options import (
        CaptionOptions,
        InputOptions,
        ModelOptions,
        RunOptions,
    )

    max_errors = 0 if values["strict"] else values["max_errors"]
    return CaptionOptions(
        inputs=InputOptions(
            arguments=values["paths"],
            include=values["include"],
            exclude=values["exclude"],
            follow_symlinks=values["follow_symlinks"],
            columns=values["columns"],
            pages=values["pages"],
            clip_seconds=values["clip_seconds"],
            private_networks=values["allow_private_networks"],
        ),
        prompts=_prompts(values),
        outputs=_outputs(values),
        run=RunOptions(
            retry_failed=values["retry_failed"],
            max_errors=max_errors,
            item_seconds=values["item_seconds"],
            dry_run=values["dry_run"],
            as_json=values["as_json"],
            quiet=values["quiet"],
            progress=values["progress"],
        ),
        model=ModelOptions(
            model=values["model"],
            device=values["device"],
            tensor_parallel=values["tensor_parallel"],
            base_url=values["base_url"],
            api_key=values["api_key"],
            concurrency=values["concurrency"],
            retries=values["retries"],
            min_confidence=values["min_confidence"],
        ),
    )


def _prompts(values: dict[str, Any]) -> Prompts:
    from k3vl.app.captioning.prompts import DEFAULT, Prompts, read_prompts, text_prompt
    from k3vl.app.captioning.schema import Schema
    from k3vl.types import SamplingParams

    schema = values["json_schema"]
    prompts = [text_prompt(text) for text in dict.fromkeys(values["prompts"])]
    if values["prompt_file"] is not None:
        prompts += read_prompts(values["prompt_file"])
    sampling = SamplingParams(
        max_tokens=values["max_tokens"],
        temperature=values["temperature"],
        top_p=values["top_p"],
        top_k=values["top_k"],
        seed=values["seed"],
        stop=values["stop"],
    )
    return Prompts(
        prompts=tuple(prompts) or (DEFAULT,),
        draw="random" if values["random_prompt"] else "all",
        seed=values["seed"],
        sampling=sampling,
        prefix=values["prefix"],
        suffix=values["suffix"],
        trigger=values["trigger"],
        schema=None if schema is None else Schema.load(schema),
    )


def _outputs(values: dict[str, Any]) -> OutputOptions:
    from k3vl.app.captioning.options import OutputOptions

    return OutputOptions(
        files=values["files"],
        form=values["form"],
        sidecars=tuple(dict.fromkeys(values["sidecars"])),
        whole_name=values["sidecar_name"] == "full",
        sidecar_folder=values["sidecar_dir"],
        journal=values["journal"],
        policy=values["on_existing"],
        reasoning=values["reasoning"],
        report=values["report"],
    )
