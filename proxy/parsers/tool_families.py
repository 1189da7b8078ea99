"""How families of models write tool calls. Data only: `tool_parser` reads calls, `tool_formats` builds grammars.

Every pattern ends with a literal or a lookahead, so a match never grows when more text arrives. This is what makes
the parser independent of how the text is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import regex

ToolFamilyName = Literal[
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "kimi_k2",
    "openai",
    "granite",
]


@dataclass(frozen=True)
class Parameters:
    """Arguments that are written one by one instead of as JSON.

    key: pattern before a value, with the group `key`. end: text after a value. close: pattern after the last value.
    strips_newlines: one newline at each end of a value is layout. markers: texts that may be tokens of their own.
    """

    key: regex.Pattern[str]
    end: str
    close: regex.Pattern[str]
    strips_newlines: bool = False
    markers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shape:
    """One way to write calls.

    head: pattern from the marker to the arguments, with the group `name` and perhaps `id`. arguments: a JSON object,
    Python keyword arguments up to the closing bracket, or Parameters. tail: pattern after the arguments. more: the
    head of a further call that follows without a marker. end: what follows the last call.
    """

    head: regex.Pattern[str]
    arguments: Literal["json", "python"] | Parameters = "json"
    tail: regex.Pattern[str] | None = None
    more: regex.Pattern[str] | None = None
    end: regex.Pattern[str] | None = None


@dataclass(frozen=True)
class Writing:
    """How a grammar writes calls. NAME and INDEX are replaced by the name and the number of the call.

    first, last: text before and after all calls; between: text between two of them. before, after: text around the
    arguments of one call.
    """

    before: str
    after: str
    first: str = ""
    between: str = ""
    last: str = ""


@dataclass(frozen=True)
class ToolFamily:
    """markers: text that begins calls; empty if a call can only begin the answer. shapes: tried in this order.

    hints: parts of chat templates that tell the family. All parts of one hint must occur.
    """

    markers: tuple[str, ...]
    shapes: tuple[Shape, ...]
    writing: Writing
    hints: tuple[tuple[str, ...], ...]


def _p(pattern: str) -> regex.Pattern[str]:
    return regex.compile(pattern, regex.DOTALL)


_JSON_HEAD = r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_BRACE = _p(r"\s*\}")
_HERMES = Shape(_p(r"<tool_call>\s*" + _JSON_HEAD), tail=_p(r"\s*\}\s*</tool_call>"))
_DEEPSEEK_V3 = r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\s*(?=\{)"
_DEEPSEEK_V31 = r"<｜tool▁call▁begin｜>(?P<name>[^\n<]+)<｜tool▁sep｜>\s*(?=\{)"
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_KIMI = (
    r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)
_PYTHON_NAME = r"(?P<name>[A-Za-z_][\w.]*)\("


def _list(marker: str) -> Shape:
    """Returns a shape in which one marker is followed by a JSON list of calls."""
    return Shape(_p(marker + r"\s*\[\s*" + _JSON_HEAD), tail=_BRACE, more=_p(r"\s*,\s*" + _JSON_HEAD), end=_p(r"\s*\]"))


def _deepseek(call: str, tail: str) -> Shape:
    return Shape(
        _p(rf"{_DEEPSEEK_BEGIN}\s*{call}"), tail=_p(tail), more=_p(rf"\s*{call}"), end=_p(rf"\s*{_DEEPSEEK_END}")
    )


_DEEPSEEK_SHAPES = (
    _deepseek(_DEEPSEEK_V3, r"\s*```\s*<｜tool▁call▁end｜>"),
    _deepseek(_DEEPSEEK_V31, r"\s*<｜tool▁call▁end｜>"),
)

TOOL_FAMILIES: dict[ToolFamilyName, ToolFamily] = {
    "openai": ToolFamily(  # read by `harmony`
        ("<|channel|>",),
        (),
        Writing("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""),
        (("<|channel|>", "<|message|>"),),
    ),
    "kimi_k2": ToolFamily(
        ("<|tool_calls_section_begin|>",),
        (
            Shape(
                _p(r"<\|tool_calls_section_begin\|>\s*" + _KIMI),
                tail=_p(r"\s*<\|tool_call_end\|>"),
                more=_p(r"\s*" + _KIMI),
                end=_p(r"\s*<\|tool_calls_section_end\|>"),
            ),
        ),
        Writing(
            "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            last="<|tool_calls_section_end|>",
        ),
        (("<|tool_calls_section_begin|>",),),
    ),
    "deepseek_v3": ToolFamily(
        (_DEEPSEEK_BEGIN,),
        _DEEPSEEK_SHAPES,
        Writing(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            _DEEPSEEK_BEGIN,
            "\n",
            _DEEPSEEK_END,
        ),
        ((_DEEPSEEK_BEGIN, "```json"),),
    ),
    "deepseek_v31": ToolFamily(
        (_DEEPSEEK_BEGIN,),
        _DEEPSEEK_SHAPES,
        Writing(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            _DEEPSEEK_BEGIN,
            last=_DEEPSEEK_END,
        ),
        ((_DEEPSEEK_BEGIN,),),
    ),
    "qwen3_coder": ToolFamily(
        ("<tool_call>",),
        (
            Shape(
                _p(r"<tool_call>\s*<function=(?P<name>[^>\s]+)>"),
                Parameters(
                    _p(r"\s*<parameter=(?P<key>[^>\n]+)>"),
                    "</parameter>",
                    _p(r"\s*</function>\s*</tool_call>"),
                    strips_newlines=True,
                ),
            ),
        ),
        Writing("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", between="\n"),
        (("<tool_call>", "<function="),),
    ),
    "glm45": ToolFamily(
        ("<tool_call>",),
        (
            Shape(
                _p(r"<tool_call>\s*(?P<name>[\w.-]+)\s*(?=<arg_key>|</tool_call>)"),
                Parameters(
                    _p(r"\s*<arg_key>\s*(?P<key>[^<]+?)\s*</arg_key>\s*<arg_value>"),
                    "</arg_value>",
                    _p(r"\s*</tool_call>"),
                    markers=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
                ),
            ),
        ),
        Writing("<tool_call>NAME\n", "</tool_call>", between="\n"),
        (("<tool_call>", "<arg_key>"),),
    ),
    "mistral": ToolFamily(
        ("[TOOL_CALLS]",),
        (
            _list(r"\[TOOL_CALLS\]"),
            Shape(
                _p(
                    r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)\s*"
                    r"(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{)"
                )
            ),
        ),
        Writing("[TOOL_CALLS]NAME[ARGS]", ""),
        (("[TOOL_CALLS]",),),
    ),
    "granite": ToolFamily(
        ("<|tool_call|>", "<tool_call>"),
        (_list(r"(?:<\|tool_call\|>|<tool_call>)"), _HERMES),
        Writing('{"name": "NAME", "arguments": ', "}", "<|tool_call|>[", ", ", "]"),
        (("<|tool_call|>",),),
    ),
    "hermes": ToolFamily(
        ("<tool_call>",),
        (_HERMES,),
        Writing('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n"),
        (("<tool_call>",),),
    ),
    "llama3_json": ToolFamily(
        (),
        (
            Shape(
                _p(r"\s*(?:<\|python_(?:tag|start)\|>\s*)?" + _JSON_HEAD),
                tail=_BRACE,
                more=_p(r"\s*;?\s*" + _JSON_HEAD),
                end=_p(r"\s*(?:<\|python_end\|>|;)"),
            ),
        ),
        Writing('{"name": "NAME", "parameters": ', "}", between="; "),
        (("<|start_header_id|>", '"parameters"'), ("<|header_start|>", '"parameters"')),
    ),
    "pythonic": ToolFamily(
        (),
        (
            Shape(
                _p(r"\s*(?:<\|python_start\|>\s*)?\[\s*" + _PYTHON_NAME),
                "python",
                more=_p(r"\s*,\s*" + _PYTHON_NAME),
                end=_p(r"\s*\]"),
            ),
        ),
        Writing("NAME(", ")", "[", ", ", "]"),
        (("<|header_start|>",),),
    ),
}
"""`tool_formats.detect_tool_family` tries them in this order: a hint of an earlier family is more specific."""
