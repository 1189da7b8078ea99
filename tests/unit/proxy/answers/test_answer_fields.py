"""Fields of answers as OpenAI's and vLLM's clients read them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import msgspec

from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.media import MediaItem
from tandem.protocol.messages.sampling import FinishReason
from tandem.proxy.answers.answers import DONE, Answers
from tandem.proxy.answers.chat import ChatAnswers
from tandem.proxy.answers.completions import CompletionAnswers
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.reading.body_reader import BodyKind
from tandem.proxy.text.prompt import RenderedPrompts
from tandem.telemetry.request_log import RequestRecord
from tests.support.proxy_cluster import EOS, Cluster, play, played, whole

USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def answers(cluster: Cluster, kind: BodyKind, **fields: Any) -> Answers:
    given = {"prompt": "abc"} if kind == "completion" else {"messages": [{"role": "user", "content": "abc"}]}
    body = json.dumps({**given, "max_tokens": 20, **fields}).encode()
    request = cluster.reader.read(body, kind, cluster.worker_table.limits())
    made = Generation(cluster.services, request, RequestRecord("r", kind))
    return ChatAnswers(made, "m") if request.is_chat else CompletionAnswers(made, "m")


async def feed(cluster: Cluster, texts: list[str], last: FinishReason = "length") -> None:
    """Plays workers that generate one of the texts for each sequence, the sequences by turns."""
    while len(ids := [i for _, m in cluster.pool.of(StartPrefill) for i in m.attempt_ids]) < len(texts):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    for attempt_id, text in zip(ids, texts, strict=True):
        token_ids = cluster.text.ids(text) + ([EOS] if last == "stop" else [])
        cluster.first(attempt_id, token_ids[0], last if len(token_ids) == 1 else None)
        for number, token_id in enumerate(token_ids[1:], start=2):
            await asyncio.sleep(0.001)  # lets the reader take the tokens one by one
            cluster.token(attempt_id, token_id, last if number == len(token_ids) else None)


async def fed(cluster: Cluster, data: Coroutine[Any, Any, bytes], texts: list[str], last: FinishReason) -> bytes:
    """Returns the answer of workers that generate these texts."""
    feeding = asyncio.create_task(feed(cluster, texts, last))
    try:
        return await data
    finally:
        feeding.cancel()


async def answer(
    cluster: Cluster, kind: BodyKind, texts: list[str], last: FinishReason = "length", **fields: Any
) -> Any:
    return json.loads(await fed(cluster, whole(answers(cluster, kind, **fields)), texts, last))


async def stream(cluster: Cluster, kind: BodyKind, texts: list[str], **fields: Any) -> list[Any]:
    async def collect() -> bytes:
        events = answers(cluster, kind, **{"stream": True, **fields}).events()
        return b"".join([event async for event in events])

    data = await fed(cluster, collect(), texts, "length")
    assert data.endswith(DONE)
    return [json.loads(event[6:]) for event in data.removesuffix(DONE).decode().split("\n\n") if event]


def test_keys_that_do_not_apply_are_null() -> None:
    async def test(cluster: Cluster) -> None:
        body = await answer(cluster, "completion", ["x👩"])
        assert {"service_tier", "system_fingerprint"} <= body.keys()
        assert body["choices"] == [
            {"index": 0, "text": "x👩", "logprobs": None, "finish_reason": "length", "stop_reason": None,
             "token_ids": None, "prompt_logprobs": None, "prompt_token_ids": None}
        ]  # fmt: skip

    async def test_chat(cluster: Cluster) -> None:
        body = await answer(cluster, "chat", ["x👩"])
        for key in ("service_tier", "system_fingerprint", "prompt_logprobs", "prompt_token_ids"):
            assert body[key] is None
        [choice] = body["choices"]
        message = choice.pop("message")
        assert choice == {
            "index": 0, "finish_reason": "length", "logprobs": None, "stop_reason": None, "token_ids": None,
        }  # fmt: skip
        assert (message.pop("role"), message.pop("content")) == ("assistant", "x👩")
        assert {"refusal", "annotations", "audio", "function_call", "tool_calls"} <= message.keys()
        assert set(message.values()) == {None}

    play(test)
    play(test_chat)


def test_token_ids_of_prompts_and_answers() -> None:
    async def test(cluster: Cluster) -> None:
        prompts, ids = [cluster.text.ids("👩"), [5, 6]], cluster.text.ids("x👩")
        body = await answer(cluster, "completion", ["x👩"] * 2, prompt=prompts, return_token_ids=True)
        assert [(c["prompt_token_ids"], c["token_ids"]) for c in body["choices"]] == [(p, ids) for p in prompts]

    async def test_stream(cluster: Cluster) -> None:
        ids = cluster.text.ids("x👩")
        chunks = [chunk["choices"][0] for chunk in await stream(cluster, "completion", ["x👩"], return_token_ids=True)]
        assert [chunk["prompt_token_ids"] for chunk in chunks] == [cluster.text.ids("abc")] + [None] * (len(chunks) - 1)
        assert [i for chunk in chunks for i in chunk["token_ids"]] == ids

    async def test_chat(cluster: Cluster) -> None:
        body = await answer(cluster, "chat", ["x👩"] * 2, n=2, return_token_ids=True)
        assert body["prompt_token_ids"] == cluster.text.ids("abc")
        assert [choice["token_ids"] for choice in body["choices"]] == [cluster.text.ids("x👩")] * 2

    async def test_chat_stream(cluster: Cluster) -> None:
        first, *rest = await stream(cluster, "chat", ["x👩"], return_token_ids=True)
        assert first["prompt_token_ids"] == cluster.text.ids("abc")
        assert not any("prompt_token_ids" in chunk for chunk in rest)
        assert [i for chunk in rest for i in chunk["choices"][0]["token_ids"]] == cluster.text.ids("x👩")

    for each in (test, test_stream, test_chat, test_chat_stream):
        play(each)


def test_stop_reasons() -> None:
    def check(expected: Any, text: str, last: FinishReason, **fields: Any) -> None:
        async def test(cluster: Cluster) -> None:
            [choice] = (await answer(cluster, "completion", [text], last, **fields))["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == expected

        play(test)

    check(("length", None), "abc", "length", stop=["z"])
    check(("stop", "c"), "abc", "length", stop=["z", "c"])
    check(("stop", None), "abc", "stop", stop_token_ids=[7])
    check(("stop", None), "abc", "stop", stop_token_ids=[EOS])
    check(("stop", EOS), "abc", "stop", stop_token_ids=[EOS], ignore_eos=True)


def test_continuous_usage_is_that_of_the_choice() -> None:
    async def test(cluster: Cluster) -> None:
        chunks = await stream(cluster, "completion", ["wxyz", "uv"], prompt=["ab", "c"], **USAGE)
        *parts, last = chunks
        for index, (num_prompt, num_generated) in enumerate([(2, 4), (1, 2)]):
            usages = [part["usage"] for part in parts if part["choices"][0]["index"] == index]
            counts = [usage["completion_tokens"] for usage in usages]
            assert counts == sorted(set(counts)) and counts[0] > 0 and counts[-1] == num_generated
            assert all(usage.keys() == {"prompt_tokens", "completion_tokens", "total_tokens"} for usage in usages)
            assert {usage["prompt_tokens"] for usage in usages} == {num_prompt}
        assert last["choices"] == [] and (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 6)
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "multimodal_tokens": None}

    async def test_chat(cluster: Cluster) -> None:
        *parts, last = await stream(cluster, "chat", ["xy", "uv"], n=2, **USAGE)
        assert [part["choices"][0]["delta"] for part in parts[:2]] == [{"role": "assistant", "content": ""}] * 2
        assert [part["choices"][0]["index"] for part in parts[:2]] == [0, 1], "all roles come first"
        assert [part["usage"]["completion_tokens"] for part in parts[:2]] == [0, 0]
        for index in (0, 1):
            counts = [part["usage"]["completion_tokens"] for part in parts if part["choices"][0]["index"] == index]
            assert counts == sorted(set(counts)) and counts[-1] == 2
        assert last["usage"]["completion_tokens"] == 4

    play(test)
    play(test_chat)


def test_an_echo_of_a_chat() -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "Once "}]
    fields: dict[str, Any] = {"messages": messages, "echo": True, "continue_final_message": True}

    async def test(cluster: Cluster) -> None:
        body = await answer(cluster, "chat", ["upon"], **fields)
        assert body["choices"][0]["message"]["content"] == "Once upon"

    async def test_stream(cluster: Cluster) -> None:
        chunks = await stream(cluster, "chat", ["upon"], **fields)
        contents = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
        assert contents[:2] == ["", "Once "] and "".join(contents) == "Once upon"

    async def test_role(cluster: Cluster) -> None:
        body = await answer(cluster, "chat", ["x"], messages=messages[:1], add_generation_prompt=False)
        assert body["choices"][0]["message"]["role"] == "user"

    for each in (test, test_stream, test_role):
        play(each)


@played()
async def test_an_echo_of_token_ids_has_special_tokens(cluster: Cluster) -> None:
    body = await answer(cluster, "completion", ["x"] * 2, prompt=[[EOS, *cluster.text.ids("a")], [EOS]], echo=True)
    assert [choice["text"] for choice in body["choices"]] == ["</s>ax", "</s>x"]


@played()
async def test_usage_counts_the_tokens_of_media(cluster: Cluster) -> None:
    body = json.dumps({"prompt": "abcdef", "max_tokens": 1}).encode()
    request = cluster.reader.read(body, "completion", cluster.worker_table.limits())
    assert isinstance(request.prompt, RenderedPrompts)
    media = (
        MediaItem(b"1", "image", ((0, 2), (3, 1)), "", ()),
        MediaItem(b"2", "image", ((4, 1),), "", ()),
        MediaItem(b"3", "video", ((5, 1),), "", ()),
    )
    prompt = RenderedPrompts([replace(request.prompt.prompts[0], media=media)])
    request = msgspec.structs.replace(request, prompt=prompt)
    made = Generation(cluster.services, request, RequestRecord("r", "completion"))
    answered = json.loads(await fed(cluster, whole(CompletionAnswers(made, "m")), ["x"], "length"))
    assert answered["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": 4, "video": 1}
