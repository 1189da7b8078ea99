"""What models of each family write for two calls, with text before them where the format allows it."""

from __future__ import annotations

import json
from typing import cast

from tandem.proxy.parsers.tool_families import ToolFamilyName
from tests.unit.proxy.parsers.case_files import read_cases

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
    },
    "now": {"type": "object", "properties": {}},
}
CITY = 'São "Paulo"\n\\'
A = {"city": CITY, "days": 3, "exact": True}
A_JSON = json.dumps(A, ensure_ascii=False)
KIMI_IDS = ["functions.get_weather:0", "functions.now:1"]
WRITTEN: dict[str, tuple[ToolFamilyName, str]] = {
    case.words[0]: (
        cast(ToolFamilyName, case.words[1]),
        case.text.replace("«arguments»", A_JSON).replace("«city»", CITY),
    )
    for case in read_cases("written_calls")
}
"""Calls of get_weather(**A) and now(), by the name of the case."""

# Tokens that some tokenisers have for parts of a format.
ADDED: dict[ToolFamilyName, tuple[str, ...]] = {
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "openai": ("<|channel|>", "<|message|>", "<|constrain|>"),
    "granite": ("<|tool_call|>",),
    "deepseek_v32": ("｜DSML｜",),
    "deepseek_v4": ("｜DSML｜",),
    "step3": (
        "<｜tool_calls_begin｜>",
        "<｜tool_call_begin｜>",
        "<｜tool_sep｜>",
        "<｜tool_call_end｜>",
        "<｜tool_calls_end｜>",
    ),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "cohere": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "apertus": ("<|tools_prefix|>", "<|tools_suffix|>"),
    "internlm": ("<|action_start|>", "<|action_end|>", "<|plugin|>"),
    "gigachat3": ("<|function_call|>", "<|message_sep|>"),
    "nemotron_nano_v2": ("<TOOLCALL>", "</TOOLCALL>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
}


# Arguments that are not written as JSON.
ARGUMENTS: dict[ToolFamilyName, str] = {
    "qwen3_coder": "<parameter=days>\n3\n</parameter>\n",
    "glm45": "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n",
    "pythonic": "days=3",
    "lfm2": "days=3",
    "olmo3": "days=3",
    "gemma4": "days:3}",
    "functiongemma": "days:3}",
    "seed_oss": "<parameter=days>3</parameter>\n",
    "minimax_m2": '<parameter name="days">3</parameter>\n',
    "dots": '<parameter name="days">3</parameter>\n',
    "step3": '<steptml:parameter name="days">3</steptml:parameter>\n',
    "deepseek_v32": '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n',
    "deepseek_v4": '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n',
}
