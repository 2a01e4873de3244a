"""Our vocabularies behind transformers' tokenizer interface.

A token is named by its bytes, each written as the letter that byte-level BPE has for it; special
tokens by their own names. Text given to the tokenizer itself is read as transformers does: the name
of a special token is that token (unless ``split_special_tokens``). Text of messages is not: see
:meth:`k3vl.hf.processing.KimiK3Processor.apply_chat_template`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AddedToken, PreTrainedTokenizer

from k3vl.errors import ConfigError
from k3vl.xtml.tokenizer import load_tokenizer
from k3vl.xtml.tokenizer_json import byte_letters
from k3vl.xtml.tokens import CLOSE, OPEN, SEP

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from k3vl.xtml.tokenizer import Tokenizer


class KimiK3Tokenizer(PreTrainedTokenizer):
    """``tiktoken.model`` or ``tokenizer.json``, padded on the left.

    Attributes:
        vocabulary: our tokenizer, which does the work.

    Raises:
        ConfigError: there is neither file, or it cannot be used.
    """

    vocab_files_names = {  # noqa: RUF012 - the base class declares the type
        "vocab_file": "tiktoken.model",
        "tokenizer_file": "tokenizer.json",
    }
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 - likewise
    padding_side = "left"

    def __init__(
        self, vocab_file: str | None = None, tokenizer_file: str | None = None, **kwargs: Any
    ) -> None:
        found = vocab_file or tokenizer_file
        if found is None:
            raise ConfigError("KimiK3Tokenizer: neither tiktoken.model nor tokenizer.json is there")
        self._file = Path(found)
        self.vocabulary: Tokenizer = load_tokenizer(self._file.parent)
        self._letter_of = {byte: letter for letter, byte in byte_letters().items()}
        self._byte_of = byte_letters()
        special = self.vocabulary.special_ids
        self._ids = {
            self._convert_id_to_token(token_id): token_id
            for token_id in range(self.vocabulary.vocab_size)
            if self.vocabulary.token_bytes(token_id)
        }
        kwargs["extra_special_tokens"] = [
            AddedToken(name, special=True, normalized=False) for name in special
        ]
        kwargs["added_tokens_decoder"] = {
            token_id: AddedToken(name, special=True, normalized=False)
            for name, token_id in special.items()
        }
        super().__init__(**kwargs)  # type: ignore[no-untyped-call] # it has no types

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self.vocabulary.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Name -> id of every token, special ones included."""
        return dict(self._ids)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        ids = self.vocabulary.encode_segment(text, allow_special=False)
        return [self._convert_id_to_token(token_id) for token_id in ids]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        data = self.vocabulary.token_bytes(index)
        if self.vocabulary.is_control(index):
            return data.decode()
        return "".join(self._letter_of[byte] for byte in data)

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """Text of ids; without markers, the tags that stand between markers go too."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if skip_special_tokens:
            ids = [*self._text_ids(ids)]
        return super()._decode(ids, skip_special_tokens, clean_up_tokenization_spaces, **kwargs)

    def _text_ids(self, ids: Iterable[int]) -> Iterator[int]:
        special = self.vocabulary.special_ids
        begins, end = (special[OPEN], special[CLOSE]), special[SEP]
        in_tag = False
        for token_id in ids:
            in_tag = token_id in begins or (in_tag and token_id != end)
            if not in_tag:
                yield token_id

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Text of tokens; bytes that are no UTF-8 become replacement characters."""
        data = bytearray()
        for token in tokens:
            if token in self.vocabulary.special_ids:
                data += token.encode()
            else:
                data += bytes(self._byte_of[letter] for letter in token)
        return data.decode("utf-8", "replace")

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        """Copy the vocabulary file as it is."""
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        target = Path(save_directory) / f"{prefix}{self._file.name}"
        if target.resolve() != self._file.resolve():
            shutil.copyfile(self._file, target)
        return (str(target),)
