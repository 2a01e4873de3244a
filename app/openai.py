"""The wire format: OpenAI's chat completion request, read strictly into our own request.

Pydantic models say what a request looks like (they are also the OpenAPI document); pure functions
turn one into :class:`k3vl.types.Request`. Nothing here does I/O. What OpenAI knows and we cannot
honour is refused by name; unknown fields are refused as OpenAI refuses them. Rules of Moonshot's
own API for K3 (tool names, dynamic tools, efforts, partial mode) are in ``rules.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from k3vl.app.rules import check_messages, check_tool_choice, check_tools
from k3vl.errors import RequestError
from k3vl.types import ChatOptions, Request, SamplingParams
from k3vl.xtml.messages import parse_messages, parse_tools

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3vl.types import Message

MAX_STOPS = 16
MAX_WORD_LENGTH = 256
MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**63 - 1

_EITHER = (("stop",), ("tool_choice",))
"""Fields of one of several kinds; a problem's second place is the kind, as Pydantic calls it."""

Word = Annotated[str, StringConstraints(max_length=MAX_WORD_LENGTH)]


class _Wire(BaseModel):
    """A wire model; types are taken as sent, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Wire):
    """``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Thinking(_Wire):
    """Moonshot's ``thinking``."""

    type: Literal["enabled", "disabled"] | None = None
    effort: str | None = None
    keep: Literal["all"] | None = None


class TemplateKwargs(_Wire):
    """``chat_template_kwargs`` of self-hosted servers."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    thinking_effort: str | None = None
    reasoning_effort: str | None = None


class JsonSchema(_Wire):
    """``response_format.json_schema``."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Wire):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(_Wire):
    """The body of ``POST /v1/chat/completions`` and ``POST /v1/tokenize``."""

    model: Word
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    stop: Word | Annotated[list[Word], Field(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Word | None = None
    media_errors: Literal["fail", "placeholder"] | None = None
    user: Word | None = None
    # Known to OpenAI's clients and without an effect here.
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Word | None = None
    safety_identifier: Word | None = None
    prompt_cache_key: Word | None = None
    prompt_cache_retention: Word | None = None
    # Known to OpenAI's clients; only values that change nothing are accepted.
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    verbosity: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may ask for.

    Attributes:
        max_messages: messages of a conversation.
        max_images, max_videos: media parts of a request.
        max_choices: ``n``.
        default_max_tokens: where a request names no limit of its own.
    """

    max_messages: int = 4096
    max_images: int = 512
    max_videos: int = 16
    max_choices: int = 8
    default_max_tokens: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A request as the server carries it out.

    Attributes:
        request: for the pipeline.
        model: the name it was asked under.
        num_choices: answers wanted.
        stream: as events.
        include_usage: end the stream with a chunk of counts.
        media_errors: what a picture or clip that cannot be used does to the request: it fails, or
            goes on with a text in the part's place.
        fields: the fields that were sent, as they were sent, messages left out.
        warnings: about the request itself.
    """

    request: Request
    model: str
    num_choices: int = 1
    stream: bool = False
    include_usage: bool = False
    media_errors: Literal["fail", "placeholder"] = "fail"
    fields: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


# ---------------------------------------------------------------------- JSON -> request


def read_call(
    data: Any, *, limits: Limits, options: ChatOptions, sampling: SamplingParams
) -> ChatCall:
    """Read a decoded body.

    Args:
        data: what JSON held.
        limits: what may be asked for.
        options, sampling: the checkpoint's defaults.

    Raises:
        RequestError: ``param`` names the field.
    """
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    try:
        wire = ChatRequest.model_validate(data)
    except ValidationError as exc:
        raise _first_problem(exc) from None
    _refuse_unsupported(wire)
    if wire.n is not None and wire.n > limits.max_choices:
        raise RequestError(f"n is {wire.n}, at most {limits.max_choices}", param="n")
    check_counts(wire.messages, limits)
    check_tools(wire.tools, wire.messages)
    check_tool_choice(wire.tool_choice, wire.tools, wire.messages)
    raw = [_developer_is_system(message) for message in wire.messages]
    check_messages(raw)
    messages = parse_messages(raw)
    request = Request(
        messages=messages,
        tools=parse_tools(wire.tools),
        options=_options(wire, options),
        sampling=_sampling(wire, sampling, limits),
    )
    return ChatCall(
        request=request,
        model=wire.model,
        num_choices=wire.n or 1,
        stream=bool(wire.stream),
        include_usage=bool(wire.stream_options and wire.stream_options.include_usage),
        media_errors=wire.media_errors or "fail",
        fields={name: value for name, value in data.items() if name != "messages"},
        warnings=_warnings(messages),
    )


def check_counts(messages: Sequence[Mapping[str, Any]], limits: Limits) -> None:
    """Count messages and media before anything is decoded.

    Raises:
        RequestError: too many; the message says how many and where they are.
    """
    if len(messages) > limits.max_messages:
        raise RequestError(
            f"{len(messages)} messages, at most {limits.max_messages} are accepted",
            param="messages",
            code="too_many_messages",
        )
    for kind, most in (("image", limits.max_images), ("video", limits.max_videos)):
        where = [
            index
            for index, message in enumerate(messages)
            if isinstance(message.get("content"), list)
            for part in message["content"]
            if isinstance(part, dict) and part.get("type") in (kind, f"{kind}_url")
        ]
        if len(where) > most:
            raise RequestError(
                f"{len(where)} {kind}s in messages {', '.join(map(str, sorted(set(where))[:20]))}, "
                f"at most {most} are accepted",
                param="messages",
                code=f"too_many_{kind}s",
            )


def _first_problem(exc: ValidationError) -> RequestError:
    """The first problem in OpenAI's words; never the offending value."""
    problems = exc.errors(include_url=False, include_context=False, include_input=False)
    problem = problems[0]
    place = problem["loc"]
    if place[:1] in _EITHER:  # a problem for each of the kinds; that of the one that was meant
        problem = max(
            (each for each in problems if each["loc"][:1] == place[:1]),
            key=lambda each: (not each["type"].endswith("_type"), len(each["loc"])),
        )
        place = (*place[:1], *problem["loc"][2:])
    where = "".join(f"[{item}]" if isinstance(item, int) else f".{item}" for item in place)
    where = where.lstrip(".")
    if problem["type"] == "extra_forbidden":
        return RequestError(f"Unknown parameter: '{where}'.", param=where, code="unknown_parameter")
    if problem["type"] == "missing":
        return RequestError(
            f"Missing required parameter: '{where}'.",
            param=where,
            code="missing_required_parameter",
        )
    return RequestError(
        f"Invalid value for '{where}': {problem['msg'][:300]}", param=where, code="invalid_value"
    )


def _refuse_unsupported(wire: ChatRequest) -> None:
    """What OpenAI's API has and this one has not, unless the value changes nothing."""
    asked = {
        "frequency_penalty": bool(wire.frequency_penalty),
        "presence_penalty": bool(wire.presence_penalty),
        "logit_bias": bool(wire.logit_bias),
        "modalities": wire.modalities not in (None, ["text"]),
        "audio": wire.audio is not None,
        "prediction": wire.prediction is not None,
        "web_search_options": wire.web_search_options is not None,
        "functions": wire.functions is not None,
        "function_call": wire.function_call is not None,
        "verbosity": wire.verbosity not in (None, "medium"),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise RequestError(
                f"'{name}' is not supported by this server",
                param=name,
                code="unsupported_parameter",
            )
    if wire.top_logprobs is not None and not wire.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    if wire.stream_options is not None and not wire.stream:
        raise RequestError("'stream_options' needs 'stream': true", param="stream_options")


def _developer_is_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """K3 has no developer role; its encoder would drop the message without a word."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _options(wire: ChatRequest, defaults: ChatOptions) -> ChatOptions:
    """How the conversation is rendered: the most particular field counts."""
    thinking, kwargs = wire.thinking or Thinking(), wire.chat_template_kwargs or TemplateKwargs()
    efforts = {
        "thinking.effort": thinking.effort,
        "reasoning_effort": wire.reasoning_effort,
        "chat_template_kwargs.thinking_effort": kwargs.thinking_effort,
        "chat_template_kwargs.reasoning_effort": kwargs.reasoning_effort,
    }
    for name, effort in efforts.items():
        if effort is not None and effort not in ("low", "high", "max"):
            raise RequestError(f"{name} must be low, high or max", param=name, code="invalid_value")
    effort = next((value for value in efforts.values() if value is not None), None)
    wishes = (
        None if thinking.type is None else thinking.type == "enabled",
        kwargs.thinking,
        kwargs.enable_thinking,
        True if effort is not None else None,  # who asks for an effort asks for thinking
    )
    think = next((wish for wish in wishes if wish is not None), defaults.thinking)
    return ChatOptions(
        thinking=think,
        thinking_effort=(effort or defaults.thinking_effort or "max") if think else None,
        tool_choice=wire.tool_choice,
        response_format=_response_format(wire.response_format),
        parallel_tool_calls=wire.parallel_tool_calls is not False,
    )


def _response_format(wanted: ResponseFormat | None) -> Mapping[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.json_schema is None:
        raise RequestError(
            "Missing required parameter: 'response_format.json_schema'.",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )
    return {"type": "json_schema", "json_schema": {"schema": wanted.json_schema.schema_}}


def _sampling(wire: ChatRequest, defaults: SamplingParams, limits: Limits) -> SamplingParams:
    stops = (wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ())
    if not all(stops):
        raise RequestError("'stop' must hold non-empty strings", param="stop")
    most = wire.max_completion_tokens or wire.max_tokens or limits.default_max_tokens
    return replace(
        defaults,
        max_tokens=most,
        temperature=defaults.temperature if wire.temperature is None else wire.temperature,
        top_p=defaults.top_p if wire.top_p is None else wire.top_p,
        top_k=defaults.top_k if wire.top_k is None else wire.top_k,
        seed=None if wire.seed is None else wire.seed & MAX_SEED,
        stop=stops,
        cache_salt=wire.cache_salt,
        logprobs=(wire.top_logprobs or 0) if wire.logprobs else None,
    )


def _warnings(messages: Sequence[Message]) -> tuple[str, ...]:
    """Text that looks like a list of parts was probably serialised by mistake; it stays text."""
    return tuple(
        f"messages[{index}].content is a string that holds a JSON list of parts; it was read as "
        "text. Send the list itself"
        for index, message in enumerate(messages)
        for part in message.parts
        if (text := getattr(part, "text", "")) and _looks_like_parts(text)
    )


def _looks_like_parts(text: str) -> bool:
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")) or '"type"' not in text[:200]:
        return False
    if len(text) > 1 << 20:
        return True  # long enough to be media, too long to be read for a remark
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(parts) and all(isinstance(part, dict) and "type" in part for part in parts)
