"""From a checkpoint directory to a running pipeline with the embedded engine."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import psutil
import torch

from k3vl.checkpoint import CheckpointReader
from k3vl.checkpoint_summary import summarise_checkpoint
from k3vl.config import checkpoint_path, load_config, load_media_config
from k3vl.errors import CapacityError, ConfigError, WeightError
from k3vl.kernels.choice import choose
from k3vl.kernels.recording import GraphRunner
from k3vl.lm.encoding import EncodeInStep, EncodeOnStream, EncodeOnThread
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.local import LocalBackend
from k3vl.lm.mirrored import EngineParts, lead, require_ranks
from k3vl.lm.ranks import axis_of, split_kernels
from k3vl.lm.table import expected_tensors as expected_text_tensors
from k3vl.lm.weights import PREFIX, load_model
from k3vl.types import ChatOptions, SamplingParams
from k3vl.vision.encoder import VisionEncoder, join_patches, pin_patches
from k3vl.vision.limits import DEFAULT_LIMITS, MediaLimits
from k3vl.vision.pool import PooledProcessor
from k3vl.vision.processor import MediaProcessor
from k3vl.vision.source import DEFAULT_POLICY, FetchPolicy
from k3vl.vision.weights import VISION_PREFIXES, load_vision
from k3vl.vision.weights import expected_tensors as expected_vision_tensors
from k3vl.xtml.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from k3vl.checkpoint_summary import CheckpointSummary
    from k3vl.config import K3Config, MediaConfig
    from k3vl.kernels.choice import Kernels
    from k3vl.lm.backend import Encoder
    from k3vl.lm.encoding import Encoding
    from k3vl.lm.model import K3Model
    from k3vl.lm.ranks import Ranks
    from k3vl.xtml.tokenizer import Tokenizer

MXFP4_FORMAT = "mxfp4-pack-quantized"
SMALL_HIDDEN_SIZE = 1024
"""Below this width a model's operations gain nothing from a second CPU thread."""
REUSE_PAGE = 16
"""Tokens of a page where the kernels' rows are independent, so that little is not reused. A quarter
of the demo model's units is lost in such pages, nothing in pages of 32."""
KEPT_PICTURES = 32 * 2**20
"""Bytes of processed pictures that are kept for the next question: some 70 of 448 x 336."""
Device: TypeAlias = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightLoader:
    """Reads weights of one configuration, again and again.

    Attributes:
        config: of the checkpoint that was opened first.
        media: its media settings; the tower normalises by them.
        dtype, device: of all weights.
        kernels: for models of that dtype on that device.
        batch: patches that the encoder joins; see :class:`k3vl.vision.encoder.VisionEncoder`.
        ranks: that divide the language model; this process has a part of it.
    """

    config: K3Config
    media: MediaConfig
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    batch: int | None = None
    ranks: Ranks | None = None

    def load(self, directory: Path) -> tuple[K3Model, VisionEncoder]:
        """Language model and encoder of a directory.

        Raises:
            WeightError: the tensors are not those of the configuration, or a file is damaged.
        """
        reader = CheckpointReader(directory)
        reader.require_only([PREFIX, *VISION_PREFIXES])
        tower, projector = load_vision(
            reader,
            self.config.vision,
            self.media,
            dtype=self.dtype,
            device=self.device,
            kernels=self.kernels.vision,
        )
        model = load_model(
            reader,
            self.config.text,
            self.kernels,
            dtype=self.dtype,
            device=self.device,
            ranks=self.ranks,
        )
        cuda = self.device.type == "cuda"
        encoder = VisionEncoder(
            tower,
            projector,
            max_patches_per_batch=self.batch,
            join=pin_patches if cuda else join_patches,
            runner=GraphRunner() if cuda and self.kernels.recordable else None,
        )
        return model, encoder

    def load_beside(self, directory: Path) -> tuple[K3Model, VisionEncoder]:
        """As :meth:`load`, for weights that are to take the place of running ones.

        Raises:
            ConfigError: a ``config.json`` beside the weights describes another model, or several
                ranks have the running one.
            CapacityError: there is no memory for both.
            WeightError: as :meth:`load`, or a weight is not a finite number.
        """
        if self.ranks is not None:
            raise ConfigError(f"weights that {self.ranks.size} ranks share cannot be renewed")
        self._require_same_model(directory)
        self._require_room(directory)
        model, encoder = self.load(directory)
        for module in (model, encoder.tower, encoder.projector):
            for name, parameter in module.named_parameters():
                if not torch.isfinite(parameter).all():
                    raise WeightError(f"{directory}: {name} holds values that are not finite")
        return model, encoder

    def _require_same_model(self, directory: Path) -> None:
        if not (directory / "config.json").is_file():
            return  # a trainer may write nothing but weights
        found = load_config(directory)
        for part in ("text", "vision"):
            mine, theirs = dataclasses.asdict(getattr(self.config, part)), getattr(found, part)
            others = [
                name for name, value in dataclasses.asdict(theirs).items() if value != mine[name]
            ]
            if others:
                raise ConfigError(
                    f"{directory}: {part}_config is not the running model's: {', '.join(others)}"
                )

    def _require_room(self, directory: Path) -> None:
        summary = summarise(directory, self.config)
        needed = summary.bytes_in_memory(self.dtype, kept=self.kernels.kept)
        if needed > (free := available_memory(self.device)):
            raise CapacityError(
                f"{directory}: new weights take {needed:,} bytes beside the running ones, "
                f"{free:,} are free"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """What a pipeline is made of; see :class:`k3vl.pipeline.Pipeline`."""

    processor: MediaProcessor
    bulk_processor: MediaProcessor
    tokenizer: Tokenizer
    backend: LocalBackend
    weights: WeightLoader
    media_pad_id: int
    defaults: ChatOptions
    name: str
    context_length: int
    min_confidence: float | None


def open_checkpoint(
    checkpoint: str | Path,
    *,
    device: Device = "auto",
    engine: EngineConfig | None = None,
    limits: MediaLimits = DEFAULT_LIMITS,
    policy: FetchPolicy = DEFAULT_POLICY,
    tensor_parallel: int = 1,
) -> Parts:
    """Load a checkpoint and start the embedded engine.

    Args:
        checkpoint: a directory, or ``demo``.
        device: ``auto`` takes a CUDA device where there is one. Weights are bfloat16 there and
            float32 on a CPU, where bfloat16 products are many times slower.
        engine: limits of the embedded engine; of several ranks, each one's.
        limits: what one media part may cost.
        policy: what may be fetched.
        tensor_parallel: GPUs of this host that share the language model, each with a process; see
            :mod:`k3vl.lm.mirrored`. On a CPU processes share it, for tests.

    Raises:
        ConfigError: the directory or its configuration is not usable, there is no such device, or
            so many ranks cannot divide the model.
        WeightError: the tensors are not.
    """
    directory = checkpoint_path(checkpoint)
    config, media = load_config(directory), load_media_config(directory)
    defaults, min_confidence = load_chat_defaults(directory), load_min_confidence(directory)
    tokenizer = load_tokenizer(directory)
    where, dtype = choose_device(device)
    require_ranks(tensor_parallel, where)
    kernels = choose(where, dtype)
    summary = summarise(directory, config)
    free = available_memory(where)
    if tensor_parallel > 1:
        free = memory_of_ranks(where, tensor_parallel, bytes_on_all(config, dtype))
    fits, sentence = summary.fits(free, dtype, kept=kernels.kept)
    if not fits:
        held = "one device's" if tensor_parallel == 1 else f"{tensor_parallel} devices'"
        raise ConfigError(f"{directory}: {sentence}; the embedded engine holds {held} worth")
    stop_ids = tuple(dict.fromkeys((config.eos_token_id, *tokenizer.stop_ids)))
    if engine is None:
        small = where.type == "cpu" and config.text.hidden_size < SMALL_HIDDEN_SIZE
        # Where pages are not passes, small ones only gain: more of a prompt is reused.
        engine = EngineConfig(num_threads=1 if small else None)
        if kernels.row_independent and tensor_parallel == 1:
            engine = replace(engine, page_size=REUSE_PAGE)
    kept = KEPT_PICTURES if engine.reuse else 0
    processor = MediaProcessor(media, limits=limits, policy=policy, keep_bytes=kept)
    bulk_processor = choose_bulk_processor(where, processor, keep_bytes=kept)
    kind: Device = "cuda" if where.type == "cuda" else "cpu"
    read = _Read(directory, config, media, kind, engine, stop_ids)
    weights, running = start_engine(read, tensor_parallel)  # from here on nothing may be refused
    return Parts(
        processor=processor,
        bulk_processor=bulk_processor,
        tokenizer=tokenizer,
        backend=LocalBackend(running),
        weights=weights,
        media_pad_id=config.media_placeholder_token_id,
        defaults=defaults,
        name=str(checkpoint),
        context_length=config.text.max_position_embeddings,
        min_confidence=min_confidence,
    )


@dataclass(frozen=True, slots=True)
class _Read:
    """What a checkpoint says, and an engine over it: all that another process has to know."""

    directory: Path
    config: K3Config
    media: MediaConfig
    device: Device
    engine: EngineConfig
    stop_ids: tuple[int, ...]

    def weights(self, ranks: Ranks | None) -> WeightLoader:
        """Of this process."""
        where, dtype = choose_device(self.device)
        kernels = choose(where, dtype)
        return WeightLoader(
            config=self.config,
            media=self.media,
            dtype=dtype,
            device=where,
            kernels=kernels if ranks is None else split_kernels(kernels, ranks),
            # A GPU wants batches; on a CPU they gain nothing and make features depend on company.
            batch=self.engine.max_step_patches if where.type == "cuda" else None,
            ranks=ranks,
        )

    def build(self, ranks: Ranks) -> EngineParts:
        """A rank's."""
        model, encoder = self.weights(ranks).load(self.directory)
        return EngineParts(model=model, encoder=encoder, config=self.engine, stop_ids=self.stop_ids)


def start_engine(read: _Read, tensor_parallel: int) -> tuple[WeightLoader, Engine]:
    """Read weights and make an engine; of several ranks the first's, beside their processes."""
    if tensor_parallel == 1:
        weights = read.weights(None)
        model, encoder = weights.load(read.directory)
        encoding = choose_encoding(weights.device, read.engine)
        return weights, Engine(
            model, encoder, read.engine, stop_ids=read.stop_ids, encoding=encoding
        )
    leading = lead(tensor_parallel, read.build, read.device)
    return read.weights(leading.followers.ranks), leading


def choose_bulk_processor(
    device: torch.device, processor: MediaProcessor, *, keep_bytes: int
) -> MediaProcessor:
    """Who prepares the media of many requests, by the rules of ``processor``.

    Beside a GPU all wait for the engine's thread, and Python's lock should be its own: media are
    decoded by other processes. On a CPU the cores have the model to compute.
    """
    if device.type != "cuda":
        return processor
    return PooledProcessor(
        processor.config, limits=processor.limits, policy=processor.policy, keep_bytes=keep_bytes
    )


def choose_encoding(device: torch.device, engine: EngineConfig) -> Callable[[Encoder], Encoding]:
    """Where media are encoded: beside the language model, where there is room for that."""
    if device.type == "cuda":
        return EncodeOnStream
    # With one thread for each operation another core, if there is one, is free for the tower.
    if engine.num_threads == 1 and usable_cores() > 1:
        return partial(EncodeOnThread, num_threads=1)
    return EncodeInStep


def usable_cores() -> int:
    """CPU cores that this process may run on, where the system tells; or else all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def summarise(directory: Path, config: K3Config) -> CheckpointSummary:
    """Add up a checkpoint against what its configuration asks for.

    Raises:
        WeightError: a header cannot be read.
    """
    quantized = config.quantized_format == MXFP4_FORMAT
    expected = {
        **expected_text_tensors(config.text, quantized_experts=quantized),
        **expected_vision_tensors(config.vision),
    }
    return summarise_checkpoint(directory, config, expected)


def available_memory(device: torch.device) -> int:
    """Bytes that can still be had on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def memory_of_ranks(device: torch.device, ranks: int, on_all: int) -> int:
    """Bytes that so many ranks can still have for a model of which each holds ``on_all`` whole."""
    if device.type == "cpu":
        return available_memory(device) - (ranks - 1) * on_all
    free = min(available_memory(torch.device("cuda", rank)) for rank in range(ranks))
    return ranks * free - (ranks - 1) * on_all


def bytes_on_all(config: K3Config, dtype: torch.dtype) -> int:
    """What ranks do not divide of a model: the tower, the embedding, small projections."""
    values = sum(spec.numel for spec in expected_vision_tensors(config.vision).values())
    text = expected_text_tensors(config.text, quantized_experts=False)
    values += sum(spec.numel for name, spec in text.items() if axis_of(name) is None)
    return values * dtype.itemsize


def load_chat_defaults(directory: Path) -> ChatOptions:
    """Chat options that a checkpoint asks for in ``generation_config.json``, if it does.

    ``chat_template_kwargs`` holds them, under the names that servers take them by: ``thinking``
    (bool) and ``thinking_effort``. Without it K3's own defaults hold: thinking, effort ``max``.

    Raises:
        ConfigError: the file is not what it should be.
    """
    path = directory / "generation_config.json"
    kwargs = _generation_config(directory).get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise ConfigError(f"{path}: chat_template_kwargs must be an object")
    thinking = kwargs.get("thinking", True)
    effort = kwargs.get("thinking_effort", "max" if thinking else None)
    if not isinstance(thinking, bool) or not (effort is None or isinstance(effort, str)):
        raise ConfigError(f"{path}: thinking must be true or false, thinking_effort a string")
    return ChatOptions(thinking=thinking, thinking_effort=effort)


def load_sampling_defaults(directory: Path) -> SamplingParams:
    """Sampling that a checkpoint asks for in ``generation_config.json``.

    ``do_sample``, ``temperature`` and ``top_p`` are read; without them K3's own defaults hold, 1.0
    and 0.95. ``do_sample`` false is greedy.

    Raises:
        ConfigError: the file is not what it should be.
    """
    data = _generation_config(directory)
    sample = data.get("do_sample", True)
    temperature, top_p = data.get("temperature", 1.0), data.get("top_p", 0.95)
    if not isinstance(sample, bool) or not all(
        isinstance(value, int | float) for value in (temperature, top_p)
    ):
        raise ConfigError(f"{directory}: do_sample, temperature or top_p is not understood")
    if not sample:
        return SamplingParams()
    return SamplingParams(temperature=float(temperature), top_p=float(top_p))


def load_min_confidence(directory: Path) -> float | None:
    """Confidence below which a checkpoint's answers are better not trusted, where it says so.

    ``min_confidence`` of ``generation_config.json``: a number from 0 to 1 that was measured on
    questions with known answers; see :attr:`k3vl.pipeline.Reply.confidence`.

    Raises:
        ConfigError: the file is not what it should be.
    """
    value = _generation_config(directory).get("min_confidence")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{directory}: min_confidence must be a number from 0 to 1")
    return float(value)


def _generation_config(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read ({type(exc).__name__})") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold an object")
    return data


def choose_device(device: Device) -> tuple[torch.device, torch.dtype]:
    """Device and weight dtype of a ``--device`` value.

    Raises:
        ConfigError: torch sees no such device.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("device cuda: torch sees no CUDA device")
    if device == "cpu" or not available:
        return torch.device("cpu"), torch.float32
    return torch.device("cuda"), torch.bfloat16
