"""Parsing takes time linear in the length of the text, whole and streamed, whatever a client makes the model write."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from tandem.proxy.parsers.output_parser import OutputParser
from tandem.proxy.parsers.parsed import MAX_TOOL_CALLS, ParsedPieces
from tandem.proxy.parsers.reasoning import REASONING_FAMILIES, ReasoningFamilyName, ReasoningFormat
from tandem.proxy.parsers.tool_families import TOOL_FAMILIES, ToolFamilyName
from tandem.proxy.parsers.tool_formats import ToolFormat

TOOLS: dict[str, Any] = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "array"}}}}
NUM_CHARACTERS = 2_000
GROWTH = 8
MAX_SLOWDOWN = 3 * GROWTH
"""Quadratic work would be slower by 64."""
# Beginnings after which the parser is in another state, for what is repeated then.
BEGINNINGS: dict[str, list[str]] = {
    "hermes": ['<tool_call>{"name": "f", "arguments": {"a": "', '<tool_call>{"name": "f", "arguments": {"a": 1}'],
    "qwen3_coder": ["<tool_call><function=f><parameter=a>", "<tool_call><function=f><parameter=b>"],
    "glm45": ["<tool_call>f<arg_key>b</arg_key><arg_value>"],
    "llama3_json": ['{"name": "f", "parameters": {"a": "', '[{"name": "f", "arguments": "{'],
    "pythonic": ["[f(a='", "[f(a=[", "[f("],
    "openai": ["<|channel|>commentary to=functions.f<|message|>"],
    "gemma4": ['<|tool_call>call:f{a:<|"|>', "<|tool_call>call:f{b:[", "<|tool_call>call:f{b:", "<|tool_call>call:f{"],
    "minimax_m2": ['<minimax:tool_call><invoke name="f"><parameter name="b">'],
    "deepseek_v4": ['<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">'],
    "olmo3": ["<function_calls>f(a='", "<function_calls>f()"],
    "dots": ['<dots_function_call>{"arguments": {"a": "'],
    "jamba": ['<tool_calls>[{"name": "f", "arguments": {}}'],
}
REPEATED = [
    " ",
    '<|"|>',
    ",",
    "a:",
    "</｜DSML｜parameter>",
    "\nf()",
    "<",
    '"',
    "\\",
    "[",
    "{",
    "</parameter>",
    "\n<parameter=a>",
    "<|start|>",
    "<|end|>",
    "'a', ",
]


def seconds(text: str, tools: ToolFamilyName | None, reasoning: ReasoningFamilyName | None, *, step: int) -> float:
    tool_format = ToolFormat(tools).with_tools(TOOLS) if tools is not None else None
    tokenizer = Tokenizer(models.BPE(vocab={}, merges=[]))
    thinking = ReasoningFormat.of(reasoning, tokenizer) if reasoning is not None else None
    best = 1e9
    for _ in range(2):
        parser, pieces = OutputParser(thinking, tool_format, is_open=False), ParsedPieces()
        begun = time.process_time()
        for start in range(0, len(text), step):
            pieces.add(parser.push(text[start : start + step]))
        pieces.add(parser.push("", is_end=True))
        pieces.parsed()
        best = min(best, time.process_time() - begun)
    return best


def check(begun: str, repeated: str, *formats: Any) -> None:
    short, long = (begun + repeated * (size // len(repeated)) for size in (NUM_CHARACTERS, GROWTH * NUM_CHARACTERS))
    for step in (len(long), 16):
        slow = seconds(long, *formats, step=step)
        if slow > 0.02:  # else it is fast enough, and too short to be measured
            assert slow < MAX_SLOWDOWN * seconds(short, *formats, step=step), (begun, repeated, step)


@pytest.mark.parametrize(
    "name", [name if name in BEGINNINGS else pytest.param(name, marks=pytest.mark.extended) for name in TOOL_FAMILIES]
)
def test_tool_calls(name: ToolFamilyName) -> None:
    family = TOOL_FAMILIES[name]
    for begun in ["", *BEGINNINGS.get(name, [])]:
        own = [*family.markers, *family.slips] if not begun else []
        for repeated in [*own, *(REPEATED if begun or name in ("pythonic", "openai") else [" "])]:
            check(begun, repeated, name, None)


@pytest.mark.parametrize("name", REASONING_FAMILIES)
def test_thinking(name: ReasoningFamilyName) -> None:
    family = REASONING_FAMILIES[name]
    for begun in ("", family.opening):
        for repeated in (" ", family.opening, family.ending[:-1], " <", *family.answer_closings):
            check(begun, repeated, None, name)


def test_calls_in_thinking() -> None:
    for repeated in ("<tool_call>", " <", "</thin"):
        check("<think>", repeated, "hermes", "qwen3")


def test_a_call_too_many_is_text() -> None:
    """Each takes memory, and two tokens are enough for one."""
    parser, pieces = OutputParser(None, ToolFormat("mistral").with_tools(TOOLS), is_open=False), ParsedPieces()
    call = "[TOOL_CALLS]f{}"
    for text in (call * MAX_TOOL_CALLS, call * 3, "[TOOL", "_CALLS] end"):
        pieces.add(parser.push(text))
    parsed = pieces.parsed()
    assert len(parsed.names) == len(parsed.arguments) == parser.num_calls == MAX_TOOL_CALLS
    assert parsed.content == call * 3 + "[TOOL_CALLS] end"


def test_a_message_too_many_to_a_function_is_text() -> None:
    parser = OutputParser(None, ToolFormat("openai").with_tools(TOOLS), is_open=False)
    call = "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}<|call|>"
    parsed = parser.push(call * (MAX_TOOL_CALLS + 2), is_end=True)
    assert len(parsed.names) == MAX_TOOL_CALLS and parsed.content == "{}{}"
