"""The input of custom tools, from arguments that arrive in pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proxy.answers.chat import CustomInput, CustomInputs
from tandem.proxy.parsers.parsed import Parsed


def pieces(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def converted(text: str, cuts: list[int]) -> str:
    call = CustomInput()
    return "".join(call.push(piece) for piece in pieces(text, cuts))


cuts = st.lists(st.integers(0, 60), max_size=12)


@given(text=st.text(max_size=20), is_ascii=st.booleans(), cuts=cuts, indent=st.sampled_from([None, 0, 4]))
def test_the_input_is_the_string_however_it_is_split(
    text: str, is_ascii: bool, cuts: list[int], indent: int | None
) -> None:
    assert converted(json.dumps({"input": text}, ensure_ascii=is_ascii, indent=indent), cuts) == text


@given(text=st.text('{}" input:\\u0dDcbn8\n', max_size=30), cuts=cuts)
def test_any_text_is_converted_the_same_whole_and_in_pieces(text: str, cuts: list[int]) -> None:
    for written in (text, '{"input": "' + text):
        assert converted(written, cuts) == converted(written, [])


@pytest.mark.parametrize(
    ("arguments", "input_"),
    [
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 3}', '{"input": 3}'),
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\', "cut"),
        ('{"inp', ""),
        ('{"input": "a", "more": "b"}', "a"),
        (r'{"input": "\ud83d\u0041\ud83d"}', "\ufffdA\ufffd"),
        (r'{"input": "\x\uZ"}', r"\x\uZ"),
        ("{" + " " * 1000 + '"input": "a"}', "a"),
    ],
)
def test_arguments_of_other_forms(arguments: str, input_: str) -> None:
    assert converted(arguments, []) == input_


def test_calls_of_functions_stay_as_they_are() -> None:
    inputs = CustomInputs(["c"])
    parsed = Parsed(names={0: "f", 1: "c"}, arguments={0: '{"input": "x"}', 1: '{"input": "x'})
    inputs.convert(parsed)
    more = Parsed(arguments={1: '\\n"}'})
    inputs.convert(more)
    assert parsed.arguments == {0: '{"input": "x"}', 1: "x"} and more.arguments == {1: "\n"}
    assert 1 in inputs and 0 not in inputs
