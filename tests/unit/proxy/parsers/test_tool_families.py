"""The formats of tool calls of all families: parsing of text split anywhere, malformed text, grammars, detection."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem.proxy.parsers.harmony import HarmonyParser
from tandem.proxy.parsers.tool_families import TOOL_FAMILIES, ToolFamilyName
from tandem.proxy.parsers.tool_formats import ToolFormat, detect_tool_family
from tandem.proxy.parsers.tool_parser import ToolParser

PLACES = st.lists(st.integers(0, 10**6), max_size=12)
SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
    },
    "now": {"type": "object", "properties": {}},
}
A = {"city": 'São "Paulo"\n\\', "days": 3, "exact": True}
A_JSON = json.dumps(A, ensure_ascii=False)
KIMI_IDS = ["functions.get_weather:0", "functions.now:1"]
# What the model writes for get_weather(**A) and now(), with text before the calls where the format allows it.
WRITTEN: dict[str, tuple[ToolFamilyName, str]] = {
    "hermes": (
        "hermes",
        f'Hm.\n<tool_call>\n{{"name": "get_weather", "arguments": {A_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "qwen3_coder": (
        "qwen3_coder",
        f"Hm.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n{A['city']}\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=exact>\ntrue\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "glm45": (
        "glm45",
        f"Hm.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{A['city']}</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n"
        "</tool_call>\n<tool_call>now\n</tool_call>",
    ),
    "llama3_json": (
        "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {A_JSON}}}; {{"name": "now", "parameters": {{}}}}',
    ),
    "llama4_pythonic": (
        "pythonic",
        "<|python_start|>[get_weather(city='São \"Paulo\"\\n\\\\', days=3, exact=True), now()]",
    ),
    "mistral_list": (
        "mistral",
        f'Hm.[TOOL_CALLS] [{{"name": "get_weather", "arguments": {A_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
    ),
    "mistral": ("mistral", f"Hm.[TOOL_CALLS]get_weather[ARGS]{A_JSON}[TOOL_CALLS]now[ARGS]{{}}"),
    "deepseek_v3": (
        "deepseek_v3",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{A_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "deepseek_v31",
        f"Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{A_JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "kimi_k2",
        "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{A_JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    "granite": (
        "granite",
        f'Hm.<|tool_call|>[{{"name": "get_weather", "arguments": {A_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
    ),
    "granite4": (
        "granite",
        f'Hm.\n<tool_call>\n{{"name": "get_weather", "arguments": {A_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "openai": (
        "openai",
        "<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{A_JSON}<|call|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}",
    ),
    "openai_recipient_first": (
        "openai",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{A_JSON}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
    ),
}


def parser(name: ToolFamilyName) -> ToolParser | HarmonyParser:
    return HarmonyParser(True) if name == "openai" else ToolFormat(name).with_tools(SCHEMAS).parser()


def parse(name: ToolFamilyName, cuts: list[str]) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Returns the content, the calls as (name, arguments), and their ids."""
    reader, content, calls, ids = parser(name), "", list[tuple[str, str]](), list[str]()
    for number, cut in enumerate(cuts, start=1):
        parsed = reader.push(cut, is_end=number == len(cuts))
        content += parsed.content
        calls += [(name, "") for name in parsed.names.values()]
        ids += parsed.ids.values()
        for index, text in parsed.arguments.items():
            calls[index] = (calls[index][0], calls[index][1] + text)
    assert reader.num_calls == len(calls)
    return content, calls, ids


def cut_up(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("case", WRITTEN)
@given(places=PLACES)
@settings(max_examples=30)
def test_calls_are_parsed_however_the_text_is_split(case: str, places: list[int]) -> None:
    name, text = WRITTEN[case]
    for cuts in (cut_up(text, places), list(text)):
        content, calls, ids = parse(name, cuts)
        assert content.strip() == ("Hm." if "Hm." in text else "")
        assert [(called, json.loads(arguments)) for called, arguments in calls] == [("get_weather", A), ("now", {})]
        assert ids == (KIMI_IDS if name == "kimi_k2" else [])


@pytest.mark.parametrize("case", [case for case, (name, _) in WRITTEN.items() if name != "openai"])
@given(data=st.data())
@settings(max_examples=50)
def test_text_without_a_call_is_kept(case: str, data: Any) -> None:
    name, text = WRITTEN[case]
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    piece = text[start:end]
    content, calls, _ = parse(name, [piece])
    if not calls:
        assert content == piece


@pytest.mark.parametrize("case", WRITTEN)
def test_text_after_a_broken_call_is_kept(case: str) -> None:
    name, text = WRITTEN[case]
    start = text.index("get_weather") + len("get_weather")
    content, calls, _ = parse(name, [text[:start] + " no, wait. " + text[start:]])
    kept = content + "".join(called + arguments for called, arguments in calls)
    assert "no, wait." in kept or name == "openai"  # harmony drops what a header has besides its fields


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call><function=", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm45"),
        ('<|start_header_id|>ipython {"name": , "parameters": }', "llama3_json"),
        ('<|header_start|>assistant {"name": , "parameters": }', "llama3_json"),
        ("<|header_start|>assistant [func(a=b)]", "pythonic"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜>function```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|tool_call|>", "granite"),
        ("<|start|>assistant<|channel|>final<|message|>", "openai"),
        ("<|im_start|>", "hermes"),
        (None, "hermes"),
    ],
)
def test_the_chat_template_tells_the_family(template: str | None, name: ToolFamilyName) -> None:
    assert detect_tool_family(template) == name


# ---- grammars


def tokenizers(*added: str) -> tuple[Tokenizer, LLTokenizer]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["<eos>", *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<eos>", *added)])
    return tokenizer, LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=0)


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
}


def is_accepted(grammar: str | None, pair: tuple[Tokenizer, LLTokenizer], text: str) -> bool:
    assert grammar is not None
    matcher = LLMatcher(pair[1], grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = pair[0].encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written_call(name: ToolFamilyName, arguments: str) -> str:
    """Returns a text of the grammar's form that calls get_weather once."""
    writing = ToolFormat.of(name, tokenizers(*ADDED.get(name, ()))[0]).writing
    text = writing.first + writing.before + arguments + writing.after + writing.last
    return text.replace("NAME", "get_weather").replace("INDEX", "0")


ARGUMENTS: dict[ToolFamilyName, str] = {
    "qwen3_coder": "<parameter=days>\n3\n</parameter>\n",
    "glm45": "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n",
    "pythonic": "days=3",
}


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_a_forced_call_follows_the_family_and_is_parsed(name: ToolFamilyName, has_tokens: bool) -> None:
    pair = tokenizers(*(ADDED.get(name, ()) if has_tokens else ()))
    tool_format = ToolFormat.of(name, pair[0])
    grammar = tool_format.grammar(SCHEMAS, is_required=True, is_parallel=True)
    writing = tool_format.writing
    arguments = ARGUMENTS.get(name, '{"days": 3}')
    text = writing.first + writing.before + arguments + writing.after + writing.last
    text = text.replace("NAME", "get_weather").replace("INDEX", "0")
    assert is_accepted(grammar, pair, text)
    assert not is_accepted(grammar, pair, "Hello") and not is_accepted(grammar, pair, text.replace("weather", "wind"))
    if name not in ARGUMENTS:
        assert not is_accepted(grammar, pair, text.replace("3", '"3"'))
    content, calls, _ = parse(name, [text])
    assert (content, [(called, json.loads(arguments)) for called, arguments in calls]) == (
        "",
        [("get_weather", {"days": 3})],
    )


@pytest.mark.parametrize("name", [name for name in TOOL_FAMILIES if name not in (*ARGUMENTS, "openai", "llama3_json")])
def test_free_text_may_contain_only_valid_calls(name: ToolFamilyName) -> None:
    pair = tokenizers(*ADDED.get(name, ()))
    grammar = ToolFormat.of(name, pair[0]).grammar(SCHEMAS, is_required=False, is_parallel=True)
    for before in ("", "Let me see. "):
        assert is_accepted(grammar, pair, before + written_call(name, '{"days": 3}'))
        assert not is_accepted(grammar, pair, before + written_call(name, '{"days": "3"}'))
    assert is_accepted(grammar, pair, "No call.")


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic", "openai"])
def test_free_text_of_other_formats_is_not_constrained(name: ToolFamilyName) -> None:
    pair = tokenizers(*ADDED.get(name, ()))
    tool_format = ToolFormat.of(name, pair[0])
    assert tool_format.grammar(SCHEMAS, is_required=False, is_parallel=True) is None
    with_format = tool_format.grammar(SCHEMAS, is_required=False, is_parallel=True, content='"yes"')
    answer = "<|channel|>final<|message|>yes" if name == "openai" else "yes"
    assert is_accepted(with_format, pair, answer) and not is_accepted(with_format, pair, answer + "no")


@pytest.mark.parametrize(
    "arguments",
    [
        "a=" + "1if 1else " * 20 + "1",
        "a=" + "-" * 9999 + "1",
        "a=" + "(" * 9999,
        "a=" + "9" * 9999,
        "a={[]: 1}",
        "a=1e999",
    ],
)
def test_arguments_that_are_no_plain_values_are_text(arguments: str, recwarn: pytest.WarningsRecorder) -> None:
    text = f"[f({arguments})]"
    assert parse("pythonic", [text])[:2] == (text, [])
    assert len(recwarn) == 0, "a model must not be able to fill the log"
