"""Values that cross the borders between the parts of k3vl. Frozen, plain, without behaviour.

Nothing here imports torch, numpy or PIL at run time: ``xtml`` and the command line stay light.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    import numpy as np
    from PIL.Image import Image

MediaKind: TypeAlias = Literal["image", "video"]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
Detail: TypeAlias = Literal["low", "high", "auto", "original"]

# ---------------------------------------------------------------------- what comes in

if TYPE_CHECKING:
    MediaSource: TypeAlias = str | bytes | PathLike[str] | Image
    """``str``: a URL (``data:``, ``http(s):``, ``file:``) under the fetch policy, never a path;
    ``PathLike``: a local file; ``bytes``: a file's content; a PIL image: taken as opened."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text inside a message; control markers in it stay plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A picture or a clip inside a message.

    ``detail`` names a pixel budget (``vision.limits``); None is the checkpoint's own.
    """

    kind: MediaKind
    source: MediaSource
    detail: Detail | None = None


Part: TypeAlias = TextPart | MediaPart


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call the assistant made.

    ``arguments`` is the decoded object, or the raw text where it was not a JSON object
    (rendered as a ``json`` element and reported as it is).
    """

    name: str
    arguments: Mapping[str, Any] | str
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``; others are dropped by K3's format.
        parts: content in order; media consume media layouts in this order.
        name: optional author name.
        reasoning: earlier thinking of an assistant message; written verbatim.
        tool_calls: calls of an assistant message.
        tool_call_id: which call a ``tool`` message answers.
        tool_name: name given with a ``tool`` message (``tool`` or ``name`` field).
        tools: tools declared by a system message in mid-conversation.
        partial: a last assistant message that the model is to continue.
    """

    role: str
    parts: tuple[Part, ...] = ()
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    tool_name: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    partial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation is rendered.

    Attributes:
        thinking: open the think channel for the answer and keep earlier reasoning.
        thinking_effort: ``low``, ``high`` or ``max``; None leaves the preamble out.
        tool_choice: ``auto``, ``required``, ``none`` or a named-function object.
        response_format: ``{"type": "json_object" | "json_schema", ...}``, a bare word, or None.
        response_schema: overrides the schema inside ``response_format``.
        add_generation_prompt: end with the opened assistant message.
        parallel_tool_calls: more than one call may be made where calls are forced; not rendered.
    """

    thinking: bool = True
    thinking_effort: str | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    response_format: str | Mapping[str, Any] | None = None
    response_schema: Any = None
    add_generation_prompt: bool = True
    parallel_tool_calls: bool = True


class LogitMask(Protocol):
    """Says which token may come next; belongs to one generation, used on the engine's thread."""

    def allowed(self) -> np.ndarray | None:
        """[ceil(vocab / 32)] int32 bits, lowest first; None allows everything."""

    def accept(self, token_id: int) -> None:
        """The token was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    Attributes:
        max_tokens: at most this many new tokens.
        temperature: 0 is greedy.
        top_k: keep the k likeliest; 0 keeps all.
        top_p: keep the smallest set with this probability mass.
        seed: makes sampling repeatable, whatever else runs in the batch; None draws one.
        stop: strings that end the answer's content; not part of it.
        stop_ids: extra token ids that end generation, beside the model's own.
        logprobs: report the log-probability of every token, and of this many likeliest ones
            beside it; None reports nothing.
        cache_salt: only requests of the same salt share cached work; say, one per API key.
        logit_mask: constrains the choice; it holds state, so it belongs to one generation.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    cache_salt: str | None = None
    logit_mask: LogitMask | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything that one answer depends on."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    options: ChatOptions = field(default_factory=ChatOptions)
    sampling: SamplingParams = field(default_factory=SamplingParams)


# ---------------------------------------------------------------------- media, prepared


@dataclass(frozen=True, slots=True)
class MediaGroup:
    """One placeholder run in the prompt: a picture, or up to four video frames.

    Attributes:
        num_tokens: length of the ``<|media_pad|>`` run.
        timestamp: text in front of a video group, ``hh:mm:ss.fff``; None for a picture.
    """

    num_tokens: int
    timestamp: str | None = None


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """What the chat format needs to know of one media part.

    Attributes:
        kind: picture or clip.
        width, height: upright pixels before the resize; they go into a picture's header.
        groups: one for a picture, one per four frames for a clip.
    """

    kind: MediaKind
    width: int
    height: int
    groups: tuple[MediaGroup, ...]


@dataclass(frozen=True, slots=True, eq=False)
class EncoderItem:
    """Input of the vision tower: one picture or one video group.

    Attributes:
        digest: SHA-256 (hex, never shortened) over the normalised pixels, their shape and the
            processor settings. Equal digests mean equal features.
        patches: [t*h*w, 3, 14, 14] uint8, frame-major then row-major.
        grid_thw: frames, patch rows, patch columns; rows and columns are even.
        num_tokens: h*w/4 features come out.
    """

    digest: str
    patches: np.ndarray
    grid_thw: tuple[int, int, int]
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedMedia:
    """One media part after decoding and preprocessing.

    Attributes:
        layout: for the prompt; ``layout.groups[i]`` belongs to ``items[i]``.
        items: for the encoder; without patches where ``urls`` carry the pixels.
        frame_times: seconds of every frame used; empty for a picture.
        warnings: what was repaired or ignored, in words.
        urls: ``data:`` URLs for another server (``vision.portable``): one for a picture or a whole
            clip, one for each item of a clip that is sent as its frames; empty for a model here.
    """

    layout: MediaLayout
    items: tuple[EncoderItem, ...]
    frame_times: tuple[float, ...] = ()
    warnings: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class MediaSpan:
    """Rows ``offset .. offset + item.num_tokens`` of the prompt are the item's features."""

    offset: int
    item: EncoderItem


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Input of a language-model backend; spans are in order and do not overlap.

    ``hints`` are depths in tokens from which other prompts are likely to go on: the end of the
    system head, the ends of turns.
    """

    token_ids: tuple[int, ...]
    spans: tuple[MediaSpan, ...] = ()
    hints: tuple[int, ...] = ()


# ---------------------------------------------------------------------- what comes out


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one answer.

    ``prompt_tokens`` leaves out the three tokens of the opened channel, as Moonshot's API counts.
    """

    prompt_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probabilities at one position, before temperature and constraints.

    Attributes:
        token_id: the token that was chosen.
        logprob: its log-probability.
        top: (token id, log-probability) of the likeliest tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A :class:`TokenLogprob` for who knows no token ids: tokens as the bytes they stand for."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of the think channel."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the answer.

    ``replaces_reasoning`` marks text that was sent as :class:`Reasoning` before the model showed
    that it was the answer all along: whoever collects the whole drops the reasoning so far.
    ``logprobs`` are those of the tokens behind the text, where they were asked for.
    """

    text: str
    replaces_reasoning: bool = False
    logprobs: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call was opened; ``index`` counts calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More text of the call's JSON arguments; the pieces of one call concatenate."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete."""

    index: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of every answer that was not cancelled."""

    reason: FinishReason
    usage: Usage | None = None


Event: TypeAlias = Reasoning | Content | ToolCallBegin | ToolCallArguments | ToolCallEnd | Finish
