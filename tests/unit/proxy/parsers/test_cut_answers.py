"""Answers that a limit cuts: nothing of a format's markers is content, wherever the text ends, streamed or not."""

from __future__ import annotations

import json

import pytest

from tandem.proxy.parsers.output_parser import OutputParser
from tandem.proxy.parsers.parsed import Cut, ParsedPieces
from tandem.proxy.parsers.reasoning import REASONING_FAMILIES, ReasoningFamilyName, ReasoningFormat
from tandem.proxy.parsers.tool_families import ToolFamilyName
from tandem.proxy.parsers.tool_formats import ToolFormat
from tests.unit.proxy.parsers.test_reasoning import FORMATS, text_of
from tests.unit.proxy.parsers.written_calls import SCHEMAS, WRITTEN

Parts = tuple[str, str, list[tuple[str, str]]]


def parse(
    cuts: list[str],
    tools: ToolFamilyName | None,
    reasoning: ReasoningFormat | None = None,
    cut: Cut | None = "length",
    is_open: bool = False,
) -> Parts:
    """Returns the thinking, the content, and the calls as (name, arguments)."""
    tool_format = None if tools is None else ToolFormat(tools).with_tools(SCHEMAS)
    parser, pieces = OutputParser(reasoning, tool_format, is_open), ParsedPieces()
    for number, piece in enumerate(cuts, start=1):
        is_end = number == len(cuts)
        pieces.add(parser.push(piece, is_end, cut if is_end else None))
    parsed = pieces.parsed()
    assert parser.num_calls == len(parsed.names)
    calls = [(parsed.names[index], arguments) for index, arguments in parsed.arguments.items()]
    return parsed.reasoning, parsed.content, calls


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.extended)])
@pytest.mark.parametrize("case", WRITTEN)
def test_a_limit_leaves_the_call_so_far_or_nothing(case: str, step: int) -> None:
    """step: between two limits that are tried; where the first one is differs between the cases."""
    name, text = WRITTEN[case]
    _, content, calls = parse([text], name, cut=None)
    assert [(called, json.loads(arguments)) for called, arguments in calls]
    for end in range(len(case) % step, len(text) + 1, step):
        whole = parse([text[:end]], name)
        for cuts in ([*text[:end], ""], [text[: end // 2], text[end // 2 : end]], [text[:end], ""]):
            assert parse(cuts, name) == whole, end
        assert content.startswith(whole[1].rstrip()), (end, whole)
        assert len(whole[2]) <= len(calls)
        for (called, arguments), (full_name, full) in zip(whole[2], calls, strict=False):
            assert called == full_name and full.startswith(arguments), (end, whole)


@pytest.mark.parametrize("case", [case for case in WRITTEN if case != "hermes_arguments_first"])
def test_the_call_has_the_arguments_so_far(case: str) -> None:
    name, text = WRITTEN[case]
    _, content, calls = parse([text[: text.index("Paulo") + len("Paulo")]], name)
    assert content.strip() in ("", "Hm.")
    [(called, arguments)] = calls
    assert called == "get_weather" and arguments.endswith("Paulo")


@pytest.mark.parametrize("case", WRITTEN)
def test_a_stop_string_within_a_call_leaves_nothing_of_it(case: str) -> None:
    """Without a call, text that looks like the beginning of a marker is the client's own."""
    name, text = WRITTEN[case]
    end = text.index("get_weather") + len("get_wea")
    if not text.startswith("get_wea"):
        assert parse([text[:end]], name, cut="stop")[1].strip() in ("", "Hm.")
    assert parse(["a < b <"], "hermes", cut="stop")[1] == "a < b <"


@pytest.mark.parametrize("name", REASONING_FAMILIES)
@pytest.mark.parametrize("is_open", [False, True])
def test_a_limit_leaves_no_marker_of_thinking(name: ReasoningFamilyName, is_open: bool) -> None:
    if name == "openai_gptoss" and is_open:
        return
    family = REASONING_FAMILIES[name]
    answer = "It is 4."
    for opening, closing in zip(
        family.answer_openings or ("",),
        family.answer_closings or ("",) * len(family.answer_openings or "1"),
        strict=False,
    ):
        text = text_of(
            name, "First, 3.", f"{opening}\n{answer}\n{closing}\n" if opening or closing else answer, is_open
        )
        assert parse([text], None, FORMATS[name], None, is_open)[:2] == ("First, 3.", answer)
        for end in range(len(text) + 1):
            whole = parse([text[:end]], None, FORMATS[name], is_open=is_open)
            assert parse([*text[:end], ""], None, FORMATS[name], is_open=is_open) == whole, end
            assert "First, 3.".startswith(whole[0].rstrip()) and answer.startswith(whole[1].rstrip()), (end, whole)


QWEN = FORMATS["qwen3"]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_a_call_in_a_thought_that_never_ends_is_a_call() -> None:
    expected = ("Hm.", "", [("get_weather", '{"city": "Paris"}')])
    for text in (f"Hm.\n{CALL}", f"Hm. {CALL}\n"):
        for cuts in ([text], list(text), [*text, ""]):
            assert parse(cuts, "hermes", QWEN, None, is_open=True) == expected
            assert parse(["<think>", *cuts], "hermes", QWEN, None) == expected
    cut = f"Hm.\n{CALL}".partition("aris")[0]
    assert parse([*cut], "hermes", QWEN, is_open=True) == ("Hm.", "", [("get_weather", '{"city": "P')])


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", "gemma4", "lfm2", "kimi_k2", "jamba"])
def test_a_limit_within_a_call_in_a_thought_leaves_nothing_of_its_markup(name: ToolFamilyName) -> None:
    [text] = [text for case, (family, text) in WRITTEN.items() if family == name and case in (name, "mistral")]
    for end in range(len(text)):
        whole = parse([text[:end]], name, QWEN, is_open=True)
        assert parse([*text[:end], ""], name, QWEN, is_open=True) == whole
        assert "Hm.".startswith(whole[0].rstrip()) and not whole[1], (text[:end], whole)


@pytest.mark.parametrize(
    "text",
    [f"Hm. {CALL} no </think>Yes", f"I may write {CALL.replace('get_weather', 'other')}", "<tool_call> is", "<tool"],
)
def test_thinking_about_calls_is_thinking(text: str) -> None:
    thought, _, answer = text.partition("</think>")
    for cuts in ([text], list(text), [*text, ""]):
        assert parse(cuts, "hermes", QWEN, None, is_open=True) == (thought.rstrip() if answer else thought, answer, [])
