"""Anthropic's Messages API, from the body to the answer, streamed and not."""

from __future__ import annotations

import asyncio
import hmac
import json
from base64 import b64encode
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.sampling import FinishReason
from tandem.proxy.answers.answers import DONE
from tandem.proxy.answers.errors import tandem_error_response
from tandem.proxy.answers.http_answers import id_header
from tandem.proxy.answers.messages import BlockWriter, MessageAnswers, encode_event, joined_blocks
from tandem.proxy.api.messages_api.messages_request import CountTokensRequest, MessageRequest, to_chat
from tandem.proxy.api.messages_api.messages_response import AnsweredThinking, AnsweredToolUse, BlockStart, BlockStop
from tandem.proxy.api.validation import BodyDecoder, ModelNotFound
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.parsers.parsed import Parsed
from tandem.runtime.errors import InvalidRequest
from tandem.telemetry.request_log import RequestRecord
from tests.support.proxy_cluster import EOS, Cluster, played, whole
from tests.unit.proxy.answers.test_parsed_answers import CALL, OPEN, generate, reader_of

TOOLS = [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
IMAGE_URL = {"type": "image", "source": {"type": "url", "url": "https://h/i.png"}}


def converted(**fields: Any) -> dict[str, Any]:
    """Returns the chat that a body becomes, without what it does not set."""
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **fields}
    request = msgspec.json.decode(json.dumps(body), type=MessageRequest)
    return dict(msgspec.to_builtins(to_chat(request, can_think=True)[0]))


def turns(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """Returns the messages of the chat without fields that are null."""
    chat = converted(messages=messages, **fields)["messages"]
    clean: Any = json.loads(json.dumps(chat), object_hook=lambda o: {k: v for k, v in o.items() if v is not None})
    return list(clean)


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": each} for each in texts]


def test_a_conversation_with_thinking_tools_and_images_becomes_a_chat() -> None:
    shown = turns(
        {"role": "user", "content": [*text("look"), IMAGE]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                *text("calling"),
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [*text("one"), IMAGE_URL]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                *text("and now?"),
            ],
        },
        system=[*text("x-anthropic-billing-header: cch=1"), *text("be brief")],
    )
    call = {"type": "function"}
    assert shown == [
        {"role": "system", "content": text("be brief")},
        {"role": "user", "content": [*text("look"), {"type": "image_url", "image_url": "data:image/png;base64,aGk="}]},
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": text("calling"),
            "tool_calls": [
                {**call, "function": {"name": "f", "arguments": {"a": 1}}, "id": "t1"},
                {**call, "function": {"name": "f", "arguments": {}}, "id": "t2"},
            ],
        },
        {"role": "tool", "content": text("one"), "tool_call_id": "t1"},
        {"role": "user", "content": [{"type": "image_url", "image_url": "https://h/i.png"}]},
        {"role": "tool", "content": [], "tool_call_id": "t2"},
        {"role": "user", "content": text("and now?")},
    ]


def test_turns_of_one_role_are_joined_and_an_answer_is_continued() -> None:
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": text("Once")}
    assert turns(user, user) == [{"role": "user", "content": text("a", "a")}]
    assert turns({"role": "user", "content": []}) == [{"role": "user", "content": ""}]
    chat = converted(messages=[user, assistant])
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)
    chat = converted(messages=[user])
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (False, True)


def test_a_budget_of_minus_one_is_none() -> None:
    """Some clients send it where they do not know the model's limits."""
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
    fields = {"thinking": {"type": "enabled", "budget_tokens": -1}}
    request = BodyDecoder("m").message(json.dumps(body | fields).encode())
    assert request.thinking_token_budget is None


def test_fields_become_those_of_chats() -> None:
    schema = {"type": "object"}
    chat = converted(
        stop_sequences=["x"], top_k=3, top_p=0.5, temperature=0.1, stream=True, tools=TOOLS, priority=3, cache_salt="s",
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 9, "display": "omitted"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
        metadata={"user_id": "u"}, betas=["b"], mcp_servers=[], container=None,
    )  # fmt: skip
    assert (chat["stop"], chat["top_k"], chat["top_p"], chat["temperature"], chat["stream"]) == (
        ["x"], 3, 0.5, 0.1, True,
    )  # fmt: skip
    assert (chat["priority"], chat["cache_salt"], chat["parallel_tool_calls"]) == (3, "s", False)
    assert chat["tools"][0]["function"]["parameters"] == TOOLS[0]["input_schema"]
    assert (chat["tool_choice"]["type"], chat["tool_choice"]["function"]) == ("function", {"name": "f"})
    assert (chat["thinking_token_budget"], chat["include_reasoning"]) == (9, False)
    assert chat["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
    assert chat["reasoning_effort"] == "low" and chat["response_format"]["json_schema"]["schema"] == schema
    for kind, wanted in (("auto", "auto"), ("any", "required"), ("none", "none")):
        assert converted(tools=TOOLS, tool_choice={"type": kind})["tool_choice"] == wanted
    off = converted(thinking={"type": "disabled"})
    assert off["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    request = msgspec.convert({"messages": [{"role": "user", "content": "a"}]}, CountTokensRequest)
    assert to_chat(request, can_think=False)[0].messages[0].role == "user"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"max_tokens": None}, "max_tokens", "Expected `int`, got `null`"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "Invalid enum value 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type", "video"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
         "messages[0].content[0]", "only assistant messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
         "messages[0].content[0]", "only user messages"),
        ({"messages": [{"role": "user", "content": text("a")}, {"role": "assistant", "content": "b"},
                       {"role": "user", "content": [IMAGE]}], "system": "s"},
         "messages[2].content[0]", "this model takes text only"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "input_schema"),
        ({"tools": [{"type": "custom", "input_schema": {}}]}, "tools[0].name", "name"),
        ({"stop_sequences": ["x"] * 257}, "stop_sequences", "length <= 256"),
        ({"stop_sequences": ["x" * 1024] * 17}, "stop_sequences", "16384 characters"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name", "add the name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice", "g"),
        ({"temperature": 3}, "temperature", "<= 2"),
        ({"container": "c"}, "container", "not supported"),
        ({"thinking": {"type": "maybe"}}, "thinking.type", "maybe"),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "length >= 1"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type", "xml"),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], param: str, said: str) -> None:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **fields}
    with pytest.raises(InvalidRequest) as refused:
        BodyDecoder("m").message(json.dumps(body).encode())
    assert refused.value.param == param and said in refused.value.message


def test_other_models_are_not_found() -> None:
    body = {"model": "claude", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    for decode in (BodyDecoder("m").message, BodyDecoder("m").count):
        with pytest.raises(ModelNotFound):
            decode(json.dumps(body).encode())


# ---- answers


def answers_to(cluster: Cluster, **fields: Any) -> MessageAnswers:
    content = fields.pop("content", OPEN)
    body = {"max_tokens": 300, "messages": [{"role": "user", "content": content}], **fields}
    request = reader_of(cluster).read(json.dumps(body).encode(), "message", cluster.worker_table.limits())
    return MessageAnswers(Generation(cluster.services, request, RequestRecord("r", "message")), "m")


async def streamed(answers: MessageAnswers) -> list[dict[str, Any]]:
    events = [event async for event in answers.events()]
    assert events[-1].endswith(MessageAnswers.END) and DONE not in b"".join(events)
    shown = []
    for event in b"".join(events).decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        shown.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {shown[-1]['type']}"
    return shown


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message that a client makes of the events."""
    message: dict[str, Any] = events[0]["message"]
    written: dict[int, str] = {}
    open_block = None
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert open_block is None and event["index"] == len(message["content"])
                open_block = event["index"]
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_block
                delta = event["delta"]
                block = message["content"][open_block]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        written[open_block] = written.get(open_block, "") + delta["partial_json"]
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case "message_delta":
                assert open_block is None
                message |= event["delta"] | {"usage": event["usage"]}
    for index, arguments in written.items():
        message["content"][index]["input"] = json.loads(arguments)
    return message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_call", [False, True])
@played(max_model_len=400)
async def test_thinking_text_and_calls_are_blocks(cluster: Cluster, stream: bool, has_call: bool) -> None:
    answers = answers_to(cluster, stream=stream, **({"tools": TOOLS} if has_call else {}))
    task = asyncio.create_task(streamed(answers) if stream else whole(answers))
    await generate(cluster, f"hm</think>hello{CALL if has_call else ''}")
    body = joined(cast(list[dict[str, Any]], await task)) if stream else json.loads(cast(bytes, await task))
    blocks = body.pop("content")
    call_id = blocks[-1].pop("id", None)
    signature = b64encode(hmac.digest(b"", b"hm", "sha256")).decode()
    assert blocks[:2] == [
        {"type": "thinking", "thinking": "hm", "signature": signature},
        {"type": "text", "text": "hello", "citations": None},
    ]
    assert blocks[2:] == ([{"type": "tool_use", "name": "f", "input": {"a": 1}}] if has_call else [])
    assert (call_id or "toolu_").startswith("toolu_")
    usage = body.pop("usage")
    assert body == {
        "id": "msg_r", "model": "m", "type": "message", "role": "assistant", "stop_sequence": None,
        "stop_reason": "tool_use" if has_call else "end_turn",
    }  # fmt: skip
    assert usage["input_tokens"] > 0 and usage["output_tokens"] > 0 and usage["cache_read_input_tokens"] == 0
    assert usage["output_tokens_details"]["thinking_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "stop_reason", "stop_sequence"),
    [
        ({"stop_sequences": ["c"]}, "stop_sequence", "c"),
        ({"max_tokens": 2}, "max_tokens", None),
        ({"max_tokens": 100_000}, "model_context_window_exceeded", None),
        ({}, "end_turn", None),
    ],
)
@played(max_model_len=400)
async def test_reasons_to_stop(
    cluster: Cluster, fields: dict[str, Any], stop_reason: str, stop_sequence: str | None
) -> None:
    answers = answers_to(cluster, content="hi", **fields)
    task = asyncio.create_task(whole(answers))
    start = await begun(cluster)
    assert start.stop.max_tokens == min(fields.get("max_tokens", 300), 400 - 2)
    for token_id in cluster.text.ids("abcd"):
        await asyncio.sleep(0)
        if token_id == cluster.text.ids("a")[0]:
            cluster.first(start.attempt_ids[0], token_id)
        else:
            reason: FinishReason | None = (
                "length" if "max_tokens" in fields and token_id == cluster.text.ids("b")[0] else None
            )
            cluster.token(start.attempt_ids[0], token_id, reason)
            if reason:
                break
    if not fields:
        cluster.token(start.attempt_ids[0], EOS, "stop")
    body = json.loads(await asyncio.wait_for(task, 10))
    assert (body["stop_reason"], body["stop_sequence"]) == (stop_reason, stop_sequence)


@pytest.mark.parametrize("stream", [False, True])
@played(max_model_len=400)
async def test_no_tokens_are_an_answer_without_content(cluster: Cluster, stream: bool) -> None:
    """A client that asks for none fills the prefix cache."""
    answers = answers_to(cluster, max_tokens=0, stream=stream, tools=TOOLS)
    task = asyncio.create_task(streamed(answers) if stream else whole(answers))
    start = await begun(cluster)
    cluster.first(start.attempt_ids[0], cluster.text.ids("a")[0], "length")
    answer = await asyncio.wait_for(task, 10)
    body = joined(cast(list[dict[str, Any]], answer)) if stream else json.loads(cast(bytes, answer))
    assert (body["content"], body["stop_reason"]) == ([], "max_tokens")
    assert body["usage"]["output_tokens"] == 0 and body["usage"]["input_tokens"] > 0


@played(max_model_len=400)
async def test_an_answer_ends_at_the_last_of_many_stop_sequences(cluster: Cluster) -> None:
    stops = [*(f"not {number}" for number in range(100)), "lo"]
    task = asyncio.create_task(whole(answers_to(cluster, stop_sequences=stops)))
    await generate(cluster, "hm</think>hello")
    body = json.loads(await task)
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "lo")


async def begun(cluster: Cluster) -> Any:
    while not (found := cluster.pool.of(StartPrefill)):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return found[0][1]


@pytest.mark.parametrize(
    ("path", "has_both"), [("/v1/messages", True), ("/v1/messages/x", True), ("/v1/models", False)]
)
def test_answers_and_errors_have_the_request_id_where_clients_look_for_it(path: str, has_both: bool) -> None:
    request = Request({"type": "http", "path": path, "headers": [(b"x-request-id", b"r1")], "state": {}})
    expected = {"x-request-id": "r1", **({"request-id": "r1"} if has_both else {})}
    assert id_header(request) == expected
    refused = tandem_error_response(request, InvalidRequest("no")).headers
    assert expected.items() <= dict(refused).items() and ("request-id" in refused) == has_both


def test_an_error_in_mid_stream_has_anthropics_form() -> None:
    answers = MessageAnswers.__new__(MessageAnswers)
    event = answers._error_event(InvalidRequest("no"))
    name, data = event.decode().strip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"] == {"type": "invalid_request_error", "message": "no"}


def test_arguments_that_are_no_json_object_are_shown_as_they_are() -> None:
    parsed = Parsed(names={0: "f"}, arguments={0: '{"a": '})
    [block] = joined_blocks(BlockWriter(True).push(parsed))
    assert isinstance(block, AnsweredToolUse) and block.input == {"INVALID_JSON": '{"a": '}


words = st.text(max_size=5)
pieces = st.lists(
    st.one_of(
        st.builds(lambda w: Parsed(reasoning=w), words),
        st.builds(lambda w: Parsed(content=w), words),
        st.builds(lambda a, b: Parsed(reasoning=a, content=b), words, words),
    ),
    max_size=6,
)


@given(before=pieces, num_calls=st.integers(0, 3), shows_thinking=st.booleans())
def test_blocks_follow_each_other_and_lose_nothing(before: list[Parsed], num_calls: int, shows_thinking: bool) -> None:
    parts = [*before, *(Parsed(names={i: f"f{i}"}, arguments={i: '{"n": '}) for i in range(num_calls))]
    for i in range(num_calls):
        parts.insert(len(before) + 2 * i + 1, Parsed(arguments={i: f"{i}}}"}))
    writer = BlockWriter(shows_thinking)
    events = [event for part in parts for event in writer.push(part)] + list(writer.end())
    kinds = [event.index for event in events if isinstance(event, BlockStart)]
    assert kinds == list(range(len(kinds))) == [event.index for event in events if isinstance(event, BlockStop)]
    assert all(encode_event(event) for event in events)
    blocks = joined_blocks(events)
    thinking = "".join(block.thinking for block in blocks if isinstance(block, AnsweredThinking))
    assert thinking == ("".join(part.reasoning for part in before) if shows_thinking else "")
    for block in blocks:
        if isinstance(block, AnsweredThinking):
            assert block.signature == b64encode(hmac.digest(b"", block.thinking.encode(), "sha256")).decode()
    assert "".join(getattr(block, "text", "") for block in blocks) == "".join(part.content for part in before)
    calls = [(block.name, block.input) for block in blocks if isinstance(block, AnsweredToolUse)]
    assert calls == [(f"f{i}", {"n": i}) for i in range(num_calls)]
