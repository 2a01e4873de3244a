"""A JSON schema that captions must fit: how it is asked for, and whether an answer fits it.

The embedded engine can write nothing that does not begin a fitting answer (``k3vl.constrain``); an
endpoint may promise as much and not keep it, and either may run out of tokens half-way. So every
answer is read and checked before it becomes a row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3vl.app.extras import needs_extra
from k3vl.errors import ConfigError, K3VLError

if TYPE_CHECKING:
    from pathlib import Path

    import jsonschema_rs

_COMBINING = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"}
)
_OPENING = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})


class SchemaError(K3VLError):
    """An answer is not what the schema asks for."""


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """A schema that was read and understood.

    Attributes:
        content: the schema itself.
        asked: what models are asked for: the same, but an object that does not say whether it has
            more than its declared properties has none. Else a model may go on for ever with
            properties of its own.
        validator: checks values.
    """

    content: dict[str, Any]
    asked: dict[str, Any]
    validator: jsonschema_rs.Validator

    @classmethod
    def load(cls, path: Path) -> Schema:
        """Read a file.

        Raises:
            ConfigError: it cannot be read, is no schema, or the validator is not installed.
        """
        with needs_extra("caption", "--json-schema"):
            import jsonschema_rs
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise ConfigError(f"{path}: cannot be read ({type(exc).__name__})") from exc
        except ValueError as exc:
            raise ConfigError(f"{path}: not JSON") from exc
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: a schema is a JSON object")
        try:
            return cls(content, closed(content), jsonschema_rs.validator_for(content))
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as exc:
            why = str(exc).partition("\n")[0]
            raise ConfigError(f"{path}: not a JSON schema: {why[:300]}") from exc

    @property
    def response_format(self) -> dict[str, Any]:
        """The request's field, as OpenAI names it."""
        return {
            "type": "json_schema",
            "json_schema": {"name": "caption", "strict": True, "schema": self.asked},
        }

    def read(self, text: str, finish: str) -> Any:
        """The value that an answer holds.

        Args:
            text: the whole answer.
            finish: why it ended.

        Raises:
            SchemaError: it is no JSON, or does not fit.
        """
        try:
            value = json.loads(text)
        except ValueError as exc:
            if finish == "length":
                reason = "--max-tokens ended the answer before its JSON was complete"
            else:
                reason = "the answer is not JSON"
            raise SchemaError(reason) from exc
        problem = next(self.validator.iter_errors(value), None)
        if problem is not None:
            where = "".join(f"[{json.dumps(key)}]" for key in problem.instance_path)
            raise SchemaError(f"the answer does not fit the schema at ${where}")
        return value


def closed(schema: Any) -> Any:
    """Objects without a word on further properties get none; whatever fits fits as well before.

    Parts that are combined (``allOf`` and the like) are left alone: together they may need what
    one of them does not declare.
    """
    if not isinstance(schema, dict) or schema.keys() & _COMBINING:
        return schema
    result = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(parts := schema.get(name), dict):
            result[name] = {key: closed(part) for key, part in parts.items()}
    if "items" in schema:
        result["items"] = closed(schema["items"])
    if "properties" in schema and not schema.keys() & _OPENING:
        result["additionalProperties"] = False
    return result
