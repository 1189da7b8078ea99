"""Patterns and shapes of single families. `tool_families` puts them together."""

from __future__ import annotations

from tandem.proxy.parsers.tool_shapes import (
    BARE_OBJECTS,
    OBJECT,
    Marked,
    Parameters,
    Shape,
    in_list,
    pattern,
)

LLAMA_TAG = r"\s*(?:<\|python_(?:tag|start)\|>)?"
LLAMA_END = r"\s*(?:\]|;|<\|python_end\|>)"
LLAMA_SHAPES = (
    *(
        Shape(
            pattern(rf"{LLAMA_TAG}\s*{head}"),
            tail=pattern(tail),
            more=pattern(rf"\s*[;,]?\s*{head}"),
            end=pattern(LLAMA_END),
            needs_known_name=True,
            begins_answer=True,
        )
        for head, tail in BARE_OBJECTS
    ),
    *in_list(LLAMA_TAG, LLAMA_END, is_bare=True),
)
FUNCTION_TAG = Shape(
    pattern(r"<function=(?P<name>[^>\s<]++)>\s*(?=\{)"), tail=pattern(r"\s*</function>"), needs_known_name=True
)
# Hunyuan's later models put a list and a separator around GLM's tags.
GLM_HEAD = r"(?:<tool_calls>\s*)?<tool_call>\s*(?P<name>[\w.-]++)\s*(?:<tool_sep>\s*)?"
GLM_PARAMETERS = Parameters(
    pattern(r"\s*<arg_key>\s*(?P<key>[^<]++)(?:</arg_key>\s*)++(?:<arg_value>|(?=[^<\s]))"),
    pattern(r"</arg_value>(?=\s{0,64}+(?:<arg_key>|</tool_call>))"),
    pattern(r"\s*</tool_call>"),
    ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    markers=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_V3 = r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n<]++)\n```json\s*" + OBJECT
_DEEPSEEK_V31 = r"<｜tool▁call▁begin｜>(?P<name>[^\n<]++)<｜tool▁sep｜>\s*" + OBJECT
KIMI = (
    r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]++):\d++)\s*"
    r"<\|tool_call_argument_begin\|>\s*" + OBJECT
)
KIMI_SLIP = (
    r"<\|tool_call_begin\|>\s*(?P<id>functions\.?(?P<name>[\w-]{1,64}?):?\d{1,4}+)\s*"
    r"<\|tool_call_argument_begin\|>\s*" + OBJECT
)
GEMMA_NAME = r"(?P<name>[^\s{}<]++)\s*\{"
GEMMA4 = Marked('<|"|>', "<tool_call|>")
APERTUS = r'\{\s*"(?P<name>[^"\\]++)"\s*:\s*' + OBJECT
GIGACHAT = r"(?:<\|message_sep\|>\s*)?(?:function call<\|role_sep\|>|<\|function_call\|>)"
XLAM_FENCE = r"(?:```(?:json)?|\[TOOL_CALLS\]|<tool_call>)"


def _deepseek(call: str, tail: str) -> Shape:
    return Shape(
        pattern(rf"(?:{DEEPSEEK_BEGIN}\s*)?{call}"),
        tail=pattern(tail),
        more=pattern(rf"\s*{call}"),
        end=pattern(rf"\s*{DEEPSEEK_END}"),
    )


def kimi(call: str, needs_known_name: bool = False) -> Shape:
    """Returns a shape of Kimi K2. call: pattern."""
    return Shape(
        pattern(r"(?:<\|tool_calls?_section_begin\|>\s*)?" + call),
        tail=pattern(r"\s*<\|tool_call_end\|>"),
        more=pattern(r"\s*" + call),
        end=pattern(r"\s*<\|tool_calls?_section_end\|>"),
        needs_known_name=needs_known_name,
    )


def glm4(begins_answer: bool) -> Shape:
    """Returns a shape of GLM-4: the name of a tool, and its arguments in JSON on the next line."""
    role = r"\s*" if begins_answer else r"<\|assistant\|>\s*"
    call = r"(?P<name>[\w.-]++)[ \t]*+\n\s*(?=\{)"
    return Shape(
        pattern(role + call),
        more=pattern(r"\s*(?:<\|assistant\|>\s*)?" + call),
        needs_known_name=True,
        begins_answer=begins_answer,
    )


DEEPSEEK_SHAPES = (
    _deepseek(_DEEPSEEK_V3, r"\s*```\s*<｜tool▁call▁end｜>"),
    _deepseek(_DEEPSEEK_V31, r"\s*<｜tool▁call▁end｜>"),
)
