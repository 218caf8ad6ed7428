"""Schemas and expressions: what is refused, where it says the fault is, and what is completed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.engine.json_schema import _CHARACTER, MAX_DEPTH, check_regex, check_schema
from paceline.errors import RequestError


def checked(schema: Any) -> Any:
    return json.loads(check_schema(json.dumps(schema)))


def integer_at(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "where", "says"),
    [
        ([1], "#", "must be an object"),
        ({"type": "objekt"}, "#/type", 'no type "objekt"'),
        ({"type": ["string", 3]}, "#/type", "no type 3"),
        ({"properties": {"a/b": {"type": "x"}}}, "#/properties/a~1b/type", "no type"),
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems", "cannot be enforced"),
        ({"not": {"type": "string"}}, "#/not", "cannot be enforced"),
        ({"type": "integer", "multipleOf": 2}, "#/multipleOf", "cannot be enforced"),
        ({"$ref": "#/$defs/x"}, "#/$ref", '"#/$defs/x"'),
        ({"$ref": "other.json"}, "#/$ref", "does not point into this schema"),
        ({"$ref": 3}, "#/$ref", "does not point"),
        ({"$defs": {"n": {}}, "$ref": "#/$defs/n", "minimum": 3}, "#/minimum", "beside `$ref`"),
        ({"type": "integer", "anyOf": [{"minimum": 3}]}, "#/type", "beside `anyOf`"),
        ({"anyOf": []}, "#/anyOf", "list of schemas"),
        ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "#/allOf", "merge them"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf/1", "use `anyOf`"),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "#/oneOf/1", "use `anyOf`"),
        ({"type": "string", "enum": ["a", 1]}, "#", "1 is not of the type"),
        ({"enum": []}, "#/enum", "list of values"),
        ({"const": 1, "minimum": 3}, "#/minimum", "beside `const`"),
        ({"type": "object", "required": ["z"]}, "#/required", '"z" is not in `properties`'),
        ({"type": "object", "required": "z"}, "#/required", "list of names"),
        ({"properties": 3}, "#/properties", "object of schemas"),
        ({"additionalProperties": True, "minProperties": 1}, "#/minProperties", "names are free"),
        ({"minLength": -1}, "#/minLength", "must be a count"),
        ({"minLength": 5, "maxLength": 2}, "#/minLength", "5 is above `maxLength` 2"),
        ({"minimum": "3"}, "#/minimum", "must be a number"),
        ({"pattern": "a", "maxLength": 3}, "#/pattern", "lengths beside"),
        ({"pattern": 'a"b'}, "#/pattern", "quotes"),
        ({"pattern": r"a\\b"}, "#/pattern", "backslashes"),
        ({"pattern": r"a\u0022b"}, "#/pattern", "quotes"),
        ({"pattern": "a\x01b"}, "#/pattern", "control characters"),
        ({"pattern": r"a\bc"}, "#", r"escape \b at character 2"),
        ({"items": [{"type": "string"}]}, "#/items", "prefixItems"),
        ({"minimum": 3, "minLength": 3}, "#", "string and number"),
        (integer_at(MAX_DEPTH + 1), "#/items", "levels deep"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_place(
    schema: Any, where: str, says: str
) -> None:
    with pytest.raises(RequestError) as caught:
        checked(schema)
    assert f"at {where}" in str(caught.value)
    assert says in str(caught.value)


def test_text_that_is_no_json_is_refused_with_line_and_column() -> None:
    with pytest.raises(RequestError, match=r"not valid JSON: .*line 2 column 11"):
        check_schema('{"type":\n "string" x}')
    with pytest.raises(RequestError, match="not valid JSON"):
        check_schema("[" * 100_000)


@pytest.mark.parametrize(
    ("schema", "completed"),
    [
        ({"type": "array"}, {"type": "array", "items": True}),
        ({"type": "object"}, {"type": "object", "additionalProperties": True}),
        ({"minimum": 3}, {"minimum": 3, "type": "number"}),
        ({"minLength": 3}, {"type": "string", "pattern": f"^{_CHARACTER}{{3,}}$"}),
        (
            {"type": "string", "maxLength": 2},
            {"type": "string", "pattern": f"^{_CHARACTER}{{0,2}}$"},
        ),
        ({"type": "string", "format": "email"}, {"type": "string"}),
        (
            {"properties": {"a": {"maxItems": 1}}},
            {
                "properties": {"a": {"maxItems": 1, "type": "array", "items": True}},
                "type": "object",
            },
        ),
    ],
)
def test_what_is_left_open_is_said(schema: Any, completed: Any) -> None:
    assert checked(schema) == completed


TAGGED = {
    "$defs": {
        kind: {
            "type": "object",
            "properties": {"kind": {"const": kind}, "next": {"$ref": "#"}},
            "required": ["kind"],
        }
        for kind in ("a", "b")
    },
    "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        TAGGED,
        {"oneOf": [{"type": "integer"}, {"type": "string"}, {"const": None}]},
        {"title": "T", "description": "d", "default": 3, "examples": [1], "x-own": {"not": 1}},
        {"type": "string", "format": "date"},
        {"type": "string", "pattern": r"^[a-z]{2}-\d+$"},
        {"type": ["integer", "null"], "minimum": 0},
        {"allOf": [{"type": "string"}]},
        {"type": "array", "prefixItems": [{"type": "integer"}], "uniqueItems": False},
        integer_at(MAX_DEPTH - 1),
    ],
)
def test_what_can_be_enforced_stays_as_it_is(schema: Any) -> None:
    assert checked(schema) == schema


@pytest.mark.parametrize("pattern", ["^a$", "^a$|^b$", r"[$^\]]\$\^", r"\d\.\u00e9", "", "a\\"])
def test_expressions_that_mean_what_they_say(pattern: str) -> None:
    check_regex(pattern, "the expression")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("a^b", r"\^ at character 2"),
        ("(a$)b", r"\$ at character 3"),
        ("a$b", r"\$ at character 2"),
        (r"a\Z", r"escape \\Z at character 2"),
        (r"\bfoo", r"escape \\b at character 1"),
        (r"\u00e", r"escape \\u at character 1"),
        (r"a\x4g", r"escape \\x at character 2"),
    ],
)
def test_expressions_that_would_mean_something_else(pattern: str, says: str) -> None:
    with pytest.raises(RequestError, match=f"the expression has .*{says}.*hint: "):
        check_regex(pattern, "the expression")
