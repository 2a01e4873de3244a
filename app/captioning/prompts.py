"""What is asked of each item, and what is made of the answer's text.

Templates hold ``{variables}``: ``path``, ``name``, ``stem``, ``folder``, ``id``, ``caption`` (an
old one: a column or a sidecar), and every column of a table. ``{{`` and ``}}`` are braces.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from k3vl.app.captioning.rows import Ask
from k3vl.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from k3vl.app.captioning.items import Item
    from k3vl.app.captioning.schema import Schema
    from k3vl.types import MediaKind, SamplingParams

DEFAULT_PROMPTS: dict[MediaKind, str] = {
    "image": "Describe the image.",
    "video": "Describe the video.",
}
PATH_VARIABLES = frozenset({"path", "name", "stem", "folder", "id", "caption"})
_FIELD = re.compile(r"\{\{|\}\}|\{([^\W\d][\w.-]*)\}")
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One template.

    Attributes:
        id: names it in outputs, and in sidecars where there are several.
        text: the template; None is the default for the kind of media.
        weight: how often it is drawn, relative to the others.
    """

    id: str
    text: str | None
    weight: float = 1.0

    @property
    def variables(self) -> frozenset[str]:
        """Names in the template."""
        return frozenset(m[1] for m in _FIELD.finditer(self.text or "") if m[1])


DEFAULT = Prompt(id="default", text=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts of a run.

    Attributes:
        prompts: at least one.
        draw: one of them for each item, by weight and seed, in place of all.
        seed: of the draw and of sampling; every item gets its own number made of it and its id.
        sampling: for every prompt.
        prefix, suffix: put around every caption.
        trigger: a word that every caption must hold; put in front where it does not.
        schema: what captions must fit; None where they are any text.
    """

    prompts: tuple[Prompt, ...] = (DEFAULT,)
    draw: Literal["all", "random"] = "all"
    seed: int | None = None
    sampling: SamplingParams
    prefix: str = ""
    suffix: str = ""
    trigger: str = ""
    schema: Schema | None = None

    @property
    def several(self) -> bool:
        """Whether an item gets more than one caption."""
        return self.draw == "all" and len(self.prompts) > 1

    def chosen(self, item: Item) -> tuple[Prompt, ...]:
        """The item's prompts; the same in every run with the same seed."""
        if self.draw == "all":
            return self.prompts
        weights = [prompt.weight for prompt in self.prompts]
        return (self._random(item, "draw").choices(self.prompts, weights)[0],)

    def ask(self, item: Item, prompt: Prompt, kind: MediaKind, old: Callable[[], str]) -> Ask:
        """Fill in a prompt.

        Raises:
            RequestError: the item has no value for a variable.
        """
        text = DEFAULT_PROMPTS[kind] if prompt.text is None else _fill(prompt.text, item, old)
        sampling = self.sampling
        if sampling.temperature > 0:
            sampling = replace(sampling, seed=self._random(item, prompt.id).getrandbits(31))
        return Ask(prompt_id=prompt.id, text=text, sampling=sampling, schema=self.schema)

    def finish(self, text: str) -> str:
        """The caption made of an answer."""
        text = text.strip()
        if self.trigger and self.trigger.casefold() not in text.casefold():
            text = f"{self.trigger}, {text}"
        return f"{self.prefix}{text}{self.suffix}"

    def _random(self, item: Item, purpose: str) -> random.Random:
        text = f"{self.seed or 0}\0{purpose}\0{item.id}".encode("utf-8", "surrogatepass")
        return random.Random(hashlib.sha256(text).digest())  # noqa: S311 - repeatable on purpose


def check_variables(prompts: Prompts, known: frozenset[str] | None) -> None:
    """Refuse templates that no item can fill; None: columns make every name possible.

    Raises:
        ConfigError: a variable is not known.
    """
    for prompt in prompts.prompts:
        unknown = sorted(prompt.variables - (known or prompt.variables))
        if unknown:
            raise ConfigError(
                f"prompt: no variable '{unknown[0]}'; there are {', '.join(sorted(known or ()))} "
                "(a brace is written {{ or }})"
            )


def _fill(template: str, item: Item, old: Callable[[], str]) -> str:
    path = PurePath(item.source.path)
    values: dict[str, str] = {
        "path": item.source.path,
        "name": path.name,
        "stem": path.stem,
        "folder": path.parent.name,
        "id": item.id,
    }
    columns: Mapping[str, str] = item.source.columns

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        if name == "caption":
            return old()
        if name in columns:
            return columns[name]
        if name in values:
            return values[name]
        raise RequestError(
            f"prompt: this item has no '{name}'", param=name, code="prompt_variable_missing"
        )

    return _FIELD.sub(value, template)


def text_prompt(text: str) -> Prompt:
    """A prompt given by itself; named after its text, so another text is another caption."""
    return Prompt(
        id="p" + hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:8], text=text
    )


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read a prompt file: a JSON list of strings or ``{"id", "text", "weight"}``, or plain text.

    Raises:
        ConfigError: it cannot be read, or an entry makes no sense.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read ({type(exc).__name__})") from exc
    if path.suffix.lower() != ".json":
        if not content.strip():
            raise ConfigError(f"{path}: no prompt in it")
        return (text_prompt(content.strip()),)
    try:
        entries = json.loads(content)
    except ValueError as exc:
        raise ConfigError(f"{path}: not JSON") from exc
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected a list of prompts")
    prompts = tuple(_entry(path, number, entry) for number, entry in enumerate(entries))
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise ConfigError(f"{path}: two prompts have the same id")
    if sum(prompt.weight for prompt in prompts) <= 0:
        raise ConfigError(f"{path}: no prompt has a weight above 0")
    return prompts


def _entry(path: Path, number: int, entry: Any) -> Prompt:
    if isinstance(entry, str):
        return text_prompt(entry)
    where = f"{path}: prompt {number + 1}"
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise ConfigError(f"{where}: expected a string or an object with 'text'")
    if unknown := sorted(set(entry) - {"id", "text", "weight"}):
        raise ConfigError(f"{where}: unknown field '{unknown[0]}'")
    name, weight = entry.get("id"), entry.get("weight", 1.0)
    if name is not None and not (isinstance(name, str) and _ID.fullmatch(name)):
        raise ConfigError(f"{where}: an id is letters, digits, - and _, at most 64 of them")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1e9:
        raise ConfigError(f"{where}: weight is not a number from 0")
    return replace(
        text_prompt(entry["text"]), id=name or text_prompt(entry["text"]).id, weight=weight
    )
