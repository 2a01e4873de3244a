"""Answers that must have a form: JSON in the response channel, tool calls that must be made.

The whole rest of the message is one grammar over bytes and control ids, in K3's own channel order:
the think channel runs free and may only be closed properly, then the response channel opens, then
the tools. So the mask engages by itself wherever the prompt left off, and no boundary that the
model gets wrong can switch it off. llguidance computes the masks; this module writes the grammars.

Calls that the model makes on its own (``tool_choice: auto``) are held to the tools' schemas from
the moment it opens the tools channel until it closes it; before and after it is free, and nothing
is computed.

Forced calls leave the response channel empty, as clients expect null content beside them. Arguments
follow the tool's schema: each property as an ``argument`` element in the order of declaration; a
schema that goes beyond plain properties is met by one ``json`` element.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from k3vl.errors import RequestError
from k3vl.types import TextPart
from k3vl.xtml import tokens
from k3vl.xtml.values import escape_attribute

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from k3vl.types import ChatOptions, LogitMask, Request
    from k3vl.xtml.tokenizer import Tokenizer

# On one line. The template writes arguments with a space behind commas and colons, so a model of
# its format wants to; without room for it, what follows is whatever else the grammar permits.
_ONE_LINE: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
_PLAIN_OBJECT: Final = frozenset(
    {"type", "properties", "required", "additionalProperties", "description", "title"}
    | {"$defs", "definitions", "$schema", "$id", "strict"}
)
_PLAIN_STRING: Final = frozenset(
    {"type", "enum", "const", "minLength", "maxLength", "description", "title", "default"}
    | {"examples"}
)
_LONGEST_HEADER: Final = 64
_JSON_TYPES: Final = {bool: "boolean", type(None): "null", int: "number", float: "number"}


class Mask:
    """The constraint of one generation; see :class:`k3vl.types.LogitMask`."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        """Start where the prompt ended."""
        self._matcher = matcher
        self._bits = allocate_token_bitmask(1, vocab_size)

    def allowed(self) -> np.ndarray | None:
        """The tokens that the grammar has room for; all, should the matcher have failed."""
        if self._matcher.is_error():
            return None
        fill_next_token_bitmask(self._matcher, self._bits)
        bits: np.ndarray = self._bits[0]
        return bits

    def accept(self, token_id: int) -> None:
        """Step over a token."""
        self._matcher.consume_token(token_id)

    def is_complete(self) -> bool:
        """The grammar's text may end here."""
        return bool(self._matcher.is_accepting())


class Constraint(Protocol):
    """A compiled grammar; every generation takes a mask of its own."""

    def mask(self) -> LogitMask:
        """A fresh mask."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeConstraint:
    """Holds from the first token on."""

    matcher: LLMatcher
    vocab_size: int

    def mask(self) -> Mask:
        """See :class:`Constraint`."""
        return Mask(self.matcher.deep_copy(), self.vocab_size)


@dataclass(frozen=True, slots=True, eq=False)
class CallsConstraint:
    """Holds inside every tools channel that the model opens."""

    inside: WholeConstraint
    tokenizer: Tokenizer

    def mask(self) -> CallsMask:
        """See :class:`Constraint`."""
        return CallsMask(self)


class CallsMask:
    """Watches for ``<|open|>tools<|sep|>``, then masks until the channel is closed."""

    def __init__(self, constraint: CallsConstraint) -> None:
        """Start outside."""
        self._constraint = constraint
        ids = constraint.tokenizer.special_ids
        self._open, self._sep = ids[tokens.OPEN], ids[tokens.SEP]
        self._header: bytes | None = None
        self._inside: Mask | None = None

    def allowed(self) -> np.ndarray | None:
        """See :class:`k3vl.types.LogitMask`."""
        return None if self._inside is None else self._inside.allowed()

    def accept(self, token_id: int) -> None:
        """See :class:`k3vl.types.LogitMask`."""
        tokenizer = self._constraint.tokenizer
        if self._inside is not None:
            self._inside.accept(token_id)
            if self._inside.is_complete():
                self._inside = None
        elif token_id == self._open:
            self._header = b""
        elif token_id == self._sep:
            if self._header is not None and self._header.strip() == b"tools":
                self._inside = self._constraint.inside.mask()
            self._header = None
        elif tokenizer.is_control(token_id):
            self._header = None
        elif self._header is not None and len(self._header) < _LONGEST_HEADER:
            self._header += tokenizer.token_bytes(token_id)


class ConstraintCompiler:
    """Compiles what requests ask for, for one vocabulary; safe on any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Nothing is built before the first request that needs it."""
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._library: LLTokenizer | None = None

    def compile(self, request: Request) -> Constraint | None:
        """The constraint of a request; None when it asks for no form.

        Raises:
            RequestError: the schema is not valid, or the library cannot enforce it.
        """
        grammar = write_grammar(request, self._tokenizer.special_ids)
        if grammar is None:
            return self._compile_calls(request)
        matcher = self._matcher(grammar)
        if matcher.is_error():
            forced = request.options.response_format is None
            where = "tools" if forced else "response_format"
            why = matcher.get_error().partition("\n")[0][:300]
            raise RequestError(
                f"{where}: the schema cannot be enforced: {why}",
                param=where,
                code="invalid_json_schema",
            )
        prefix = _prefix(request)
        if prefix and not matcher.consume_tokens(self._tokenizer.encode_segment(prefix, False)):
            raise RequestError(
                "the text to be continued cannot begin an answer of the asked form",
                param=f"messages[{len(request.messages) - 1}].content",
            )
        return WholeConstraint(matcher, self._tokenizer.vocab_size)

    def _compile_calls(self, request: Request) -> CallsConstraint | None:
        """For calls that may be made.

        Schemas that cannot be enforced leave them free: nobody asked for a form, so the request
        must not fail for it.
        """
        grammar = write_calls_grammar(request, self._tokenizer.special_ids)
        if grammar is None:
            return None
        matcher = self._matcher(grammar)
        if matcher.is_error():
            return None
        return CallsConstraint(
            WholeConstraint(matcher, self._tokenizer.vocab_size), self._tokenizer
        )

    def _matcher(self, grammar: str) -> LLMatcher:
        library = self._tokenizer_of_library()
        return LLMatcher(library, LLMatcher.grammar_from_lark(grammar), log_level=0)

    def _tokenizer_of_library(self) -> LLTokenizer:
        with self._lock:
            if self._library is None:
                self._library = LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer)))
            return self._library


class _Vocabulary:
    """A tokenizer in the shape that llguidance reads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = tokenizer.stop_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids.values())
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode_segment(text, False)


def _prefix(request: Request) -> str:
    """The text of a message that is to be continued."""
    if not request.messages or not request.messages[-1].partial:
        return ""
    parts = request.messages[-1].parts
    return "".join(part.text for part in parts if isinstance(part, TextPart))


# ---------------------------------------------------------------------- grammars


def write_grammar(request: Request, special_ids: Mapping[str, int]) -> str | None:
    """The grammar of the rest of the message, in llguidance's Lark dialect; None without a form.

    Raises:
        RequestError: a named tool is not declared.
    """
    options = request.options
    declared = declared_functions(request)
    forced = _forced(options, declared)
    schema = _schema(options)
    if forced is None and schema is None:
        return None
    writer = _Grammar(special_ids)
    partial = bool(request.messages) and request.messages[-1].partial
    think = options.thinking and not partial
    end_response = f'{writer.close} "response" {writer.sep}'
    head = f'TEXT {writer.close} "think" {writer.sep} {writer.open} "response" {writer.sep}'
    answers = []
    if forced is not None:
        several = options.tool_choice == "required" and options.parallel_tool_calls
        calls = writer.calls(forced, several=several)
        answers = [f"{'TEXT ' if partial else ''}{end_response} {calls}"]
    else:
        body = writer.json(schema)
        answers = [f"{body} {end_response}"]
        if declared and options.tool_choice != "none":
            calls = writer.calls(declared, several=options.parallel_tool_calls)
            answers += [f"{end_response} {calls}", f"{body} {end_response} {calls}"]
    writer.rules["start"] = f'{head if think else ""} answer {writer.close} "message" {writer.sep}'
    writer.rules["answer"] = "\n  | ".join(answers)
    return writer.text()


def write_calls_grammar(request: Request, special_ids: Mapping[str, int]) -> str | None:
    """The grammar of a tools channel behind its opening tag; None where no call may be made."""
    declared = declared_functions(request)
    if not declared or request.options.tool_choice == "none":
        return None
    writer = _Grammar(special_ids)
    writer.rules["start"] = writer.calls_inside(
        declared, several=request.options.parallel_tool_calls
    )
    return writer.text()


def declared_functions(request: Request) -> list[Mapping[str, Any]]:
    """The ``function`` objects of the request's tools and of those declared on the way."""
    tools = [*request.tools, *(tool for message in request.messages for tool in message.tools)]
    functions = [tool.get("function", tool) for tool in tools]
    return [f for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)]


def _forced(
    options: ChatOptions, declared: list[Mapping[str, Any]]
) -> list[Mapping[str, Any]] | None:
    """The functions of which one must be called; None when nothing is forced."""
    choice = options.tool_choice
    if isinstance(choice, str) or choice is None:
        return declared if choice == "required" and declared else None
    name = choice.get("function", choice).get("name")
    named = [function for function in declared if function["name"] == name]
    if not named:
        raise RequestError(
            "tool_choice names a function that is not among the tools", param="tool_choice"
        )
    return named[:1]


def _schema(options: ChatOptions) -> Any:
    """The schema that the response must fit; None when it may be any text."""
    wanted = options.response_format
    kind = wanted.get("type") if not isinstance(wanted, str | None) else wanted
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        return None
    if options.response_schema is not None or isinstance(wanted, str | None):
        return options.response_schema
    spec = wanted.get("json_schema") or {}
    return spec.get("schema", spec.get("json_schema", spec))


class _Grammar:
    """Collects rules; knows K3's tags."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.open = f"<[{special_ids[tokens.OPEN]}]>"
        self.close = f"<[{special_ids[tokens.CLOSE]}]>"
        self.sep = f"<[{special_ids[tokens.SEP]}]>"
        self.rules: dict[str, str] = {}

    def text(self) -> str:
        """The grammar."""
        rules = [f"{name}: {body}" for name, body in self.rules.items()]
        return "\n".join([*rules, "TEXT: /(?s:.*)/", ""])

    def json(self, schema: Any, defs: Mapping[str, Any] | None = None) -> str:
        """A rule for JSON on one line that fits a schema."""
        if not isinstance(schema, dict):
            schema = {} if schema is True else {"not": {}}
        name = f"json_{len(self.rules)}"
        whole = {**(defs or {}), **schema, "x-guidance": _ONE_LINE}
        self.rules[name] = f"%json {json.dumps(whole)}"
        return name

    def calls(self, functions: Sequence[Mapping[str, Any]], *, several: bool) -> str:
        """A rule for the tools channel with calls of these functions."""
        inside = self.calls_inside(functions, several=several)
        self.rules["calls"] = f'{self.open} "tools" {self.sep} {inside}'
        return "calls"

    def calls_inside(self, functions: Sequence[Mapping[str, Any]], *, several: bool) -> str:
        """What follows the opening tag of the tools channel, its closing tag included."""
        self.rules["call"] = "\n  | ".join(self._call(function) for function in functions)
        return f'{"call+" if several else "call"} {self.close} "tools" {self.sep}'

    def _call(self, function: Mapping[str, Any]) -> str:
        head = f'call tool="{escape_attribute(function["name"])}" index="'
        inside = self._arguments(function.get("parameters"))
        index = '/[1-9][0-9]?/ "\\""'
        return (
            f'{self.open} {json.dumps(head)} {index} {self.sep} {inside} {self.close} "call" '
            f"{self.sep}"
        )

    def _arguments(self, parameters: Any) -> str:
        if not isinstance(parameters, dict) or not parameters:
            return '""'
        defs = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
        properties = parameters.get("properties", {})
        plain = parameters.keys() <= _PLAIN_OBJECT and isinstance(properties, dict)
        required = parameters.get("required", [])
        if plain and isinstance(required, list) and set(map(str, required)) <= properties.keys():
            written = [self._argument(key, value, defs) for key, value in properties.items()]
            if all(written):
                pairs = zip(properties, written, strict=True)
                rules = [f"{rule}{'' if key in required else '?'}" for key, rule in pairs]
                return " ".join(rules) or '""'
        body = self.json(parameters)
        head = json.dumps('json type="object"')
        return f'{self.open} {head} {self.sep} {body} {self.close} "json" {self.sep}'

    def _argument(self, key: str, schema: Any, defs: Mapping[str, Any]) -> str | None:
        """A rule for one argument element; None when its schema is not plain."""
        values = self._values(schema, defs)
        if values is None:
            return None
        escaped = escape_attribute(key)
        alternatives = []
        for kind, value in values:
            head = json.dumps(f'argument key="{escaped}" type="{kind}"')
            alternatives.append(
                f'{self.open} {head} {self.sep} {value} {self.close} "argument" {self.sep}'
            )
        name = f"argument_{len(self.rules)}"
        self.rules[name] = "\n  | ".join(alternatives)
        return name

    def _values(self, schema: Any, defs: Mapping[str, Any]) -> list[tuple[str, str]] | None:
        """(XTML type, grammar of the value's text) of everything that a plain schema permits."""
        if not isinstance(schema, dict):
            return None
        if "enum" in schema or "const" in schema:
            choices = schema["enum"] if "enum" in schema else [schema["const"]]
            if not isinstance(choices, list) or not choices:
                return None
            return [_literal(choice) for choice in choices]
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not kinds:
            return None
        values = []
        for kind in kinds:
            if kind == "string":
                if not schema.keys() <= _PLAIN_STRING:
                    return None
                values.append(("string", _string(schema)))
            else:
                only = {**schema, "type": kind}
                values.append(("number" if kind == "integer" else str(kind), self.json(only, defs)))
        return values


def _literal(value: Any) -> tuple[str, str]:
    """One permitted value."""
    if isinstance(value, str):
        return "string", json.dumps(value)
    kind = _JSON_TYPES.get(type(value), "object" if isinstance(value, dict) else "array")
    return kind, json.dumps(json.dumps(value, ensure_ascii=False))


def _string(schema: Mapping[str, Any]) -> str:
    """Raw text within the lengths that a schema states."""
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if not low and high is None:
        return "TEXT"
    return f"/(?s:.{{{int(low)},{'' if high is None else int(high)}}})/"
