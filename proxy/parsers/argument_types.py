"""JSON types of tools' arguments by their schemas, and the conversion of values that models write without a type. Pure.

Families that write arguments in tags (`<parameter=zip>90210</parameter>`) do not say whether a value is a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from tandem.proxy.parsers.python_arguments import python_value, whole_characters

JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MAX_DEPTH = 32
"""Schemas within schemas that are looked at. Deeper ones allow any type."""
_MAX_STEPS = 20_000
"""Schemas, names and values of one tool that are looked at, about 30 ms; further ones allow any type. References repeat
what they name, so the number is not limited by the schema's size."""

Types = tuple[str, ...]
"""JSON types that a value may have; empty if any."""
TEXT: Types = ("string",)
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")


class ToolArguments(msgspec.Struct, frozen=True):
    """types: by name of the argument. others: of arguments that the schema does not name."""

    types: dict[str, Types] = {}
    others: Types = ()

    @classmethod
    def of(cls, schema: Any) -> ToolArguments:
        """schema: JSON schema of all arguments of a tool."""
        reader = _SchemaReader(schema)
        found = {name: _packed(types) for name, types in reader.properties(schema).items()}
        others = schema.get("additionalProperties") if isinstance(schema, dict) else None
        return cls(found, _packed(reader.types(others)))

    def of_argument(self, name: str) -> Types:
        return self.types.get(name, self.others)


def _packed(types: frozenset[str]) -> Types:
    return () if types >= JSON_TYPES else tuple(sorted(types))


class _SchemaReader:
    """Reads one schema. Each `$ref` is followed once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_steps_left = _MAX_STEPS
        self._types: dict[str, frozenset[str]] = {}  # of what a reference names
        self._properties: dict[str, dict[str, frozenset[str]]] = {}

    def types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Returns the types that the schema allows. A recursive reference allows any type where it is met again."""
        self._num_steps_left -= 1
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or self._num_steps_left < 0:
            return JSON_TYPES
        allowed = JSON_TYPES
        given, enum = schema.get("type"), schema.get("enum")
        self._num_steps_left -= sum(len(values) for values in (given, enum) if isinstance(values, list))
        if names := _names(given):
            allowed &= names | ({"integer"} if "number" in names else set())
        if isinstance(enum, list):
            allowed &= {_type_of(value) for value in enum}
        if "const" in schema:
            allowed &= {_type_of(schema["const"])}
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._types:
                self._types[reference] = JSON_TYPES
                self._types[reference] = self.types(self._referred(reference), depth + 1)
            allowed &= self._types[reference]
        for keyword in ("anyOf", "oneOf"):
            if members := _members(schema, keyword):
                allowed &= frozenset().union(*(self.types(member, depth + 1) for member in members))
        for member in _members(schema, "allOf"):
            allowed &= self.types(member, depth + 1)
        if schema.get("nullable") is True:
            allowed |= {"null"}
        return allowed or JSON_TYPES  # nothing is valid

    def properties(self, schema: Any, depth: int = 0) -> dict[str, frozenset[str]]:
        """Returns the types of the members that an object may have."""
        self._num_steps_left -= 1
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or self._num_steps_left < 0:
            return {}
        own = schema.get("properties")
        found = {name: self.types(value) for name, value in own.items()} if isinstance(own, dict) else {}
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._properties:
                self._properties[reference] = {}
                self._properties[reference] = self.properties(self._referred(reference), depth + 1)
            self._restrict(found, self._properties[reference])
        for member in _members(schema, "allOf"):
            self._restrict(found, self.properties(member, depth + 1))
        for keyword in ("anyOf", "oneOf"):
            union: dict[str, frozenset[str]] = {}
            for member in _members(schema, keyword):
                for name, types in self.properties(member, depth + 1).items():
                    union[name] = union.get(name, frozenset()) | types
            self._restrict(found, union)
        return found

    def _restrict(self, found: dict[str, frozenset[str]], more: dict[str, frozenset[str]]) -> None:
        self._num_steps_left -= len(more)
        if self._num_steps_left >= 0:
            for name, types in more.items():
                found[name] = (found.get(name, JSON_TYPES) & types) or JSON_TYPES

    def _referred(self, reference: str) -> Any:
        """Returns the schema that a reference within the tool's schema names; None if there is none."""
        if not reference.startswith("#"):
            return None
        found = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict):
                return None
            found = found.get(part)
        return found


def _members(schema: dict[str, Any], keyword: str) -> list[Any]:
    members = schema.get(keyword)
    return members if isinstance(members, list) else []


def _names(given: Any) -> frozenset[str]:
    """Returns the known names in `type`, which is a name or a list of names."""
    names: Iterable[Any] = given if isinstance(given, list) else [given]
    return frozenset(name for name in names if isinstance(name, str) and name in JSON_TYPES)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    kinds = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds[type(value)]


# ---- values


def typed_value(text: str, types: Types) -> str:
    """Returns the JSON of a value that the model wrote as plain text.

    A value that may be a string is one unless the text is exactly the JSON of another type that is allowed. Otherwise
    Python's spellings are taken too. Text that is no allowed value stays what it is: JSON where it is JSON, else a
    string. The client checks it against the schema.
    """
    if types == TEXT:
        return json.dumps(text, ensure_ascii=False)
    is_json, value = _decoded(text)
    if is_json and not types:
        return text.strip()
    if "string" not in types:
        if isinstance(value, str):  # the value was quoted
            text = value
            is_json, value = _decoded(text)
        if types and (spelt := _spelt_value(text.strip(), types)) is not None:
            return spelt
    if is_json and (kind := _type_of(value)) != "string":
        if kind == "number" and "number" not in types and "integer" in types and float(value).is_integer():
            return str(int(value))
        is_allowed = kind in types or (kind == "integer" and "number" in types)
        if is_allowed or "string" not in types:
            return text.strip()
    return json.dumps(text, ensure_ascii=False)


def _decoded(text: str) -> tuple[bool, Any]:
    """Returns whether the text is JSON, and its value."""
    try:
        return True, json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False, None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _spelt_value(text: str, types: Types) -> str | None:
    """Returns the JSON of a value in Python's spelling, if its type is allowed."""
    word = text.lower()
    if "boolean" in types and word in ("true", "false"):
        return word
    if "null" in types and word in ("null", "none"):
        return "null"
    opening = {"{": "object", "[": "array", "(": "array"}.get(text[:1], "")
    if opening not in types or _decoded(text)[0]:
        return None
    return python_value(text)


def marked_types(types: Types, is_string: str | None) -> Types:
    """Returns the types of an argument whose tag says whether it is a string. is_string: "true", "false" or None."""
    if is_string == "true" and (not types or "string" in types):
        return TEXT
    if is_string == "false" and types != TEXT:
        return tuple(kind for kind in types or sorted(JSON_TYPES) if kind != "string")
    return types


def decoded_string(text: str) -> str:
    """Returns the value of a JSON string without its quotes, or the text itself if it is none."""
    try:
        value: str = json.loads(f'"{_CUT_ESCAPE.sub("", text)}"', strict=False)
    except ValueError:
        return text
    return whole_characters(value)
