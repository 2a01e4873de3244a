"""Attributes and typed arguments, both directions."""

from __future__ import annotations

import json
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3vl.errors import TemplateError
from k3vl.xtml.values import (
    argument_json,
    argument_text,
    argument_type,
    argument_value,
    escape_attribute,
    json_fragment,
    parse_header,
    strict_json,
    unescape_attribute,
)
from tests.timing import cpu_limit

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.text())
def test_attributes_survive_escaping(value):
    assert unescape_attribute(escape_attribute(value)) == value
    assert '"' not in escape_attribute(value)


def test_escaping_touches_two_characters_only():
    assert escape_attribute("<a b='&amp;\"'>\n|") == "<a b='&amp;amp;&quot;'>\n|"


@given(JSON)
def test_arguments_survive_the_way_there_and_back(value):
    kind, text = argument_type(value), argument_text(value)
    back = argument_value(kind, text)
    assert back == value
    assert type(back) is type(value)
    assert json.loads(argument_json(kind, text)) == value


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (True, "boolean", "true"),
        (None, "null", "null"),
        (1, "number", "1"),
        (1e21, "number", "1e+21"),
        ("é\n", "string", "é\n"),
        ({"b": [1, {"a": "é"}]}, "object", '{"b": [1, {"a": "é"}]}'),
        ((1, 2), "array", "[1, 2]"),
        ([MappingProxyType({"a": 1})], "array", '[{"a": 1}]'),
    ],
)
def test_types_and_spelling(value, kind, text):
    assert (argument_type(value), argument_text(value)) == (kind, text)


@pytest.mark.parametrize("value", [object(), b"x", {1}])
def test_what_is_not_json_has_no_type(value):
    with pytest.raises(TemplateError):
        argument_type(value)


@pytest.mark.parametrize(
    "text",
    ["NaN", "-Infinity", "1e999", '{"a": [1e999]}', "01", "{'a': 1}", "", "[1,]", "[" * 99999],
)
def test_strict_json_refuses_what_other_readers_refuse(text):
    with pytest.raises(ValueError):
        strict_json(text)
    assert argument_value("object", text) == text
    assert json.loads(argument_json("object", text)) == text


@pytest.mark.parametrize("unit", [("[", "]"), ('{"a":', "}")])
def test_nesting_ends_at_two_hundred(unit):
    def nested(depth):
        return unit[0] * depth + "1" + unit[1] * depth

    assert json.dumps(strict_json(nested(200)), separators=(",", ":")) == nested(200)
    assert argument_value("array", nested(201)) == nested(201)
    assert len(strict_json(json.dumps([[]] * 500))) == 500


def test_integers_beyond_pythons_limit_stay_text():
    digits = "9" * 5000
    assert argument_value("number", digits) == digits
    assert json.loads(argument_json("number", digits)) == digits


def test_numbers_keep_their_spelling():
    assert argument_json("number", "1.50") == "1.50"
    assert argument_json("number", "1E5") == "1E5"


def test_the_declared_type_is_not_enforced():
    assert argument_value("integer", "3") == 3
    assert argument_value("number", '"x"') == "x"


@given(st.lists(st.text()))
def test_fragments_concatenate_to_one_string(pieces):
    assert json.loads(f'"{"".join(map(json_fragment, pieces))}"') == "".join(pieces)


@pytest.mark.parametrize(
    ("header", "tag", "attributes"),
    [
        ("think", "think", {}),
        ("  think\n", "think", {}),
        ("", "", {}),
        ('call tool="f" index="1"', "call", {"tool": "f", "index": "1"}),
        ('call index="1"\n tool="f"', "call", {"tool": "f", "index": "1"}),
        ('a k="&amp;quot;" v="&quot;"', "a", {"k": "&quot;", "v": '"'}),
        ('a k=""', "a", {"k": ""}),
        ('a k = "v"', "a", {"k": "v"}),
        ('a k="v', "a", {}),
        ('a k=v "x" m="n"', "a", {"m": "n"}),
        ('a k="1" k="2"', "a", {"k": "2"}),
        ('a k="x y=z"', "a", {"k": "x y=z"}),
        ('a ="v"', "a", {}),
    ],
)
def test_headers(header, tag, attributes):
    assert parse_header(header) == (tag, attributes)


@pytest.mark.parametrize("unit", ['a="', 'a="b" ', '"', "=", " ", "a"])
def test_headers_take_linear_time(unit):
    with cpu_limit(2):
        parse_header("call " + unit * 200_000)
