"""The formats of tool calls of all families: parsing of text split anywhere, malformed text, grammars, detection."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem.proxy.parsers.output_parser import OutputParser
from tandem.proxy.parsers.tool_families import TOOL_FAMILIES, ToolFamilyName
from tandem.proxy.parsers.tool_formats import ToolFormat, detect_tool_family
from tests.unit.proxy.parsers.written_calls import ADDED, ARGUMENTS, KIMI_IDS, SCHEMAS, WRITTEN, A

PLACES = st.lists(st.integers(0, 10**6), max_size=12)


def parser(name: ToolFamilyName) -> OutputParser:
    return OutputParser(None, ToolFormat(name).with_tools(SCHEMAS), is_open=False)


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
@settings(max_examples=12)
def test_calls_are_parsed_however_the_text_is_split(case: str, places: list[int]) -> None:
    name, text = WRITTEN[case]
    for cuts in (cut_up(text, places), list(text)):
        content, calls, ids = parse(name, cuts)
        assert content.strip() == ("Hm." if "Hm." in text else "")
        assert [(called, json.loads(arguments)) for called, arguments in calls] == [("get_weather", A), ("now", {})]
        assert ids == (KIMI_IDS if name == "kimi_k2" else [])


@pytest.mark.parametrize("tool", ["获取天气", "wetter_für.große-städte"])
@pytest.mark.parametrize("case", WRITTEN)
def test_names_may_have_letters_of_any_script(case: str, tool: str) -> None:
    name, text = WRITTEN[case]
    tools = {tool: SCHEMAS["get_weather"], "now": SCHEMAS["now"]}
    parser = OutputParser(None, ToolFormat(name).with_tools(tools), is_open=False)
    parsed = parser.push(text.replace("get_weather", tool), is_end=True)
    assert list(parsed.names.values()) == [tool, "now"]
    assert [json.loads(arguments) for arguments in parsed.arguments.values()] == [A, {}]


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
        rest = piece.removeprefix(content)
        assert piece.startswith(content) and rest.replace("<|message_sep|>", "").strip() == ""
        assert not rest or name == "gigachat3"


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
        ("<|start_header_id|>{{ tools }}<function=f>{}</function>", "llama3_json"),  # Functionary 3.1
        ("<|header_start|>assistant [func(a=b)]", "pythonic"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜>function```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|tool_call|>", "granite"),
        ("<|start|>assistant<|channel|>final<|message|>", "openai"),
        ("{% for tool in tools %}<|tool|>{% endfor %}<|/tool|>", "phi4_mini"),
        ("functools[{", "phi4_mini"),
        ("<|tool|>{{ tool }}<|/tool|> <|tool_call|>{", "phi4_mini"),  # llama.cpp's template
        ("{%- set dsml_token = '｜DSML｜' %}<{{ dsml_token }}function_calls>", "deepseek_v32"),
        ("<｜DSML｜tool_calls>", "deepseek_v4"),
        ("<｜tool_calls_begin｜>function<｜tool_sep｜><steptml:invoke", "step3"),
        ("<minimax:tool_call>\n<invoke name=", "minimax_m2"),
        ("<beginning_of_sentence>ai <tools> <tool_calls>\n", "minimax_m1"),
        ("助手： <tool_calls>[{", "hunyuan_a13b"),
        ("<tool_calls>[{", "jamba"),
        ("<tool_calls><tool_call>f<tool_sep><arg_key>", "glm45"),
        ("<seed:tool_call>\n<function=", "seed_oss"),
        ("<TOOLCALL>[", "nemotron_nano_v2"),
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        ("<|tool_call_start|>[", "lfm2"),
        ("<function_calls>\nf(a='b')", "olmo3"),
        ("<|START_ACTION|>[", "cohere"),
        ('Action: ```json\n[{"tool_name": ', "cohere"),
        ("<|tools_prefix|>[", "apertus"),
        ('make calls in a single JSON array: [{"name": , "arguments": }] <|start_header_id|>', "xlam"),
        ("<|function_call_library|> <function_call> {", "granite_20b_fc"),
        ("name=<|plugin|> <|action_start|>", "internlm"),
        ("[gMASK]<sop> tools <|observation|>", "glm4"),
        ("[gMASK]<sop> tools <|observation|> <tool_call>{{ name }}<arg_key>", "glm45"),
        ("<start_function_declaration>", "functiongemma"),
        ("<|tool>declaration:<tool|> <|tool_call>call:", "gemma4"),
        ("function call<|role_sep|>\n", "gigachat3"),
        ("<|start_header_id|>ipython {{ tools }} [func_name1(params_name1=params_value1...)]", "pythonic"),
        ("<start_of_turn> {{ tools }} [func_name1(params_name1=params_value1...)]", "pythonic"),
        ("<|im_start|>", "hermes"),
        ("<|im_start|>{% if tools %}<tools>{% endif %}", None),
        ("<|im_start|>{{ stools }}", "hermes"),
        (None, "hermes"),
    ],
)
def test_the_chat_template_tells_the_family(template: str | None, name: ToolFamilyName | None) -> None:
    assert detect_tool_family(template) == name


def test_a_format_that_is_not_known_is_forced_only() -> None:
    pair = tokenizers()
    unknown = replace(ToolFormat.of("hermes", pair[0]), is_known=False)
    assert unknown.grammar(SCHEMAS, is_required=False, is_parallel=True) is None
    answer = unknown.grammar(SCHEMAS, is_required=False, is_parallel=True, content='"yes"')
    assert is_accepted(answer, pair, "yes") and not is_accepted(answer, pair, written_call("hermes", "{}"))
    forced = unknown.grammar(SCHEMAS, is_required=True, is_parallel=True)
    assert is_accepted(forced, pair, written_call("hermes", '{"days": 3}'))


# ---- grammars


def tokenizers(*added: str) -> tuple[Tokenizer, LLTokenizer]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["<eos>", *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<eos>", *added)])
    return tokenizer, LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=0)


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


UNCONSTRAINED = [*ARGUMENTS, "openai", "glm4", "xlam"]
CONSTRAINED = [name for name in TOOL_FAMILIES if name not in (*UNCONSTRAINED, "llama3_json")]


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


@pytest.mark.parametrize("name", CONSTRAINED)
def test_free_text_may_contain_only_valid_calls(name: ToolFamilyName) -> None:
    pair = tokenizers(*ADDED.get(name, ()))
    grammar = ToolFormat.of(name, pair[0]).grammar(SCHEMAS, is_required=False, is_parallel=True)
    for before in ("", "Let me see. "):
        assert is_accepted(grammar, pair, before + written_call(name, '{"days": 3}'))
        assert not is_accepted(grammar, pair, before + written_call(name, '{"days": "3"}'))
    assert is_accepted(grammar, pair, "No call.")


@pytest.mark.parametrize("name", UNCONSTRAINED)
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
