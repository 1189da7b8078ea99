"""What grammars need to know of JSON schemas: what says nothing to them, and the place of a fault. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from tandem.protocol.messages.grammar import GrammarCheck
from tandem.proxy.api.schema import JsonObject

MAX_PARTS = 200
"""Parts of a schema that are checked, each with the schema's definitions."""
_MAX_PLACE_CHARACTERS = 200
_NO_SCHEMA = "schema must be an object or boolean"
"""The library's reason where a number, a string or null stands in place of a schema."""
_ANNOTATIONS = frozenset({"title", "description", "examples", "default", "$comment", "deprecated"})
_DEFINITIONS = ("$defs", "definitions")
_SCHEMAS_BY_NAME = ("properties", "patternProperties")
_SCHEMAS = ("additionalProperties", "items", "prefixItems", "anyOf", "oneOf", "allOf")
_PLAIN = re.compile(r"[\w$-]{1,64}\Z")


def without_annotations(schema: JsonObject) -> JsonObject:
    """Returns the schema without keywords that allow and forbid nothing: they are most of the text of many tools."""
    smaller: JsonObject = {}
    pending = [(schema, smaller)]

    def copy(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        pending.append((part, {}))
        return pending[-1][1]

    for source, target in pending:  # grows
        for keyword, value in source.items():
            if keyword in _ANNOTATIONS:
                continue
            if keyword in (*_SCHEMAS_BY_NAME, *_DEFINITIONS) and isinstance(value, dict):
                target[keyword] = {name: copy(part) for name, part in value.items()}
            elif keyword in _SCHEMAS:
                target[keyword] = [copy(part) for part in value] if isinstance(value, list) else copy(value)
            else:
                target[keyword] = value
    return smaller


def find_fault(schema: JsonObject, reason: str, check: Callable[[JsonObject], GrammarCheck]) -> str:
    """Returns the place, such as `.properties.city`, whose check by itself has the same result; "" for the whole.

    reason: the error of the whole schema. Where checking the parts takes too long, the place is one that contains it.
    """
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    node, place, seen = schema, "", {id(schema)}
    num_parts = 0
    while True:
        for step, part in _parts(node):
            if not isinstance(part, dict):
                if reason == _NO_SCHEMA and not isinstance(part, bool):
                    return _shown(place + step)
                continue
            if num_parts == MAX_PARTS or (result := check(definitions | part)).is_over_time:
                return _shown(place)
            num_parts += 1
            if result.error == reason:
                node, place = part, place + step
                break
        else:
            found = _referred(schema, node.get("$ref"))
            if found is None or id(found[1]) in seen:
                return _shown(place)
            place, node = found
            seen.add(id(node))


def _parts(node: JsonObject) -> Iterator[tuple[str, Any]]:
    """Yields the schemas directly within a schema, each with the steps to it."""
    for keyword in _SCHEMAS_BY_NAME:
        if isinstance(members := node.get(keyword), dict):
            yield from ((f".{keyword}{_step(name)}", part) for name, part in members.items())
    for keyword in _SCHEMAS:
        if keyword not in node:
            continue
        value = node[keyword]
        if isinstance(value, list):
            yield from ((f".{keyword}[{number}]", part) for number, part in enumerate(value))
        else:
            yield f".{keyword}", value


def _referred(schema: JsonObject, reference: Any) -> tuple[str, JsonObject] | None:
    """Returns the place and the schema that a reference within the schema names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    node: Any = schema
    place = ""
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or name not in node:
            return None
        node, place = node[name], place + _step(name)
    return (place, node) if isinstance(node, dict) else None


def _step(name: str) -> str:
    return f".{name}" if _PLAIN.match(name) else f"[{name[:64]!r}]"


def _shown(place: str) -> str:
    return place if len(place) <= _MAX_PLACE_CHARACTERS else f"{place[:_MAX_PLACE_CHARACTERS]}..."
