"""The openai client's Responses API against a real cluster of two proxies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.cluster import MODEL, Cluster

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "paint", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("alice\nbob\n")
    with Cluster("--api-keys-file", str(keys), "--dtype", "float32", "--proxies", "2") as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="alice", max_retries=0, timeout=60) as client:
        yield client


def create(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"model": MODEL, "input": "Tell me a story.", "max_output_tokens": 24, "temperature": 0, **fields}
    return client.responses.create(**asked)


def test_a_stream_has_the_text_of_the_whole_answer_and_of_a_chat(client: openai.OpenAI) -> None:
    whole = create(client)
    assert whole.output_text and whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens" and whole.usage.output_tokens == 24
    events = list(create(client, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == text == whole.output_text
    messages: Any = [{"role": "user", "content": "Tell me a story."}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, temperature=0)
    assert chat.choices[0].message.content == whole.output_text


def test_functions_and_structured_output(client: openai.OpenAI) -> None:
    asked = create(client, tools=[TOOL], tool_choice="required", max_output_tokens=100)
    [call] = asked.output
    assert call.type == "function_call" and json.loads(call.arguments)["colour"] in ("red", "blue")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "painted"}
    after = create(client, tools=[TOOL], tool_choice="none", input=[output], previous_response_id=asked.id)
    assert after.output_text
    with client.responses.stream(model=MODEL, input="x", tools=[TOOL], tool_choice="required") as stream:
        assert stream.get_final_response().output[0].type == "function_call"
    text = {"format": {"type": "json_schema", "name": "colour", "schema": SCHEMA}}
    assert json.loads(create(client, text=text, max_output_tokens=100).output_text).keys() == {"colour"}


NOTE: Any = {"type": "custom", "name": "note", "description": "Takes a note.", "format": {"type": "text"}}


def test_custom_tools_beside_hosted_ones(client: openai.OpenAI) -> None:
    fields: Any = {
        "tools": [{"type": "web_search"}, NOTE, TOOL],
        "tool_choice": {"type": "custom", "name": "note"},
        "max_output_tokens": 60,
    }
    asked = create(client, **fields)
    [call] = asked.output
    assert (call.type, call.name) == ("custom_tool_call", "note") and call.input
    assert [tool.type for tool in asked.tools] == ["custom", "function"]
    events = list(create(client, stream=True, **fields))
    pieces = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(pieces) == events[-1].response.output[0].input == call.input
    answer = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "noted"}
    search = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    }
    after = create(client, tools=[NOTE], tool_choice="none", input=[search, answer], previous_response_id=asked.id)
    assert after.output_text
    custom: Any = {"type": "custom", "custom": {"name": "note", "description": "Takes a note."}}
    chosen: Any = {"type": "custom", "custom": {"name": "note"}}
    story: Any = [{"role": "user", "content": "Tell me a story."}]
    chat: Any = {"model": MODEL, "messages": story, "tools": [custom], "tool_choice": chosen, "temperature": 0}
    [of_chat] = client.chat.completions.create(**chat, max_tokens=60).choices[0].message.tool_calls or ()
    assert of_chat.type == "custom" and of_chat.custom.name == "note" and of_chat.custom.input
    chunks = client.chat.completions.create(**chat, max_tokens=60, stream=True)
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(call.model_extra["custom"]["input"] for call in deltas) == of_chat.custom.input


def test_a_conversation_is_continued_on_any_proxy(cluster: Cluster, client: openai.OpenAI) -> None:
    first = create(client, max_output_tokens=8)
    second = create(client, input="And then?", max_output_tokens=8, previous_response_id=first.id)
    sent = [
        {"role": "user", "content": "Tell me a story."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    assert create(client, input=sent, max_output_tokens=8).output_text == second.output_text
    headers = {"authorization": "Bearer alice"}
    for _ in range(8):  # new connections, which the kernel gives to either proxy
        shown = httpx.get(f"{cluster.url}/v1/responses/{second.id}", headers=headers).json()
        assert shown["id"] == second.id and shown["previous_response_id"] == first.id
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"]
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="bob", max_retries=0) as bob:
        with pytest.raises(openai.NotFoundError):
            bob.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as refused:
            create(bob, previous_response_id=first.id)
        assert refused.value.code == "previous_response_not_found"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    unstored = create(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
