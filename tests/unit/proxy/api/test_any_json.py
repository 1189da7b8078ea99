"""Bodies of every kind with any JSON in them: each is accepted or refused, and no other error comes out."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proxy.api.messages_api.messages_request import MessageRequest
from tandem.proxy.api.responses_api.responses_request import ResponseRequest
from tandem.proxy.api.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from tandem.proxy.api.validation import BodyDecoder
from tandem.runtime.errors import InvalidRequest

DECODER = BodyDecoder("m", max_media=4)


@pytest.mark.parametrize("again", [b"[]", b"3", b"null", b"{}", b'[{"role": "user"}]'])
def test_a_wrong_field_of_a_key_that_occurs_twice_is_refused(again: bytes) -> None:
    with pytest.raises(InvalidRequest, match="role"):
        DECODER.chat(b'{"messages": [{"role": 5}], "messages": ' + again + b"}")


MINIMAL: dict[str, Any] = {
    "completion": (CompletionRequest, {"prompt": "a"}),
    "chat": (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "embedding": (EmbeddingRequest, {"input": "a"}),
    "tokenize": (TokenizeRequest, {"prompt": "a"}),
    "message": (MessageRequest, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    "response": (ResponseRequest, {"input": "a"}),
}
"""For each kind of body: its type, and a valid one."""
WORDS = st.sampled_from(
    ["type", "text", "role", "content", "name", "function", "json_schema", "schema", "user", "auto"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


@given(kind=st.sampled_from(sorted(MINIMAL)), values=st.data())
@settings(max_examples=400)
def test_any_json_in_any_field_of_any_body_is_accepted_or_refused(kind: str, values: st.DataObject) -> None:
    struct, body = MINIMAL[kind]
    field = values.draw(st.sampled_from(struct.__struct_fields__))
    data = json.dumps({**body, field: values.draw(JSON)}).encode()
    with suppress(InvalidRequest):
        DECODER.response(data, lambda _: []) if kind == "response" else getattr(DECODER, kind)(data)
