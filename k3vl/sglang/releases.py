"""What differs between the releases of SGLang that we support; everything else is the same there.

0.5.17 is the release for torch 2.11: it has Kimi K3, but not yet an interface for chat encoders,
full identities, a cache of prepared pictures, or a list of allowed hosts.
"""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol

from k3vl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3vl.sglang.chat import K3ChatAdapter

SPEC: Final = "kimi_k3"
"""SGLang's name for the way in which K3's chats are encoded."""


class Release(Protocol):
    """A running server of one release, as its processor sees it."""

    def checkpoint(self) -> tuple[str, str | None]:
        """``--model-path`` and ``--revision``."""

    def process_config(self) -> Mapping[str, Any]:
        """``--mm-process-config``."""

    def allowed_domains(self) -> Sequence[str]:
        """``--allowed-media-domains``; none: any."""

    def has_encoder_server(self) -> bool:
        """``--language-only``: media are encoded elsewhere."""

    def install(self, adapter: K3ChatAdapter) -> None:
        """Make every chat endpoint of this process encode K3's conversations with ``adapter``."""

    def refuse_identities(self, processor: Any, media: Sequence[Any], request: Any) -> None:
        """Keep identities that a caller made up out of the caches.

        Raises:
            ValueError: there are some.
        """

    def identify(self, item: Any, digest: bytes) -> None:
        """Make a SHA-256 the key of an encoder item in SGLang's caches."""

    async def picture(
        self, processor: Any, source: Any, content_hash: str | None, pad_id: int
    ) -> Any:
        """SGLang's own output for a prompt that is one picture and nothing else."""

    def wrap(self, processor: Any, item: Any) -> None:
        """Put an item's feature, which is on the GPU, into SGLang's pool there."""

    def hand_over(self, processor: Any, items: list[Any]) -> list[Any]:
        """The encoder items as the scheduler takes them."""

    def take_back(self, processor: Any, item: Any) -> None:
        """Free an item's place in SGLang's pool: the request will not be handed over."""


class Release0523:
    """SGLang 0.5.23."""

    def checkpoint(self) -> tuple[str, str | None]:
        """See :class:`Release`."""
        from sglang.srt.runtime_context import get_model

        return get_model().model_path, get_model().revision

    def process_config(self) -> Mapping[str, Any]:
        """See :class:`Release`."""
        from sglang.srt.runtime_context import get_mm

        return get_mm().mm_process_config or {}

    def allowed_domains(self) -> Sequence[str]:
        """See :class:`Release`."""
        from sglang.srt.runtime_context import get_mm

        return get_mm().allowed_media_domains or ()

    def has_encoder_server(self) -> bool:
        """See :class:`Release`."""
        from sglang.srt.runtime_context import get_disagg

        return bool(get_disagg().language_only)

    def install(self, adapter: K3ChatAdapter) -> None:
        """See :class:`Release`."""
        from sglang.srt.entrypoints.openai import chat_encoding_adapters

        from k3vl.sglang.answers import K3AnswerAdapter
        from k3vl.sglang.chat import K3ChatAdapter

        def build(context: Any) -> K3ChatAdapter:
            if not context.reasoning_parser == context.tool_call_parser == SPEC:
                return adapter  # the user wants other parsers, or none
            tokenizer, defaults = adapter.tokenizer, adapter.defaults
            return K3ChatAdapter(
                tokenizer,
                defaults,
                takes_clips=adapter.takes_clips,
                output=K3AnswerAdapter(tokenizer, defaults, context.chat_hooks),
            )

        # There is no public way to enter an adapter for a chat that SGLang has a branch for.
        chat_encoding_adapters._BUILDERS[SPEC] = {"builtin": build}

    def refuse_identities(self, processor: Any, media: Sequence[Any], request: Any) -> None:
        """See :class:`Release`."""
        processor.reject_caller_image_identity(media, request)

    def identify(self, item: Any, digest: bytes) -> None:
        """See :class:`Release`."""
        item.set_identity(digest)

    async def picture(
        self, processor: Any, source: Any, content_hash: str | None, pad_id: int
    ) -> Any:
        """See :class:`Release`."""
        if not processor.mm_preprocess_cache.enabled:
            return await processor._process_mm_data_uncached([source], [pad_id], None)
        artifacts = await processor.prepare_media_artifacts([source], content_hashes=[content_hash])
        return processor.compose_request([pad_id], artifacts)

    def wrap(self, processor: Any, item: Any) -> None:
        """See :class:`Release`; the scheduler's stream waits for the copy."""
        processor._prepare_mm_items_for_transport([item])

    def hand_over(self, processor: Any, items: list[Any]) -> list[Any]:
        """See :class:`Release`."""
        return processor._prepare_mm_items_for_transport(items)  # type: ignore[no-any-return]

    def take_back(self, processor: Any, item: Any) -> None:
        """See :class:`Release`."""
        processor.cudaipc_mmfeature_pool.cancel_proxy(item.feature)


class Release0517:
    """SGLang 0.5.17; keys of its caches have 64 bits of the digest, of its prefix cache 30."""

    def __init__(self, server_args: Any) -> None:
        """Settings lie in one object there, which every processor is given."""
        self._args = server_args

    def checkpoint(self) -> tuple[str, str | None]:
        """See :class:`Release`."""
        return self._args.model_path, self._args.revision

    def process_config(self) -> Mapping[str, Any]:
        """See :class:`Release`."""
        return self._args.mm_process_config or {}

    def allowed_domains(self) -> Sequence[str]:
        """See :class:`Release`."""
        return ()

    def has_encoder_server(self) -> bool:
        """See :class:`Release`."""
        return bool(self._args.language_only)

    def install(self, adapter: K3ChatAdapter) -> None:
        """See :class:`Release`."""
        from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

        native = OpenAIServingChat._encode_messages

        def encode(
            self: Any, messages: list[dict[str, Any]], request: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if self.chat_encoding_spec != SPEC:
                return native(self, messages, request, *args, **kwargs)
            return adapter.encode_messages(
                messages=messages, request=request, tools=None, thinking=False, image_data=[]
            )

        OpenAIServingChat._encode_messages = encode

    def refuse_identities(self, processor: Any, media: Sequence[Any], request: Any) -> None:
        """See :class:`Release`; there is no way to give any."""

    def identify(self, item: Any, digest: bytes) -> None:
        """See :class:`Release`."""
        item.set_hash(int.from_bytes(digest[:8], "big"))

    async def picture(
        self, processor: Any, source: Any, content_hash: str | None, pad_id: int
    ) -> Any:
        """See :class:`Release`."""
        from sglang.srt.multimodal.processors.kimi_k3 import KimiK3ImageProcessor

        request = SimpleNamespace(video_data=None)
        return await KimiK3ImageProcessor.process_mm_data_async(
            processor, [source], [pad_id], request
        )

    def wrap(self, processor: Any, item: Any) -> None:
        """See :class:`Release`; nothing there makes the scheduler wait for the copy."""
        import torch

        item.feature = processor._wrap_tensor_for_cuda_ipc(item.feature)
        torch.cuda.current_stream(processor.cudaipc_mmfeature_pool.memory_pool.device).synchronize()

    def hand_over(self, processor: Any, items: list[Any]) -> list[Any]:
        """See :class:`Release`."""
        return items

    def take_back(self, processor: Any, item: Any) -> None:
        """See :class:`Release`; each process of the engine would have acknowledged it."""
        item.feature.acknowledge_consumption(self._args.tp_size)


SUPPORTED: Final = ("0.5.23", "0.5.17")
"""The first is the one that every test runs against."""


def check_version(found: str) -> None:
    """Refuse releases whose inner parts may differ from what was tested.

    Raises:
        ConfigError: not one of :data:`SUPPORTED`.
    """
    if found not in SUPPORTED:
        raise ConfigError(f"SGLang {found} is installed; k3vl supports {', '.join(SUPPORTED)}")


def this_release(server_args: Any) -> Release:
    """The installed release.

    Raises:
        ConfigError: it is not supported.
    """
    found = version("sglang")
    check_version(found)
    return Release0523() if found == "0.5.23" else Release0517(server_args)
