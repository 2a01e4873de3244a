"""OpenAI chat messages -> token ids with slots, in the place of SGLang's own K3 encoder.

The messages go through ``k3vl.xtml``, so markers that a client typed stay text, and clips have a
place in the prompt. SGLang collects the media itself, in the order of the messages; the slots name
each medium by its place in those lists. What the model answers is read in ``answers.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from k3vl.errors import K3VLError, RequestError
from k3vl.sglang.slots import open_layout, with_slots
from k3vl.xtml.messages import parse_messages, parse_tools
from k3vl.xtml.render import media_parts, render
from k3vl.xtml.tokenizer import encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3vl.types import ChatOptions, MediaKind
    from k3vl.xtml.tokenizer import Tokenizer

EFFORTS: Final = ("low", "high", "max")
_COLLECTED: Final[Mapping[str, MediaKind]] = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
}
"""Part types whose media SGLang collects, and the list each goes into."""


class K3ChatAdapter:
    """SGLang's ``ChatEncodingAdapter`` over our renderer.

    Attributes:
        collects_openai_media: SGLang fills its lists of media after the encoding.
        strict_tool_call_arguments: arguments that are no JSON are rendered as K3 does, not refused.
        tokenizer: the checkpoint's vocabulary.
        defaults: the checkpoint's chat defaults.
        output: reads the answers; None: SGLang's own parsers do.
    """

    collects_openai_media: Final = True
    strict_tool_call_arguments: Final = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        defaults: ChatOptions,
        *,
        takes_clips: bool,
        output: Any = None,
    ) -> None:
        """Keep what every request shares; an encoder server is in no position to take clips."""
        self.tokenizer, self.defaults, self.output = tokenizer, defaults, output
        self.takes_clips = takes_clips

    def encode_messages(
        self,
        *,
        messages: list[dict[str, Any]],
        request: Any,
        tools: list[dict[str, Any]] | None,
        thinking: bool,
        image_data: list[Any],
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            messages: as dumped by SGLang's request model, one for each of ``request.messages``.
            request: SGLang's ``ChatCompletionRequest``.
            tools: not read; SGLang dumps them with defaults that the client did not write.
            thinking: not read; it is the default of another family of models.
            image_data: not filled, see ``collects_openai_media``.

        Raises:
            ValueError: the conversation cannot be expressed; SGLang answers 400 with the message.
        """
        try:
            return self._encode(_conversation(messages, request), request)
        except K3VLError as exc:
            raise ValueError(str(exc)) from exc

    def _encode(self, messages: list[dict[str, Any]], request: Any) -> list[int]:
        parsed = parse_messages(messages)
        places = _media_places(messages)
        slots = []
        for where, part in media_parts(parsed):
            if where not in places:
                raise RequestError(f"{where}: send it as image_url or video_url", param=where)
            slots.append((part.kind, places[where][1]))
        if any(kind == "video" for kind, _ in slots) and not self.takes_clips:
            raise RequestError("encoder disaggregation (--language-only) carries pictures only")
        segments = render(
            parsed,
            tools=parse_tools([_written(tool) for tool in request.tools or ()]),
            options=chat_options(request, self.defaults),
            media=[open_layout(kind) for kind, _ in slots],
        )
        return encode(with_slots(segments, slots), self.tokenizer)


def _conversation(messages: list[dict[str, Any]], request: Any) -> list[dict[str, Any]]:
    """The messages as our reader takes them."""
    conversation = []
    for message, source in zip(messages, request.messages, strict=True):
        message = dict(message)
        declared = getattr(source, "tools", None)
        if declared and message.get("role") in ("system", "developer"):
            message["tools"] = [_written(tool) for tool in declared]
        if message.get("role") == "developer":
            # K3's format has no such role and drops it without a word.
            message["role"] = "system"
        conversation.append(message)
    if request.continue_final_message and conversation:
        conversation[-1]["partial"] = True
    return conversation


def _written(model: Any) -> Any:
    """A request model's fields as the client wrote them: defaults would reach the prompt."""
    return model.model_dump(exclude_unset=True, by_alias=True)


def _media_places(messages: Sequence[Mapping[str, Any]]) -> dict[str, tuple[MediaKind, int]]:
    """Where each medium is in the conversation -> its list and its place in it."""
    places: dict[str, tuple[MediaKind, int]] = {}
    count = {"image": 0, "video": 0}
    for index, message in enumerate(messages):
        content = message.get("content")
        for position, part in enumerate(content if isinstance(content, list) else ()):
            kind = _COLLECTED.get(part.get("type", ""))
            if kind is not None:
                places[f"messages[{index}].content[{position}]"] = kind, count[kind]
                count[kind] += 1
    return places


def _declares_tools(request: Any) -> bool:
    """Without tools SGLang sets ``tool_choice`` to ``none``, which must not reach the prompt."""
    return bool(request.tools) or any(
        getattr(message, "tools", None) for message in request.messages
    )


def chat_options(request: Any, defaults: ChatOptions) -> ChatOptions:
    """How a request wants its conversation rendered.

    ``chat_template_kwargs`` may hold ``thinking``, ``thinking_effort`` and ``response_schema``;
    ``reasoning_effort`` counts where it names one of K3's own efforts. Efforts of other models are
    read as the default, as SGLang's own encoder does.
    """
    wishes = dict(request.chat_template_kwargs or {})
    thinking = bool(wishes.get("thinking", defaults.thinking))
    effort = wishes.get("thinking_effort")
    if effort is None and request.reasoning_effort in EFFORTS:
        effort = request.reasoning_effort
    if effort is None:
        # Who turns thinking on where the checkpoint has it off gets K3's own default.
        effort = defaults.thinking_effort if defaults.thinking else "max"
    response_format = None
    if request.response_format is not None and request.response_format.type != "text":
        response_format = _written(request.response_format)
    return replace(
        defaults,
        thinking=thinking,
        thinking_effort=effort if thinking else None,
        tool_choice=request.tool_choice if _declares_tools(request) else None,
        response_format=response_format,
        response_schema=wishes.get("response_schema"),
    )
