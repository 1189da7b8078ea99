"""How families of models write tool calls. Data only: `tool_parser` reads calls, `tool_formats` builds grammars.

`tool_shapes` explains the fields.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from tandem.proxy.parsers.tool_shapes import (
    BARE_OBJECTS,
    OBJECT,
    OBJECTS,
    PYTHON_NAME,
    Marked,
    Parameters,
    Shape,
    ToolFamily,
    Writing,
    function_tags,
    in_block,
    in_list,
    in_tags,
    invoke_tags,
    pattern,
    python_calls,
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


ToolFamilyName = Literal[
    "apertus",
    "cohere",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "dots",
    "functiongemma",
    "gemma4",
    "gigachat3",
    "glm4",
    "glm45",
    "granite",
    "granite_20b_fc",
    "hermes",
    "hunyuan_a13b",
    "internlm",
    "jamba",
    "kimi_k2",
    "lfm2",
    "llama3_json",
    "longcat",
    "minimax_m1",
    "minimax_m2",
    "mistral",
    "nemotron_nano_v2",
    "olmo3",
    "openai",
    "phi4_mini",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
    "step3",
    "xlam",
]


def _dsml(block: str) -> ToolFamily:
    """Returns the entry of DeepSeek's models that write `<｜DSML｜invoke name=...>`. block: name of the outer tag."""
    blocks = r"(?:function_calls|tool_?calls|tool)>"
    return ToolFamily(
        (f"<｜DSML｜{block}>",),
        invoke_tags("｜DSML｜", rf"(?:<｜DSML｜{blocks})?", rf"</｜DSML｜{blocks}", attribute=' string="BOOLEAN"'),
        Writing(
            '<｜DSML｜invoke name="NAME">\n', "</｜DSML｜invoke>\n", f"<｜DSML｜{block}>\n", last=f"</｜DSML｜{block}>"
        ),
        (("｜DSML｜", f"{block}>"),),
        slips=tuple(
            f"<｜DSML｜{name}"
            for name in ("function_calls>", "tool_calls>", "toolcalls>", "tool>", "invoke")
            if name != f"{block}>"
        ),
    )


_DEEPSEEK_SLIPS = ("<｜tool▁call▁begin｜>",)
_TOOL_CALLS = ToolFamily(
    ("<tool_calls>",),
    in_block("<tool_calls>", "</tool_calls>"),
    Writing('{"name": "NAME", "arguments": ', "}", "<tool_calls>[", ", ", "]</tool_calls>"),
    (("<tool_calls>",),),
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
        (kimi(KIMI), kimi(KIMI_SLIP, needs_known_name=True)),
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
        (DEEPSEEK_BEGIN,),
        DEEPSEEK_SHAPES,
        Writing(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            DEEPSEEK_BEGIN,
            "\n",
            DEEPSEEK_END,
        ),
        ((DEEPSEEK_BEGIN, "```json"),),
        slips=_DEEPSEEK_SLIPS,
    ),
    "deepseek_v31": ToolFamily(
        (DEEPSEEK_BEGIN,),
        DEEPSEEK_SHAPES,
        Writing(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            DEEPSEEK_BEGIN,
            last=DEEPSEEK_END,
        ),
        ((DEEPSEEK_BEGIN,),),
        slips=_DEEPSEEK_SLIPS,
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": replace(_dsml("tool_calls"), hints=(("｜DSML｜",),)),
    "step3": ToolFamily(
        ("<｜tool_calls_begin｜>",),
        invoke_tags(
            "steptml:",
            "(?:<｜tool_calls_begin｜>)?",
            "<｜tool_calls_end｜>",
            before=r"(?:<｜tool_sep｜>\s*)?<｜tool_call_begin｜>\s*(?:function\s*)?(?:<｜tool_sep｜>\s*)?(?:[\w.-]++\s*)?",
            after="<｜tool_call_end｜>",
        ),
        Writing(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">\n',
            "</steptml:invoke><｜tool_call_end｜>",
            "<｜tool_calls_begin｜>\n",
            "\n",
            "\n<｜tool_calls_end｜>",
        ),
        (("steptml:",), ("<｜tool_calls_begin｜>",)),
        slips=("<｜tool_call_begin｜>",),
    ),
    "minimax_m2": ToolFamily(
        ("<minimax:tool_call>",),
        invoke_tags("", "<minimax:tool_call>", "</minimax:tool_call>"),
        Writing('<invoke name="NAME">\n', "</invoke>\n", "<minimax:tool_call>\n", last="</minimax:tool_call>"),
        (("<minimax:tool_call>",),),
    ),
    "dots": ToolFamily(
        ("<dots_function_call>",),
        (
            *invoke_tags("", "<dots_function_call>", "</dots_function_call>"),
            *in_tags("<dots_function_call>", r"\s*</dots_function_call>"),
        ),
        Writing('<invoke name="NAME">\n', "</invoke>\n", "<dots_function_call>\n", last="</dots_function_call>"),
        (("<dots_function_call>",),),
    ),
    "seed_oss": ToolFamily(
        ("<seed:tool_call>",),
        (
            function_tags(r"<seed:tool_call>\s*", "</seed:tool_call>"),
            function_tags("", "</seed:tool_call>", needs_known_name=True),
        ),
        Writing("<seed:tool_call>\n<function=NAME>\n", "</function>\n</seed:tool_call>", between="\n"),
        (("<seed:tool_call>",),),
        slips=("<function=",),
    ),
    "qwen3_coder": ToolFamily(
        ("<tool_call>",),
        (
            function_tags(r"<tool_call>\s*", "</tool_call>", "\n"),
            function_tags("", "</tool_call>", needs_known_name=True),
            *in_tags("<tool_call>"),
        ),
        Writing("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", between="\n"),
        (("<tool_call>", "<function="),),
        slips=("<function=",),
    ),
    "glm45": ToolFamily(
        ("<tool_call>",),
        (
            Shape(pattern(rf"{GLM_HEAD}(?=<arg_key>|</tool_call>)"), GLM_PARAMETERS, end=pattern(r"\s*</tool_calls>")),
            Shape(pattern(rf"{GLM_HEAD}(?=\{{)"), tail=pattern(r"\s*</tool_call>"), end=pattern(r"\s*</tool_calls>")),
            *in_tags("<tool_call>"),
        ),
        Writing("<tool_call>NAME\n", "</tool_call>", between="\n"),
        (("<tool_call>", "<arg_key>"),),
        slips=("<tool_calls>",),
    ),
    "glm4": ToolFamily(
        (),
        (glm4(begins_answer=True), glm4(begins_answer=False)),
        Writing("NAME\n", "", between="\n"),
        (("<|observation|>", "!<tool_call>"),),
        slips=("<|assistant|>",),
    ),
    "mistral": ToolFamily(
        ("[TOOL_CALLS]",),
        (
            *in_list(r"\[TOOL_CALLS\]"),
            Shape(
                pattern(
                    r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]++)\s*"
                    r"(?:\[CALL_ID\]\s*(?P<id>\w++)\s*)?(?:\[ARGS\]\s*)?(?=\{)"
                )
            ),
        ),
        Writing("[TOOL_CALLS]NAME[ARGS]", ""),
        (("[TOOL_CALLS]",),),
    ),
    "gemma4": ToolFamily(
        ("<|tool_call>",),
        (
            Shape(pattern(rf"<\|tool_call>\s*:?\s*call:\s*{GEMMA_NAME}"), GEMMA4, tail=pattern(r"\s*<tool_call\|>")),
            Shape(
                pattern(rf"(?:call:|<call>)\s*{GEMMA_NAME}"),
                GEMMA4,
                tail=pattern(r"\s*<tool_call\|>"),
                needs_known_name=True,
            ),
        ),
        Writing("<|tool_call>call:NAME{", "<tool_call|>"),
        (("<|tool_call>",), ("<|tool>", "<tool|>")),
        slips=("call:", "<call>"),
        layout=("<|tool_response>", "<turn|>"),
    ),
    "functiongemma": ToolFamily(
        ("<start_function_call>",),
        (
            Shape(
                pattern(rf"<start_function_call>\s*call:\s*{GEMMA_NAME}"),
                Marked("<escape>", "<end_function_call>"),
                tail=pattern(r"\s*<end_function_call>"),
            ),
        ),
        Writing("<start_function_call>call:NAME{", "<end_function_call>"),
        (("<start_function_call>",), ("<start_function_declaration>",)),
        layout=("<start_function_response>", "<end_of_turn>"),
    ),
    "cohere": ToolFamily(
        ("<|START_ACTION|>",),
        (*in_block(r"<\|START_ACTION\|>", r"<\|END_ACTION\|>"), *in_block(r"Action:\s*(?:```(?:json)?)?", "```")),
        Writing(
            '{"tool_call_id": "INDEX", "tool_name": "NAME", "parameters": ',
            "}",
            "<|START_ACTION|>[",
            ", ",
            "]<|END_ACTION|>",
        ),
        (("<|START_ACTION|>",), ("Action:", "tool_name")),
        slips=("Action:",),
    ),
    "apertus": ToolFamily(
        ("<|tools_prefix|>",),
        (
            Shape(
                pattern(rf"<\|tools_prefix\|>\s*\[\s*{APERTUS}"),
                tail=pattern(r"\s*\}"),
                more=pattern(rf"\s*,\s*{APERTUS}"),
                end=pattern(r"\s*(?:\]|<\|tools_suffix\|>)"),
            ),
        ),
        Writing('{"NAME": ', "}", "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
        (("<|tools_prefix|>",),),
    ),
    "internlm": ToolFamily(
        ("<|action_start|>",),
        in_block(r"<\|action_start\|>\s*<\|plugin\|>", r"<\|action_end\|>"),
        Writing('<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ', "}<|action_end|>", between="\n"),
        (("<|action_start|>",), ("<|plugin|>",)),
    ),
    "gigachat3": ToolFamily(
        ("<|function_call|>",),
        tuple(Shape(pattern(rf"{GIGACHAT}\s*{head}"), tail=pattern(tail)) for head, tail in OBJECTS),
        Writing('<|function_call|>{"name": "NAME", "arguments": ', "}", between="\n"),
        (("<|role_sep|>", "function call"), ("<|function_call|>",)),
        slips=("function call<|role_sep|>", "<|message_sep|>"),
        layout=("<|message_sep|>",),
    ),
    "nemotron_nano_v2": ToolFamily(
        ("<TOOLCALL>",),
        in_block("<TOOLCALL>", "</TOOLCALL>"),
        Writing('{"name": "NAME", "arguments": ', "}", "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
        (("<TOOLCALL>",),),
    ),
    "longcat": ToolFamily(
        ("<longcat_tool_call>",),
        in_tags("<longcat_tool_call>", r"\s*</longcat_tool_call>"),
        Writing('<longcat_tool_call>\n{"name": "NAME", "arguments": ', "}\n</longcat_tool_call>", between="\n"),
        (("<longcat_tool_call>",),),
    ),
    "minimax_m1": replace(
        _TOOL_CALLS,
        writing=Writing('{"name": "NAME", "arguments": ', "}\n", "<tool_calls>\n", last="</tool_calls>"),
        hints=(("<tool_calls>", "beginning_of_sentence>"),),
    ),
    "hunyuan_a13b": replace(_TOOL_CALLS, hints=(("<tool_calls>", "助手："),)),
    "jamba": _TOOL_CALLS,
    "lfm2": ToolFamily(
        ("<|tool_call_start|>",),
        (
            *python_calls(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"),
            *in_block(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"),
        ),
        Writing("NAME(", ")", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
        (("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    ),
    "olmo3": ToolFamily(
        ("<function_calls>",),
        python_calls("<function_calls>", "</function_calls>"),
        Writing("NAME(", ")\n", "<function_calls>\n", last="</function_calls>"),
        (("<function_calls>", "!<invoke"),),
    ),
    "granite_20b_fc": ToolFamily(
        ("<function_call>",),
        in_block("<function_call>", "</function_call>"),
        Writing('<function_call> {"name": "NAME", "arguments": ', "}", between="\n"),
        (("<function_call>",),),
    ),
    "phi4_mini": ToolFamily(
        ("functools[",),
        (
            *in_list(r"(?:functools|<\|tool_calls?\|>)", r"\s*(?:\]|<\|/tool_calls?\|>)"),
            *(Shape(pattern(rf"functools\s*{head}"), tail=pattern(tail)) for head, tail in OBJECTS),
            *in_block(r"<\|tool_calls?\|>", r"<\|/tool_calls?\|>"),
        ),
        Writing('{"name": "NAME", "arguments": ', "}", "functools[", ", ", "]"),
        (("<|tool|>", "<|/tool|>"), ("functools[",)),
        slips=("functools{", "<|tool_call|>", "<|tool_calls|>"),
    ),
    "granite": ToolFamily(
        ("<|tool_call|>", "<tool_call>"),
        (*in_list(r"(?:<\|tool_call\|>|<tool_call>)"), *in_tags("<tool_call>")),
        Writing('{"name": "NAME", "arguments": ', "}", "<|tool_call|>[", ", ", "]"),
        (("<|tool_call|>",),),
    ),
    "hermes": ToolFamily(
        ("<tool_call>",),
        in_tags("<tool_call>"),
        Writing('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n"),
        (("<tool_call>",),),
    ),
    "xlam": ToolFamily(
        (),
        (
            *in_list("", is_bare=True),
            *in_list("", is_bare=True, begins_answer=False),
            *in_block(XLAM_FENCE, r"```|</tool_call>", is_bare=True),
        ),
        Writing('{"name": "NAME", "arguments": ', "}", "[", ", ", "]"),
        (("single JSON array", "arguments"), ("more tool calls as required", "arguments")),
        slips=("```", "[TOOL_CALLS]", "<tool_call>", "["),
    ),
    "pythonic": ToolFamily(
        (),
        (
            Shape(
                pattern(rf"{LLAMA_TAG}\s*\[\s*{PYTHON_NAME}"),
                "python",
                more=pattern(rf"\s*,\s*{PYTHON_NAME}"),
                end=pattern(LLAMA_END),
                needs_known_name=True,
            ),
            *LLAMA_SHAPES,
        ),
        Writing("NAME(", ")", "[", ", ", "]"),
        (("[func_name1(",), ("[func1(",), ("<|header_start|>", '!"parameters"')),
        slips=("<|python_start|>", "["),
    ),
    "llama3_json": ToolFamily(
        (),
        (*LLAMA_SHAPES, FUNCTION_TAG),
        Writing('{"name": "NAME", "parameters": ', "}", between="; "),
        (
            ("<|start_header_id|>", '"parameters"'),
            ("<|header_start|>", '"parameters"'),
            ("</function>", "!<tool_call>"),
        ),
        slips=("<function=",),
    ),
}
"""`tool_formats.detect_tool_family` tries them in this order: a hint of an earlier family is more specific."""
