"""``k3vl bench``: argument parsing only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3vl.app.flags import count_option, device_option, ranks_option

if TYPE_CHECKING:
    from k3vl.load import Device


@click.group()
def bench() -> None:
    """Measure K3's own dimensions without its weights: slices with random ones."""


layers_option = count_option(
    "--layers", 5, "Layers, in K3's pattern; the first has a dense MLP.", 2
)
experts_option = click.option(
    "--experts", type=click.IntRange(min=16), help="Routed experts of a layer.  [default: 896]"
)
tiny_option = click.option("--tiny", is_flag=True, help="Small numbers in place of K3's.")


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """A list like 1,32."""
    fields = value.split(",") if value else []
    if not all(field.isdecimal() and int(field) for field in fields):
        raise click.BadParameter(f"{value!r}: numbers with commas between them are wanted")
    return tuple(map(int, fields))


@bench.command("slice")
@layers_option
@experts_option
@tiny_option
@click.option(
    "--prefill",
    default="1024,4096,16384,32768",
    show_default=True,
    callback=_numbers,
    help="Lengths of prompts.",
)
@click.option(
    "--decode", default="1,32", show_default=True, callback=_numbers, help="Requests at once."
)
@count_option("--context", 512, "Tokens of the prompts of requests that decode.")
@count_option("--pass-tokens", 8192, "Most tokens of a prefill pass, and of a page.", 16)
@count_option("--repeat", 21, "Timed runs of each.", 2)
@click.option("--seed", default=0, show_default=True, help="Of weights and prompts.")
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Append JSON Lines here."
)
@click.option("--commit", help="Of the code, where there is no repository.")
@device_option
@ranks_option
def bench_slice(**values: Any) -> None:
    """Time the whole engine on a slice whose weights are drawn on the device.

    Its logits are compared with plain PyTorch's first. Figures are medians, with the middle half of
    the runs, and the share of what the device's own bandwidth and matrix rate allow.
    """
    from k3vl.app.slice_bench import SliceOptions, show
    from k3vl.app.slice_bench import bench_slice as run

    options = SliceOptions(**values)
    for row in run(options):
        click.echo(show(row, options))


@bench.command("write")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@layers_option
@experts_option
@tiny_option
@count_option("--shard-mib", 1024, "Size of a file; as much is held in memory.")
@click.option("--seed", default=0, show_default=True, help="Of the weights.")
def bench_write(
    directory: Path,
    layers: int,
    experts: int | None,
    tiny: bool,
    shard_mib: int,
    seed: int,
) -> None:
    """Write a slice as a checkpoint: K3's names, shapes and MXFP4 packing, random weights."""
    from k3vl.synthetic import slice_config, write_slice

    content = slice_config(layers, experts=experts, tiny=tiny)
    total = write_slice(directory, content, seed=seed, max_shard_bytes=shard_mib << 20)
    click.echo(f"{directory}: {total:,} bytes")


@bench.command("load")
@click.argument("directory", type=click.Path(path_type=Path))
@device_option
def bench_load(directory: Path, device: Device) -> None:
    """Time how a checkpoint's language model comes into memory."""
    from k3vl.app.load_bench import bench_load as run

    click.echo(str(run(directory, device)))
