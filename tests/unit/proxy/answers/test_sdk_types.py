"""Answers and stream events, checked strictly with the types of the openai and anthropic packages.

The clients themselves accept almost anything. Here every value must have the type that they declare, and fields that
they do not know must be listed.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic.types as claude
import msgspec
import openai.types as gpt
import pydantic
import pytest
from openai.types import responses as gpt_responses
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tandem.protocol.messages.dispatch import StartPrefill
from tandem.proxy.admission.admission import ClientLimitExceeded
from tandem.proxy.admission.api_key import InvalidApiKey
from tandem.proxy.answers.chat import ParsedAnswers
from tandem.proxy.answers.completions import CompletionAnswers
from tandem.proxy.answers.errors import error_body, messages_error
from tandem.proxy.answers.json_parts import encode
from tandem.proxy.answers.messages import MessageAnswers
from tandem.proxy.answers.responses import ResponseAnswers
from tandem.proxy.api.answer_bodies import ModelCard
from tandem.proxy.api.messages_api.messages_response import TokenCount
from tandem.proxy.api.responses_api.response_store import ResponseStore, StoredResponse
from tandem.proxy.api.responses_api.responses_request import InputItem, ResponseRequest, options_of
from tandem.proxy.api.validation import ModelNotFound
from tandem.proxy.batches.batch import BatchRequest, LineError
from tandem.proxy.batches.batch_store import BatchStore, Owner
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.http.routes.batches import DeletedFile
from tandem.proxy.http.routes.stored_responses import InputItemList
from tandem.proxy.reading.body_reader import BodyKind
from tandem.runtime.errors import DeadlineExceeded, InternalError, InvalidRequest, Overloaded, TandemError
from tandem.telemetry.request_log import RequestRecord
from tests.support.proxy_cluster import PREFILL, Cluster, play, whole
from tests.unit.proxy.answers.test_answer_fields import feed
from tests.unit.proxy.answers.test_parsed_answers import CALL, OPEN, TOOLS, generate, reader_of
from tests.unit.proxy.dispatch.test_adapters_and_embeddings import answer, report

KINDS: dict[str, Any] = {
    "completion": CompletionAnswers, "chat": ParsedAnswers, "message": MessageAnswers, "response": ResponseAnswers,
}  # fmt: skip
VLLM_CHAT = {"prompt_logprobs", "prompt_token_ids", "choices.stop_reason", "choices.token_ids"}
"""Fields of vLLM's answers."""
TEXT = f"hm</think>hello{CALL}"


def checked(kind: Any, data: bytes | str) -> set[str]:
    """Returns the paths of the fields that the type does not declare. Raises ValidationError for other values."""
    value = pydantic.TypeAdapter(kind).validate_json(data, strict=True)
    return set(_unknown(value, ""))


def _unknown(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _unknown(each, path)
    elif isinstance(value, pydantic.BaseModel):
        yield from (f"{path}{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), f"{path}{name}.")


async def body_of(
    cluster: Cluster, kind: BodyKind, fields: dict[str, Any], writes: str = TEXT, is_cut: bool = False
) -> bytes:
    """Returns the answer's bytes, streamed if the fields say so, of a model that writes a text. is_cut: at a limit."""
    reader = reader_of(cluster)
    request = reader.read(json.dumps(fields).encode(), kind, cluster.worker_table.limits())
    store = (None, "") if kind == "response" else ()
    answers = KINDS[kind](Generation(cluster.services, request, RequestRecord("r", kind)), "m", *store)

    async def collect() -> bytes:
        return b"".join([event async for event in answers.events()])

    task = asyncio.create_task(collect() if fields.get("stream") else whole(answers))
    await (feed(cluster, [writes]) if is_cut else generate(cluster, writes))
    return await task


def events_of(data: bytes) -> list[str]:
    """Returns the data of server-sent events."""
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: ")]
    return [line for line in lines if line != "[DONE]"]


def run(test: Any) -> None:
    play(test, max_model_len=400)


def test_completions() -> None:
    asked: dict[str, Any] = {"prompt": "abc", "max_tokens": 50, "logprobs": None, "return_token_ids": True}
    vllm = {"choices.stop_reason", "choices.token_ids", "choices.prompt_token_ids"}

    async def test(cluster: Cluster) -> None:
        assert checked(gpt.Completion, await body_of(cluster, "completion", asked, "hello")) == {
            *vllm, "choices.prompt_logprobs", "service_tier", "usage.prompt_tokens_details.multimodal_tokens",
        }  # fmt: skip

    async def test_stream(cluster: Cluster) -> None:
        for event in events_of(await body_of(cluster, "completion", {**asked, "stream": True}, "hello")):
            # OpenAI's type is the same for pieces, and requires a reason to end of each.
            piece = json.loads(event)
            for choice in piece["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            assert checked(gpt.Completion, json.dumps(piece)) <= vllm

    run(test)
    run(test_stream)


def test_chats() -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": OPEN}], "tools": TOOLS, "max_tokens": 200}

    async def test(cluster: Cluster) -> None:
        assert checked(ChatCompletion, await body_of(cluster, "chat", {**asked, "return_token_ids": True})) == {
            *VLLM_CHAT, "choices.message.reasoning", "usage.prompt_tokens_details.multimodal_tokens",
        }  # fmt: skip

    async def test_stream(cluster: Cluster) -> None:
        usage = {"include_usage": True}
        data = await body_of(
            cluster, "chat", {**asked, "stream": True, "return_token_ids": True, "stream_options": usage}
        )
        unknown = {path for event in events_of(data) for path in checked(ChatCompletionChunk, event)}
        assert unknown == {
            *VLLM_CHAT - {"prompt_logprobs"}, "choices.delta.reasoning",
            "usage.prompt_tokens_details.multimodal_tokens",
        }  # fmt: skip

    run(test)
    run(test_stream)


def test_embeddings() -> None:
    async def test(cluster: Cluster) -> None:
        answering = answer(cluster, input="abc", encoding_format="float")
        while not (starts := cluster.pool.of(StartPrefill)):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        report(cluster, starts[0][1], PREFILL)
        assert checked(gpt.CreateEmbeddingResponse, await answering) == {
            "id", "created", "usage.prompt_tokens_details",
        }  # fmt: skip

    run(test)


def test_models() -> None:
    vllm = {"max_model_len", "root", "parent"}
    assert checked(gpt.Model, encode(ModelCard("m", 1, 100))) == vllm


RESPONSE_TOOLS = [{"type": "function", **TOOLS[0]["function"]}]
RESPONSE: dict[str, Any] = {
    "input": OPEN, "max_output_tokens": 300, "tools": RESPONSE_TOOLS, "metadata": {"a": "b"},
    "reasoning": {"effort": "low", "summary": "auto"}, "instructions": None, "text": {"format": {"type": "text"}},
}  # fmt: skip


UNDECLARED = {"store", "response.store"}
"""OpenAI's answers have it, its package's type does not."""


@pytest.mark.parametrize(
    ("writes", "is_cut"),
    [(TEXT, False), ("hm</think>hello", False), ("hm</think>", False), (TEXT[:-20], True), ("h", True)],
)
def test_responses(writes: str, is_cut: bool) -> None:
    async def test(cluster: Cluster) -> None:
        body = await body_of(cluster, "response", RESPONSE, writes, is_cut)
        assert checked(gpt_responses.Response, body) == {"store"}
        assert json.loads(body)["status"] == ("incomplete" if is_cut else "completed")

    async def test_stream(cluster: Cluster) -> None:
        for event in events_of(await body_of(cluster, "response", {**RESPONSE, "stream": True}, writes, is_cut)):
            is_end_of_call = json.loads(event)["type"] == "response.function_call_arguments.done"
            expected = {"name"} if is_end_of_call else UNDECLARED  # OpenAI documents the name too
            assert checked(gpt_responses.ResponseStreamEvent, event) <= expected, event

    run(test)
    run(test_stream)


CUSTOM_CALL = TEXT.replace('{"a": 1}', json.dumps({"input": 'a\n"b"'}))


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_custom_tools(stream: bool) -> None:
    custom = {"name": "f", "description": "d", "format": {"type": "text"}}
    chat = {"messages": [{"role": "user", "content": OPEN}], "tools": [{"type": "custom", "custom": custom}]}
    response = {**RESPONSE, "tools": [{"type": "custom", **custom}]}

    async def test_response(cluster: Cluster) -> None:
        data = await body_of(cluster, "response", {**response, "stream": stream}, CUSTOM_CALL)
        body = data.decode()
        if stream:
            events = events_of(data)
            for event in events:
                assert checked(gpt_responses.ResponseStreamEvent, event) <= {
                    *UNDECLARED,
                    "item.status",
                    "response.output.status",
                }, event
            body = json.dumps(json.loads(events[-1])["response"])
            pieces = [json.loads(event) for event in events if "custom_tool_call_input" in event]
            assert "".join(piece["delta"] for piece in pieces[:-1]) == pieces[-1]["input"] == 'a\n"b"'
        assert checked(gpt_responses.Response, body) <= {"store", "output.status"}
        call = json.loads(body)["output"][-1]
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "f", 'a\n"b"')

    async def test_chat(cluster: Cluster) -> None:
        data = await body_of(cluster, "chat", {**chat, "stream": stream, "max_tokens": 200}, CUSTOM_CALL)
        if not stream:
            message = ChatCompletion.model_validate_json(data, strict=True).choices[0].message
            [call] = message.tool_calls or ()
            assert call.type == "custom" and (call.custom.name, call.custom.input) == ("f", 'a\n"b"')
            return
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events_of(data)]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert (calls[0]["type"], calls[0]["custom"]["name"], bool(calls[0]["id"])) == ("custom", "f", True)
        assert "".join(call["custom"]["input"] for call in calls) == 'a\n"b"'

    run(test_response)
    run(test_chat)


@pytest.mark.parametrize("error", [InternalError("a"), InvalidRequest("a"), ClientLimitExceeded("a", 1)])
def test_a_response_that_fails_in_mid_stream(error: TandemError) -> None:
    async def test(cluster: Cluster) -> None:
        request = reader_of(cluster).read(json.dumps(RESPONSE).encode(), "response", cluster.worker_table.limits())
        generation = Generation(cluster.services, request, RequestRecord("r", "response"))
        [event] = events_of(ResponseAnswers(generation, "m", None, "")._error_event(error))
        assert checked(gpt_responses.ResponseFailedEvent, event) == {"response.store"}

    run(test)


INPUT_ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
    {"role": "user", "content": [{"type": "input_image", "image_url": "https://h/i.png"}]},
    {"role": "assistant", "content": "b"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call", "call_id": "2", "name": "f"},
    {"type": "function_call_output", "call_id": "1", "output": "c"},
    {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "d"}]},
]


@pytest.mark.parametrize("given", [INPUT_ITEMS, "a"])
def test_items_of_a_stored_response(given: Any, tmp_path: Path) -> None:
    request = msgspec.json.decode(json.dumps({"input": given}), type=ResponseRequest)
    store = ResponseStore(tmp_path)
    store.save("", "resp_1", StoredResponse(b"{}", options_of(request).input))
    with store.input_items("", "resp_1") as kept:
        items = [msgspec.json.decode(kept.item(number), type=InputItem) for number in range(len(kept.ids))]
    assert len(items) == len(given) and len({item.id for item in items}) == len(items)
    listed = InputItemList(data=items, first_id=items[0].id, last_id=items[-1].id, has_more=False)
    assert checked(gpt_responses.ResponseItemList, encode(listed)) == set()


def test_files_and_batches(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    stored = store.files.add(io.BytesIO(b"{}"), 2, "in.jsonl", "batch")
    made = store.create(BatchRequest(input_file_id=stored.id, endpoint="/v1/completions", completion_window="24h"),
                        Owner("", ""))  # fmt: skip
    wrong = made.with_errors(1.0, [LineError("invalid_request", "no", 1, "custom_id")])
    assert checked(gpt.FileObject, encode(stored)) == set()
    assert checked(gpt.FileDeleted, encode(DeletedFile(stored.id))) == set()
    for batch in (made, wrong):
        assert checked(gpt.Batch, encode(batch)) == set()


MESSAGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": OPEN}],
    "max_tokens": 300,
    "tools": [{"name": "f", "input_schema": TOOLS[0]["function"]["parameters"]}],
}


@pytest.mark.parametrize(("writes", "is_cut"), [(TEXT, False), ("hm</think>", False), (TEXT[:-20], True), ("h", True)])
def test_messages(writes: str, is_cut: bool) -> None:
    async def test(cluster: Cluster) -> None:
        assert checked(claude.Message, await body_of(cluster, "message", MESSAGE, writes, is_cut)) == set()

    async def test_stream(cluster: Cluster) -> None:
        events = events_of(await body_of(cluster, "message", {**MESSAGE, "stream": True}, writes, is_cut))
        for event in events:
            assert checked(claude.RawMessageStreamEvent, event) == set(), event

    run(test)
    run(test_stream)
    assert checked(claude.MessageTokensCount, encode(TokenCount(3))) == set()


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("a"), InvalidApiKey("a"), ModelNotFound("a"), ClientLimitExceeded("a", 1),
     Overloaded("a"), DeadlineExceeded("a"), InternalError("a")],
)  # fmt: skip
def test_errors(error: TandemError) -> None:
    """Anthropic documents `request_too_large` too, which its package's type lacks."""
    assert checked(claude.ErrorResponse, encode(messages_error(error, "r"))) == set()
    assert checked(gpt.ErrorObject, json.dumps(json.loads(error_body(error))["error"])) == set()
