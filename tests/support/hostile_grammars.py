"""Grammars that a client may send to exhaust a stack or a processor."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

NUM_NESTED = 30


def _rules(number: int, rule: Callable[[int], str], name: str = "r") -> str:
    chain = "\n".join(f"{name}{i}: {rule(i + 1)}" for i in range(number))
    return f'start: {name}0\n{chain}\n{name}{number}: "a"'


def _schema(number: int, value: Callable[[dict[str, str]], Any]) -> str:
    definitions = {f"d{i}": value({"$ref": f"#/$defs/d{i + 1}"}) for i in range(number)}
    schema = {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{number}": {"type": "null"}}}
    return f"%llguidance {{}}\nstart: %json {json.dumps(schema)}"


def _nested(leaf: dict[str, Any], wrap: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    for _ in range(NUM_NESTED):
        leaf = wrap(leaf)
    return leaf


CHAINS: dict[str, Callable[[int], str]] = {
    "rules": lambda number: _rules(number, lambda i: f"r{i}"),
    "rules with options": lambda number: _rules(number, lambda i: f'"b" | r{i} "c"'),
    "terminals": lambda number: _rules(number, lambda i: f'"x" T{i}', "T"),
    "rules in brackets": lambda number: _rules(
        number, lambda i: '("x" | ' * (NUM_NESTED - 5) + f"r{i}" + ")*" * (NUM_NESTED - 5)
    ),
    "references": lambda number: _schema(number, lambda ref: ref),
    "properties": lambda number: _schema(number, lambda ref: {"type": "object", "properties": {"a": ref}}),
    "anyOf": lambda number: _schema(
        number, lambda ref: _nested(dict(ref), lambda value: {"anyOf": [{"type": "null"}, value]})
    ),
    "items": lambda number: _schema(
        number, lambda ref: _nested(dict(ref), lambda value: {"type": "array", "items": value})
    ),
}
"""By what the chain is made of: makes a grammar with a chain of this length."""


def ambiguous(number: int) -> str:
    """Any number of letters up to `number`, in as many ways as there are subsets. One row has all of its items."""
    return "start: " + "a? " * number + '\na: "a"'


CONJUNCTIONS: dict[str, list[str]] = {
    "contains": [f".*a{i}.*" for i in range(200)],
    "contains, few": [f".*a{i}.*" for i in range(20)],
    "distances": [f"a.{{{i}}}b" for i in range(200)],
    "long distances": [f"a.{{{1000 + i}}}b.*" for i in range(30)],
    "ends": [f"^.*[{chr(97 + i % 26)}].{{{i % 9 + 1}}}$" for i in range(400)],
}
"""Patterns of which a string must match each. Checking them takes minutes or gigabytes."""
