"""Rows: what every output says of one caption, and their flat form for tables."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from k3vl.app.captioning.schema import Schema, SchemaError
from k3vl.errors import CapacityError, K3VLError, MediaError, RequestError
from k3vl.types import Usage

if TYPE_CHECKING:
    from k3vl.app.captioning.items import Item
    from k3vl.app.captioning.media import Fetched
    from k3vl.types import MediaKind, SamplingParams

Row = dict[str, Any]

COLUMNS: dict[str, str] = {
    "id": "text",
    "path": "text",
    "kind": "text",
    "width": "int",
    "height": "int",
    "frames": "int",
    "frame_times": "floats",
    "digest": "text",
    "prompt_id": "text",
    "prompt": "text",
    "caption": "text",
    "data": "text",
    "reasoning": "text",
    "confidence": "float",
    "guess": "text",
    "finish": "text",
    **{f"usage_{name}": "int" for name in asdict(Usage())},
    "latency": "float",
    "model": "text",
    "revision": "text",
    "seed": "int",
    "params": "text",
    "warnings": "texts",
    "duplicate_of": "text",
    "error": "text",
    "code": "text",
    "error_class": "text",
}
"""Columns of CSV and Parquet outputs and what they hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was found out about an item's media.

    Attributes:
        kind: picture or clip.
        width, height: upright pixels.
        frame_times: seconds of the frames used; empty for a picture.
        digest: SHA-256 of the file's content.
        warnings: what was repaired or ignored.
    """

    kind: MediaKind
    width: int
    height: int
    frame_times: tuple[float, ...] = ()
    digest: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an engine made of one item and one prompt.

    Attributes:
        text: the caption as it was generated.
        reasoning: the think channel.
        finish: why it ended.
        usage: token counts.
        latency: seconds in the engine.
        revision: of the model, where the engine tells it with each answer.
        confidence: geometric mean of the probabilities of the caption's tokens, where known.
        guess: what the model would have said, where ``text`` says that it is not sure.
    """

    text: str
    reasoning: str = ""
    finish: str
    usage: Usage
    latency: float
    revision: str | None = None
    confidence: float | None = None
    guess: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt for one item, filled in.

    Attributes:
        prompt_id: names it in outputs.
        text: what the model is asked.
        sampling: with the item's own seed.
        schema: what the answer must fit; None where it may be any text.
    """

    prompt_id: str
    text: str
    sampling: SamplingParams
    schema: Schema | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What all rows of a run share.

    Attributes:
        model: how it is called.
        revision: which state of it.
        with_reasoning: rows hold the think channel.
    """

    model: str
    revision: str
    with_reasoning: bool = False


def caption_row(
    item: Item, seen: Seen, ask: Ask, answer: Answer, *, caption: str, data: Any, origin: Origin
) -> Row:
    """The row of a caption; ``data`` is what it holds where a schema was asked for."""
    row: Row = {
        "id": item.id,
        "path": item.source.path,
        "kind": seen.kind,
        "width": seen.width,
        "height": seen.height,
        "frames": max(len(seen.frame_times), 1),
        "frame_times": [round(at, 3) for at in seen.frame_times],
        "digest": seen.digest,
        "prompt_id": ask.prompt_id,
        "prompt": ask.text,
        "caption": caption,
        "finish": answer.finish,
        "usage": asdict(answer.usage),
        "latency": round(answer.latency, 4),
        "warnings": list(seen.warnings),
        "model": origin.model,
        "revision": answer.revision or origin.revision,
        "seed": ask.sampling.seed,
        "params": {
            "max_tokens": ask.sampling.max_tokens,
            "temperature": ask.sampling.temperature,
            "top_k": ask.sampling.top_k,
            "top_p": ask.sampling.top_p,
            "stop": list(ask.sampling.stop),
        },
    }
    if ask.schema is not None:
        row["data"] = data
    if answer.confidence is not None:
        row["confidence"] = round(answer.confidence, 4)
    if answer.guess is not None:
        row["guess"] = answer.guess
    if origin.with_reasoning:
        row["reasoning"] = answer.reasoning
    return row


def error_row(
    item: Item, prompt_id: str, error: K3VLError, origin: Origin, fetched: Fetched | None = None
) -> Row:
    """The row of an item that has no caption."""
    # The part's place in the request says nothing to somebody who gave a path.
    message = str(error).removeprefix("messages[0].content[0]: ")
    row: Row = {
        "id": item.id,
        "path": item.source.path,
        "prompt_id": prompt_id,
        "error": message,
        "code": error_code(error),
        "error_class": error_class(error),
        "model": origin.model,
    }
    if fetched is not None:
        row["digest"] = fetched.digest
    return row


class ItemTimeoutError(K3VLError):
    """An item took longer than it may."""


def error_code(error: K3VLError) -> str:
    """A stable word for what went wrong."""
    if isinstance(error, ItemTimeoutError):
        return "item_timeout"
    if isinstance(error, SchemaError):
        return "schema_unmet"
    if isinstance(error, RequestError):
        return error.code
    return "capacity" if isinstance(error, CapacityError) else "engine_error"


def error_class(error: K3VLError) -> str:
    """``media``: the file is at fault; ``request``: the prompt; ``engine``: neither, try again."""
    if isinstance(error, MediaError):
        return "media"
    return "request" if isinstance(error, RequestError) else "engine"


def flat(row: Row) -> dict[str, Any]:
    """One value for each of :data:`COLUMNS`; what a row does not have is None."""
    values = {**row, **{f"usage_{k}": v for k, v in row.get("usage", {}).items()}}
    for name in ("params", "data"):
        if name in values:
            values[name] = json.dumps(values[name], ensure_ascii=False)
    return {name: values.get(name) for name in COLUMNS}
