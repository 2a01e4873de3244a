"""Prompts with slots and their media -> token ids and encoder items, inside SGLang's tokenizer.

Each group of up to four frames becomes one item of SGLang's image modality with a temporal grid,
which its K3 tower takes as it is. So padding, batching, vision data parallelism, the embedding
cache and the prefix cache below are SGLang's own, and clips share them with pictures. An item's
identity is our digest over its pixels, its grid and the settings: groups that two clips have in
common are encoded once.

Pixels stay uint8 until they are beside the tower (``features.py``): a quarter of the bytes through
the processes, and no arithmetic in this one, whose event loop every request shares.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from fastapi import HTTPException
from PIL import Image
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)
from sglang.srt.models.kimi_k3 import KimiK3ForConditionalGeneration
from sglang.srt.multimodal.processors.kimi_k3 import (
    DEFER_CUDA_IPC_FEATURE_RECONSTRUCTION_KEY,
    KimiK3ImageProcessor,
)
from sglang.srt.utils import ImageData, VideoData

from k3vl.config import load_media_config
from k3vl.errors import CapacityError, K3VLError, MediaError, RequestError
from k3vl.load import load_chat_defaults
from k3vl.sglang.chat import K3ChatAdapter
from k3vl.sglang.checkpoint import checkpoint_directory
from k3vl.sglang.features import NORMALISE_KEY, place_beside_the_tower
from k3vl.sglang.releases import this_release
from k3vl.sglang.settings import PluginSettings
from k3vl.sglang.slots import expand, find_slots
from k3vl.types import MediaPart
from k3vl.vision.processor import MediaProcessor
from k3vl.vision.workers import MediaWorkers
from k3vl.xtml.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from k3vl.sglang.slots import Slot
    from k3vl.types import MediaKind, ProcessedMedia


@dataclass(frozen=True, slots=True, eq=False)
class _Medium:
    """One medium's tokens and encoder items; the items' offsets count from its first token."""

    token_ids: Sequence[int]
    items: Sequence[MultimodalDataItem]


class K3MediaProcessor(KimiK3ImageProcessor):  # type: ignore[misc] # SGLang is not typed
    """SGLang's K3 processor, with clips, mixed media and our pictures.

    Requests without clips go SGLang's own way where the settings ask for parity.
    """

    models = [KimiK3ForConditionalGeneration]  # noqa: RUF012 - SGLang's own form

    def __init__(
        self, hf_config: Any, server_args: Any, processor: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Called by SGLang in each process that reads requests."""
        super().__init__(hf_config, server_args, processor, *args, **kwargs)
        self._release = this_release(server_args)
        directory = checkpoint_directory(*self._release.checkpoint())
        self._settings = PluginSettings.from_process_config(self._release.process_config())
        self._domains = frozenset(self._release.allowed_domains())
        self._pad_id: int = hf_config.media_placeholder_token_id
        self._vocabulary = load_tokenizer(directory)
        self._media = MediaProcessor(
            load_media_config(directory),
            limits=self._settings.limits,
            policy=self._settings.fetch_policy(sorted(self._domains)),
        )
        self._workers = MediaWorkers(
            self._media,
            num_workers=self._settings.media_workers,
            max_seconds=self._settings.media_seconds,
            max_memory=self._settings.media_memory,
            niceness=0,  # the engine has its own process, and a step waits for these pictures
        )
        adapter = K3ChatAdapter(
            self._vocabulary,
            load_chat_defaults(directory),
            takes_clips=not self._release.has_encoder_server(),
        )
        self._release.install(adapter)

    async def process_mm_data_async(
        self,
        image_data: Sequence[Any] | None,
        input_text: Any,
        request_obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> MultimodalProcessorOutput:
        """Prepare a request that has media.

        Args:
            image_data: pictures, in SGLang's forms.
            input_text: token ids, or text; control markers in it count, as everywhere in
                SGLang's ``/generate``. Each medium has one slot.
            request_obj: SGLang's request; ``video_data`` holds the clips.
            args: SGLang's.
            kwargs: SGLang's.

        Raises:
            ValueError: the request or one of its media cannot be used; SGLang answers 400.
            HTTPException: 503 where too many media are waiting.
        """
        try:
            return await self._process(
                list(image_data or ()), input_text, request_obj, args, kwargs
            )
        except CapacityError as exc:
            raise HTTPException(503, str(exc)) from exc
        except K3VLError as exc:
            raise ValueError(str(exc)) from exc

    async def _process(
        self, images: list[Any], text: Any, request: Any, args: Any, kwargs: Any
    ) -> MultimodalProcessorOutput:
        videos = list(request.video_data or ())
        if kwargs.get("audio_data"):
            raise RequestError("Kimi K3 takes pictures and clips, no audio")
        self._release.refuse_identities(self, [*images, *videos], request)
        if any(self._is_preprocessed_input(item) for item in [*images, *videos]):
            raise RequestError(
                "precomputed features and embeddings are not accepted for Kimi K3: their tokens "
                "cannot be checked against the prompt; send the picture or clip itself",
                code="precomputed_unsupported",
            )
        token_ids = self._token_ids(text)
        slots = find_slots(
            token_ids,
            self._vocabulary,
            self._pad_id,
            num_images=len(images),
            num_videos=len(videos),
        )
        in_order = [slot.index for slot in slots] == list(range(len(images)))
        if self._settings.parity and not videos and in_order:
            plain = _lone_pads(token_ids, slots, self._pad_id)
            return await super().process_mm_data_async(images, plain, request, *args, **kwargs)
        lists = {"image": images, "video": videos}
        hashes = getattr(request, "mm_content_hashes", None) or [None] * len(images)
        media = await _all(
            self._medium(slot, lists[slot.kind][slot.index], hashes) for slot in slots
        )
        output = self._compose(token_ids, slots, media)
        output.mm_items = await self._hand_over(output.mm_items)
        return output

    def _token_ids(self, text: Any) -> list[int]:
        """The prompt as ids; text with markers is read as SGLang's tokenizer reads it."""
        if isinstance(text, str):
            return self._vocabulary.encode_segment(text, True)
        return [int(token_id) for token_id in text]

    # ------------------------------------------------------------------ one medium

    async def _medium(
        self, slot: Slot, source: Any, content_hashes: Sequence[str | None]
    ) -> _Medium:
        """Prepare what belongs into a slot; errors say which medium it was."""
        try:
            if slot.kind == "image" and self._settings.parity:
                content_hash = content_hashes[slot.index]
                output = await self._release.picture(self, source, content_hash, self._pad_id)
                return _Medium(output.input_ids, output.mm_items)
            media = await self._load(slot.kind, source)
            if slot.kind == "image":
                return self._ours(media)
            # The tokens of a long clip take time that the event loop does not have.
            return await asyncio.to_thread(self._ours, media)
        except MediaError as exc:
            message = f"{slot.kind} {slot.index}: {str(exc).removeprefix(f'{slot.kind}: ')}"
            raise MediaError(message, param=exc.param, code=exc.code) from exc

    async def _load(self, kind: MediaKind, source: Any) -> ProcessedMedia:
        """Fetch, decode and cut; files in a worker process, opened pictures on a thread."""
        part = self._part(kind, source)
        if isinstance(part.source, Image.Image):
            return await asyncio.to_thread(self._media.process, part)
        return await self._workers.process(part)

    def _part(self, kind: MediaKind, source: Any) -> MediaPart:
        """SGLang's forms of a source as ours."""
        detail = None
        if isinstance(source, ImageData | VideoData):
            if source.preprocess_kwargs or getattr(source, "max_long_side_pixel", None):
                raise MediaError(
                    "sizes and frame rates are not chosen by the request; Kimi K3 has its own rule "
                    "for both, and the server has the limits",
                    code="media_option_unsupported",
                )
            detail = getattr(source, "detail", None)
            source = source.url
        if isinstance(source, str):
            self._check_domain(kind, source)
            root = self._settings.media_root
            if root is not None and "://" not in source[:16] and not source.startswith("data:"):
                source = Path(source).absolute().as_uri()
        elif not isinstance(source, bytes | Image.Image):
            raise MediaError(
                f"a source is a URL, bytes or a PIL image, not {type(source).__name__}",
                code="source_invalid",
            )
        return MediaPart(kind, source, detail)

    def _check_domain(self, kind: MediaKind, url: str) -> None:
        """SGLang's ``--allowed-media-domains`` holds here too."""
        if not self._domains or url[:5].lower() in ("data:", "file:"):
            return
        try:
            host = (urlsplit(url).hostname or "").rstrip(".")
        except ValueError:
            host = ""
        if host not in self._domains:
            raise MediaError(
                f"{kind}: the URL's host is not among the allowed", code="url_forbidden"
            )

    def _ours(self, media: ProcessedMedia) -> _Medium:
        """Tokens and items of a medium that we prepared."""
        config = self._media.config
        token_ids, spans = expand(media.layout, self._vocabulary, self._pad_id)
        items = []
        for (offset, length), item in zip(spans, media.items, strict=True):
            entry = MultimodalDataItem(
                modality=Modality.IMAGE,
                feature=torch.from_numpy(item.patches),
                offsets=[(offset, offset + length - 1)],
                model_specific_data={
                    "image_grid_thw": torch.tensor([item.grid_thw]),
                    NORMALISE_KEY: [*config.image_mean, *config.image_std],
                },
            )
            self._release.identify(entry, bytes.fromhex(item.digest))
            items.append(entry)
        return _Medium(token_ids, items)

    # ------------------------------------------------------------------ all of them

    def _compose(
        self, token_ids: Sequence[int], slots: Sequence[Slot], media: Sequence[_Medium]
    ) -> MultimodalProcessorOutput:
        """Put each medium's tokens in the place of its slot."""
        composed: list[int] = []
        items: list[MultimodalDataItem] = []
        done = 0
        for slot, medium in zip(slots, media, strict=True):
            composed += token_ids[done : slot.start]
            for item in medium.items:
                item.offsets = [(a + len(composed), b + len(composed)) for a, b in item.offsets]
                items.append(item)
            composed += medium.token_ids
            done = slot.stop
        composed += token_ids[done:]
        return MultimodalProcessorOutput(
            input_ids=composed,
            mm_items=items,
            im_token_id=self._pad_id,
        )

    async def _hand_over(self, items: list[MultimodalDataItem]) -> list[MultimodalDataItem]:
        """The items as the scheduler takes them: on the GPU, where SGLang has a pool there."""
        pool = getattr(self, "cudaipc_mmfeature_pool", None)
        if pool is not None:
            device = pool.memory_pool.device
            job = asyncio.ensure_future(
                asyncio.to_thread(place_beside_the_tower, items, device, self._wrap)
            )
            try:
                await asyncio.shield(job)
            except BaseException:
                job.add_done_callback(lambda _: self._take_back(items))
                raise
        return self._release.hand_over(self, items)

    def _wrap(self, item: MultimodalDataItem) -> None:
        """Into the pool; the one process that encodes the item takes it out."""
        item.model_specific_data[DEFER_CUDA_IPC_FEATURE_RECONSTRUCTION_KEY] = True
        self._release.wrap(self, item)

    def _take_back(self, items: Iterable[MultimodalDataItem]) -> None:
        """Nobody will: the caller has gone, or another item failed."""
        for item in items:
            if not isinstance(item.feature, torch.Tensor):
                self._release.take_back(self, item)

    def shutdown(self) -> None:
        """Called by SGLang when its tokenizer ends."""
        self._workers.kill()
        super().shutdown()


def _lone_pads(token_ids: Sequence[int], slots: Sequence[Slot], pad_id: int) -> list[int]:
    """The prompt in SGLang's own form: each slot is one pad."""
    plain: list[int] = []
    done = 0
    for slot in slots:
        plain += [*token_ids[done : slot.start], pad_id]
        done = slot.stop
    return plain + list(token_ids[done:])


async def _all(jobs: Iterable[Coroutine[Any, Any, _Medium]]) -> list[_Medium]:
    """Every medium of a request at once; where one fails, nobody works on the others any more."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
