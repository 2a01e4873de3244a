"""A pipeline whose answers are written by the test, token by token, and can be cancelled."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from k3vl.config import load_config, load_media_config
from k3vl.errors import Cancelled
from k3vl.lm.backend import Token
from k3vl.pipeline import Pipeline
from k3vl.types import ChatOptions
from k3vl.vision.processor import MediaProcessor
from k3vl.xtml.tokenizer import load_tokenizer
from tests.test_config import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.errors import K3VLError
    from k3vl.types import Prompt, SamplingParams

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DIRECTORY = GOLDEN / "sglang_tiny"
TOKENIZER = load_tokenizer(DIRECTORY)
END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
AFTER_CALLS = "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
THOUGHT = "<|close|>think<|sep|><|open|>response<|sep|>"
CALLS = "<|close|>response<|sep|><|open|>tools<|sep|>"
CALL = (
    '<|open|>call tool="look_up" index="1"<|sep|>'
    '<|open|>argument key="word" type="string"<|sep|>cat<|close|>argument<|sep|>'
    "<|close|>call<|sep|>"
)
TOOLS = '[{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]'


@dataclass
class ScriptedBackend:
    """Sends the next script's tokens, ``delay`` seconds apart, until it is cancelled.

    The last script is used again and again; a word of ``by_word`` in the prompt chooses another.
    ``#`` in a script is the request's number, which tells equal answers apart.
    ``running`` holds the requests that are being served, ``held`` the media that are encoded.
    """

    scripts: list[str]
    delay: float = 0.0
    by_word: dict[str, str] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)
    sampling: list[SamplingParams] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    cancelled: set[int] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    error: K3VLError | None = None

    def holds_features(self, digest: str) -> bool:
        return digest in self.held

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        sink: Callable[[Token | K3VLError], None],
    ) -> int:
        number = len(self.prompts)
        self.prompts.append(prompt)
        self.sampling.append(sampling)
        script = self.scripts[min(number, len(self.scripts) - 1)]
        asked = self.asked()
        script = next((text for word, text in self.by_word.items() if word in asked), script)
        ids = TOKENIZER.encode_segment(script.replace("#", str(number)), allow_special=True)
        self.running.add(number)
        threading.Thread(target=self._send, args=(number, ids, sink), daemon=True).start()
        return number

    def _send(self, number: int, ids: list[int], sink: Callable[..., None]) -> None:
        for position, token in enumerate(ids):
            if number in self.cancelled:
                self.running.discard(number)
                sink(Cancelled("the request was cancelled"))
                return
            if self.error is not None:
                break
            sink(Token(id=token, finish="stop" if position == len(ids) - 1 else None))
            if self.delay:
                time.sleep(self.delay)
        self.running.discard(number)
        if self.error is not None:
            sink(self.error)

    def cancel(self, request_id: int) -> None:
        self.cancelled.add(request_id)

    def close(self) -> None:
        self.cancelled.update(range(len(self.prompts)))

    def asked(self, number: int = -1) -> str:
        """The text of a prompt, control markers included."""
        ids = self.prompts[number].token_ids
        return b"".join(map(TOKENIZER.token_bytes, ids)).decode()


def scripted(*scripts: str, delay: float = 0.0, by_word: dict[str, str] | None = None) -> Pipeline:
    config = load_config(DIRECTORY)
    return Pipeline(
        processor=MediaProcessor(load_media_config(DIRECTORY)),
        tokenizer=TOKENIZER,
        backend=ScriptedBackend(list(scripts), delay, by_word or {}),
        media_pad_id=config.media_placeholder_token_id,
        defaults=ChatOptions(thinking=False),
        name="scripted",
    )
