"""Training of the demo model: one command, for a fixed time, resumable.

::

    python -m k3vl.demo.train --init CHECKPOINT --atlas FOLDER --out FOLDER --seconds 430 --ranks 4

Data is drawn on the device from the atlas while CPU workers make up scenes and conversations. Loss:
the answers, and the label of every visual token through a head that is not shipped. Muon on the
matrices, AdamW on the rest, one cosine over the time there is. ``--init`` continues from a
checkpoint: the optimisers start anew with a warm-up, the curriculum is skipped. The result is
written as bfloat16 shards under K3's names; ``k3vl.demo.pack`` makes the 8-bit directory of it.
``--ranks`` trains on so many devices of one machine: the batch of a step grows, its time does not.

On CUDA this needs ``fla-core`` (the ``train`` extra). On a CPU it runs for tests, at toy sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.multiprocessing.spawn import start_processes

from k3vl.checkpoint_writer import save_checkpoint
from k3vl.demo.atlas import load_atlas
from k3vl.demo.compose import IGNORED, Composer
from k3vl.demo.convert import from_k3, to_k3
from k3vl.demo.feed import DeviceBatch, Feed, Sources
from k3vl.demo.muon import Muon
from k3vl.demo.pack import CHECKPOINT, encode_bf16, read_tensors
from k3vl.demo.quick_check import quick_check
from k3vl.demo.ranks import Ranks
from k3vl.demo.train_layers import Experts
from k3vl.demo.train_model import DemoModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from k3vl.demo.atlas import Atlas

HEAD_FILE = "dense_head.safetensors"
_SHARD_BYTES = 15 << 20
_NOT_MATRICES = ("embed", "head", "vision.pos", "dense_head")
_WARM_UP = 100  # steps
_EARLY = 0.1  # share of a run from scratch with single small pictures only
_BALANCE = 1e-3
_SEEDS_APART = 1000
_GROUND_WEIGHT = 0.1  # most cells are ground
_LOG_EVERY = 50
_RENEW_EVERY = 16  # steps; then a part of the sprites is drawn anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of a run.

    Attributes:
        init: checkpoint directory to continue from; None starts from random weights.
        seconds: of wall clock for start-up and training together; evaluation and saving follow.
        muon, adam: peak learning rates.
        size: samples of a step; None fills the token budget of the recipe.
        check: items of every set of the closing check; 0 leaves it out.
        steps: end after so many steps; None trains until the time is over.
        save_every: seconds between savings of the state so far, each in a folder of its own.
        ranks: processes, each with a device of its own; ``workers`` are those of each.
    """

    atlas: Path
    out: Path
    init: Path | None
    seconds: float
    workers: int
    muon: float
    adam: float
    seed: int
    size: int | None
    check: int
    steps: int | None
    save_every: float
    ranks: int


@dataclass(slots=True)
class Journal:
    """Losses since the last entry, and where entries go; None for processes that keep silent."""

    file: TextIO | None
    start: float
    samples: int = 0
    _sums: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def add(self, bucket: str, losses: Tensor) -> None:
        """Remember one step's losses without waiting for the device."""
        self._sums[bucket].append(losses)

    def write(self, **values: object) -> None:
        """One JSON line, on disk and on the terminal."""
        if self.file is None:
            return
        line = json.dumps({"seconds": round(time.monotonic() - self.start, 1)} | values)
        print(line, flush=True)  # noqa: T201 - the log of a command
        self.file.write(line + "\n")
        self.file.flush()

    def flush(self, step: int, scale: float) -> bool:
        """Write the mean losses per bucket; False if one is not finite."""
        means = {
            name: [round(x, 4) for x in torch.stack(values).mean(0).tolist()]
            for name, values in sorted(self._sums.items())
        }
        self._sums.clear()
        self.write(step=step, samples=self.samples, rate=round(scale, 4), losses=means)
        return all(math.isfinite(x) for values in means.values() for x in values)


class Trainer:
    """Model, optimisers and composer of one run.

    Args:
        options: settings.
        atlas: the drawings.
        ranks: this process among all.
    """

    def __init__(self, options: Options, atlas: Atlas, ranks: Ranks) -> None:
        torch.manual_seed(options.seed)
        device = ranks.device
        self._options = options
        self._ranks = ranks
        self.composer = Composer(atlas, device, options.seed + _SEEDS_APART * ranks.index)
        self.model = DemoModel(atlas.n_classes)
        if options.init is not None:
            self._load(options.init)
        self.model.to(device)
        named = dict(self.model.named_parameters())
        matrices = {n: p for n, p in named.items() if _is_matrix(n, p)}
        rest = [p for n, p in named.items() if n not in matrices]
        self._muon = Muon(matrices.values())
        fused = device.type == "cuda"
        self._adam = torch.optim.AdamW(
            rest, lr=options.adam, betas=(0.9, 0.98), weight_decay=0.0, fused=fused
        )
        weights = torch.ones(atlas.n_classes, device=device)
        weights[atlas.ground_label] = _GROUND_WEIGHT
        self._class_weights = weights

    def step(self, batch: DeviceBatch, scale: float, dense: float) -> Tensor:
        """One update.

        Args:
            batch: on the device.
            scale: of the learning rates.
            dense: weight of the dense labels' loss.

        Returns:
            [3]: loss of the answers, loss and accuracy of the dense labels.
        """
        answers, labels, accuracy = self._losses(batch)
        (answers + dense * labels).backward()
        loads = [layer.mlp.load for layer in self.model.layers if isinstance(layer.mlp, Experts)]
        self._ranks.average(list(self.model.parameters()), loads)
        self._muon.step(self._options.muon * scale)
        for group in self._adam.param_groups:
            group["lr"] = self._options.adam * scale
        self._adam.step()
        for parameter in self.model.parameters():
            parameter.grad = None
        self.model.balance(_BALANCE)
        return torch.stack([answers.detach(), labels.detach(), accuracy])

    def _losses(self, batch: DeviceBatch) -> tuple[Tensor, Tensor, Tensor]:
        arrays = batch.arrays
        pictures, labels = self.composer(arrays, batch.bucket, noise=True)
        features = self.model.see(pictures, batch.bucket.runs)
        hidden = self.model(arrays["ids"].long(), features, arrays["slots"])
        logits = self.model.logits(hidden.index_select(0, arrays["predict"].long())).float()
        each = F.cross_entropy(logits, arrays["target"].long(), reduction="none")
        weight = arrays["weight"]
        answers = (each * weight).sum() / weight.sum()
        guesses = self.model.labels(features).flatten(0, 2)
        labels = labels.flatten()
        dense = F.cross_entropy(
            guesses,
            labels,
            weight=self._class_weights,
            ignore_index=IGNORED,
            reduction="sum",
        )
        # Charts have no labels at all.
        known = torch.where(labels >= 0, self._class_weights[labels.clamp(min=0)], 0.0)
        dense = dense / known.sum().clamp(min=1)
        with torch.no_grad():
            things = (labels >= 0) & (labels != len(self._class_weights) - 1)
            right = (guesses.argmax(-1) == labels) & things
            accuracy = right.sum() / things.sum().clamp(min=1)
        return answers, dense, accuracy

    def align(self) -> None:
        """Make the model the same in all processes."""
        self._ranks.align([*self.model.parameters(), *self.model.buffers()])

    def _load(self, directory: Path) -> None:
        state = from_k3(read_tensors(directory))
        head = directory / HEAD_FILE
        if head.is_file():
            state |= load_file(head)
        else:
            state["dense_head"] = self.model.dense_head.detach()
        self.model.load_state_dict(state)

    def save(self, directory: Path) -> None:
        """Write bfloat16 shards under K3's names, and the dense head beside them."""
        state = {name: t.float().cpu() for name, t in self.model.model_state().items()}
        save_checkpoint(
            directory, encode_bf16(to_k3(state)), json_files={}, max_shard_bytes=_SHARD_BYTES
        )
        save_file({"dense_head": self.model.dense_head.detach().cpu()}, directory / HEAD_FILE)


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim > 1 and name not in _NOT_MATRICES and not name.endswith(".conv")


def train(options: Options) -> None:
    """Run it, in one process or in several."""
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, Path(folder) / "meeting", start)
        if options.ranks == 1:
            _train(0, *arguments)
        else:
            start_processes(_train, arguments, options.ranks, start_method="spawn")


def _train(index: int, options: Options, meeting: Path, start: float) -> None:
    """One process: its data, its device; the first one writes."""
    ranks = Ranks(index, options.ranks)
    sources = Sources(options.atlas, CHECKPOINT / "tokenizer.json", options.size)
    feed = Feed(
        sources,
        options.workers,
        early=options.init is None,
        seed=options.seed + _SEEDS_APART * index,
    )
    with (options.out / "train.jsonl").open("a", encoding="utf-8") as file:
        journal = Journal(file if ranks.is_first else None, start)
        try:
            ranks.join(meeting)
            _prepare(ranks.device)
            trainer = Trainer(options, load_atlas(options.atlas), ranks)
            feed.start(ranks.device)
            _loop(options, trainer, feed, journal, ranks)
        finally:
            feed.close()
        ranks.leave()
        if not ranks.is_first:
            return
        trainer.save(options.out)
        journal.write(saved=str(options.out))
        if options.check:
            # Without gradients every graph would be compiled once more, for one batch each.
            torch.compiler.set_stance("force_eager")
            model, composer = trainer.model, trainer.composer
            exact = quick_check(model, composer, sources, options.check, ranks.device)
            journal.write(check=exact)
            text = json.dumps(exact, indent=1)
            (options.out / "check.json").write_text(text, encoding="utf-8")


def _prepare(device: torch.device) -> None:
    """Compile on CUDA; run as written elsewhere."""
    if device.type != "cuda":
        torch.compiler.set_stance("force_eager")
        return
    from torch._dynamo import config as graphs

    # One graph per number of mixed rows and per direction; the default limit counts them as drift.
    graphs.recompile_limit = 64
    torch.backends.cuda.matmul.allow_tf32 = True


def _loop(options: Options, trainer: Trainer, feed: Feed, journal: Journal, ranks: Ranks) -> None:
    begin = ranks.agree(time.monotonic())
    length = max(journal.start + options.seconds - begin, 1e-3)
    scratch = options.init is None
    waited = 0.0
    step = 0
    sound = True
    saved = time.monotonic()
    while step != options.steps:
        over = ranks.agree((time.monotonic() - begin) / length if sound else math.inf)
        if over >= 1:
            break
        if scratch and over > _EARLY:
            feed.all_buckets()
        scale = min(1.0, (step + 1) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * over))
        asked = time.monotonic()
        batch = feed.next()
        waited += time.monotonic() - asked
        begun = time.monotonic()
        losses = trainer.step(batch, scale, 1.0 - 0.7 * over)
        journal.add(batch.bucket.name, losses)
        journal.samples += len(batch.arrays["ids"]) * ranks.count
        step += 1
        if step <= 12:  # compilation and autotuning show here
            losses.tolist()
            took = round(time.monotonic() - begun, 2)
            journal.write(step=step, bucket=batch.bucket.name, took=took)
        if step % _RENEW_EVERY == 0:
            trainer.composer.renew()
        if step % _LOG_EVERY == 0:
            trainer.align()
            sound = journal.flush(step, scale)
            if ranks.is_first and sound and time.monotonic() - saved > options.save_every:
                saved = time.monotonic()
                trainer.save(options.out / f"step-{step}")
    if not sound:
        journal.write(stopped="a loss is not finite")
    journal.write(steps=step, samples=journal.samples, waited=round(waited, 1))


def parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(prog="python -m k3vl.demo.train", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--atlas", type=Path, required=True, help="folder with sheets and fonts")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and log")
    parser.add_argument("--init", type=Path, help="checkpoint to continue from")
    parser.add_argument("--seconds", type=float, default=480, help="start-up and training")
    parser.add_argument("--workers", type=int, default=6, help="processes that make up scenes")
    parser.add_argument("--muon", type=float, help="peak rate (4e-3, or 3e-3 with --init)")
    parser.add_argument("--adam", type=float, help="peak rate (2e-3, or 1.5e-3 with --init)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, help="samples of a step")
    parser.add_argument("--check", type=int, default=512, help="items a set; 0 for no check")
    parser.add_argument("--save-every", type=float, default=600, help="seconds")
    parser.add_argument("--ranks", type=int, default=1, help="processes, one on each device")
    parser.add_argument("--steps", type=int, help="end after so many steps")
    return parser


def options_of(args: argparse.Namespace) -> Options:
    """The settings that flags stand for."""
    fresh = args.init is None
    args.muon = args.muon or (4e-3 if fresh else 3e-3)
    args.adam = args.adam or (2e-3 if fresh else 1.5e-3)
    return Options(**vars(args))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    train(options_of(parser().parse_args(arguments)))


if __name__ == "__main__":
    main()
