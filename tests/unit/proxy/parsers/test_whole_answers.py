"""Whole answers of models with thinking, content and calls, in the marks that their chat templates show."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proxy.parsers.output_parser import OutputParser
from tandem.proxy.parsers.parsed import ParsedPieces
from tandem.proxy.parsers.tool_formats import ToolFormat
from tests.unit.proxy.parsers.case_files import Case, read_cases
from tests.unit.proxy.parsers.test_reasoning import FORMATS

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "get-time": {"properties": {"zone": {"type": "string"}, "at": {"type": "object"}, "tags": {"type": "array"}}},
}
ANSWERS = read_cases("whole_answers")


def parse(answer: Case, cuts: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    _, thinking, tools, *is_open = answer.words
    reasoning = FORMATS[cast(Any, thinking)] if thinking != "-" else None
    parser = OutputParser(reasoning, ToolFormat(cast(Any, tools)).with_tools(SCHEMAS), bool(is_open))
    pieces = ParsedPieces()
    for number, cut in enumerate(cuts, start=1):
        pieces.add(parser.push(cut, is_end=number == len(cuts)))
    parsed = pieces.parsed()
    calls = [(parsed.names[index], json.loads(arguments)) for index, arguments in parsed.arguments.items()]
    return parsed.reasoning, parsed.content.strip(), calls


@pytest.mark.parametrize(
    "answer", ANSWERS, ids=[f"{number}-{answer.words[0]}" for number, answer in enumerate(ANSWERS)]
)
@given(places=st.lists(st.integers(0, 10**6), max_size=8))
@settings(max_examples=20)
def test_each_part_is_where_clients_look_for_it(answer: Case, places: list[int]) -> None:
    text = answer.text
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    for cuts in ([text], [*text], [*text, ""], [text[start:end] for start, end in pairwise(ends)]):
        assert parse(answer, cuts) == (answer.thinking, answer.content, answer.calls)
