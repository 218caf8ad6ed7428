"""Which JSON schemas output can be held to, and what is wrong with others.

The grammar compiler leaves some keywords out without saying so. A request must not be answered
with text that its schema forbids, so whatever would not be enforced is refused here, with its
place. Keywords that assert nothing (``title``, ``format``, unknown ones) are let pass. This file
must not know grammars or tokenizers. Standard library only.

    text = check_schema('{"type": "array"}')    # RequestError, or the schema to compile
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from paceline.engine.regex_check import check_regex, with_safe_repeats
from paceline.errors import RequestError

MAX_DEPTH = 64  # of a schema; compile time grows with its cube
MAX_ALTERNATIVES = 500  # of a `oneOf`, which are compared with one another
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
# Keywords that say something of one kind of value; also what a schema without `type` is about.
_OF_TYPE = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
_ASSERTIONS = frozenset(name for names in _OF_TYPE.values() for name in names)
_CHOICES = ("anyOf", "oneOf", "allOf")
_VALUES = ("enum", "const")
_NOT_ENFORCED = {
    "not": "describe what is allowed",
    "if": "use `anyOf` with one alternative a case",
    "then": "use `anyOf` with one alternative a case",
    "else": "use `anyOf` with one alternative a case",
    "multipleOf": "leave it out",
    "uniqueItems": "leave it out",
    "contains": "use `items` or `prefixItems`",
    "minContains": "use `items` or `prefixItems`",
    "maxContains": "use `items` or `prefixItems`",
    "patternProperties": "use `properties` or `additionalProperties`",
    "propertyNames": "use `properties`",
    "dependentRequired": "use `anyOf` with one alternative a case",
    "dependentSchemas": "use `anyOf` with one alternative a case",
    "dependencies": "use `anyOf` with one alternative a case",
    "unevaluatedProperties": "use `additionalProperties`",
    "unevaluatedItems": "use `items`",
    "additionalItems": "use `prefixItems` and `items`",
    "$dynamicRef": "use `$ref`",
    "$recursiveRef": "use `$ref`",
}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Formats are notes, but these cost nothing to keep. Others would allow quotes inside a string.
_FORMATS = ("date", "time", "date-time", "duration", "uuid", "ipv4")
# What a JSON string holds unescaped, in ranges that the compiler turns into valid UTF-8 only.
_CHARACTER = "[ !#-\\[\\]-~\u0080-\ud7ff\ue000-\U0010ffff]"
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
# Escapes of characters that a JSON string does not hold as they are, and of some more.
_CONTROL = re.compile(r"\\([nrtfv0xc]|u00[0-7]|u\{0*[0-7]?[0-9a-fA-F]\})")


def check_schema(text: str) -> str:
    """The schema as it is to be compiled.

    What JSON Schema leaves open stays open only where nothing else is said: an object without
    ``properties`` may have any, one with them has no others unless ``additionalProperties`` says
    so.

    Raises:
        RequestError: it is no JSON, no schema, or has something that cannot be enforced.
    """
    try:
        schema = json.loads(text)
        half = _HALF_CHARACTER.search(json.dumps(schema, ensure_ascii=False))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not valid JSON: {error}") from error
    if half is not None:
        raise RequestError(
            f"the JSON schema cannot be used: it has \\u{ord(half[0]):04x}, half of a character. "
            "hint: write the pair, or the character itself"
        )
    try:
        _Checker(schema).check(schema, "#", 0)
    except RecursionError:
        raise RequestError(
            "the JSON schema cannot be used: it is nested too deeply. hint: make it flatter"
        ) from None
    return json.dumps(schema, ensure_ascii=False)


class _Checker:
    """Walks one schema; completes it in place."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._seen: set[int] = set()  # schemas, by identity: references may lead round
        # Pairs of schemas that were compared, by identity; True also while they are.
        self._overlaps: dict[tuple[int, int], bool] = {}

    def check(self, schema: Any, where: str, depth: int) -> None:
        if isinstance(schema, bool) or id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        if not isinstance(schema, dict):
            raise _fault(where, f"a schema must be an object, got {_shown(schema)}", "")
        if depth > MAX_DEPTH:
            raise _fault(where, f"it is more than {MAX_DEPTH} levels deep", "make it flatter")
        for name, hint in _NOT_ENFORCED.items():
            if schema.get(name, False) is not False:
                raise _fault(f"{where}/{name}", f"`{name}` cannot be enforced", hint)
        for name in ("$defs", "definitions"):
            self._check_each(schema.get(name, {}), f"{where}/{name}", depth)
        self._check_alone(schema, where)
        _check_type(schema, where)
        self._check_form(schema, where, depth)

    def _check_form(self, schema: dict[str, Any], where: str, depth: int) -> None:
        """A reference, alternatives, values, or a type with its keywords."""
        if "$ref" in schema:
            ref = schema["$ref"]
            if not isinstance(ref, str) or ref.split("/")[0] != "#":
                problem = f"{_shown(ref)} does not point into this schema"
                raise _fault(f"{where}/$ref", problem, "use #/$defs/…")
            self.check(self._target(ref, where), ref, depth + 1)
            return
        choice = next((name for name in _CHOICES if name in schema), None)
        if choice is not None:
            self._check_choice(choice, schema[choice], f"{where}/{choice}", depth)
        elif any(name in schema for name in _VALUES):
            _check_values(schema, where)
        else:
            self._check_typed(schema, where, depth)

    def _check_alone(self, schema: dict[str, Any], where: str) -> None:
        """References, alternatives and values are taken alone: nothing beside them would count."""
        name = next((n for n in ("$ref", *_CHOICES, *_VALUES) if n in schema), None)
        others = _ASSERTIONS | {"type", "$ref", *_CHOICES, *_VALUES}
        if name in _VALUES:
            others = others - {"type"}
        beside = [n for n in schema if n in others and n != name]
        if name is not None and beside:
            raise _fault(
                f"{where}/{beside[0]}",
                f"`{beside[0]}` beside `{name}` cannot be enforced",
                f"move it into what `{name}` names",
            )

    def _target(self, ref: str, where: str) -> Any:
        """What a reference points to."""
        target = self._root
        for step in ref.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or key not in target:
                raise _fault(f"{where}/$ref", f"no object has {_shown(ref)}", "define it")
            target = target[key]
        return target

    def _check_choice(self, name: str, options: Any, where: str, depth: int) -> None:
        if not isinstance(options, list) or not options:
            raise _fault(where, f"`{name}` must be a list of schemas", "")
        if name == "allOf" and len(options) > 1:
            raise _fault(where, "`allOf` of several schemas cannot be enforced", "merge them")
        for place, option in enumerate(options):
            self.check(option, f"{where}/{place}", depth + 1)
        if name == "oneOf":
            if len(options) > MAX_ALTERNATIVES:
                problem = f"{len(options)} alternatives, and {MAX_ALTERNATIVES} are allowed"
                raise _fault(where, problem, "use `enum` for values, or `anyOf`")
            for place, option in enumerate(options):
                if any(self._overlap(option, other) for other in options[:place]):
                    raise _fault(
                        f"{where}/{place}",
                        "text could fit this alternative of `oneOf` and an earlier one",
                        "use `anyOf`, or give them different types or a required constant",
                    )

    def _overlap(self, one: Any, other: Any) -> bool:
        """Whether some value may fit both; True where that is not easy to tell."""
        one, other = self._resolved(one), self._resolved(other)
        pair = id(one), id(other)
        if pair not in self._overlaps:
            self._overlaps[pair] = True
            self._overlaps[pair] = self._compare(one, other)
        return self._overlaps[pair]

    def _compare(self, one: Any, other: Any) -> bool:
        if not isinstance(one, dict) or not isinstance(other, dict):
            return True
        values = _values_of(one), _values_of(other)
        if values[0] is not None and values[1] is not None:
            return any(_same(a, b) for a in values[0] for b in values[1])
        types = _types_of(one), _types_of(other)
        if not types[0] or not types[1]:
            return True
        if not types[0] & types[1]:
            return False
        if types[0] & types[1] != {"object"}:
            return True
        shared = set(one.get("required", ())) & set(other.get("required", ()))
        for key in shared & set(one.get("properties", {})) & set(other.get("properties", {})):
            if not self._overlap(one["properties"][key], other["properties"][key]):
                return False
        return True

    def _resolved(self, schema: Any) -> Any:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._target(schema["$ref"], "#")
        return schema

    def _check_each(self, schemas: Any, where: str, depth: int) -> None:
        if not isinstance(schemas, dict):
            raise _fault(where, f"it must be an object of schemas, got {_shown(schemas)}", "")
        for key, schema in schemas.items():
            self.check(schema, f"{where}/{_escaped(key)}", depth + 1)

    def _check_typed(self, schema: dict[str, Any], where: str, depth: int) -> None:
        if "type" not in schema:
            about = [of for of, names in _OF_TYPE.items() if any(n in schema for n in names)]
            if len(about) > 1:
                raise _fault(where, f"it speaks of {' and '.join(about)}", "say which in `type`")
            if about:
                schema["type"] = about[0]
        types = schema.get("type")
        named = set(types) if isinstance(types, list) else {types}
        _check_counts(schema, where)
        if "object" in named:
            self._check_object(schema, where, depth)
        if "array" in named:
            self._check_array(schema, where, depth)
        if "string" in named:
            _check_string(schema, where)

    def _check_object(self, schema: dict[str, Any], where: str, depth: int) -> None:
        properties = schema.get("properties", {})
        self._check_each(properties, f"{where}/properties", depth)
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(n, str) for n in required):
            raise _fault(f"{where}/required", "it must be a list of names", "")
        for name in required:
            if name not in properties:
                raise _fault(
                    f"{where}/required", f"{_shown(name)} is not in `properties`", "add it there"
                )
        if not properties:
            schema.setdefault("additionalProperties", True)
        others = schema.get("additionalProperties", False)
        self.check(others, f"{where}/additionalProperties", depth + 1)
        if others is not False and schema.get("minProperties"):
            raise _fault(
                f"{where}/minProperties",
                "it cannot be enforced where names are free, as they may repeat",
                "name the properties in `required`",
            )

    def _check_array(self, schema: dict[str, Any], where: str, depth: int) -> None:
        first = schema.get("prefixItems", [])
        if not isinstance(first, list):
            raise _fault(f"{where}/prefixItems", "it must be a list of schemas", "")
        for place, item in enumerate(first):
            self.check(item, f"{where}/prefixItems/{place}", depth + 1)
        if not first:
            schema.setdefault("items", True)
        if isinstance(schema.get("items"), list):
            raise _fault(f"{where}/items", "a list of schemas is an old form", "use `prefixItems`")
        self.check(schema.get("items", False), f"{where}/items", depth + 1)


def _check_type(schema: dict[str, Any], where: str) -> None:
    types = schema.get("type")
    if types == []:
        raise _fault(f"{where}/type", "it names no type", f"use {', '.join(_TYPES)}")
    for one in types if isinstance(types, list) else [types] if "type" in schema else []:
        if one not in _TYPES:
            raise _fault(
                f"{where}/type", f"there is no type {_shown(one)}", f"use {', '.join(_TYPES)}"
            )


def _check_counts(schema: dict[str, Any], where: str) -> None:
    for name in _COUNTS:
        value = schema.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise _fault(f"{where}/{name}", f"it must be a count, got {_shown(value)}", "")
    for what in ("Length", "Items", "Properties"):
        low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}")
        if high is not None and low > high:
            raise _fault(f"{where}/min{what}", f"{low} is above `max{what}` {high}", "")
    for name in _OF_TYPE["number"]:
        value = schema.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _fault(f"{where}/{name}", f"it must be a number, got {_shown(value)}", "")


def _check_string(schema: dict[str, Any], where: str) -> None:
    lengths = [name for name in ("minLength", "maxLength") if name in schema]
    if "pattern" in schema:
        _check_pattern(schema, where)
    elif lengths:
        # The compiler's own form of lengths lets control characters into the string.
        low, high = schema.pop("minLength", 0), schema.pop("maxLength", "")
        schema["pattern"] = f"^{_CHARACTER}{{{low},{high}}}$"
    if "pattern" in schema:
        schema["pattern"] = with_safe_repeats(schema["pattern"])
    if "pattern" in schema or schema.get("format") not in _FORMATS:
        schema.pop("format", None)


def _check_pattern(schema: dict[str, Any], where: str) -> None:
    pattern = schema["pattern"]
    if "minLength" in schema or "maxLength" in schema:
        raise _fault(
            f"{where}/pattern",
            "lengths beside a `pattern` cannot be enforced",
            "say the length in the pattern, as in ^[a-z]{2,5}$",
        )
    if not isinstance(pattern, str):
        raise _fault(f"{where}/pattern", f"it must be a string, got {_shown(pattern)}", "")
    check_regex(pattern, f"the pattern of the JSON schema at {where}")
    plain = pattern.replace("\\\\", "\n")
    if any(c == '"' or c < " " for c in plain) or _CONTROL.search(plain):
        raise _fault(
            f"{where}/pattern",
            "quotes, backslashes and control characters in a pattern cannot be enforced",
            "leave them out",
        )


def _check_values(schema: dict[str, Any], where: str) -> None:
    values = _values_of(schema)
    if not isinstance(values, list) or not values:
        raise _fault(f"{where}/enum", "it must be a list of values", "")
    types = _types_of({"type": schema["type"]}) if "type" in schema else None
    for value in values:
        if types is not None and not types & _types_of_value(value):
            raise _fault(
                where, f"{_shown(value)} is not of the type that `type` says", "leave one out"
            )


def _values_of(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values: list[Any] | None = schema.get("enum")
    return values


def _types_of(schema: dict[str, Any]) -> set[str]:
    """Types that a schema names or its values have; every integer is a number too."""
    values = _values_of(schema)
    if isinstance(values, list):
        return set().union(*(_types_of_value(value) for value in values))
    types = schema.get("type", [])
    named = {types} if isinstance(types, str) else set(types)
    return named | ({"integer"} if "number" in named else set())


def _types_of_value(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    kinds: Iterable[tuple[type, str]] = (
        (float, "number"),
        (str, "string"),
        (list, "array"),
        (dict, "object"),
    )
    return {name for kind, name in kinds if isinstance(value, kind)} or {"null"}


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _escaped(key: str) -> str:
    """A key as one step of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _fault(where: str, what: str, hint: str) -> RequestError:
    ending = f". hint: {hint}" if hint else ""
    return RequestError(f"the JSON schema cannot be used: at {where}: {what}{ending}")
