"""Parsing of thinking, with text split anywhere; counting its tokens; the choice by the chat template."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem.protocol.messages.packed import pack_token_ids
from tandem.proxy.parsers.output_parser import OutputParser
from tandem.proxy.parsers.parsed import Cut
from tandem.proxy.parsers.reasoning import (
    REASONING_FAMILIES,
    ReasoningCounter,
    ReasoningFamilyName,
    ReasoningFormat,
    detect_reasoning_family,
)
from tandem.proxy.parsers.tool_formats import ToolFormat

PLACES = st.lists(st.integers(0, 10**6), max_size=12)
MARKERS = ("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>", "<|message|>", "<|end|>", "<|start|>")


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in MARKERS])
    return tokenizer


TOKENIZER = make_tokenizer()
FORMATS = {name: ReasoningFormat.of(name, TOKENIZER) for name in REASONING_FAMILIES}


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text).ids
    return found


def parse(
    name: ReasoningFamilyName,
    cuts: list[str],
    is_open: bool = False,
    has_tools: bool = False,
    cut: Cut | None = None,
) -> Any:
    """Returns the thinking, the answer, and the names of the calls."""
    parser = OutputParser(FORMATS[name], ToolFormat() if has_tools else None, is_open)
    reasoning, content, names = "", "", list[str]()
    for number, piece in enumerate(cuts, start=1):
        parsed = parser.push(piece, is_end=number == len(cuts), cut=cut)
        reasoning += parsed.reasoning
        content += parsed.content
        names += parsed.names.values()
    return reasoning, content, names


def cut_up(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


def text_of(name: ReasoningFamilyName, thinking: str, answer: str, is_open: bool = False) -> str:
    family = REASONING_FAMILIES[name]
    opening = "" if is_open else family.opening
    return f"{opening}{thinking}{family.ending}{family.to_answer}{answer}"


OPEN = [
    (name, is_open)
    for name in REASONING_FAMILIES
    for is_open in (False, True)
    if name != "openai_gptoss" or not is_open
]


@pytest.mark.parametrize(("name", "is_open"), OPEN)
@given(places=PLACES)
@settings(max_examples=30)
def test_thinking_is_separated_however_the_text_is_split(
    name: ReasoningFamilyName, is_open: bool, places: list[int]
) -> None:
    text = text_of(name, "First, é < 3.", "It is </ 4.", is_open)
    for cuts in (cut_up(text, places), list(text)):
        assert parse(name, cuts, is_open) == ("First, é < 3.", "It is </ 4.", [])


@pytest.mark.parametrize(("name", "is_open"), OPEN)
@given(data=st.data(), places=PLACES)
@settings(max_examples=15)
def test_splitting_any_text_does_not_change_the_result(
    name: ReasoningFamilyName, is_open: bool, data: Any, places: list[int]
) -> None:
    family = REASONING_FAMILIES[name]
    whole_text = text_of(name, "a", "b")
    pieces = [family.opening, family.ending, whole_text[:9], whole_text[5:], "<tool_call>", "x", " ", "\n", *MARKERS]
    pieces += (*family.openings, *family.endings, *family.answer_openings, *family.answer_closings)
    pieces.append('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    text = data.draw(st.lists(st.sampled_from(pieces), max_size=10).map("".join))
    cuts: tuple[Cut | None, ...] = (None, "length", "stop")
    for has_tools, cut in product((False, name != "openai_gptoss"), cuts):
        whole = parse(name, [text], is_open, has_tools, cut)
        assert parse(name, cut_up(text, places), is_open, has_tools, cut) == whole
        assert parse(name, [*text, ""], is_open, has_tools, cut) == whole


@pytest.mark.parametrize("name", [name for name in REASONING_FAMILIES if name != "openai_gptoss"])
@given(
    text=st.text(max_size=30) | st.lists(st.sampled_from(["</think>", "<thi", "[/THINK]", "nk>", " x "])).map("".join)
)
def test_text_that_does_not_begin_with_thinking_is_the_answer(name: ReasoningFamilyName, text: str) -> None:
    if not text.lstrip(" \t\r\n").startswith(REASONING_FAMILIES[name].opening):
        assert parse(name, [text]) == ("", text, [])


def test_thinking_that_does_not_end_is_no_answer() -> None:
    assert parse("qwen3", ["<think>\nHm, "]) == ("Hm, ", "", [])
    assert parse("qwen3", ["<think>"]) == ("", "", []) and parse("qwen3", ["", ""], is_open=True) == ("", "", [])
    assert parse("qwen3", ["Hm</thi"], is_open=True) == ("Hm</thi", "", [])
    assert parse("openai_gptoss", ["<|channel|>analysis<|message|>Hm"]) == ("Hm", "", [])


def test_empty_thinking_leaves_only_the_answer() -> None:
    assert parse("qwen3", ["<think>\n\n</think>\n\nYes"]) == ("", "Yes", [])
    assert parse("qwen3", list("\n</think>\n\nYes"), is_open=True) == ("", "Yes", [])
    assert parse("deepseek_r1", ["<think>\nHm</think>Yes"], is_open=True) == ("Hm", "Yes", [])  # repeats the opening


def test_calls_follow_the_thinking_and_are_not_looked_for_in_it() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert parse("qwen3", [f"<think>{call}</think>\n\nOk. {call}"], has_tools=True) == (call, "Ok.", ["f"])


def test_thinking_is_emitted_as_soon_as_it_is_certain() -> None:
    parser = OutputParser(FORMATS["qwen3"], None, is_open=True)
    assert parser.push("\nHm").reasoning == "Hm"
    assert parser.push(", so</thi").reasoning == ", so"
    parsed = parser.push("nk>\n\nYes")
    assert (parsed.reasoning, parsed.content) == ("", "Yes")


@pytest.mark.parametrize(("name", "is_open"), OPEN)
def test_reasoning_tokens_are_those_between_the_markers(name: ReasoningFamilyName, is_open: bool) -> None:
    counter = ReasoningCounter(FORMATS[name], is_open)
    for token_id in ids(text_of(name, "twelve bytes", "and the answer", is_open)):
        counter.add(token_id)
    assert counter.num_tokens == 12
    other = ReasoningCounter(FORMATS[name], False)
    for token_id in ids("no thinking"):
        other.add(token_id)
    assert other.num_tokens == 0


def test_a_prompt_that_ends_with_the_opening_begins_thinking() -> None:
    found = FORMATS["qwen3"]
    assert found.is_open(pack_token_ids(ids("user: <think> x assistant: <think>\n")), TOKENIZER)
    assert not found.is_open(pack_token_ids(ids("assistant: <think>\n\n</think>\n\n")), TOKENIZER)
    assert not found.is_open(pack_token_ids(ids("what is <think>? assistant:")), TOKENIZER)
    assert FORMATS["apriel"].is_open(pack_token_ids(ids("Here are my reasoning steps:\n")), TOKENIZER)


def test_granite_may_shorten_its_phrases() -> None:
    text = "Here's my thought process: Hm. Here's my response: Yes"
    for cuts in ([text], list(text)):
        assert parse("granite", cuts) == ("Hm.", "Yes", [])


def test_the_end_of_thinking_is_forced_after_the_budget() -> None:
    for name in ("qwen3", "openai_gptoss"):
        found = FORMATS[name]
        opening, ending = ids(REASONING_FAMILIES[name].opening), list(found.forced_ids)
        thinking = found.thinking(False, 3, is_constrained=False)
        output = [*opening, *ids("abc")]
        assert [thinking.forced_token(output[:number]) for number in range(len(output))] == [None] * len(output)
        for token_id in ending:
            assert thinking.forced_token(output) == token_id
            output.append(token_id)
        assert thinking.forced_token(output) is None
        assert thinking.forced_token([*opening, *ids("a"), *ending, *ids("answer")]) is None  # it has ended by itself
        begun = [*opening, *ids("ab"), ending[0]]  # the limit is reached in the middle of what may become the ending
        for token_id in thinking.forced[1:]:
            assert thinking.forced_token(begun) == token_id
            begun.append(token_id)
        assert thinking.forced_token(begun) is None
        assert thinking.forced_token(ids("abcdef")) is None and thinking.forced_token(ids("abc")) is None
    at_once = FORMATS["qwen3"].thinking(True, 0, is_constrained=False)
    assert at_once.forced_token([]) == ids("</think>")[0] and at_once.forced_token(ids("</think>")) is None
    assert FORMATS["qwen3"].thinking(True, None, is_constrained=True).forced_token([]) is None


def test_a_grammar_may_follow_a_forced_end() -> None:
    """With tools or a grammar, the forced tokens do not choose how the answer begins."""
    found = FORMATS["openai_gptoss"]
    assert found.thinking(False, 1, is_constrained=True).forced == found.ending_ids


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if '</think>' in content %}<|im_start|>", "qwen3"),
        ("<｜User｜><｜Assistant｜></think>", "deepseek_r1"),
        ("[gMASK]<|observation|></think>", "glm45"),
        ("<|im_system|><|im_middle|><think></think>", "kimi_k2"),
        ("◁think▷", "kimi_vl"),
        ("[SYSTEM_PROMPT][THINK]", "mistral"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "openai_gptoss"),
        ("<|turn>model\n<|channel>thought", "gemma4"),
        ("<|turn>system\n<|think|>", "gemma4"),
        ("<|START_THINKING|>", "cohere"),
        ("<|inner_prefix|>", "apertus"),
        ("<seed:think>", "seed_oss"),
        ("<|thought_start|>", "minicpm3"),
        ("thoughts after 'Here is my thought process:' and", "granite"),
        ("between <think></think> and <response></response>", "ernie45"),
        ("<response></response> <minimax:tool_call> </think>", "minimax_m2"),
        ("<think>\n\n</think>\n 助手：", "hunyuan_a13b"),
        ("</think> <answer>", "hunyuan_a13b"),
        ("Here are my reasoning steps:\n [BEGIN FINAL RESPONSE]", "apriel"),
        ("<thought> </thought>", "exaone"),
        ("<|im_start|>", None),
        (None, None),
    ],
)
def test_the_chat_template_tells_the_family(template: str | None, name: ReasoningFamilyName | None) -> None:
    assert detect_reasoning_family(template) == name
