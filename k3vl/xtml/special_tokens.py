"""What the two vocabularies share: special tokens in trusted text, and text that can be encoded."""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from k3vl.errors import ConfigError
from k3vl.xtml import tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


LONGEST_KEPT, NUM_KEPT = 32, 1024
"""Characters of a text whose ids are kept, and how many such texts are."""


class SpecialTokens:
    """Finds special tokens in trusted text; for both vocabularies.

    Raises:
        ConfigError: a marker that the template needs is missing; all missing ones are named.
    """

    def __init__(self, ids: Mapping[str, int], origin: str) -> None:
        missing = [marker for marker in tokens.CONTROL_MARKERS if marker not in ids]
        if missing:
            raise ConfigError(f"{origin}: no special token {', '.join(missing)}")
        self.ids = ids
        self.names: Mapping[int, str] = {token_id: name for name, token_id in ids.items()}
        self.stop_ids = tuple(ids[name] for name in tokens.END_MARKERS if name in ids)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches any name; longer ones first, in case one begins another."""
        names = sorted(self.ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names))})")

    def encode(
        self, text: str, allow_special: bool, encode_plain: Callable[[str], list[int]]
    ) -> list[int]:
        """Tokenise a segment: where allowed, special tokens become their ids.

        Cut here and not by the libraries, so that a long run of ``<|media_pad|>`` never meets the
        rules for cutting long text, and so that both vocabularies agree on what is special.

        Args:
            text: of the segment.
            allow_special: the template wrote it; elsewhere markers are ordinary characters.
            encode_plain: what the vocabulary does with ordinary text.
        """
        if allow_special and text in self.ids:  # most trusted segments are a marker
            return [self.ids[text]]
        text = well_formed(text)
        if not allow_special:
            return encode_plain(text)
        ids: list[int] = []
        for piece in self.pattern.split(text):
            if piece in self.ids:
                ids.append(self.ids[piece])
            elif piece:
                ids += encode_plain(piece)
        return ids


class ShortTexts:
    """Encodes ordinary text; keeps the ids of short texts, of which a template is full."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._kept = lru_cache(NUM_KEPT)(lambda text: tuple(encode(text)))

    def __call__(self, text: str) -> list[int]:
        """Ids of a text."""
        return self._encode(text) if len(text) > LONGEST_KEPT else list(self._kept(text))


def well_formed(text: str) -> str:
    """Text that UTF-8 can express: half surrogates become the replacement character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        pass
    else:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
