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
    "phi4_mini",
]


@dataclass(frozen=True)
class Parameters:
    """Arguments that are written one by one instead of as JSON."""

    key: regex.Pattern[str]
    """Pattern before a value, with the group `key`."""
    end: regex.Pattern[str]
    """Pattern after a value. If it has the group `key` too, the value ends only where a known argument begins."""
    close: regex.Pattern[str]
    """Pattern after the last value."""
    strips_newline: bool = False
    """Whether one newline before a value is layout."""
    markers: tuple[str, ...] = ()
    """Texts that may be tokens of their own."""


@dataclass(frozen=True)
class Shape:
    """One way to write calls."""

    head: regex.Pattern[str]
    """Pattern from the marker to the arguments, with the group `name` and perhaps `id`."""
    arguments: Literal["json", "python"] | Parameters = "json"
    """A JSON object or a string that contains one, Python keyword arguments up to the bracket, or Parameters."""
    tail: regex.Pattern[str] | None = None
    """Pattern after the arguments."""
    more: regex.Pattern[str] | None = None
    """Head of a further call that follows without a marker."""
    end: regex.Pattern[str] | None = None
    """Pattern of what follows the last call, any number of times."""
    needs_known_name: bool = False
    """Whether only text that names a tool of the request is a call, because answers may look like this shape."""
    begins_answer: bool = False
    """Whether it is a call only at the beginning of the answer, because a JSON answer may contain it."""


@dataclass(frozen=True)
class Writing:
    """How a grammar writes calls. NAME and INDEX are replaced by the name and the number of the call."""

    before: str
    """Text before the arguments of one call."""
    after: str
    """Text after the arguments of one call."""
    first: str = ""
    """Text before all calls."""
    between: str = ""
    """Text between two calls."""
    last: str = ""
    """Text after all calls."""


@dataclass(frozen=True)
class ToolFamily:
    """One way to write calls, as the models of a family do."""

    markers: tuple[str, ...]
    """Texts that begin calls; empty if a call usually begins the answer."""
    shapes: tuple[Shape, ...]
    """Shapes that are tried in this order; grammars write arguments as in the first."""
    writing: Writing
    hints: tuple[tuple[str, ...], ...]
    """Parts of chat templates that tell the family. All parts of one hint must occur."""
    slips: tuple[str, ...] = ()
    """Other texts that begin calls where a model leaves out the marker; grammars do not write them."""


def _p(pattern: str) -> regex.Pattern[str]:
    """Compiles a pattern. White space is matched possessively, so that no pattern tries a long run twice."""
    return regex.compile(pattern.replace(r"\s*", r"\s*+"), regex.DOTALL)


_FIELD = r'"(?:type|id|index)"\s*:\s*(?:"[^"\\]*+"|-?\d++|null)'
_NAME = r'"(?:name|function)"\s*:\s*"(?P<name>[^"\\]*+)"\s*,\s*'
_OBJECT = r'(?=\{|"\s*\{)'
_VALUE = rf'"(?:arguments|parameters)"\s*:\s*{_OBJECT}'
_JSON_HEAD = rf"\{{\s*(?:{_FIELD}\s*,\s*)*+{_NAME}(?:{_FIELD}\s*,\s*)*+{_VALUE}"
_JSON_TAIL = rf"(?:\s*,\s*{_FIELD})*+\s*\}}"
# The form of OpenAI's API: {"type": "function", "function": {"name": ..., "arguments": ...}}.
_NESTED_HEAD = rf'\{{\s*(?:{_FIELD}\s*,\s*)*+"function"\s*:\s*{_JSON_HEAD}'
_NESTED_TAIL = _JSON_TAIL * 2
_OBJECTS = ((_JSON_HEAD, _JSON_TAIL), (_NESTED_HEAD, _NESTED_TAIL))


def _in_tags(opening: str) -> tuple[Shape, ...]:
    """Returns shapes in which each call is one JSON object between tags, perhaps with braces too many."""
    return tuple(
        Shape(_p(rf"{opening}\s*{head}"), tail=_p(rf"{tail}(?:\s*\}})*+\s*</tool_call>")) for head, tail in _OBJECTS
    )


def _in_list(opening: str, end: str = r"\s*\]", is_bare: bool = False) -> tuple[Shape, ...]:
    """Returns shapes in which a JSON list of calls follows. is_bare: no marker distinguishes it from a JSON answer."""
    return tuple(
        Shape(
            _p(rf"{opening}\s*\[\s*{head}"),
            tail=_p(tail),
            more=_p(rf"\s*,\s*{head}"),
            end=_p(end),
            needs_known_name=is_bare,
            begins_answer=is_bare,
        )
        for head, tail in _OBJECTS
    )


_LLAMA_TAG = r"\s*(?:<\|python_(?:tag|start)\|>)?"
_LLAMA_END = r"\s*(?:\]|;|<\|python_end\|>)"
_LLAMA_SHAPES = (
    *(
        Shape(
            _p(rf"{_LLAMA_TAG}\s*{head}"),
            tail=_p(tail),
            more=_p(rf"\s*[;,]?\s*{head}"),
            end=_p(_LLAMA_END),
            needs_known_name=True,
            begins_answer=True,
        )
        for head, tail in _OBJECTS
    ),
    *_in_list(_LLAMA_TAG, _LLAMA_END, is_bare=True),
)
_FUNCTION_TAG = Shape(_p(r"<function=(?P<name>[^>\s<]++)>\s*(?=\{)"), tail=_p(r"\s*</function>"), needs_known_name=True)
_QWEN_PARAMETERS = Parameters(
    _p(r"\s*<parameter=(?P<key>[^>\n<]++)>"),
    # Values may contain the tags. A tag that the model forgot is recognised by the one that follows.
    _p(
        r"\n?</parameter>(?=\s{0,64}+(?:<parameter=|</function>))"
        r"|\n?(?=</function>\s{0,64}+</tool_call>)"
        r"|\n(?=<parameter=(?P<key>[^>\n<]{1,256}+)>)"
    ),
    _p(r"\s*</function>"),
    strips_newline=True,
)
_GLM_PARAMETERS = Parameters(
    _p(r"\s*<arg_key>\s*(?P<key>[^<]++)(?:</arg_key>\s*)++(?:<arg_value>|(?=[^<\s]))"),
    _p(r"</arg_value>(?=\s{0,64}+(?:<arg_key>|</tool_call>))"),
    _p(r"\s*</tool_call>"),
    markers=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_DEEPSEEK_V3 = r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n<]++)\n```json\s*" + _OBJECT
_DEEPSEEK_V31 = r"<｜tool▁call▁begin｜>(?P<name>[^\n<]++)<｜tool▁sep｜>\s*" + _OBJECT
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_KIMI_BEGIN = r"(?:<\|tool_calls?_section_begin\|>\s*)?"
_KIMI_END = r"\s*<\|tool_calls?_section_end\|>"
_KIMI = (
    r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]++):\d++)\s*"
    r"<\|tool_call_argument_begin\|>\s*" + _OBJECT
)
_KIMI_SLIP = (
    r"<\|tool_call_begin\|>\s*(?P<id>functions\.?(?P<name>[\w-]{1,64}?):?\d{1,4}+)\s*"
    r"<\|tool_call_argument_begin\|>\s*" + _OBJECT
)
_PYTHON_NAME = r"(?P<name>[A-Za-z_][\w.-]*+)\("


def _deepseek(call: str, tail: str) -> Shape:
    return Shape(
        _p(rf"(?:{_DEEPSEEK_BEGIN}\s*)?{call}"), tail=_p(tail), more=_p(rf"\s*{call}"), end=_p(rf"\s*{_DEEPSEEK_END}")
    )


def _kimi(call: str, needs_known_name: bool = False) -> Shape:
    return Shape(
        _p(_KIMI_BEGIN + call),
        tail=_p(r"\s*<\|tool_call_end\|>"),
        more=_p(r"\s*" + call),
        end=_p(_KIMI_END),
        needs_known_name=needs_known_name,
    )


_DEEPSEEK_SHAPES = (
    _deepseek(_DEEPSEEK_V3, r"\s*```\s*<｜tool▁call▁end｜>"),
    _deepseek(_DEEPSEEK_V31, r"\s*<｜tool▁call▁end｜>"),
)
_DEEPSEEK_SLIPS = ("<｜tool▁call▁begin｜>",)

TOOL_FAMILIES: dict[ToolFamilyName, ToolFamily] = {
    "openai": ToolFamily(  # read by `harmony`
        ("<|channel|>",),
        (),
        Writing("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""),
        (("<|channel|>", "<|message|>"),),
    ),
    "kimi_k2": ToolFamily(
        ("<|tool_calls_section_begin|>",),
        (_kimi(_KIMI), _kimi(_KIMI_SLIP, needs_known_name=True)),
        Writing(
            "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            last="<|tool_calls_section_end|>",
        ),
        (("<|tool_calls_section_begin|>",),),
        slips=("<|tool_call_section_begin|>", "<|tool_call_begin|>"),
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
        slips=_DEEPSEEK_SLIPS,
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
        slips=_DEEPSEEK_SLIPS,
    ),
    "qwen3_coder": ToolFamily(
        ("<tool_call>",),
        (
            Shape(_p(r"<tool_call>\s*<function=(?P<name>[^>\s<]++)>"), _QWEN_PARAMETERS, tail=_p(r"\s*</tool_call>")),
            Shape(
                _p(r"<function=(?P<name>[^>\s<]++)>"),
                _QWEN_PARAMETERS,
                tail=_p(r"\s*</tool_call>"),
                needs_known_name=True,
            ),
            *_in_tags("<tool_call>"),
        ),
        Writing("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", between="\n"),
        (("<tool_call>", "<function="),),
        slips=("<function=",),
    ),
    "glm45": ToolFamily(
        ("<tool_call>",),
        (
            Shape(_p(r"<tool_call>\s*(?P<name>[\w.-]++)\s*(?=<arg_key>|</tool_call>)"), _GLM_PARAMETERS),
            Shape(_p(r"<tool_call>\s*(?P<name>[\w.-]++)\s*(?=\{)"), tail=_p(r"\s*</tool_call>")),
            *_in_tags("<tool_call>"),
        ),
        Writing("<tool_call>NAME\n", "</tool_call>", between="\n"),
        (("<tool_call>", "<arg_key>"),),
    ),
    "mistral": ToolFamily(
        ("[TOOL_CALLS]",),
        (
            *_in_list(r"\[TOOL_CALLS\]"),
            Shape(
                _p(
                    r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]++)\s*"
                    r"(?:\[CALL_ID\]\s*(?P<id>\w++)\s*)?(?:\[ARGS\]\s*)?(?=\{)"
                )
            ),
        ),
        Writing("[TOOL_CALLS]NAME[ARGS]", ""),
        (("[TOOL_CALLS]",),),
    ),
    "granite": ToolFamily(
        ("<|tool_call|>", "<tool_call>"),
        (*_in_list(r"(?:<\|tool_call\|>|<tool_call>)"), *_in_tags("<tool_call>")),
        Writing('{"name": "NAME", "arguments": ', "}", "<|tool_call|>[", ", ", "]"),
        (("<|tool_call|>",),),
    ),
    "hermes": ToolFamily(
        ("<tool_call>",),
        _in_tags("<tool_call>"),
        Writing('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n"),
        (("<tool_call>",),),
    ),
    "llama3_json": ToolFamily(
        (),
        (*_LLAMA_SHAPES, _FUNCTION_TAG),
        Writing('{"name": "NAME", "parameters": ', "}", between="; "),
        (("<|start_header_id|>", '"parameters"'), ("<|header_start|>", '"parameters"')),
        slips=("<function=",),
    ),
    "phi4_mini": ToolFamily(
        ("functools[",),
        (
            *_in_list(r"(?:functools|<\|tool_calls?\|>)", r"\s*(?:\]|<\|/tool_calls?\|>)"),
            *(Shape(_p(rf"functools\s*{head}"), tail=_p(tail)) for head, tail in _OBJECTS),
        ),
        Writing('{"name": "NAME", "arguments": ', "}", "functools[", ", ", "]"),
        (("<|tool|>", "<|/tool|>"),),
        slips=("functools{", "<|tool_call|>", "<|tool_calls|>"),
    ),
    "pythonic": ToolFamily(
        (),
        (
            Shape(
                _p(rf"{_LLAMA_TAG}\s*\[\s*{_PYTHON_NAME}"),
                "python",
                more=_p(rf"\s*,\s*{_PYTHON_NAME}"),
                end=_p(_LLAMA_END),
                needs_known_name=True,
            ),
            *_LLAMA_SHAPES,
        ),
        Writing("NAME(", ")", "[", ", ", "]"),
        (("<|header_start|>",),),
        slips=("<|python_start|>", "["),
    ),
}
"""`tool_formats.detect_tool_family` tries them in this order: a hint of an earlier family is more specific."""
