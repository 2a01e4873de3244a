"""Kimi K3's own vocabulary: ``tiktoken.model``, 163,584 byte-pair ranks and 256 special ids.

The split pattern, the special table and the rule for cutting long text are those of the release;
K2's file has the same ranks but other names for some special ids, so K2's ``tokenizer_config.json``
beside the file is refused.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import TYPE_CHECKING, Any, Final

from k3vl.errors import ConfigError
from k3vl.xtml import tokens
from k3vl.xtml.special_tokens import ShortTexts, SpecialTokens

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tiktoken import Encoding

_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SPLIT: Final = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_MAX_CHUNK: Final = 400_000
_MAX_RUN: Final = 25_000
_RUN: Final = re.compile(r"\s+|\S+")


class TiktokenModel:
    """K3's vocabulary, exact to the id."""

    def __init__(self, ranks: dict[bytes, int]) -> None:
        import tiktoken

        self._encoding: Encoding = tiktoken.Encoding(
            "kimi_k3", pat_str=_SPLIT, mergeable_ranks=ranks, special_tokens={}
        )
        self._ordinary = ShortTexts(self._encode_plain)
        self._special = SpecialTokens(tokens.K3_SPECIAL_IDS, "tiktoken.model")

    @property
    def vocab_size(self) -> int:
        """163,840."""
        return tokens.K3_NUM_RANKS + tokens.K3_NUM_SPECIAL

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The 256 names of K3's table, reserved ones included."""
        return self._special.ids

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``<|end_of_msg|>`` and ``[EOS]``."""
        return self._special.stop_ids

    def encode_segment(self, text: str, allow_special: bool) -> list[int]:
        """Tokenise one segment; see :class:`k3vl.xtml.tokenizer.Tokenizer`."""
        return self._special.encode(text, allow_special, self._ordinary)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id; nothing outside the vocabulary."""
        if token_id in self._special.names:
            return self._special.names[token_id].encode()
        if not 0 <= token_id < tokens.K3_NUM_RANKS:
            return b""
        return self._encoding.decode_single_token_bytes(token_id)

    def is_control(self, token_id: int) -> bool:
        """The id is one of the 256 special ones."""
        return token_id in self._special.names

    def _encode_plain(self, text: str) -> list[int]:
        return [
            token_id for piece in cut(text) for token_id in self._encoding.encode_ordinary(piece)
        ]


def cut(text: str) -> list[str]:
    """Cut long text as the release does.

    Every 400,000 characters, and inside of that every 25,000 characters of a run that is all white
    space or has none.
    """
    pieces: list[str] = []
    for start in range(0, len(text), _MAX_CHUNK):
        chunk = text[start : start + _MAX_CHUNK]
        if len(chunk) <= _MAX_RUN:
            pieces.append(chunk)
            continue
        begin = 0
        for run in _RUN.finditer(chunk):
            for position in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                pieces.append(chunk[begin:position])
                begin = position
        pieces.append(chunk[begin:])
    return pieces


def load_tiktoken_model(path: Path) -> TiktokenModel:
    """Read the file; a ``tokenizer_config.json`` beside it must agree on the special ids.

    Raises:
        ConfigError: not lines of a token in base64 and its rank, or not K3's number of them; or the
            configuration gives a special id another name.
    """
    ranks = _read_ranks(path)
    if len(ranks) != tokens.K3_NUM_RANKS or set(ranks.values()) != set(range(len(ranks))):
        raise ConfigError(
            f"{path}: {len(ranks)} tokens, expected {tokens.K3_NUM_RANKS} with ranks from 0"
        )
    _check_names(path.with_name("tokenizer_config.json"))
    return TiktokenModel(ranks)


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().split(b"\n"):
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read ({type(exc).__name__})") from exc
    except (ValueError, binascii.Error) as exc:
        raise ConfigError(
            f"{path}: what follows token {len(ranks)} is not a token in base64 and its rank"
        ) from exc
    return ranks


def _check_names(path: Path) -> None:
    """A checkpoint of another family must not pass for K3."""
    if not path.is_file():
        return
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: cannot be read ({type(exc).__name__})") from exc
    added = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    if not isinstance(added, dict):
        return
    for name, token_id in tokens.K3_SPECIAL_IDS.items():
        entry = added.get(str(token_id))
        found = entry.get("content") if isinstance(entry, dict) else None
        if name in tokens.CONTROL_MARKERS and entry is not None and found != name:
            raise ConfigError(
                f"{path}: id {token_id} is named '{found}', in Kimi K3 it is '{name}'"
            )
