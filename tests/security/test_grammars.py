"""Grammars as weapons: chains that overflow a stack, and the largest values of the fields that become grammars."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.protocol.messages.grammar import MAX_GRAMMAR_BYTES
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.text.model_text import ModelText
from tandem.runtime.errors import InvalidRequest

_CHECK_CHAINS = """
from bisect import bisect_right
from llguidance import LLMatcher
from tandem.protocol.messages import grammar
from tandem.runtime.stack import call_with_stack
from tests.support.hostile_grammars import CHAINS

num_served = 0
for make in CHAINS.values():
    longest = bisect_right(range(20_000), grammar.MAX_GRAMMAR_BYTES, key=lambda number: len(make(number))) - 1
    for number in (15, 30, 330, 990, 1038, 2675, longest):
        text = make(number)
        if grammar.check_grammar(text).error:
            continue
        num_served += 1
        half = grammar.CHECK_STACK_BYTES // 2
        call_with_stack(half, lambda: LLMatcher.validate_grammar(text, limits=grammar.parser_limits()))
print(num_served)
"""
_HALF = MAX_GRAMMAR_BYTES // 2
_LIMITS = ModelLimits(max_model_len=2048, vocab_size=2048)
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def tool(number: int, properties: int = 0) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(properties)}}
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def structured(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


LARGEST: dict[str, Callable[[], dict[str, Any]]] = {
    "line breaks": lambda: structured(grammar="\n" * MAX_GRAMMAR_BYTES),
    "blank lines": lambda: structured(grammar=" \n" * _HALF),
    "a chain in GBNF": lambda: structured(grammar="root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(7000))
                                          + 'r7000 ::= "a"'),
    "alternatives in GBNF": lambda: structured(grammar="root ::= " + "a|" * (_HALF - 50) + 'a\na ::= "x"'),
    "brackets in GBNF": lambda: structured(grammar="root ::= " + "(" * (MAX_GRAMMAR_BYTES - 50)),
    "nested brackets in GBNF": lambda: structured(grammar="root ::= " + f'{"(" * 150}"a" "b"{")" * 150} ' * 400),
    "a literal in GBNF": lambda: structured(grammar='root ::= "' + "a" * (MAX_GRAMMAR_BYTES - 50) + '"'),
    "comments in GBNF": lambda: structured(grammar="# a\n" * (_HALF // 2 - 50) + 'root ::= "a"'),
    "optional rules": lambda: structured(grammar="start: " + "a? " * 43_000 + '\na: "a"'),
    "a long name": lambda: structured(grammar="a" * MAX_GRAMMAR_BYTES),
    "far beyond the limit": lambda: structured(grammar="\n" * (16 << 20)),
    "a regular expression": lambda: structured(regex="a?" * (_HALF - 50)),
    "classes in a regular expression": lambda: structured(regex=r"\d" * (8 << 20)),
    "choices": lambda: structured(choice=["a"] * 1_000_000),
    "different choices": lambda: structured(choice=[str(i) for i in range(12_000)]),
    "properties": lambda: response_format({"properties": {f"a{i}": {} for i in range(5000)}}),
    "an enumeration": lambda: response_format({"enum": [f"a{i}" for i in range(11_000)]}),
    "definitions": lambda: response_format({"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i // 2}"} for i in range(3000)}}),
    "a schema far beyond the limit": lambda: response_format({"enum": [f"a{i}" for i in range(1_000_000)]}),
    "tools": lambda: {"tools": [tool(i) for i in range(1000)]},
    "tools with properties": lambda: {"tools": [tool(i, 20) for i in range(80)], "tool_choice": "required"},
    "tools far beyond the limit": lambda: {"tools": [tool(i) for i in range(50_000)]},
    "tools and a format": lambda: {"tools": [tool(i) for i in range(500)], "response_format": {"type": "json_object"}},
}  # fmt: skip


EXTENDED = {
    "blank lines", "nested brackets in GBNF", "comments in GBNF", "a long name", "far beyond the limit",
    "classes in a regular expression", "choices", "a schema far beyond the limit", "tools far beyond the limit",
}  # fmt: skip
"""Those that resemble another one."""


@pytest.fixture(scope="module")
def reader(noise_model: Path) -> BodyReader:
    return BodyReader(ModelText(str(noise_model)), ProxyConfig("proxy-0", "", "m", "m"))


@pytest.mark.extended
def test_no_chain_overflows_the_stack_of_the_process_that_checks_it() -> None:
    """The lengths are around those at which the library overflows a stack of 8 MiB, and the longest in
    MAX_GRAMMAR_BYTES. What is served needs less than half of the stack that checks it, which is a quarter of the one
    that compiles it."""
    done = subprocess.run([sys.executable, "-c", _CHECK_CHAINS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-1000:]}"
    assert int(done.stdout) >= 15


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extended if name in EXTENDED else ()) for name in LARGEST]
)
def test_the_largest_value_of_each_field_is_read_in_bounded_time_and_memory(reader: BodyReader, name: str) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    body = msgspec.json.encode(chat | LARGEST[name]())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.process_time()
    try:
        reader.read(body, "chat", _LIMITS)
    except InvalidRequest as error:
        assert len(error.message) < 500
    seconds = time.process_time() - begun
    assert seconds < 5, f"{len(body)} bytes took {seconds} s"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 700 * 1024
