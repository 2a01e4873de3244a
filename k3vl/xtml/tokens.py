"""The control markers of K3's chat format, their ids, and the two units that text travels in.

Nothing here tokenises. Marker strings and ids are those of Kimi K3's ``tokenizer_config.json``; a
checkpoint with a ``tokenizer.json`` has the same strings at other ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

OPEN: Final = "<|open|>"
CLOSE: Final = "<|close|>"
SEP: Final = "<|sep|>"
END_OF_MSG: Final = "<|end_of_msg|>"
MEDIA_BEGIN: Final = "<|media_begin|>"
MEDIA_CONTENT: Final = "<|media_content|>"
MEDIA_PAD: Final = "<|media_pad|>"
MEDIA_END: Final = "<|media_end|>"
EOS: Final = "[EOS]"

CONTROL_MARKERS: Final = (
    OPEN,
    CLOSE,
    SEP,
    END_OF_MSG,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_PAD,
    MEDIA_END,
)
"""What the template writes; every tokenizer must have an id for each."""

END_MARKERS: Final = (END_OF_MSG, EOS)
"""Either one ends a generated message; the second may be missing from a vocabulary."""

IMAGE_PLACEHOLDER: Final = "<|kimi_image_placeholder|>"
"""Stand-in for a picture of unknown size; ordinary text, not in K3's vocabulary."""

K3_NUM_RANKS: Final = 163_584
"""Ordinary tokens in K3's ``tiktoken.model``; special ids follow."""

K3_NUM_SPECIAL: Final = 256

_K3_NAMED: Final = MappingProxyType(
    {
        163584: "[BOS]",
        163585: EOS,
        163586: END_OF_MSG,
        163587: OPEN,
        163588: CLOSE,
        163589: SEP,
        163590: "[start_header_id]",
        163591: "[end_header_id]",
        163593: "[EOT]",
        163602: MEDIA_BEGIN,
        163603: MEDIA_CONTENT,
        163604: MEDIA_END,
        163605: MEDIA_PAD,
        163649: "<osagent_mode>",
        163838: "[UNK]",
        163839: "[PAD]",
    }
)

K3_SPECIAL_IDS: Final = MappingProxyType(
    {
        _K3_NAMED.get(token_id, f"<|reserved_token_{token_id}|>"): token_id
        for token_id in range(K3_NUM_RANKS, K3_NUM_RANKS + K3_NUM_SPECIAL)
    }
)
"""Name -> id of all 256 special tokens; ids without a name of their own are reserved ones."""


class Segment(NamedTuple):
    """Text that is tokenised on its own, never joined to its neighbours.

    ``allow_special`` is true only for text that the template wrote: control markers in it become
    control ids. In all other text they stay characters.
    """

    text: str
    allow_special: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of generated text; ``control`` is true when it came from a control id."""

    text: str
    control: bool
