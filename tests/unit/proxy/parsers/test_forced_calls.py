"""Whatever a model samples from the grammar of forced calls, the parser reads it as calls, in each family."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from tandem.proxy.parsers.output_parser import OutputParser
from tandem.proxy.parsers.tool_families import TOOL_FAMILIES, ToolFamilyName
from tandem.proxy.parsers.tool_formats import ToolFormat
from tandem.proxy.parsers.tool_shapes import Marked, Parameters
from tests.unit.proxy.parsers.test_tool_families import tokenizers
from tests.unit.proxy.parsers.written_calls import ADDED, ARGUMENTS

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "é"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
MAX_TOKENS = 1500


def sampled(grammar: str, name: ToolFamilyName, seed: int, has_tokens: bool) -> str | None:
    """Returns a text that the grammar allows; None if it does not end soon."""
    tokenizer, ll_tokenizer = tokenizers(*(ADDED.get(name, ()) if has_tokens else ()))
    matcher = LLMatcher(ll_tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    generator, ids = random.Random(seed), list[int]()
    alphabet = {tokenizer.token_to_id(c) for c in "abcdefgh123,:=</>{}()[]'\"Ċ"}
    while len(ids) < MAX_TOKENS:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(tokenizer.get_vocab_size()) if mask[i // 8] >> (i % 8) & 1]
        if 0 in allowed and (matcher.is_stopped() or generator.random() < 0.5 or allowed == [0]):
            return str(tokenizer.decode(ids, skip_special_tokens=False))
        likely = [i for i in allowed if i in alphabet or i > 256] or [i for i in allowed if i != 0]
        ids.append(generator.choice(likely))
        assert matcher.consume_token(ids[-1])
    return None


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_the_parser_reads_what_the_grammar_writes(name: ToolFamilyName, has_tokens: bool) -> None:
    tokenizer = tokenizers(*(ADDED.get(name, ()) if has_tokens else ()))[0]
    tool_format = ToolFormat.of(name, tokenizer).with_tools(TOOLS)
    num_ended = 0
    for is_parallel in (True, False):
        grammar = tool_format.grammar(TOOLS, is_required=True, is_parallel=is_parallel)
        assert grammar is not None
        for seed in range(3):
            text = sampled(grammar, name, seed, has_tokens)
            if text is None:
                continue
            num_ended += 1
            parser = OutputParser(None, tool_format, is_open=False)
            parsed = parser.push(text, is_end=True)
            assert set(parsed.names.values()) <= TOOLS.keys(), text
            if any(isinstance(shape.arguments, (Parameters, Marked)) for shape in TOOL_FAMILIES[name].shapes[:1]):
                assert parsed.names
                assert all(isinstance(json.loads(arguments), dict) for arguments in parsed.arguments.values()), text
            if name in ARGUMENTS:  # random text is seldom what Python or a tag may contain
                continue
            assert parsed.names and parsed.content.strip() == "", text
            assert is_parallel or len(parsed.names) == 1
            for index, arguments in parsed.arguments.items():
                value = json.loads(arguments)
                assert value.keys() <= TOOLS[parsed.names[index]]["properties"].keys(), text  # type: ignore[attr-defined]
    assert num_ended or name in ARGUMENTS


@given(text=st.lists(st.sampled_from([*"a:,{}[] 1<", '<|"|>', "<tool_call|>"])).map("".join))
def test_marked_arguments_are_json_whatever_the_model_writes(text: str) -> None:
    parser = OutputParser(None, ToolFormat("gemma4").with_tools(TOOLS), is_open=False)
    parsed = parser.push("<|tool_call>call:now{" + text, is_end=True)
    assert isinstance(json.loads(parsed.arguments[0]), dict)
