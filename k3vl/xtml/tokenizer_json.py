"""``tokenizer.json``: byte-level BPE of the ``tokenizers`` library, as small checkpoints have it.

The library recognises added tokens in any text, and its switch against that covers only those
marked special. So it is given the vocabulary without added tokens, for ordinary text, and special
tokens are found here, in trusted segments alone.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from k3vl.errors import ConfigError
from k3vl.xtml.special_tokens import ShortTexts, SpecialTokens

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tokenizers import Tokenizer as LibraryTokenizer


class TokenizerJson:
    """A vocabulary from a ``tokenizer.json``.

    Args:
        plain: the library's tokenizer, without added tokens.
        special: added tokens, name -> id.
        origin: for messages.

    Raises:
        ConfigError: a marker is missing, ordinary text can yield a special id, or a token is not
            made of byte letters.
    """

    def __init__(self, plain: LibraryTokenizer, special: Mapping[str, int], origin: str) -> None:
        self._plain = plain
        self._special = SpecialTokens(special, origin)
        self._ordinary = ShortTexts(self._encode_plain)
        self._bytes: dict[int, bytes] = {}
        letters = byte_letters()
        for token, token_id in plain.get_vocab(with_added_tokens=False).items():
            if token_id in self._special.names:
                continue
            if not letters.keys() >= set(token):
                raise ConfigError(f"{origin}: token {token_id} is not made of byte letters")
            self._bytes[token_id] = bytes(letters[letter] for letter in token)
        self._bytes |= {token_id: name.encode() for name, token_id in special.items()}
        for name, token_id in special.items():
            if token_id in self._encode_plain(name):
                raise ConfigError(f"{origin}: the text '{name}' is tokenised as the special token")

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._bytes) + 1

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Name -> id of every added token."""
        return self._special.ids

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``<|end_of_msg|>``, and ``[EOS]`` where the vocabulary has it."""
        return self._special.stop_ids

    def encode_segment(self, text: str, allow_special: bool) -> list[int]:
        """Tokenise one segment; see :class:`k3vl.xtml.tokenizer.Tokenizer`."""
        return self._special.encode(text, allow_special, self._ordinary)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id; nothing outside the vocabulary."""
        return self._bytes.get(token_id, b"")

    def is_control(self, token_id: int) -> bool:
        """The id is an added token."""
        return token_id in self._special.names

    def _encode_plain(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)


def load_tokenizer_json(path: Path) -> TokenizerJson:
    """Read the file.

    Raises:
        ConfigError: not JSON, not byte-level BPE, or as :class:`TokenizerJson`.
    """
    from tokenizers import Tokenizer as LibraryTokenizer

    data = _read(path)
    try:
        special = {str(token["content"]): int(token["id"]) for token in data["added_tokens"]}
        plain_data = {
            **data,
            "added_tokens": [],
            "post_processor": None,
            "truncation": None,
            "padding": None,
        }
        plain = LibraryTokenizer.from_str(json.dumps(plain_data))
    except Exception as exc:
        raise ConfigError(f"{path}: not understood by the tokenizers library") from exc
    return TokenizerJson(plain, special, str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: cannot be read as JSON ({type(exc).__name__})") from exc
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise ConfigError(f"{path}: the model is not BPE")
    if not _is_byte_level(data.get("pre_tokenizer")):
        raise ConfigError(f"{path}: the pre-tokenizer is not ByteLevel; no other kind is known")
    whole: dict[str, Any] = data
    return whole


def _is_byte_level(pre_tokenizer: Any) -> bool:
    if not isinstance(pre_tokenizer, dict):
        return False
    parts = pre_tokenizer.get("pretokenizers")
    if isinstance(parts, list):
        return any(map(_is_byte_level, parts))
    return pre_tokenizer.get("type") == "ByteLevel"


def byte_letters() -> dict[str, int]:
    """The letter that stands for each byte: itself where it prints, else one from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    letters = {chr(byte): byte for byte in printing}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}
