"""Chats whose text has thinking and tool calls, from the body to the answer, streamed and not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from tokenizers import AddedToken

from tandem.protocol.messages.dispatch import StartPrefill
from tandem.proxy.admission.budgets import UNCOUNTED_BYTES, AnswerBudget, HeldAnswer
from tandem.proxy.answers.chat import CustomInputs, ParsedAnswers, ParsedChoice
from tandem.proxy.dispatch.generation import Generation, TextDelta
from tandem.proxy.parsers.output_parser import OutputParser
from tandem.proxy.parsers.tool_formats import ToolFormat
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.text.model_text import ModelText
from tandem.runtime.errors import InvalidRequest
from tandem.telemetry.request_log import RequestRecord
from tests.support.proxy_cluster import EOS, Cluster, play, played, whole
from tests.support.settings import proxy_config

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
]
OPEN = "hi<think>\n"  # FakeText's template renders the message's content alone


def reader_of(cluster: Cluster, parser: str = "auto") -> BodyReader:
    cluster.text.tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    cluster.text.chat_template = "<|im_start|></think><tool_call>"  # type: ignore[assignment]
    config = proxy_config(reasoning_parser=parser)
    return BodyReader(cast(ModelText, cluster.text), config)


def answers_to(cluster: Cluster, content: str = OPEN, **fields: Any) -> ParsedAnswers:
    body = json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()
    request = reader_of(cluster).read(body, "chat", cluster.worker_table.limits())
    assert request.is_parsed
    return ParsedAnswers(Generation(cluster.services, request, RequestRecord("r", "chat")), "m")


async def generate(cluster: Cluster, text: str) -> StartPrefill:
    """Plays the workers that generate `text`. Returns the command that they got."""
    while not (found := cluster.pool.of(StartPrefill)):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    start = found[0][1]
    [attempt_id] = start.attempt_ids
    first, *rest = cluster.text.ids(text)
    cluster.first(attempt_id, first)
    for token_id in rest:
        cluster.token(attempt_id, token_id)
        await asyncio.sleep(0)
    cluster.token(attempt_id, EOS, "stop")
    assert isinstance(start, StartPrefill)
    return start


async def streamed(answers: ParsedAnswers) -> list[dict[str, Any]]:
    events = b"".join([event async for event in answers.events()]).decode().split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events if event and "[DONE]" not in event]


def with_cluster(test: Callable[[Cluster], Coroutine[Any, Any, None]]) -> None:
    play(test, max_model_len=400)


@pytest.mark.parametrize("include_reasoning", [None, True, False])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_call", [False, True])
def test_thinking_answer_and_calls_are_separate_fields(
    include_reasoning: bool | None, stream: bool, has_call: bool
) -> None:
    async def test(cluster: Cluster) -> None:
        fields: dict[str, Any] = {"include_reasoning": include_reasoning}
        if has_call:
            fields["tools"] = TOOLS
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        answers = answers_to(cluster, **fields)
        task = asyncio.create_task(streamed(answers) if stream else whole(answers))
        await generate(cluster, "Hm, é.</think>\n\nYes." + (f"\n{CALL}" if has_call else ""))
        if stream:
            chunks = cast(list[dict[str, Any]], await task)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
            reasoning = "".join(delta.get("reasoning", "") for delta in deltas) or None
            content = "".join(delta.get("content", "") for delta in deltas)
            pieces = [call for delta in deltas for call in delta.get("tool_calls", [])]
            arguments = "".join(piece["function"]["arguments"] for piece in pieces)
            finish_reason = chunks[-2]["choices"][0]["finish_reason"]
            usage = chunks[-1]["usage"]
        else:
            body = json.loads(cast(bytes, await task))
            message = body["choices"][0]["message"]
            reasoning, content = message["reasoning"], message["content"]
            arguments = "".join(call["function"]["arguments"] for call in message["tool_calls"] or [])
            finish_reason, usage = body["choices"][0]["finish_reason"], body["usage"]
        assert reasoning == (None if include_reasoning is False else "Hm, é.")
        assert content == "Yes." and arguments == ('{"a": 1}' if has_call else "")
        assert finish_reason == ("tool_calls" if has_call else "stop")
        assert usage["completion_tokens_details"] == {"reasoning_tokens": len("Hm, é.".encode())}

    with_cluster(test)


def test_an_answer_that_only_thinks_has_no_content() -> None:
    async def test(cluster: Cluster) -> None:
        answers = answers_to(cluster, "hi")
        task = asyncio.create_task(whole(answers))
        await generate(cluster, "<think>Hm")
        message = json.loads(await task)["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == (None, "Hm")

    with_cluster(test)


@pytest.mark.parametrize(
    ("content", "fields", "expected"),
    [
        (OPEN, {}, None),
        (OPEN, {"thinking_token_budget": -1}, None),
        (OPEN, {"thinking_token_budget": 0}, (True, 0)),
        ("hi", {"thinking_token_budget": 7}, (False, 7)),
        (OPEN, {"response_format": {"type": "json_object"}}, (True, None)),
        ("hi", {"response_format": {"type": "json_object"}, "thinking_token_budget": 3}, (False, 3)),
        (OPEN, {"tools": TOOLS, "tool_choice": "required"}, (True, None)),
    ],
)
def test_workers_know_of_the_thinking_where_they_need_it(
    content: str, fields: dict[str, Any], expected: tuple[bool, int | None] | None
) -> None:
    async def test(cluster: Cluster) -> None:
        body = json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()
        request = reader_of(cluster).read(body, "chat", cluster.worker_table.limits())
        thinking = request.base_sampling.thinking
        assert (None if thinking is None else (thinking.is_open, thinking.max_tokens)) == expected
        if thinking is not None:
            assert len(thinking.opening) == len(thinking.ending) == 1 and thinking.forced == thinking.ending

    with_cluster(test)


def test_a_budget_is_refused_where_the_model_does_not_think() -> None:
    async def test(cluster: Cluster) -> None:
        reader, limits = reader_of(cluster, "none"), cluster.worker_table.limits()
        body = {"messages": [{"role": "user", "content": OPEN}]}
        assert not reader.read(json.dumps(body).encode(), "chat", limits).is_parsed
        for budget, words in ((5, "thinking_token_budget is 5"), (-2, ">= -1"), ("5", "int"), (True, "int")):
            with pytest.raises(InvalidRequest, match=words) as caught:
                reader.read(json.dumps(body | {"thinking_token_budget": budget}).encode(), "chat", limits)
            assert caught.value.param == "thinking_token_budget"

    with_cluster(test)


def test_each_call_counts_towards_the_memory_of_answers() -> None:
    budget = AnswerBudget()
    held = HeldAnswer(budget, "client")
    parser = OutputParser(None, ToolFormat("mistral").with_tools({"f": {}}), is_open=False)
    choice = ParsedChoice(0, held, parser, CustomInputs([]))
    held.reserve(UNCOUNTED_BYTES)  # what follows counts
    held.grow(UNCOUNTED_BYTES)
    text = "[TOOL_CALLS]f{}" * 100
    choice.add(TextDelta(0, text, [], 0, "stop"))
    parsed, finish_reason = choice.parsed()
    assert (len(parsed.names), finish_reason) == (100, "tool_calls")
    assert budget.num_held >= len(text) + 100 * 1024


@pytest.mark.parametrize(
    ("text", "finish_reason", "stop_reason", "content", "arguments"),
    [
        ('Hm.\n<tool_call>\n{"name": "f", "arg', "length", None, "Hm.", None),
        ('Hm.\n<tool_call>\n{"name": "f", "arguments": {"a": 1', "length", None, "Hm.", '{"a": 1'),
        ("Hm.\n<tool", "length", None, "Hm.", None),
        ("Hm.\n<tool_call>", "stop", "\n", "Hm.", None),
        ("Hm.\n<tool", "stop", "b", "Hm.\n<tool", None),
        ("Hm.\n<tool_call>", "stop", None, "Hm.\n<tool_call>", None),
        ("Hm.\n<tool_call>", "stop", 7, "Hm.\n<tool_call>", None),
    ],
)
def test_what_ends_an_answer_decides_what_a_call_that_has_begun_is(
    text: str, finish_reason: Any, stop_reason: int | str | None, content: str, arguments: str | None
) -> None:
    """The model itself may end with text that looks like a call; a limit only cuts calls."""
    parser = OutputParser(None, ToolFormat("hermes").with_tools({"f": {}}), is_open=False)
    choice = ParsedChoice(0, HeldAnswer(AnswerBudget(), "client"), parser, CustomInputs(()))
    choice.add(TextDelta(0, text, [], 0, finish_reason, stop_reason=stop_reason))
    parsed, reason = choice.parsed()
    assert (parsed.content, parsed.arguments.get(0)) == (content, arguments)
    assert reason == (finish_reason if arguments is None or finish_reason == "length" else "tool_calls")


@played(max_model_len=2000)
async def test_tokens_that_have_piled_up_are_parsed_in_slices(cluster: Cluster) -> None:
    """A client that reads slowly must not make the loop parse all of its answer at once."""
    answers = answers_to(cluster, "hi", stream=True, tools=TOOLS)
    task = asyncio.create_task(streamed(answers))
    while not (found := cluster.pool.of(StartPrefill)):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    [attempt_id] = found[0][1].attempt_ids
    [letter] = cluster.text.ids("x")
    cluster.first(attempt_id, letter)
    for _ in range(999):
        cluster.token(attempt_id, letter)
    cluster.token(attempt_id, EOS, "stop")
    chunks = await task
    contents = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(contents) == "x" * 1000 and max(map(len, contents)) <= 256
