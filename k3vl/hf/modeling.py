"""The model: transformers' ``generate`` over our language model, tower and projector.

For inference. Batches may be padded on either side; a sequence's padding is left out before our
model sees it, so that its numbers are those of the sequence alone. Prompts are prefilled page by
page as in the engine.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from k3vl.checkpoint_writer import save_checkpoint
from k3vl.config import load_media_config
from k3vl.errors import ConfigError, ShapeError
from k3vl.hf.cache import KimiK3Cache
from k3vl.hf.configuration import KimiK3Config, refuse
from k3vl.hf.passes import decode, prefill
from k3vl.kernels.choice import reference_kernels
from k3vl.lm.weights import stored_tensors
from k3vl.load import WeightLoader, choose_device
from k3vl.types import EncoderItem
from k3vl.vision.encoder import VisionEncoder
from k3vl.vision.weights import placements

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from k3vl.config import K3Config
    from k3vl.hf.passes import Span
    from k3vl.lm.model import K3Model
    from k3vl.vision.projector import PatchMerger
    from k3vl.vision.tower import VisionTower

_REFUSED = ("labels", "inputs_embeds", "output_attentions", "output_hidden_states")
"""Inputs of ``forward`` in transformers that would change its result, and do not here."""


class KimiK3ForConditionalGeneration(PreTrainedModel, GenerationMixin):
    """K3 with its vision tower; made by :meth:`from_pretrained`.

    Attributes:
        language_model, vision_tower, mm_projector: our modules.
    """

    config_class = KimiK3Config
    base_model_prefix = ""
    main_input_name = "input_ids"
    input_modalities = ["image", "video", "text"]  # noqa: RUF012 - the base class declares the type
    _is_stateful = True  # no rollback: transformers then refuses assisted decoding

    def __init__(
        self,
        config: KimiK3Config,
        *,
        language_model: K3Model,
        vision_tower: VisionTower,
        mm_projector: PatchMerger,
    ) -> None:
        super().__init__(config)
        self.parsed: K3Config = config.parse()
        self.language_model = language_model
        self.vision_tower = vision_tower
        self.mm_projector = mm_projector
        self._encoder = VisionEncoder(vision_tower, mm_projector)

    # ------------------------------------------------------------------ files

    @classmethod
    def from_pretrained(  # type: ignore[override] # fewer options, all of which count
        cls,
        pretrained_model_name_or_path: str | PathLike[str],
        *,
        config: KimiK3Config | None = None,
        dtype: torch.dtype | str | None = None,
        device_map: str | torch.device | None = None,
        **options: Any,
    ) -> Self:
        """Load a checkpoint directory, quantised or not.

        Args:
            pretrained_model_name_or_path: a directory; nothing is fetched.
            config: read from the directory unless given.
            dtype: of the weights. None and ``auto``: bfloat16 on a CUDA device, else float32.
            device_map: one device for all; None: the CPU.
            options: those of transformers that only concern downloads are accepted.

        Raises:
            ConfigError: no such directory, an unusable configuration, or an option that cannot be
                honoured.
            WeightError: the tensors are not those of the configuration.
        """
        refuse("from_pretrained", options)
        directory = Path(pretrained_model_name_or_path)
        if not directory.is_dir():
            raise ConfigError(f"{directory}: no such directory; fetch the repository first")
        config = config or KimiK3Config.from_pretrained(directory)
        parsed = config.parse()
        device = _device(device_map)
        weights = _dtype(dtype, device)
        loader = WeightLoader(
            config=parsed,
            media=load_media_config(directory),
            dtype=weights,
            device=device,
            # Compiled kernels stay where they were chosen; transformers moves and casts models.
            kernels=reference_kernels("a model of transformers may be moved or cast"),
        )
        language_model, encoder = loader.load(directory)
        model = cls(
            config,
            language_model=language_model,
            vision_tower=encoder.tower,
            mm_projector=encoder.projector,
        )
        model.train(mode=False)
        model.name_or_path = str(directory)
        if (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory)
        return model

    def save_pretrained(self, save_directory: str | PathLike[str], **options: Any) -> None:  # type: ignore[override] # fewer options
        """Write a checkpoint directory: K3's tensor names, in this model's dtype.

        The vocabulary and the media settings are the processor's to save.

        Raises:
            ConfigError: an option that cannot be honoured.
            WeightError: the directory holds weights, or cannot be written.
        """
        refuse("save_pretrained", options)
        directory = Path(save_directory)
        tensors = stored_tensors(self.language_model)
        places = placements(self.vision_tower, self.mm_projector)
        tensors |= {name: place.target.detach() for name, place in places.items()}
        save_checkpoint(directory, tensors, json_files={})
        self._plain_config().save_pretrained(directory)
        self.generation_config.save_pretrained(directory)

    def _plain_config(self) -> KimiK3Config:
        """The configuration of weights that are not quantised any more."""
        data = self.config.to_dict() | {"dtype": str(self.dtype).removeprefix("torch.")}
        data["architectures"] = [type(self).__name__]
        for part in (data, data["text_config"]):
            part.pop("quantization_config", None)
        return KimiK3Config.from_dict(data)

    # ------------------------------------------------------------------ a pass

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: KimiK3Cache | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        use_cache: bool = True,
        logits_to_keep: int | torch.Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Advance a batch.

        Args:
            input_ids: [B, T]; the new tokens, media pads among them.
            attention_mask: [B, columns seen + T], 0 for padding; None: there is none.
            cache: of the columns seen.
            pixel_values: [P, 3, 14, 14] patches of all media items, uint8 or normalised, in the
                order of their pads: by sequence, then by position.
            image_grid_thw: [items, 3] frames, patch rows and patch columns.
            use_cache: return the cache.
            logits_to_keep: only the last so many columns' logits (0: all), or those of indices.
            options: nothing that would change the result.

        Returns:
            float32 logits [B, kept, vocab], 0 at padding.

        Raises:
            ConfigError: another kind of cache, or an input that cannot be honoured.
            ShapeError: pads and media do not agree, or the cache is of another batch.
        """
        refuse("forward", {name: options.get(name) for name in _REFUSED})
        batch, columns = input_ids.shape
        if cache is None:
            text = self.parsed.text
            cache = KimiK3Cache(text, batch, dtype=self.dtype, device=self.device)
        elif not isinstance(cache, KimiK3Cache):
            raise ConfigError(f"cache: a KimiK3Cache is needed, not a {type(cache).__name__}")
        if cache.batch_size != batch:
            raise ShapeError(f"the cache has {cache.batch_size} sequences, the input {batch}")
        rows = _tokens(input_ids, attention_mask)
        kept = torch.arange(columns, device="cpu")
        if isinstance(logits_to_keep, torch.Tensor):
            kept = kept[logits_to_keep.cpu()]
        elif logits_to_keep:
            kept = kept[-logits_to_keep:]
        media = self._place_media(rows, pixel_values, image_grid_thw)
        logits = torch.zeros(batch, len(kept), self.parsed.text.vocab_size, device=self.device)
        if columns == 1 and cache.get_seq_length() and all(rows) and not any(media):
            logits[:, 0] = decode(self.language_model, cache, [row[0][1] for row in rows])
        else:
            for index, row in enumerate(rows):
                place = {column: at for at, column in enumerate(column for column, _ in row)}
                wanted = [(to, place[c]) for to, c in enumerate(kept.tolist()) if c in place]
                ids = [token_id for _, token_id in row]
                made = prefill(
                    self.language_model,
                    cache,
                    index,
                    ids,
                    media=media[index],
                    wanted={at for _, at in wanted},
                )
                for to, at in wanted:
                    logits[index, to] = made[at]
        cache.advance(columns)
        return CausalLMOutputWithPast(logits=logits, cache=cache if use_cache else None)

    # ------------------------------------------------------------------ media

    def _place_media(
        self,
        rows: Sequence[Sequence[tuple[int, int]]],
        pixel_values: torch.Tensor | None,
        grids: torch.Tensor | None,
    ) -> list[list[Span]]:
        """Features of all media, with the token of its sequence where each begins."""
        if pixel_values is None or grids is None:
            return [[] for _ in rows]
        shapes = _grids(grids)
        features = iter(self._encode_media(pixel_values, shapes))
        shared = self._first_pads([[token_id for _, token_id in row] for row in rows], shapes)
        return [
            [(at, rows_of) for at, rows_of in zip(starts, features, strict=False)]
            for starts in shared
        ]

    def _encode_media(
        self, pixel_values: torch.Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> list[torch.Tensor]:
        """[tokens, D] of every item, each encoded alone as the engine does on a CPU."""
        parts = pixel_values.cpu().split([t * h * w for t, h, w in grids])
        items = [
            EncoderItem(f"item {i}", part.numpy(), grid, grid[1] * grid[2] // 4)
            for i, (part, grid) in enumerate(zip(parts, grids, strict=True))
        ]
        return self._encoder.encode(items)

    def _first_pads(
        self, rows: Sequence[Sequence[int]], grids: Sequence[tuple[int, int, int]]
    ) -> list[list[int]]:
        """First tokens of the items of every sequence, in order."""
        pad = self.parsed.media_placeholder_token_id
        lengths = iter([h * w // 4 for _, h, w in grids])
        starts: list[list[int]] = []
        for row in rows:
            pads = [at for at, token_id in enumerate(row) if token_id == pad]
            mine: list[int] = []
            while pads:
                length = next(lengths, None)
                if length is None or pads[:length] != list(range(pads[0], pads[0] + length)):
                    raise ShapeError(
                        f"a sequence has {len(pads)} media pads from token {pads[0]} on, the next "
                        f"media item has {length or 'no'} features"
                    )
                mine.append(pads[0])
                pads = pads[length:]
            starts.append(mine)
        if left := len(list(lengths)):
            raise ShapeError(f"{left} media items have no pads in the prompt")
        return starts

    # ------------------------------------------------------------------ generate's hooks

    def _prepare_cache_for_generation(  # type: ignore[override] # theirs says bool, returns nothing
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Give ``generate`` our kind of cache, for as many sequences as it will ask for."""
        if generation_config.cache_implementation is not None:
            raise ConfigError(
                f"cache_implementation {generation_config.cache_implementation}: K3's state has a "
                "form of its own"
            )
        if model_kwargs.get("cache") is None and generation_config.use_cache:
            each = max(generation_config.num_beams, generation_config.num_return_sequences)
            model_kwargs["cache"] = KimiK3Cache(
                self.parsed.text, batch_size * each, dtype=self.dtype, device=self.device
            )

    def _expand_inputs_for_generation(  # type: ignore[override] # plain tensors
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Repeat every sequence with its own media."""
        assert input_ids is not None
        pixels = model_kwargs.pop("pixel_values", None)
        grids = model_kwargs.pop("image_grid_thw", None)
        media: dict[str, torch.Tensor] = {}
        if pixels is not None and grids is not None:
            shapes = _grids(grids)
            counts = [len(mine) for mine in self._first_pads(input_ids.tolist(), shapes)]
            items = iter(pixels.split([t * h * w for t, h, w in shapes]))
            groups = [list(islice(items, count)) for count in counts]
            pixels = torch.cat([p for group in groups for _ in range(expand_size) for p in group])
            grids = torch.cat([part.repeat(expand_size, 1) for part in grids.split(counts)])
            media = {"pixel_values": pixels, "image_grid_thw": grids}
        expanded = {
            name: value.repeat_interleave(expand_size, dim=0)
            if isinstance(value, torch.Tensor) and name != "logits_to_keep"
            else value
            for name, value in model_kwargs.items()
        }
        return input_ids.repeat_interleave(expand_size, dim=0), expanded | media


def _tokens(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> list[list[tuple[int, int]]]:
    """(column, token id) of every sequence's tokens, without padding."""
    columns = input_ids.shape[1]
    ids = input_ids.tolist()
    if attention_mask is None:
        return [list(enumerate(row)) for row in ids]
    if attention_mask.ndim != 2:
        raise ShapeError(f"attention_mask has {attention_mask.ndim} dimensions, it must have 2")
    real = attention_mask[:, -columns:].tolist()
    return [
        [(column, token_id) for column, token_id in enumerate(row) if mask[column]]
        for row, mask in zip(ids, real, strict=True)
    ]


def _grids(grids: torch.Tensor) -> list[tuple[int, int, int]]:
    return [(int(t), int(h), int(w)) for t, h, w in grids.tolist()]


def _device(device_map: str | torch.device | None) -> torch.device:
    if device_map == "auto":
        return choose_device("auto")[0]
    if isinstance(device_map, str | torch.device):
        return torch.device(device_map)
    if device_map is not None:
        raise ConfigError("device_map: one device for the whole model, or auto")
    return torch.device("cpu")


def _dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in (None, "auto"):
        return choose_device("cuda" if device.type == "cuda" else "cpu")[1]
    named = getattr(torch, str(dtype), None)
    if not isinstance(named, torch.dtype):
        raise ConfigError(f"dtype {dtype} is not one of torch's")
    return named
