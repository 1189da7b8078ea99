"""JSON that is sent as an event, or as a line of a file, is one line for every client."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from tandem.proxy.answers.errors import error_body
from tandem.proxy.answers.json_parts import JsonText, encode
from tandem.runtime.errors import InvalidRequest

LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
"""All that end a line for `str.splitlines`."""
TEXTS = st.text(st.one_of(st.sampled_from(LINE_ENDS), st.characters(codec="utf-8")))


@given(TEXTS)
@example(LINE_ENDS)
def test_no_character_of_a_text_ends_a_line(text: str) -> None:
    encoded = encode({"text": text})
    assert len(encoded.decode().splitlines()) == 1
    assert json.loads(encoded) == {"text": text}
    part = JsonText(lambda num_bytes: None)
    part.push(text)
    assert len(part.data.decode().splitlines()) <= 1
    assert str(part) == text


def test_errors_are_one_line() -> None:
    body = error_body(InvalidRequest(f"there is no model {LINE_ENDS}")).decode()
    assert len(body.splitlines()) == 1
    assert LINE_ENDS in json.loads(body)["error"]["message"]
