"""What models write beside their templates' forms: calls are read, and text that only looks like one stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.proxy.parsers.tool_families import ToolFamilyName
from tests.unit.proxy.parsers.test_cut_answers import parse

WEATHER: tuple[str, Any] = ("get_weather", {"city": "Paris"})
NOW: tuple[str, Any] = ("now", {})
BLOCKS: dict[ToolFamilyName, tuple[str, str]] = {
    "hermes": ("<tool_call>\n", "\n</tool_call>"),
    "minimax_m1": ("<tool_calls>\n", "\n</tool_calls>"),
    "jamba": ("<tool_calls>[", "]</tool_calls>"),
    "hunyuan_a13b": ("<tool_calls>[", "]</tool_calls>"),
    "nemotron_nano_v2": ("<TOOLCALL>[", "]</TOOLCALL>"),
    "granite": ("<|tool_call|>[", "]"),
    "granite_20b_fc": ("<function_call> ", ""),
    "internlm": ("<|action_start|><|plugin|>\n", "<|action_end|>"),
    "mistral": ("[TOOL_CALLS] [", "]"),
    "phi4_mini": ("functools[", "]"),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "cohere": ("<|START_ACTION|>[", "]<|END_ACTION|>"),
    "gigachat3": ("<|function_call|>", ""),
}
EMPTY: dict[ToolFamilyName, str] = {
    "jamba": "<tool_calls>[]</tool_calls>",
    "nemotron_nano_v2": "<TOOLCALL>[ ]</TOOLCALL>",
    "cohere": "<|START_ACTION|>[\n]<|END_ACTION|>",
    "lfm2": "<|tool_call_start|>[]<|tool_call_end|>",
    "mistral": "[TOOL_CALLS][]",
}
GEMMA_STRING = '<|"|>Paris<|"|>'


def check(name: ToolFamilyName, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    """Parses the text whole, in characters and in two pieces, also where a limit cuts it."""
    whole = parse([text], name, cut=None)
    assert whole[1].strip() == content
    assert [(called, json.loads(arguments)) for called, arguments in whole[2]] == calls
    assert parse([*text, ""], name, cut=None) == whole
    for end in range(len(text) + 1):
        assert parse([text[:end], text[end:]], name, cut=None) == whole
        cut = parse([text[:end]], name)
        assert parse([*text[:end], ""], name) == cut
        assert not calls or content.startswith(cut[1].strip()), text[:end]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    "written", ['{"name": "now"}', '{"name": "now", "arguments": null}', '{"id": "1", "name": "now"}']
)
def test_calls_need_no_arguments(name: ToolFamilyName, written: str) -> None:
    first, last = BLOCKS[name]
    check(name, f"{first}{written}{last}", "", [NOW])


@pytest.mark.parametrize("name", ["jamba", "mistral", "phi4_mini", "minimax_m1"])
def test_calls_with_and_without_arguments_may_follow_each_other(name: ToolFamilyName) -> None:
    first, last = BLOCKS[name]
    calls = '{"name": "now"}, {"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}'
    check(name, f"{first}{calls}{last}", "", [NOW, WEATHER, NOW])


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "gigachat3"])
def test_arguments_may_come_before_the_name(name: ToolFamilyName) -> None:
    first, last = BLOCKS[name]
    check(name, f'{first}{{"arguments": {{"city": "Paris"}}, "name": "get_weather"}}{last}', "", [WEATHER])


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_list_of_calls_is_no_content(name: ToolFamilyName) -> None:
    check(name, f"Yes.\n{EMPTY[name]}", "Yes.", [])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"<|tool_call>:call:get_weather{{city:{GEMMA_STRING}}}", ""),
        (f"call:get_weather{{city:{GEMMA_STRING}}}<turn|>", ""),
        (f"<call>get_weather{{city:{GEMMA_STRING}}}", ""),
        (f"<|tool_call>call:get_weather{{city:{GEMMA_STRING}}}<turn|>", ""),
    ],
)
def test_gemma_forgets_a_marker(text: str, content: str) -> None:
    check("gemma4", text, content, [WEATHER])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("step3", "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>get_weather\n"),
        ("step3", "<｜tool_calls_begin｜><｜tool_call_begin｜>"),
    ],
)
def test_step3_writes_the_name_twice(name: ToolFamilyName, text: str) -> None:
    text += (
        '<steptml:invoke name="get_weather"><steptml:parameter name="city">Paris</steptml:parameter></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜>"
    )
    check(name, text, "", [WEATHER])


@pytest.mark.parametrize("city", ["it's", "sed -n '1,2p' x", "a\n'b', c", "print(f(x='y'))", 'say "]"'])
def test_lfm2_does_not_escape_quotes(city: str) -> None:
    """Its template puts strings between quotes as they are."""
    text = f"<|tool_call_start|>[get_weather(city='{city}', days=3), now()]<|tool_call_end|>"
    check("lfm2", text, "", [("get_weather", {"city": city, "days": 3}), NOW])


PLAIN = [
    "It is half of",
    "I call",
    "a function",
    "Action",
    "Well, call: 555-1234",
    "Well, recall: get it",
    "```html\n<p>hi</p>\n```",
    "```python\nx = [f(1), 2]\n```",
    '{"name": "now"}',
    '[{"name": "now"}]',
    '{"name": "Bob", "arguments": {}}',
    "[1, 2]",
    "{see}",
    "<html><body>x</body></html>",
    "The `<think>` tag",
]


@pytest.mark.parametrize("name", [*BLOCKS, "gemma4", "lfm2", "xlam", "pythonic", "llama3_json", "glm4", "step3"])
@pytest.mark.parametrize("text", PLAIN)
def test_other_text_is_content(name: ToolFamilyName, text: str) -> None:
    check(name, text, text, [])


@pytest.mark.parametrize("name", [*BLOCKS, "gemma4", "xlam", "pythonic", "llama3_json"])
@pytest.mark.parametrize("text", ["It is half of", "I call", "a function", "An Action", "use ```", "Well, call: 555"])
def test_a_limit_takes_no_word_from_other_text(name: ToolFamilyName, text: str) -> None:
    """Some markers begin with a word, such as `functools[`, and `half of` ends with the beginning of one."""
    assert parse([text], name) == parse([*text, ""], name) == ("", text, [])
