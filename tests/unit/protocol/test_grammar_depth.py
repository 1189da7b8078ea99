"""The depth of grammars: chains of references and nested values are counted, and any text takes little time."""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from contextlib import suppress
from typing import Any

import pytest

from tandem.protocol.messages.grammar import MAX_GRAMMAR_BYTES, MAX_GRAMMAR_DEPTH, check_grammar, grammar_depth
from tests.support.hostile_grammars import CHAINS


def schema(value: dict[str, Any]) -> str:
    return f"%llguidance {{}}\nstart: %json {json.dumps(value)}"


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ('start: "a"', 1),
        ('start: a b\na: "((((" /[(]/ // ((((\nb: C\nC: "x"', 3),
        ('start: (("a"))', 3),
        ('start: "b" | "(" start ")"', 1),
        (schema({"type": "object", "properties": {"a": {"type": "string"}}}), 4),
        (schema({"properties": {"next": {"$ref": "#"}}}), 4),
        (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"items": {}}}}), 6),
    ],
)
def test_references_and_nested_values_are_levels(text: str, depth: int) -> None:
    assert grammar_depth(text) == depth


@pytest.mark.parametrize("kind", CHAINS)
def test_chains_are_refused_beyond_the_limit_and_served_within_it(kind: str) -> None:
    length = bisect_right(range(1100), MAX_GRAMMAR_DEPTH, key=lambda n: grammar_depth(CHAINS[kind](n))) - 1
    assert not check_grammar(CHAINS[kind](length)).error
    for beyond in (length + 1, 2 * length, 3 * length):
        if len(CHAINS[kind](beyond)) <= MAX_GRAMMAR_BYTES:
            error = check_grammar(CHAINS[kind](beyond)).error
            assert "too deeply nested" in error and f" more than {MAX_GRAMMAR_DEPTH} levels" in error


def test_rules_and_schemas_that_refer_to_each_other_are_served() -> None:
    rules = [f'r{i}: "a" r{(i + 1) % 300} | "b" r{(7 * i) % 300} | "c"' for i in range(300)]
    assert not check_grammar("\n".join(["start: r0", *rules])).error
    definitions = {
        f"d{i}": {"type": "object", "properties": {f"p{j}": {"$ref": f"#/$defs/d{(i * j + 1) % 60}"} for j in range(5)}}
        for i in range(60)
    }
    assert not check_grammar(schema({"$ref": "#/$defs/d0", "$defs": definitions})).error


@pytest.mark.parametrize(
    "unit",
    ["a", "a ", " a\n", "a: b\n", "a:", "(", "()", '"', '"a" ', "/", "/a/", "#", "//", "\n", " ", "?", "%json {",
     "%json {}", '%json {"a":"%json {",', '%json {"a":[', '{"":', "\\", "start: a\n", "a" * 50 + ":", '\\"', "\\/"],
)  # fmt: skip
@pytest.mark.parametrize("begin", ["", '"', "/"])
def test_any_text_of_the_allowed_size_is_measured_in_linear_time(unit: str, begin: str) -> None:
    text = begin + unit * (MAX_GRAMMAR_BYTES // len(unit))
    begun = time.process_time()
    grammar_depth(text)
    with suppress(RecursionError):
        grammar_depth(f"%json {text}")
    assert time.process_time() - begun < 3


def test_lines_of_a_pattern_are_no_rules() -> None:
    """They hid the rules of the same names, and so a chain that is too deep."""
    hidden = "".join(f"r{i}: x\n" for i in range(2000))
    chain = "".join(f"r{i}: r{i + 1}\n" for i in range(2000)) + 'r2000: "a"\n'
    assert grammar_depth(f"start: /{hidden}/ r0\n{chain}") > 2000


def test_references_of_a_schema_are_followed_in_linear_time() -> None:
    pointer = {"$ref": "#" + "/0" * 500}
    text = schema({"items": [pointer] * 120})
    chain = schema({"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)}})
    begun = time.process_time()
    grammar_depth(text)
    assert grammar_depth(chain) > 3000
    assert time.process_time() - begun < 3
