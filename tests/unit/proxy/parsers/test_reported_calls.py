"""Calls that models write in other ways than their formats say: the same parts whole and streamed, however split."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proxy.parsers.output_parser import OutputParser
from tandem.proxy.parsers.parsed import Cut, ParsedPieces
from tandem.proxy.parsers.tool_families import TOOL_FAMILIES, ToolFamilyName
from tandem.proxy.parsers.tool_formats import ToolFormat
from tests.unit.proxy.parsers.case_files import Case, read_cases
from tests.unit.proxy.parsers.written_calls import WRITTEN


def schema(**types: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": kind} for name, kind in types.items()}}


TOOLS: dict[str, dict[str, Any]] = {
    "Bash": schema(command="string", timeout="integer"),
    "Glob": schema(pattern="string"),
    "Write": schema(path="string", content="string"),
    "exec": schema(command="string"),
    "get_weather": schema(city="string", unit="string"),
    "get_user_info": schema(user_id="integer", special="string"),
    "get_current_traffic": schema(location="string"),
    "search": schema(query="string", tags="array", cursor=["string", "null"], safe="boolean"),
    "list-dir": schema(path="string"),
    "TodoWrite": schema(todos="array"),
    "now": schema(),
}
CASES = read_cases("reported_calls")
CUTS: tuple[Cut | None, ...] = (None, "length", "stop")
IDS = [f"{number}-{case.words[0]}" for number, case in enumerate(CASES)]


def parse(name: str, cuts: list[str], cut: Cut | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Returns the content, and the calls as (name, arguments)."""
    parser = OutputParser(None, ToolFormat(cast(ToolFamilyName, name)).with_tools(TOOLS), is_open=False)
    pieces = ParsedPieces()
    for number, piece in enumerate(cuts, start=1):
        pieces.add(parser.push(piece, is_end=number == len(cuts), cut=cut))
    parsed = pieces.parsed()
    return parsed.content, [(parsed.names[index], arguments) for index, arguments in parsed.arguments.items()]


def cut_up(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_reported_texts_are_read_as_the_model_meant_them(case: Case) -> None:
    for cuts in ([case.text], list(case.text), [*case.text, ""]):
        content, calls = parse(case.words[0], cuts)
        assert [(name, json.loads(arguments)) for name, arguments in calls] == case.calls
        assert content.strip() == case.content if case.calls else content == case.content


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_each_family_has_an_example_and_those_with_reports_have_three(name: ToolFamilyName) -> None:
    assert name in {family for family, _ in WRITTEN.values()}
    assert len({case.words[1] for case in CASES if case.words[0] == name}) not in (1, 2)


def pieces_of(name: ToolFamilyName) -> list[str]:
    texts = [case.text for case in CASES if case.words[0] == name]
    texts += [text for family, text in WRITTEN.values() if family == name]
    found = {
        text[start : start + length] for text in texts for length in (5, 11, 40) for start in range(0, len(text), 5)
    }
    family = TOOL_FAMILIES[name]
    marks = ["<|message|>", "<|end|>", '"""', "true", *"{}\"\\\n x)]['=,1"]
    return [*sorted(found), *family.markers, *family.slips, *marks]


@pytest.mark.parametrize("name", TOOL_FAMILIES)
@given(data=st.data(), places=st.lists(st.integers(0, 10**6), max_size=12))
@settings(max_examples=20)
def test_splitting_any_text_does_not_change_the_result(name: ToolFamilyName, data: Any, places: list[int]) -> None:
    text = data.draw(st.lists(st.sampled_from(pieces_of(name)), max_size=14).map("".join))
    for cut in CUTS:
        whole = parse(name, [text], cut)
        assert parse(name, cut_up(text, places), cut) == whole
        assert parse(name, [*text, ""], cut) == whole
        if not whole[1] and name not in ("openai", "gigachat3"):
            assert text.startswith(whole[0].rstrip()) if cut else whole[0] == text
