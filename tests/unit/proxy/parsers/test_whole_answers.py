"""Whole answers of models with thinking, content and calls, in the marks that their chat templates show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proxy.parsers.output_parser import OutputParser
from tandem.proxy.parsers.parsed import ParsedPieces
from tandem.proxy.parsers.reasoning import ReasoningFamilyName
from tandem.proxy.parsers.tool_families import ToolFamilyName
from tandem.proxy.parsers.tool_formats import ToolFormat
from tests.unit.proxy.parsers.test_reasoning import FORMATS

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "get-time": {"properties": {"zone": {"type": "string"}, "at": {"type": "object"}, "tags": {"type": "array"}}},
}


class Answer(NamedTuple):
    """is_open: the prompt ends with the opening of the thinking. calls: names with arguments."""

    model: str
    reasoning: ReasoningFamilyName | None
    tools: ToolFamilyName
    is_open: bool
    text: str
    thinking: str
    content: str
    calls: Sequence[tuple[str, Any]] = ()


WEATHER: tuple[str, Any] = ("get_weather", {"city": "Paris", "days": 3})
JSON = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
ANSWERS = [
    Answer(
        "Gemma 4",
        "gemma4",
        "gemma4",
        False,
        '<|channel>thought\nHm.<channel|>I see.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:get-time{at:{h:1,f:-2.5e3,n:null,on:true,in:[]},tags:[<|"|>a{}<<|"|>,<|"|>,<|"|>,[1,{}]],'
        'zone:<|"|><|"|>}<tool_call|><|tool_response>',
        "Hm.",
        "I see.",
        [
            WEATHER,
            (
                "get-time",
                {
                    "at": {"h": 1, "f": -2500.0, "n": None, "on": True, "in": []},
                    "tags": ["a{}<", ",", [1, {}]],
                    "zone": "",
                },
            ),
        ],
    ),
    Answer("Gemma 4", "gemma4", "gemma4", False, "<|channel>thought\n<channel|>Yes.<turn|>", "", "Yes."),
    Answer(
        "Gemma 4, which thinks again",
        "gemma4",
        "gemma4",
        False,
        '<|channel>thought\nA<channel|>I <|channel>thought\nB<channel|>see.<|tool_call>call:get_weather{city:<|"|>Paris'
        '<|"|>,days:3}<tool_call|><|channel>thought\nC<channel|>',
        "ABC",
        "I see.",
        [WEATHER],
    ),
    Answer(
        "Gemma 4, quoted names, a word for a string, a string for a number, no end",
        "gemma4",
        "gemma4",
        False,
        '<|tool_call>call:get_weather{<|"|>city<|"|>: Paris, days: <|"|>3<|"|>',
        "",
        "",
        [WEATHER],
    ),
    Answer(
        "Gemma 4, strings as in JSON",
        None,
        "gemma4",
        False,
        '<|tool_call>call:get-time{"zone": "a, \\"b\\"}<\\u00e9", "tags": ["x", ""]}<tool_call|>'
        '<|tool_call>call:get_weather{city:"Paris","days":"3"}<tool_call|>',
        "",
        "",
        [("get-time", {"zone": 'a, "b"}<é', "tags": ["x", ""]}), WEATHER],
    ),
    Answer(
        "FunctionGemma",
        None,
        "functiongemma",
        False,
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>"
        "<start_function_response>",
        "",
        "",
        [WEATHER],
    ),
    Answer(
        "DeepSeek V3.2",
        "deepseek_r1",
        "deepseek_v32",
        True,
        'Hm.</think>I see.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter '
        'name="city" string="true">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3'
        '</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="get-time">\n<｜DSML｜parameter name="at" '
        'string="false">{"h": "</div>"}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Hm.",
        "I see.",
        [WEATHER, ("get-time", {"at": {"h": "</div>"}})],
    ),
    Answer(
        "DeepSeek V4, another name of the block",
        "deepseek_r1",
        "deepseek_v4",
        True,
        'Hm.</think>\n\n<｜DSML｜toolcalls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city">Paris'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="true">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜toolcalls>",
        "Hm.",
        "",
        [WEATHER],
    ),
    Answer(
        "DeepSeek V3.2, JSON in place of parameters",
        None,
        "deepseek_v32",
        False,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n{"city": "Paris", "days": 3}\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "",
        "",
        [WEATHER],
    ),
    Answer(
        "MiniMax M2",
        "minimax_m2",
        "minimax_m2",
        True,
        'Hm.\n</think>\n\nI see.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
        "</parameter>\n<parameter name='days'>3</parameter>\n</invoke>\n</minimax:tool_call>\n",
        "Hm.",
        "I see.",
        [WEATHER],
    ),
    Answer(
        "MiniMax M1",
        "qwen3",
        "minimax_m1",
        False,
        f"<think>\nHm.\n</think>\n\n<tool_calls>\n{JSON}\n{JSON}\n</tool_calls>",
        "Hm.",
        "",
        [WEATHER, WEATHER],
    ),
    Answer("Jamba", None, "jamba", False, f" <tool_calls>[\n    {JSON}\n]</tool_calls>", "", "", [WEATHER]),
    Answer(
        "Hunyuan A13B",
        "hunyuan_a13b",
        "hunyuan_a13b",
        False,
        f"<think>\nHm.\n</think>\n<answer>\nI see.\n<tool_calls>[{JSON}]</tool_calls>\n</answer>",
        "Hm.",
        "I see.",
        [WEATHER],
    ),
    Answer("Hunyuan A13B", "hunyuan_a13b", "hunyuan_a13b", False, "助手：Yes.", "", "Yes."),
    Answer(
        "Seed-OSS",
        "seed_oss",
        "seed_oss",
        False,
        "<seed:think>Hm.</seed:think>\nI see.\n\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris"
        "</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        "Hm.",
        "I see.",
        [WEATHER],
    ),
    Answer(
        "Nemotron Nano v2",
        "qwen3",
        "nemotron_nano_v2",
        True,
        f"Hm.\n</think>\n\nI see.\n\n<TOOLCALL>[{JSON}, {JSON}]</TOOLCALL>\n",
        "Hm.",
        "I see.",
        [WEATHER, WEATHER],
    ),
    Answer(
        "LFM2",
        None,
        "lfm2",
        False,
        "<|tool_call_start|>[get_weather(city='Paris', days=3)]<|tool_call_end|>I look.",
        "",
        "I look.",
        [WEATHER],
    ),
    Answer(
        "OLMo 3",
        "qwen3",
        "olmo3",
        True,
        "Hm.</think>I see.<function_calls>get_weather(city=\"Paris\", days=3)\n\nget_weather(days=3, city='Paris')"
        "</function_calls>",
        "Hm.",
        "I see.",
        [WEATHER, WEATHER],
    ),
    Answer(
        "Command R7B",
        "cohere",
        "cohere",
        False,
        '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
        '"parameters": {"city": "Paris", "days": 3}}\n]<|END_ACTION|>',
        "Hm.",
        "",
        [WEATHER],
    ),
    Answer("Command R7B", "cohere", "cohere", False, "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "", "Yes."),
    Answer("Command A", "cohere", "cohere", False, "Yes.<|END_RESPONSE|>", "", "Yes."),
    Answer(
        "Command A Reasoning",
        "cohere",
        "cohere",
        True,
        "Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>",
        "Hm.",
        "Yes.",
    ),
    Answer(
        "Apertus",
        "apertus",
        "apertus",
        False,
        "<|inner_prefix|>Hm.<|inner_suffix|>I see.<|tools_prefix|>"
        '[{"get_weather": {"city": "Paris", "days": 3}}, {"get-time": {}}]<|tools_suffix|>',
        "Hm.",
        "I see.",
        [WEATHER, ("get-time", {})],
    ),
    Answer(
        "Apertus, which calls within its thinking",
        "apertus",
        "apertus",
        False,
        '<|inner_prefix|>Hm.<|tools_prefix|>[{"get_weather": {"city": "Paris", "days": 3}}]<|tools_suffix|>',
        "Hm.",
        "",
        [WEATHER],
    ),
    Answer(
        "xLAM 2",
        None,
        "xlam",
        False,
        f"[{JSON}, {JSON}]",
        "",
        "",
        [WEATHER, WEATHER],
    ),
    Answer("xLAM 2, text before", None, "xlam", False, f"I see. [{JSON}]", "", "I see.", [WEATHER]),
    Answer("xLAM 2, tags", None, "xlam", False, f"I see.\n<tool_call>[{JSON}]</tool_call>", "", "I see.", [WEATHER]),
    Answer("xLAM 2, marker", None, "xlam", False, f"I see.[TOOL_CALLS][{JSON}]", "", "I see.", [WEATHER]),
    Answer("xLAM 2, JSON that is no call", None, "xlam", False, '[{"name": "Paris"}]', "", '[{"name": "Paris"}]'),
    Answer("Granite 20B", None, "granite_20b_fc", False, f"<function_call> {JSON}", "", "", [WEATHER]),
    Answer(
        "Granite 3.2",
        "granite",
        "granite",
        False,
        f"Here is my thought process:\n\nHm.\n\nHere is my response:\n\nI see.<|tool_call|>[{JSON}]",
        "Hm.",
        "I see.",
        [WEATHER],
    ),
    Answer(
        "Granite 3.3",
        "ernie45",
        "granite",
        False,
        "<think>Hm.</think>\n\n<response>Yes.</response>",
        "Hm.",
        "Yes.",
    ),
    Answer(
        "ERNIE 4.5",
        "ernie45",
        "hermes",
        True,
        f"Hm.\n</think>\n\n\n<tool_call>\n{JSON}\n</tool_call>\n",
        "Hm.",
        "",
        [WEATHER],
    ),
    Answer(
        "ERNIE 4.5",
        "ernie45",
        "hermes",
        True,
        "Hm.\n</think>\n\n<response>\nA <response> is text.\n</response>\n",
        "Hm.",
        "A <response> is text.",
    ),
    Answer(
        "InternLM 2",
        None,
        "internlm",
        False,
        'I see.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}'
        "<|action_end|>\n",
        "",
        "I see.",
        [WEATHER],
    ),
    Answer(
        "GLM-4-0414",
        None,
        "glm4",
        False,
        'get_weather\n{"city": "Paris", "days": 3}',
        "",
        "",
        [WEATHER],
    ),
    Answer("GLM-4-0414", None, "glm4", False, "Paris\n{see below}", "", "Paris\n{see below}"),
    Answer(
        "Step 3",
        "qwen3",
        "step3",
        True,
        "Hm.\n</think>\nI see.<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke "
        'name="get_weather">\n<steptml:parameter name="city">Paris</steptml:parameter>\n<steptml:parameter '
        'name="days">3</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>',
        "Hm.",
        "I see.",
        [WEATHER],
    ),
    Answer(
        "GigaChat 3",
        None,
        "gigachat3",
        False,
        f"I see.<|message_sep|>\n\nfunction call<|role_sep|>\n{JSON}<|message_sep|>\n\n",
        "",
        "I see.",
        [WEATHER],
    ),
    Answer("GigaChat 3", None, "gigachat3", False, "Yes.<|message_sep|>\n\n", "", "Yes."),
    Answer(
        "gpt-oss",
        "openai_gptoss",
        "openai",
        False,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=get_weather<|constrain|>"
        'json<|message|>{"city": "Paris", "days": 3}<|call|>',
        "Hm.",
        "",
        [WEATHER],
    ),
    Answer(
        "Qwen3, which does not end its thinking",
        "qwen3",
        "hermes",
        False,
        f"<think>\nHm.\n\n<tool_call>\n{JSON}\n</tool_call>",
        "Hm.",
        "",
        [WEATHER],
    ),
    Answer(
        "Qwen3.5, which does not end its thinking",
        "qwen3",
        "qwen3_coder",
        True,
        "Hm.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "Hm.",
        "",
        [WEATHER],
    ),
    Answer(
        "Apriel 1.5",
        "apriel",
        "jamba",
        True,
        f"Hm.\n[BEGIN FINAL RESPONSE]\nI see.\n<tool_calls>[{JSON}]</tool_calls>\n[END FINAL RESPONSE]\n<|end|>",
        "Hm.",
        "I see.",
        [WEATHER],
    ),
    Answer(
        "MiniCPM 3",
        "minicpm3",
        "lfm2",
        False,
        '<|thought_start|>\nHm.\n<|thought_end|>\n<|tool_call_start|>\n```python\nget_weather(city="Paris",days=3)\n'
        "```\n<|tool_call_end|>\n",
        "Hm.",
        "",
        [WEATHER],
    ),
    Answer(
        "Llama 3.2, with vLLM's template for Python calls",
        None,
        "pythonic",
        False,
        '[get_weather(city="Paris", days=3), get_weather(city="Paris", days=3)]',
        "",
        "",
        [WEATHER, WEATHER],
    ),
    Answer("Phi-4-mini", None, "phi4_mini", False, f"functools[{JSON}]", "", "", [WEATHER]),
]


def parse(answer: Answer, cuts: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    reasoning = FORMATS[answer.reasoning] if answer.reasoning is not None else None
    parser = OutputParser(reasoning, ToolFormat(answer.tools).with_tools(SCHEMAS), answer.is_open)
    pieces = ParsedPieces()
    for number, cut in enumerate(cuts, start=1):
        pieces.add(parser.push(cut, is_end=number == len(cuts)))
    parsed = pieces.parsed()
    calls = [(parsed.names[index], json.loads(arguments)) for index, arguments in parsed.arguments.items()]
    return parsed.reasoning, parsed.content.strip(), calls


@pytest.mark.parametrize("answer", ANSWERS, ids=[f"{number}-{a.model}" for number, a in enumerate(ANSWERS)])
@given(places=st.lists(st.integers(0, 10**6), max_size=8))
@settings(max_examples=20)
def test_each_part_is_where_clients_look_for_it(answer: Answer, places: list[int]) -> None:
    text = answer.text
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    for cuts in ([text], [*text], [*text, ""], [text[start:end] for start, end in pairwise(ends)]):
        assert parse(answer, cuts) == (answer.thinking, answer.content, list(answer.calls))
