"""OpenAI's Responses API, from the body to the answer, streamed and not, and stored responses."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from tandem.protocol.messages.dispatch import StartPrefill
from tandem.proxy.admission.budgets import HeldAnswer
from tandem.proxy.answers.answers import DONE
from tandem.proxy.answers.responses import ResponseAnswers
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.api.responses_api.response_store import (
    ItemLookup,
    PreviousResponseNotFound,
    ResponseStore,
)
from tandem.proxy.api.responses_api.responses_chat import ResponseTools, to_chat
from tandem.proxy.api.responses_api.responses_request import InputItem, ResponseRequest
from tandem.proxy.api.validation import BodyDecoder, ModelNotFound
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.reading.body_reader import reads_files
from tandem.proxy.text.prompt import ChatPrompt
from tandem.runtime.errors import InternalError, InvalidRequest
from tandem.telemetry.request_log import RequestRecord
from tests.support.proxy_cluster import Cluster, play, played, whole
from tests.unit.proxy.answers.test_parsed_answers import CALL, OPEN, generate, reader_of

TOOLS = [{"type": "function", "name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}]
NO_HISTORY: list[InputItem] = []


def converted(history: list[InputItem] = NO_HISTORY, **fields: Any) -> dict[str, Any]:
    """Returns the chat that a body becomes, without fields that are null."""
    request = msgspec.json.decode(json.dumps({"input": "hi", **fields}), type=ResponseRequest)
    chat = msgspec.to_builtins(to_chat(request, history, ResponseTools(request, history))[0])
    return dict(json.loads(json.dumps(chat), object_hook=lambda o: {k: v for k, v in o.items() if v is not None}))


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": each} for each in texts]


@played(max_model_len=400)
async def test_functions_of_a_namespace_are_called_with_it(cluster: Cluster) -> None:
    answers = answers_to(cluster, tools=[{"type": "namespace", "name": "n", "tools": TOOLS}])
    task = asyncio.create_task(whole(answers))
    start = await generate(cluster, f"</think>{CALL}")
    assert start is not None
    [call] = json.loads(await task)["output"]
    assert (call["name"], call["namespace"]) == ("f", "n")


def test_items_become_a_chat() -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": "https://h/i.png"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "calling", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [
            {"type": "input_text", "text": "two"}, {"type": "input_image", "image_url": "https://h/j.png"}]},
        {"role": "user", "content": "and now?"},
    ]  # fmt: skip
    chat = converted(input=items, instructions="you are f")
    call = {"type": "function"}
    assert chat["messages"] == [
        {"role": "system", "content": "you are f"},
        {"role": "developer", "content": text("be brief")},
        {"role": "user", "content": [*text("look"), {"type": "image_url", "image_url": "https://h/i.png"}]},
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": text("calling"),
            "tool_calls": [
                {**call, "function": {"name": "f", "arguments": '{"a": 1}'}, "id": "c1"},
                {**call, "function": {"name": "f", "arguments": "{}"}, "id": "c2"},
            ],
        },
        {"role": "tool", "content": text("one"), "tool_call_id": "c1"},
        {"role": "tool", "content": text("two"), "tool_call_id": "c2"},
        {"role": "user", "content": [{"type": "image_url", "image_url": "https://h/j.png"}]},
        {"role": "user", "content": text("and now?")},
    ]


def test_fields_become_those_of_chats() -> None:
    schema = {"type": "object"}
    chat = converted(
        temperature=0.1, top_p=0.5, tools=TOOLS, parallel_tool_calls=False, stream=True,
        tool_choice={"type": "function", "name": "f"}, reasoning={"effort": "low", "summary": "auto"}, priority=2,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}, cache_salt="s",
        metadata={"a": "b"}, store=False, include=["reasoning.encrypted_content"], truncation="disabled",
        prompt_cache_key="k", user="u", background=False, top_logprobs=0, service_tier="auto",
    )  # fmt: skip
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert (chat["temperature"], chat["top_p"]) == (0.1, 0.5)
    assert chat["tools"][0]["function"] == {"name": "f", "parameters": TOOLS[0]["parameters"]}
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert (chat["parallel_tool_calls"], chat["stream"], chat["reasoning_effort"]) == (False, True, "low")
    assert chat["response_format"] == {
        "type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True},
    }  # fmt: skip
    assert (chat["priority"], chat["cache_salt"]) == (2, "s")
    before = [InputItem("message", "user", "old"), InputItem("message", "assistant", "answer")]
    assert [message["role"] for message in converted(before)["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": None}, "input", "null"),
        ({"input": []}, "input", "no items"),
        ({"input": [{"content": "x"}]}, "input[0]", "no role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'tool'"),
        ({"input": [{"role": "user"}]}, "input[0].content", "is null"),
        ({"input": [{"type": "web_search_call"}]}, "input", "no items"),
        ({"input": [{"type": "additional_tools", "tools": {}}]}, "input[0].tools", "array"),
        ({"input": [{"type": "custom_tool_call", "name": "c"}]}, "input[0].call_id", "no call_id"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name", "no name"),
        ({"tools": [*TOOLS, TOOLS[0] | {"parameters": {}}]}, "tools[1].name", "another"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "name": "g"}}, "tool_choice", "g"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{}]}}, "tool_choice.tools[0].name", "add"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type", "input_file"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "refusal": "x"}]}]},
         "input[0].content[0]", "no text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://h/i"}]}]},
         "input[0].content[0]", "takes text only"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "no call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "no call_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "no name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "g"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "no schema"),
        ({"background": True}, "background", "true"),
        ({"background": 0}, "background", "0"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"truncation": "never"}, "truncation", "Invalid enum value"),
        ({"top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "requires mode and tools"),
        ({"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"temperature": 3}, "temperature", "<= 2"),
        ({"metadata": {"a": 1}}, "metadata", "str"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "length <= 16"),
        ({"metadata": {"a": "b" * 513}}, "metadata", "length <= 512"),
        ({"metadata": {"a" * 65: "b"}}, "metadata", "length <= 64"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "unknown"),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], param: str, said: str) -> None:
    def history(response_id: str) -> list[InputItem]:
        raise PreviousResponseNotFound("unknown", "previous_response_id")

    with pytest.raises(InvalidRequest) as refused:
        BodyDecoder("m").response(json.dumps({"input": "hi", **fields}).encode(), history)
    assert (refused.value.param or "").startswith(param) and said in refused.value.message


def test_other_models_are_not_found() -> None:
    with pytest.raises(ModelNotFound):
        BodyDecoder("m").response(b'{"input": "a", "model": "gpt"}', lambda _: [])


# ---- answers


def answers_to(cluster: Cluster, kept: ResponseStore | None = None, **fields: Any) -> ResponseAnswers:
    body = {"max_output_tokens": 300, "input": OPEN, **fields}
    request = reader_of(cluster).read(json.dumps(body).encode(), "response", cluster.worker_table.limits())
    return ResponseAnswers(Generation(cluster.services, request, RequestRecord("r", "response")), "m", kept, "k")


async def streamed(answers: ResponseAnswers) -> list[dict[str, Any]]:
    data = b"".join([event async for event in answers.events()])
    assert DONE not in data
    shown = []
    for number, event in enumerate(data.decode().split("\n\n")[:-1]):
        name, content = event.split("\n")
        shown.append(json.loads(content.removeprefix("data: ")))
        assert name == f"event: {shown[-1]['type']}" and shown[-1]["sequence_number"] == number
    return shown


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_call", [False, True])
@played(max_model_len=400)
async def test_thinking_text_and_calls_are_items(
    cluster: Cluster, stream: bool, has_call: bool, tmp_path: Path
) -> None:
    store = ResponseStore(tmp_path)
    fields = {"tools": TOOLS} if has_call else {}
    answers = answers_to(cluster, store, stream=stream, metadata={"a": "b"}, **fields)
    task = asyncio.create_task(streamed(answers) if stream else whole(answers))
    await generate(cluster, f"hm</think>hello{CALL if has_call else ''}")
    if stream:
        events = cast(list[dict[str, Any]], await task)
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[0]["response"]["output"] == [] and events[-1]["type"] == "response.completed"
        deltas = {"response.output_text.delta": "", "response.function_call_arguments.delta": ""}
        for event in events:
            if event["type"] in deltas:
                deltas[event["type"]] += event["delta"]
        assert list(deltas.values()) == ["hello", '{"a": 1}' if has_call else ""]
        body = events[-1]["response"]
    else:
        body = json.loads(cast(bytes, await task))
    assert (body["id"], body["status"], body["metadata"], body["store"]) == (
        "resp_r",
        "completed",
        {"a": "b"},
        True,
    )
    thinking, message, *calls = body["output"]
    assert thinking["type"] == "reasoning" and thinking["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"] == [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}]
    assert [(call["name"], call["arguments"]) for call in calls] == ([("f", '{"a": 1}')] if has_call else [])
    assert {item["status"] for item in body["output"]} == {"completed"}
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0
    assert json.loads(store.load("k", "resp_r")) == body
    items = store.history("k", "resp_r")
    kinds = ["message", "reasoning", "message", *(["function_call"] if has_call else [])]
    assert [item.type for item in items] == kinds
    for item in body["output"]:
        found = ItemLookup(store, "k").find(item["id"])
        assert found is not None and (found.id, found.type) == (item["id"], item["type"])
        assert ItemLookup(store, "other").find(item["id"]) is None, "another client's"


def test_a_reference_stands_for_the_item_of_an_earlier_answer() -> None:
    earlier = InputItem("message", "assistant", "hello", id="msg_1_r")
    references = [{"type": "item_reference", "id": "msg_1_r"}, {"role": "user", "content": "and?"}]

    def contents(request: GenerationRequest) -> list[str]:
        assert isinstance(request.prompt, ChatPrompt)
        return [message["content"] for message in request.prompt.messages]

    decoder, body = BodyDecoder("m"), json.dumps({"input": references}).encode()
    request = decoder.response(body, lambda _: [], {"msg_1_r": earlier}.get)
    assert contents(request) == ["hello", "and?"]
    assert request.response is not None and b"item_reference" not in request.response.input.items, "kept with the item"
    body = json.dumps({"input": references, "previous_response_id": "resp_r"}).encode()
    assert contents(decoder.response(body, lambda _: [earlier])) == ["hello", "and?"], "not twice"
    assert reads_files("response", json.dumps({"input": references}).encode())
    gone = [{"type": "item_reference", "id": "rs_1"}, {"role": "user", "content": "and?"}]
    assert contents(decoder.response(json.dumps({"input": gone}).encode(), lambda _: [])) == ["and?"], "no condition"
    for wrong, says in (({"id": "msg_9_x"}, "no item of a stored answer"), ({}, "has no id")):
        with pytest.raises(InvalidRequest, match=says) as caught:
            decoder.response(json.dumps({"input": [{"type": "item_reference", **wrong}]}).encode(), lambda _: [])
        assert caught.value.param is not None and caught.value.param.startswith("input[0]")


@pytest.mark.parametrize("stream", [False, True])
@played(max_model_len=400)
async def test_what_an_answer_repeats_of_its_request_counts(cluster: Cluster, stream: bool) -> None:
    tool = {"type": "function", "name": "f", "description": "x" * (5 << 20), "parameters": {}}
    answers = answers_to(cluster, tools=[tool], tool_choice="none", stream=stream)
    budget, held = cluster.services.answer_budget, []
    grow = HeldAnswer.grow

    def seen(self: HeldAnswer, num_bytes: int) -> None:
        grow(self, num_bytes)
        held.append(budget.num_held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeldAnswer, "grow", seen)
        task = asyncio.create_task(streamed(answers) if stream else whole(answers))
        await generate(cluster, "hm</think>hello")
        await task
    assert max(held) >= 4 << 20


@pytest.mark.parametrize(("asked", "given"), [(7, 7), (100_000, 398), (None, 398)])
@played(max_model_len=400)
async def test_an_answer_may_end_where_the_context_does(cluster: Cluster, asked: int | None, given: int) -> None:
    task = asyncio.create_task(whole(answers_to(cluster, max_output_tokens=asked, input="hi")))
    while not (found := cluster.pool.of(StartPrefill)):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    start = found[0][1]
    assert start.stop.max_tokens == given
    cluster.first(start.attempt_ids[0], cluster.text.ids("a")[0], "length")
    body = json.loads(await task)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["max_output_tokens"] == asked


@played(max_model_len=400)
async def test_a_response_that_is_not_to_be_stored_is_not(cluster: Cluster, tmp_path: Path) -> None:
    task = asyncio.create_task(whole(answers_to(cluster, ResponseStore(tmp_path), store=False)))
    await generate(cluster, "hm</think>hello")
    assert json.loads(await task)["store"] is False
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)

    async def test(cluster: Cluster) -> None:
        task = asyncio.create_task(whole(answers_to(cluster, ResponseStore(tmp_path))))
        await generate(cluster, "hm</think>hello")
        assert json.loads(await task)["status"] == "completed"

    play(test, max_model_len=400)
    assert "No space left" in caplog.text and not [file for file in tmp_path.rglob("*") if file.is_file()]


@played(max_model_len=400)
async def test_an_error_in_mid_stream_is_a_failed_response(cluster: Cluster) -> None:
    event = answers_to(cluster)._error_event(InternalError("no")).decode()
    failed = json.loads(event.partition("data: ")[2])
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "no"}
