"""Messages and media to the model's inputs: transformers' processor over our renderer.

``apply_chat_template`` is the way in. It writes the conversation segment by segment, so that a
control marker that somebody typed stays text. A prompt that comes as one string cannot tell the
two apart; :meth:`KimiK3Processor.__call__` reads every marker in it as the template's.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import torch
from transformers import BatchFeature, ProcessorMixin

from k3vl.config import load_media_config
from k3vl.errors import ConfigError, MediaError, TemplateError
from k3vl.hf.configuration import refuse
from k3vl.hf.tokenization import KimiK3Tokenizer
from k3vl.load import load_chat_defaults
from k3vl.types import MediaPart, Message
from k3vl.vision.processor import MediaProcessor
from k3vl.xtml.messages import parse_messages, parse_tools
from k3vl.xtml.parser import StreamParser, collect
from k3vl.xtml.render import ImagePrompts, media_parts, media_segments, render
from k3vl.xtml.tokenizer import decode, encode
from k3vl.xtml.tokens import IMAGE_PLACEHOLDER, Segment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from k3vl.types import ChatOptions, ProcessedMedia

CHAT_OPTIONS: Final = (
    "thinking",
    "thinking_effort",
    "tool_choice",
    "response_format",
    "response_schema",
)
"""Keywords of ``apply_chat_template`` that become :class:`k3vl.types.ChatOptions`."""

_PADDING = ("padding", "max_length", "pad_to_multiple_of", "padding_side")


class KimiK3Processor(ProcessorMixin):
    """Tokenizer and media processor of a checkpoint.

    Attributes:
        tokenizer: the vocabulary.
        media: cuts pictures and clips into patches; its limits and fetch policy hold.
        defaults: chat options of the checkpoint.
    """

    tokenizer: KimiK3Tokenizer
    chat_template = None  # the format is code: k3vl.xtml.render

    def __init__(
        self, tokenizer: KimiK3Tokenizer, media: MediaProcessor, defaults: ChatOptions
    ) -> None:
        # Not ProcessorMixin's: it takes transformers' own kinds of parts only.
        self.tokenizer = tokenizer
        self.media = media
        self.defaults = defaults

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tokenizer!r}, {self.media.config!r})"

    # ------------------------------------------------------------------ files

    @classmethod
    def from_pretrained(  # type: ignore[override] # a directory only
        cls, pretrained_model_name_or_path: str | PathLike[str], **options: Any
    ) -> Self:
        """Read the vocabulary, the media settings and the chat options of a directory.

        Raises:
            ConfigError: no such directory, a file is missing or not understood, or an option cannot
                be honoured.
        """
        # pipeline() hands the model's options to its processor as well.
        own = {n: value for n, value in options.items() if n not in ("dtype", "device_map")}
        refuse("from_pretrained", own)
        directory = Path(pretrained_model_name_or_path)
        if not directory.is_dir():
            raise ConfigError(f"{directory}: no such directory; fetch the repository first")
        return cls(
            KimiK3Tokenizer.from_pretrained(directory),
            MediaProcessor(load_media_config(directory)),
            load_chat_defaults(directory),
        )

    def save_pretrained(  # type: ignore[override] # fewer options
        self, save_directory: str | PathLike[str], **options: Any
    ) -> list[str]:
        """Write the vocabulary and the media settings.

        Raises:
            ConfigError: an option that cannot be honoured.
        """
        refuse("save_pretrained", options)
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        saved = list(self.tokenizer.save_pretrained(directory))
        settings = {
            "processor_class": type(self).__name__,
            "media_proc_cfg": asdict(self.media.config),
        }
        path = directory / "preprocessor_config.json"
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return [*saved, str(path)]

    # ------------------------------------------------------------------ messages

    def apply_chat_template(  # type: ignore[override] # other options of its own
        self,
        conversation: Sequence[Any],
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = False,
        return_dict: bool = False,
        return_tensors: str | None = "auto",
        processor_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Write one conversation, or several, in K3's chat format.

        Args:
            conversation: messages as transformers or OpenAI have them; parts of type ``image`` and
                ``video`` hold a URL, a path, bytes or a PIL image.
            chat_template: must be None; the format is fixed.
            tools: declarations.
            add_generation_prompt: end with the opened assistant message.
            continue_final_message: leave the last message, an assistant's, open.
            tokenize: make token ids; without it pictures stay placeholders.
            return_dict: all inputs of the model, else the token ids alone.
            return_tensors: ``pt`` (and ``auto``), or None for lists and arrays.
            processor_kwargs: padding, as options too.
            options: chat options (:data:`CHAT_OPTIONS`) and padding.

        Returns:
            Text, token ids, or a ``BatchFeature`` with ``input_ids`` and ``attention_mask`` [B, T],
            and where there are media ``pixel_values`` [P, 3, 14, 14] uint8 and ``image_grid_thw``
            [items, 3].

        Raises:
            TemplateError: the format cannot express a conversation, or an option is not known.
            MediaError: a media part cannot be used.
        """
        padding = _options(chat_template, {**options, **(processor_kwargs or {})})
        chat = replace(
            self.defaults,
            add_generation_prompt=add_generation_prompt,
            **{name: options[name] for name in CHAT_OPTIONS if name in options},
        )
        declared = parse_tools(list(tools or ()))
        is_batch = bool(conversation) and not isinstance(conversation[0], Mapping | Message)
        chats = [
            _conversation(messages, partial=continue_final_message)
            for messages in (conversation if is_batch else [conversation])
        ]
        if not tokenize:
            written = [
                render(messages, tools=declared, options=chat, media=ImagePrompts(None))
                for messages in chats
            ]
            texts = ["".join(segment.text for segment in segments) for segments in written]
            return texts if is_batch else texts[0]
        rows, media = [], []
        for messages in chats:
            items = [self._process(where, part) for where, part in media_parts(messages)]
            layouts = [item.layout for item in items]
            segments = render(messages, tools=declared, options=chat, media=layouts)
            rows.append(encode(segments, self.tokenizer.vocabulary))
            media += items
        batch = self._batch(rows, media, padding, return_tensors)
        return batch if return_dict else batch["input_ids"]

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        *,
        return_tensors: str | None = "auto",
        **options: Any,
    ) -> BatchFeature:
        """Read prompts that are text already, markers and all.

        Args:
            images: in the order of their placeholders ``<|kimi_image_placeholder|>``: sources as in
                messages, one, a list, or a list for every prompt.
            text: one prompt or several.
            return_tensors: as in :meth:`apply_chat_template`.
            options: padding.

        Raises:
            TemplateError: no text, or not as many pictures as placeholders.
            MediaError: a picture cannot be used.
        """
        if text is None:
            raise TemplateError("the processor needs text; pictures belong to its placeholders")
        texts = [text] if isinstance(text, str) else list(text)
        sources = [_source(image) for image in _flat(images)]
        media = [
            self._process(f"images[{i}]", MediaPart("image", source))
            for i, source in enumerate(sources)
        ]
        placeholders = sum(prompt.count(IMAGE_PLACEHOLDER) for prompt in texts)
        if placeholders != len(media):
            raise TemplateError(f"{len(media)} pictures, the text has {placeholders} placeholders")
        left = iter(media)
        rows = []
        for prompt in texts:
            first, *rest = prompt.split(IMAGE_PLACEHOLDER)
            segments = [Segment(first, allow_special=True)]
            for piece in rest:
                segments += media_segments(next(left).layout)
                segments.append(Segment(piece, allow_special=True))
            rows.append(encode(segments, self.tokenizer.vocabulary))
        return self._batch(rows, media, _options(None, options), return_tensors)

    def parse_response(  # type: ignore[override] # no schema: the format is fixed
        self, response: Sequence[int] | torch.Tensor, *, thinking: bool | None = None
    ) -> dict[str, Any]:
        """Read a generated message.

        Args:
            response: token ids behind the prompt, one sequence.
            thinking: whether the prompt opened the think channel; None: as the checkpoint does.

        Returns:
            ``role``, ``content``, and where there are any ``reasoning_content`` and ``tool_calls``.
        """
        ids = response.tolist() if isinstance(response, torch.Tensor) else list(response)
        parser = StreamParser(thinking=self.defaults.thinking if thinking is None else thinking)
        events = parser.feed(decode(ids, self.tokenizer.vocabulary))
        answer = collect([*events, *parser.flush("stop")])
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.tool_calls
            ]
        return message

    # ------------------------------------------------------------------ inside

    def _process(self, where: str, part: MediaPart) -> ProcessedMedia:
        try:
            return self.media.process(part)
        except MediaError as exc:
            raise MediaError(f"{where}: {exc}", param=where, code=exc.code) from exc

    def _batch(
        self,
        rows: list[list[int]],
        media: Sequence[ProcessedMedia],
        padding: Mapping[str, Any],
        return_tensors: str | None,
    ) -> BatchFeature:
        kind = "pt" if return_tensors == "auto" else return_tensors
        if kind not in ("pt", None):
            raise TemplateError(f"return_tensors is {kind}, only pt is supported")
        settings = {"padding": len(rows) > 1, **padding}
        data: dict[str, Any] = dict(self.tokenizer.pad({"input_ids": rows}, **settings))
        items = [item for part in media for item in part.items]
        if items:
            data["pixel_values"] = np.concatenate([item.patches for item in items])
            data["image_grid_thw"] = np.array([item.grid_thw for item in items])
        return BatchFeature(data, tensor_type=kind)


def _options(chat_template: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The padding among the options; whatever else is not known is refused."""
    unknown = [
        name
        for name, value in options.items()
        if name not in (*CHAT_OPTIONS, *_PADDING, "return_tensors") and value
    ]
    if chat_template is not None:
        unknown.append("chat_template")
    if unknown:
        raise TemplateError(f"{', '.join(sorted(unknown))}: not supported by K3's processor")
    return {name: options[name] for name in _PADDING if name in options}


def _conversation(messages: Sequence[Any], *, partial: bool) -> tuple[Message, ...]:
    """Messages as transformers writes them."""
    parsed = parse_messages([_message(item) for item in messages])
    if partial and parsed:
        parsed = (*parsed[:-1], replace(parsed[-1], partial=True))
    return parsed


def _message(item: Any) -> Any:
    content = item.get("content") if isinstance(item, Mapping) else None
    if not isinstance(content, list | tuple):
        return item
    return {**item, "content": [_part(part) for part in content]}


def _part(part: Any) -> Any:
    """A media part in OpenAI's form; all others are left alone."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("image", "video"):
        return part
    if part.get("base64") is not None:
        return {"type": kind, kind: base64.b64decode(part["base64"])}
    given = [part[name] for name in (kind, "url", "path") if part.get(name) is not None]
    return {"type": kind, kind: _source(given[0])} if given else part


def _source(source: Any) -> Any:
    """Transformers lets a string be a path; ours are URLs, and paths are paths."""
    if isinstance(source, str) and not source.startswith(("http:", "https:", "data:", "file:")):
        return Path(source)
    return source


def _flat(images: Any) -> list[Any]:
    if images is None:
        return []
    if not isinstance(images, list | tuple):
        return [images]
    return [image for part in images for image in _flat(part)]
