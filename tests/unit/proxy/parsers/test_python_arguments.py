"""Python's keyword arguments become JSON as Python would read them, however the text is split."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.proxy.parsers.held_text import HeldText
from tandem.proxy.parsers.python_arguments import PythonArguments, python_value

TEXTS = st.text(alphabet=st.characters(codec="utf-8"), max_size=12)
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(TEXTS | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)
ADJACENT_STRINGS = re.compile(r"""["']\s*["']""")
"""Python joins two strings; models that escape no quotes write `'echo 'a' 'b''`."""


def read(pieces: list[str]) -> tuple[bool, str]:
    """Returns whether the pieces are arguments, and their JSON or what was read."""
    arguments, held = PythonArguments(), HeldText()
    for piece in pieces:
        held.push(piece)
        if (done := arguments.read(held, is_end=False)) is not None:
            break
    else:
        done = arguments.read(held, is_end=True)
    return bool(done), arguments.json if done else "".join(arguments.source)


@given(values=st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), size=st.integers(1, 9))
def test_literals_are_read_as_python_reads_them(values: dict[str, Any], size: int) -> None:
    text = ", ".join(f"{name}={value!r}" for name, value in values.items()) + ")"
    done, written = read([text[start : start + size] for start in range(0, len(text), size)])
    assert done and json.loads(written) == json.loads(json.dumps(values))


@pytest.mark.filterwarnings("ignore:.*escape sequence")  # of `ast.parse`
@given(text=st.lists(st.sampled_from([*"abx=,()[]{}:'\"\\ \n1.5-", "None", "true", '"""', "a=", "\\x41"])).map("".join))
@settings(max_examples=500)
@example("a='\\,')")
@example("None=None)")
@example("a='\\None')")
def test_what_python_reads_means_what_it_means_in_python(text: str) -> None:
    done, written = read([text])
    assert read(list(text)) == (done, written)
    if done:
        json.loads(written)
    end = text.find(")")
    if done and end == len(text) - 1 and ADJACENT_STRINGS.search(text) is None:
        try:
            call = ast.parse(f"f({text}", mode="eval").body
        except SyntaxError:
            return  # more is read than Python reads
        assert isinstance(call, ast.Call)
        values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        assert json.loads(written) == json.loads(json.dumps(values))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", "true"),
        ("null", "null"),
        ("{'a': None, \"b\": [false, True]}", '{"a": null, "b": [false, true]}'),
        ("'line\nbreak'", '"line\\nbreak"'),
        ("'\\ud83d\\ude00 \\ud800'", '"😀 \ufffd"'),
        ("r'\\d'", '"\\\\d"'),
        ("x", None),
        ("1, w=2", None),
        ("1), f(2", None),
        ("1e999", None),
        ("f'{x}'", None),
        ("b'x'", None),
        ("{1, 2}", "[1, 2]"),
        ("{'a', 'b'}", '["a", "b"]'),
        ("{('a')}", None),
        ("{'a'}", '["a"]'),
        ("{1: 'a', 'b': {2}}", '{"1": "a", "b": [2]}'),
        ("{1: 2, 3}", None),
        ("{1, 2: 3}", None),
        ("-007", "-7"),
        ("'it's'", '"it\'s"'),
        ("['a', 'it's', \"b\"]", '["a", "it\'s", "b"]'),
        ("{'a': 'it's'}", '{"a": "it\'s"}'),
        ("1 + 1", None),
        ("[" * 65 + "]" * 65, None),
        ("9" * 400, None),
    ],
)
def test_values(text: str, expected: str | None) -> None:
    assert python_value(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("c='sed -n '1,2p' /x')", "sed -n '1,2p' /x"),
        ("c='echo 'a', 'b'', d=1)", "echo 'a', 'b'"),
        ("c='print(f(m='x'))')", "print(f(m='x'))"),
        ('c="a "b" c" , d=1)', 'a "b" c'),
        ("c='it\\'s' )", "it's"),
        ("c='a',)", "a"),
    ],
)
def test_a_quote_ends_a_string_only_where_python_goes_on(text: str, expected: str) -> None:
    done, written = read([text])
    assert done and json.loads(written)["c"] == expected
    assert read(list(text)) == (done, written)
