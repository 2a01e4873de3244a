"""The ``k3vl`` command: argument parsing only.

Heavy modules are imported inside the commands, so ``k3vl --help`` answers at once.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3vl import __version__
from k3vl.app.bench_cli import bench
from k3vl.app.caption_flags import caption_options, options_of
from k3vl.app.extras import needs_extra
from k3vl.app.flags import (
    api_key_option,
    base_url_option,
    count_option,
    device_option,
    model_option,
    ranks_option,
)
from k3vl.app.output import prepare_interrupt, prepare_streams
from k3vl.errors import ConfigError, K3VLError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3vl.load import Device

EXIT_NOTHING_DONE = 1
EXIT_ITEM_ERRORS = 2
EXIT_INTERRUPTED = 130


class _Group(click.Group):
    """Turns our own errors into one line and exit code 1, Ctrl-C into one line and 130.

    So with a wrong command line: 2 is for runs that finished. Everything else is a bug.
    """

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as exc:
            exc.show()
            sys.exit(EXIT_NOTHING_DONE)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as exc:
            exc.show()
            ctx.exit(EXIT_NOTHING_DONE)
        except K3VLError as exc:
            raise click.ClickException(str(exc)) from exc
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Kimi K3 looks at pictures and video."""


@cli.command()
@caption_options
@model_option
@device_option
@ranks_option
def caption(**values: Any) -> None:
    """Caption pictures and clips.

    PATHS are files, folders with everything in them, tables (.jsonl, .csv, .parquet), WebDataset
    shards (.tar), URLs, or - for a list of those on standard input.

    An item that cannot be used is reported and does not stop the run; the exit code is then 2. A
    run that was killed or interrupted (130) goes on where it was when the same command is given.
    """
    from k3vl.app.caption import caption as run

    if run(options_of(values)):
        sys.exit(EXIT_ITEM_ERRORS)


@cli.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), help="Default: the first free from 7860.")
@click.option("--max-file-mb", default=200, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--auth",
    envvar="K3VL_DEMO_AUTH",
    metavar="NAME:PASSWORD",
    help="Ask visitors for these; better given as K3VL_DEMO_AUTH.",
)
@click.option("--open", "open_browser", is_flag=True, help="Open a browser tab.")
@base_url_option
@api_key_option
@model_option
@device_option
@ranks_option
def demo(
    host: str,
    port: int | None,
    max_file_mb: int,
    auth: str | None,
    open_browser: bool,
    base_url: str | None,
    api_key: str | None,
    model: str,
    device: Device,
    tensor_parallel: int,
) -> None:
    """Chat with the model in the browser.

    Pictures and clips are pasted, dropped or attached. Listens on this machine only, unless --host
    says otherwise. With --base-url answers come from an endpoint that knows the model as --model.
    """
    from k3vl.app.chat_demo.launch import DemoSettings, parse_auth, run_demo

    settings = DemoSettings(
        model=model,
        device=device,
        tensor_parallel=tensor_parallel,
        host=host,
        port=port,
        max_file_mb=max_file_mb,
        open_browser=open_browser,
        auth=parse_auth(auth),
        base_url=base_url,
        api_key=api_key,
    )
    run_demo(settings, say=click.echo)


@cli.command()
@click.option(
    "--model",
    metavar="demo|DIR",
    help="Checkpoint directory, or the small model that comes with the package.  [default: demo; "
    "with --backend: K3's own media settings, and no tokenizer]",
)
@click.option(
    "--backend",
    metavar="URL",
    help="Answer from this OpenAI-compatible endpoint of K3, up to and including /v1; of --model "
    "only media settings and tokenizer are used.",
)
@click.option(
    "--backend-key", envvar="K3VL_BACKEND_KEY", show_envvar=True, help="Key of the endpoint."
)
@click.option(
    "--backend-model", help="Name of the model there.  [default: the only one that it lists]"
)
@click.option(
    "--backend-video",
    type=click.Choice(["frames", "native"]),
    default="frames",
    show_default=True,
    help="Send clips as pictures with their times, or as clips.",
)
@device_option
@ranks_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--api-key",
    multiple=True,
    envvar="K3VL_API_KEYS",
    show_envvar=True,
    help="Key that opens the server; may be given several times. Without one it is open.",
)
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), help="File with keys, one on each line."
)
@click.option("--served-model-name", multiple=True, help="Name of the model; may be repeated.")
@click.option(
    "--allowed-media-path",
    type=click.Path(path_type=Path),
    help="Directory that file: URLs may point into; without it there are none.",
)
@click.option(
    "--allow-private-networks",
    is_flag=True,
    help="Also fetch media from loopback, private and link-local addresses.",
)
@click.option("--cors-origin", multiple=True, help="Web origin that may call; * is any.")
@count_option("--max-running", 32, "Requests that generate at once.")
@count_option("--max-waiting", 64, "Requests that wait; more are sent away with 429.", 0)
@count_option("--media-prefills", 1, "Requests with media on the way to their first token at once.")
@count_option("--max-images", 512, "Pictures of a request.", 0)
@count_option("--max-videos", 16, "Clips of a request.", 0)
@count_option("--max-choices", 8, "Largest n.")
@count_option("--max-body-mib", 40, "Size of a request body.")
@count_option("--max-media-mib", 256, "Size of a picture or clip, decoded from base64 or fetched.")
@count_option("--default-max-tokens", 1024, "Length of answers where the request names none.")
@click.option(
    "--media-workers",
    type=click.IntRange(min=1),
    help="Processes that decode media. Default: 2; sglang: half of the CPUs, from 2 to 8.",
)
@click.option("--media-seconds", default=60.0, show_default=True, help="Time to decode one.")
@count_option("--media-memory-mib", 4096, "Memory of each of those processes.", 256)
@count_option("--shutdown-seconds", 30, "Time that answers have left once the server is to stop.")
@click.option(
    "--engine",
    type=click.Choice(["embedded", "sglang"]),
    default="embedded",
    show_default=True,
    help="What runs the model: ours, or an SGLang that is installed beside it.",
)
@click.option("--direct", is_flag=True, help="sglang: leave its own server to the clients.")
@click.option("--parity", is_flag=True, help="sglang: pictures go its own way, to the byte.")
@click.option("--start-seconds", default=3600.0, show_default=True, help="sglang: longest start.")
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
def serve(**options: Any) -> None:
    """Serve the OpenAI-compatible API: /v1/chat/completions, /v1/models, /v1/tokenize.

    Also /health, /ready, /metrics and /openapi.json. With --engine sglang any option of SGLang may
    follow a --, for one machine or one rank of several.
    """
    with needs_extra("serve", "the server"):
        from k3vl.app.launch import ServeOptions, launch
        from k3vl.app.sglang_launch import EngineOptions, launch_sglang
    names = EngineOptions.__dataclass_fields__
    engine = EngineOptions(**{name: options.pop(name) for name in names})
    if engine.engine == "sglang":
        launch_sglang(ServeOptions(**options), engine)
    elif engine.engine_args or engine.direct or engine.parity:
        raise ConfigError("--direct, --parity and options behind a -- are for --engine sglang")
    else:
        launch(ServeOptions(**options))


@cli.command("eval")
@click.argument("folder", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option("--quick", is_flag=True, help="The questions of the package; so without FOLDER too.")
@click.option(
    "--atlas",
    type=click.Path(path_type=Path, file_okay=False),
    help="Compose the whole held-out table from these drawings; see docs/demo.",
)
@count_option("--items", 200, "Questions of a split, with --atlas.")
@click.option(
    "--blanks",
    type=click.IntRange(min=0),
    help="Questions of a split that are asked about a grey picture too. Default: 100; 4 of ours.",
)
@click.option("--only", default="", help="Splits whose name begins so.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Figures, as JSON.")
@click.option(
    "--answers", type=click.Path(path_type=Path, dir_okay=False), help="Each answer, as JSON Lines."
)
@model_option
@device_option
@ranks_option
@base_url_option
@api_key_option
@count_option("--in-flight", 16, "Questions in the works at once.")
def evaluate(quick: bool, **values: Any) -> None:
    """Measure right answers: files on disk through processor, model and parser.

    FOLDER holds labels.jsonl, one question a line: {"file", "prompt", "answer"} and, where wanted,
    "files", "answers", "metric" (exact, balanced, loose, contains, f1, cer, json, tool_call),
    "split", "options", "tools", "baselines". Without FOLDER the held-out questions of the demo
    model are asked.
    """
    from k3vl.app.eval import EvalOptions
    from k3vl.app.eval import evaluate as run

    if sum((quick, values["folder"] is not None, values["atlas"] is not None)) > 1:
        raise click.UsageError("FOLDER, --quick and --atlas exclude each other")
    if values["blanks"] is None:
        own = values["folder"] is not None or values["atlas"] is not None
        values["blanks"] = 100 if own else 4
    if run(EvalOptions(**values)):
        sys.exit(EXIT_ITEM_ERRORS)


@cli.group()
def inspect() -> None:
    """Look inside: the chat format, the media rules, a checkpoint. JSON Lines in and out."""


files_argument = click.argument(
    "files", nargs=-1, type=click.Path(exists=True, dir_okay=False, allow_dash=True)
)
config_option = click.option(
    "--config",
    default="k3",
    show_default=True,
    metavar="k3|k25|DIR",
    help="Media settings: the published ones of K3 or K2.5, or a checkpoint's.",
)


@inspect.command()
@files_argument
def render(files: Sequence[str]) -> None:
    """Write conversations in K3's chat format.

    Reads {"messages", "tools", "options"} records from FILES or standard input; writes
    {"segments": [{"text", "allow_special"}]} or {"error"} for each.
    """
    from k3vl.app.inspect import transform_lines
    from k3vl.xtml.records import render_record

    transform_lines(files, render_record)


@inspect.command()
@files_argument
def parse(files: Sequence[str]) -> None:
    """Read what a model wrote.

    Reads {"pieces": [[text, is_control], ...], "options"} records; writes {"reasoning", "content",
    "tool_calls", "finish"} or {"error"} for each.
    """
    from k3vl.app.inspect import transform_lines
    from k3vl.xtml.records import parse_record

    transform_lines(files, parse_record)


@inspect.command()
@files_argument
@config_option
def plan(files: Sequence[str], config: str) -> None:
    """Plan picture sizes.

    Reads {"width", "height"} records; writes {"new_width", "new_height", "pad_width", "pad_height",
    "grid_thw", "num_tokens"} or {"error"} for each.
    """
    from k3vl.app.inspect import media_config, transform_lines
    from k3vl.vision.inspect import plan_record

    settings = media_config(config)
    transform_lines(files, lambda record: plan_record(record, settings))


@inspect.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@config_option
@click.option(
    "--save-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the pictures that the model sees here, one file per frame.",
)
@click.option("--parity", is_flag=True, help="As the released processor: EXIF ignored, no scaling.")
def media(paths: Sequence[Path], config: str, save_dir: Path | None, parity: bool) -> None:
    """Show how pictures and clips are taken.

    One record per path: kind, upright size, frames with times, grid_thw, tokens, warnings, digest;
    or error and code. The exit code is 2 when a path could not be used.
    """
    from k3vl.app.inspect import inspect_media

    if inspect_media(paths, config, save_dir=save_dir, parity=parity):
        sys.exit(EXIT_ITEM_ERRORS)


@inspect.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--memory", type=click.IntRange(min=1), help="Bytes to fit into; default: what is free."
)
@device_option
def checkpoint(directory: Path, memory: int | None, device: Device) -> None:
    """Add up a checkpoint: layers, parameters, bytes, and whether it fits.

    DIRECTORY may hold config.json alone. "demo" is the small model that comes with the package.
    """
    from k3vl.app.inspect import inspect_checkpoint

    if not inspect_checkpoint(directory, memory=memory, device=device):
        sys.exit(1)


cli.add_command(bench)


@cli.command()
@device_option
def doctor(device: Device) -> None:
    """Show versions, the device, and which kernels a model would run on it and why."""
    from k3vl.app.doctor import diagnose

    diagnose(device)


def main() -> None:
    """Entry point of the ``k3vl`` script."""
    prepare_interrupt()
    prepare_streams()
    # Pillow prints remarks on odd files; ours come with the file's record.
    warnings.filterwarnings("ignore", module="PIL")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    cli(prog_name="k3vl")
