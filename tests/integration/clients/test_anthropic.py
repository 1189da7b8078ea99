"""The anthropic client against a real cluster: messages, streams, tools, structured output, errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.support.cluster import MODEL, Cluster
from tests.support.scripted_model import scripted_model

KEY = "secret"
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "n": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["colour", "n"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "paint", "description": "Paints.", "input_schema": SCHEMA}
GREEDY = {"temperature": 0}  # version 2.12 of the client has no such parameter
HELLO: Any = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("--api-key", KEY, "--dtype", "float32", "--max-model-len", "1024") as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=cluster.url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def create(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    answer = client.messages.create(
        **{"model": MODEL, "max_tokens": 24, "messages": HELLO, "extra_body": GREEDY, **fields}
    )
    assert isinstance(answer, anthropic.types.Message)
    return answer


def streamed(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    asked = {"model": MODEL, "max_tokens": 24, "messages": HELLO, "extra_body": GREEDY, **fields}
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


def test_a_stream_has_the_text_and_usage_of_the_whole_answer(client: anthropic.Anthropic) -> None:
    whole, stream = create(client), streamed(client)
    assert whole.content[0].type == "text"
    assert [whole.content[0].text] == [block.text for block in stream.content if block.type == "text"]
    assert whole.stop_reason == stream.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == stream.usage.output_tokens == 24
    read = [answer.usage.cache_read_input_tokens or 0 for answer in (whole, stream)]
    assert whole.usage.input_tokens + read[0] == stream.usage.input_tokens + read[1]
    text = client.messages.create(model=MODEL, max_tokens=24, messages=HELLO, extra_body=GREEDY, stream=True)
    deltas = [event.delta for event in text if event.type == "content_block_delta"]
    assert "".join(delta.text for delta in deltas if delta.type == "text_delta") == whole.content[0].text


def test_system_prompts_turns_and_continued_answers(client: anthropic.Anthropic) -> None:
    plain = client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    told = client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.").input_tokens
    assert told > plain > 0
    usage = create(client, system="Be brief.").usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == told
    first = create(client, max_tokens=8).content
    assert first[0].type == "text"
    continued = create(client, max_tokens=16, messages=[*HELLO, {"role": "assistant", "content": first[0].text}])
    assert continued.content and continued.usage.output_tokens <= 16


@pytest.mark.parametrize("run", [create, streamed])
def test_a_tool_is_called_and_its_result_read(client: anthropic.Anthropic, run: Any) -> None:
    answer = run(client, tools=[TOOL], tool_choice={"type": "tool", "name": "paint"}, max_tokens=100)
    [call] = answer.content
    assert answer.stop_reason == "tool_use" and call.name == "paint" and call.id.startswith("toolu_")
    assert call.input["colour"] in ("red", "blue") and 1 <= call.input["n"] <= 9
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "painted"}]}
    following = run(
        client,
        tools=[TOOL],
        tool_choice={"type": "none"},
        messages=[*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}],
    )
    assert following.content[0].type == "text" and following.stop_reason in ("end_turn", "max_tokens")


def test_structured_output_and_stop_sequences(client: anthropic.Anthropic) -> None:
    answer = create(client, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, max_tokens=100)
    assert answer.content[0].type == "text" and answer.content[0].text.lstrip().startswith("{")
    assert answer.stop_reason == "end_turn"
    whole = create(client).content[0]
    assert whole.type == "text"
    word = whole.text.split()[2]
    stopped = create(client, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].type == "text" and stopped.content[0].text == whole.text.partition(word)[0]


def test_no_tokens_fill_the_prefix_cache(client: anthropic.Anthropic) -> None:
    story: Any = [{"role": "user", "content": "Once there was a mouse that lived in a hollow tree. " * 20}]
    for run in (create, streamed):
        warm = run(client, messages=story, max_tokens=0)
        assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    usage = create(client, messages=story).usage
    assert (usage.cache_read_input_tokens or 0) > usage.input_tokens


def test_many_stop_sequences(client: anthropic.Anthropic) -> None:
    whole = create(client).content[0]
    assert whole.type == "text"
    word = whole.text.split()[2]
    stopped = create(client, stop_sequences=[*(f"<{number}>" for number in range(60)), word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)


@pytest.mark.parametrize("run", [create, streamed])
def test_thinking_is_signed_and_may_be_sent_back(run: Any, tmp_path: Path) -> None:
    def script(prompt: str) -> str:
        return "<think>hm</think>yes"

    with (
        scripted_model(tmp_path, script, reasoning_parser="qwen3") as (url, _workers),
        anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=60) as thinker,
    ):
        answer = run(thinker, model="scripted")
        thought, said = answer.content
        assert (thought.type, thought.thinking, said.text) == ("thinking", "hm", "yes") and len(thought.signature) > 20
        forged: Any = {"type": "thinking", "thinking": "hm", "signature": "forged"}
        hidden: Any = {"type": "redacted_thinking", "data": "x"}
        for blocks in (answer.content, [forged, said], [hidden, said]):
            following = [*HELLO, {"role": "assistant", "content": blocks}, *HELLO]
            assert run(thinker, model="scripted", messages=following).content[0].signature == thought.signature


def test_an_answer_ends_with_the_context(client: anthropic.Anthropic) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 5000}
    answer = create(client, output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=100_000)
    assert answer.stop_reason == "model_context_window_exceeded" and answer.usage.output_tokens > 900


def test_errors_have_the_types_of_the_client(cluster: Cluster, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(client, model="claude")
    assert missing.value.request_id == missing.value.response.headers["x-request-id"]
    assert create(client)._request_id
    assert missing.value.body == {
        "type": "error",
        "error": {
            "type": "not_found_error",
            "message": f"The model 'claude' does not exist; this server serves {MODEL!r}.",
        },
        "request_id": missing.value.response.headers["x-request-id"],
    }
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        create(client, max_tokens=-1)
    with pytest.raises(anthropic.BadRequestError, match="takes text only"):
        source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
        create(client, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])
    with (
        anthropic.Anthropic(base_url=cluster.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        create(stranger)
    with (
        anthropic.Anthropic(base_url=cluster.url, auth_token=KEY, max_retries=0) as bearer,
    ):
        assert create(bearer).content
    unknown = httpx.get(f"{cluster.url}/v1/messages/batches", headers={"x-api-key": KEY})
    assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "not_found_error"
