"""The tool parser, with text split anywhere; and the grammars of tool calls."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem.proxy.parsers.parsed import Parsed
from tandem.proxy.parsers.tool_families import ToolFamilyName
from tandem.proxy.parsers.tool_formats import ToolFormat
from tandem.proxy.parsers.tool_parser import ToolParser

HERMES, LLAMA = ToolFormat("hermes"), ToolFormat("llama3_json")


def parse(parser: ToolParser, cuts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Returns the content and the calls as (name, arguments)."""
    content, calls = "", list[tuple[str, str]]()
    for number, cut in enumerate(cuts, start=1):
        parsed = parser.push(cut, is_end=number == len(cuts))
        content += parsed.content
        assert list(parsed.names) == list(range(len(calls), len(calls) + len(parsed.names)))
        calls += [(name, "") for name in parsed.names.values()]
        for index, text in parsed.arguments.items():
            assert text or index in parsed.names
            calls[index] = (calls[index][0], calls[index][1] + text)
    assert parser.num_calls == len(calls)
    return content, calls


def cut_up(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


JSON_VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet=st.characters(codec="utf-8"), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["get_weather", "a.b-c", "f"]), st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=3)
    ),
    max_size=3,
)
PLACES = st.lists(st.integers(0, 10**6), max_size=12)


@given(
    calls=CALLS, content=st.text(max_size=20), indent=st.sampled_from([None, 2]), is_ascii=st.booleans(), places=PLACES
)
def test_hermes_calls_are_parsed_however_the_text_is_split(
    calls: list[tuple[str, dict[str, Any]]], content: str, indent: int | None, is_ascii: bool, places: list[int]
) -> None:
    content = content.replace("<tool_call>", "").rstrip()
    written = [json.dumps(arguments, indent=indent, ensure_ascii=is_ascii) for _, arguments in calls]
    text = content + "".join(
        f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for (name, _), arguments in zip(calls, written, strict=True)
    )
    parsed, found = parse(HERMES.parser(), cut_up(text, places))
    if "<tool_call" not in content:
        assert parsed == (content.rstrip(" \t\r\n") if calls else content)
        assert found == [(name, arguments) for (name, _), arguments in zip(calls, written, strict=True)]


@given(calls=CALLS, places=PLACES)
def test_llama_calls_are_parsed_however_the_text_is_split(
    calls: list[tuple[str, dict[str, Any]]], places: list[int]
) -> None:
    written = [(name, json.dumps(arguments)) for name, arguments in calls]
    text = "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in written)
    assert parse(LLAMA.parser(), cut_up(text, places)) == ("", written)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"title": "f"}\n</tool_call>',
        "<tool_call>\nsorry, no",
        "<tool_call>",
        '<tool_call>{"name": "' + "x" * 2000,
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        'a <tool_call>{"name": "f\\n", "arguments": {}}</tool_call> b',
    ],
)
def test_text_that_is_not_a_call_becomes_content(text: str) -> None:
    assert parse(HERMES.parser(), [text]) == (text, [])


def test_text_and_arguments_are_emitted_as_soon_as_they_are_certain() -> None:
    parser = HERMES.parser()
    assert parser.push("I see. ") == Parsed("I see.")
    assert parser.push("<too") == Parsed() and parser.push('l_call>\n{"name": "f", "argum') == Parsed()
    assert parser.push('ents": {"a": "') == Parsed(names={0: "f"}, arguments={0: '{"a": "'})
    assert parser.push('}"') == Parsed(arguments={0: '}"'})
    assert parser.push("}}\n</tool_call> and") == Parsed(" and", arguments={0: "}"})
    assert LLAMA.parser().push("No,") == Parsed("No,")


def test_an_incomplete_call_keeps_its_arguments() -> None:
    assert parse(HERMES.parser(), ['<tool_call>\n{"name": "f", "arguments": {"a": [1, 2']) == (
        "",
        [("f", '{"a": [1, 2')],
    )


# ---- the grammars

TOOLS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False,
    },
    "get_weather": {"type": "object", "properties": {"b": {"$ref": "#/$defs/B"}}, "$defs": {"B": {"enum": ["é", 1]}}},
}  # fmt: skip


def tokenizer_with(*added: AddedToken) -> tuple[Tokenizer, LLTokenizer]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken("<|end|>", special=True)])
    bpe.add_tokens(list(added))
    return bpe, LLTokenizer(bpe.to_str(), eos_token=bpe.token_to_id("<|end|>"))


TOKENIZERS = {
    "plain": tokenizer_with(),
    "thinks": tokenizer_with(AddedToken("<think>", special=False)),
    "qwen": tokenizer_with(*(AddedToken(t, special=False) for t in ("<tool_call>", "</tool_call>", "<think>"))),
    "special": tokenizer_with(*(AddedToken(t, special=True) for t in ("<tool_call>", "</tool_call>"))),
}
F = '{"name": "f", "KEY": {"a": 12}}'
W = '{"name": "get_weather", "KEY": {"b": "é"}}'
WRONG = '{"name": "f", "KEY": {"a": "12"}}'


def text_of(name: ToolFamilyName, calls: list[str], content: str = "") -> str:
    if name == "llama3_json":
        return content + "; ".join(call.replace("KEY", "parameters") for call in calls)
    return content + "\n".join(f"<tool_call>\n{call.replace('KEY', 'arguments')}\n</tool_call>" for call in calls)


def accepts(tool_format: ToolFormat, tokenizers: tuple[Tokenizer, LLTokenizer], text: str, **options: Any) -> bool:
    grammar = tool_format.grammar(TOOLS, **({"is_required": False, "is_parallel": True} | options))
    assert grammar is not None
    matcher = LLMatcher(tokenizers[1], grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizers[0].encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_grammars_accept_only_valid_calls(name: ToolFamilyName, kind: str) -> None:
    tokenizers = TOKENIZERS[kind]
    tool_format = ToolFormat.of(name, tokenizers[0])
    assert tool_format.has_special_markers == (name == "hermes" and kind == "special")

    def takes(text: str, **options: Any) -> bool:
        return accepts(tool_format, tokenizers, text, **options)

    one, two, wrong = (text_of(name, calls) for calls in ([F], [W, F], [WRONG]))
    for required in (True, False):
        assert takes(one, is_required=required) and takes(two, is_required=required)
        assert not takes(wrong, is_required=required) and not takes(text_of(name, [W])[:-3], is_required=required)
        assert takes(one, is_required=required, is_parallel=False)
        assert not takes(two, is_required=required, is_parallel=False)
    assert not takes("Hello", is_required=True) and not takes("", is_required=True)
    assert takes("Hello") and takes("") and takes("a\n<b> {é}")
    assert takes("42", content="/[0-9]+/") and takes(one, content="/[0-9]+/") and not takes("no", content="/[0-9]+/")
    if name == "hermes":
        assert takes(text_of(name, [F], "Let me see.\n")) and not takes(text_of(name, [WRONG], "Let me see.\n"))
        assert takes(text_of(name, [F], "<think>hm</think>"))
    else:
        assert takes('{"nam": 1}')  # JSON that is not a call
