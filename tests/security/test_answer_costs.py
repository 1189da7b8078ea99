"""Answers that repeat prompts and logprobs: limited before any work, encoded once, in slices, in limited memory."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tandem.protocol.messages.dispatch import FirstToken, StartPrefill
from tandem.protocol.messages.packed import pack_logprobs, unpack_token_ids
from tandem.protocol.messages.sampling import SampledToken, TokenLogprobs
from tandem.proxy.admission.admission import Admission, ClientLimitExceeded, QueueFull
from tandem.proxy.admission.budgets import AnswerBudget
from tandem.proxy.answers.answers import Answers
from tandem.proxy.answers.chat import ChatAnswers
from tandem.proxy.answers.completions import CompletionAnswers
from tandem.proxy.answers.logprobs import completion_logprobs, prompt_logprobs
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.proxy_settings import AdmissionSettings
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.text.prompt import RenderedPrompts
from tandem.runtime.errors import InvalidRequest
from tandem.telemetry.request_log import RequestRecord
from tests.support.proxy_cluster import PREFILL, Cluster, FakeText, play, whole
from tests.support.settings import proxy_config

LIMITS = ModelLimits(1_000_000, 257, "m", 64)
RANDOM = random.Random(0)


def some_logprobs(num_top: int) -> TokenLogprobs:
    top = [(RANDOM.randrange(1, 257), -RANDOM.random() * 10) for _ in range(num_top)]
    return TokenLogprobs(-RANDOM.random() * 10, RANDOM.randrange(1, 9), top)


def read(cluster: Cluster, **fields: Any) -> GenerationRequest:
    kind: Any = "chat" if "messages" in fields else "completion"
    return cluster.reader.read(json.dumps(fields).encode(), kind, LIMITS)


def answers_to(cluster: Cluster, request: GenerationRequest, is_chat: bool = False) -> Answers:
    generation = Generation(cluster.services, request, RequestRecord("r", "completion"))
    return ChatAnswers(generation, "m") if is_chat else CompletionAnswers(generation, "m")


async def starts(cluster: Cluster, number: int) -> list[StartPrefill]:
    while len(sent := cluster.pool.of(StartPrefill)) < number:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return [message for _, message in sent]


def answer_first_tokens(cluster: Cluster, start: StartPrefill, token_id: int = 66) -> list[TokenLogprobs]:
    """Plays the worker for a request of one token. Returns the logprobs of the prompt."""
    num_top = start.num_prompt_logprobs or 0
    logprobs = [some_logprobs(num_top) for _ in unpack_token_ids(start.token_ids)[1:]]
    packed = pack_logprobs(logprobs) if start.num_prompt_logprobs is not None else None
    own = None if start.sampling.logprobs is None else TokenLogprobs(-1.0, 1, [(token_id, -1.0)])
    for number, attempt_id in enumerate(start.attempt_ids):
        first = FirstToken(attempt_id, SampledToken(token_id, own), "length", 0.0, 0.0, None if number else packed)
        cluster.dispatcher.on_message(PREFILL, first)
    return logprobs


class LoopTurns:
    """Counts how often the event loop runs other work during the context."""

    def __init__(self) -> None:
        self.number = 0

    async def __aenter__(self) -> LoopTurns:
        self._counting = asyncio.create_task(self._count())
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._counting.cancel()

    async def _count(self) -> None:
        while True:
            self.number += 1
            await asyncio.sleep(0)


def test_the_answer_has_every_prompts_part_in_all_its_choices() -> None:
    async def test(cluster: Cluster) -> None:
        prompts = ["one 1 \N{SNOWMAN}" * 70, "x", 'two "2"\n' * 50]
        fields = {"prompt": prompts, "n": 2, "echo": True, "logprobs": 3, "prompt_logprobs": 2, "max_tokens": 1}
        request = read(cluster, **fields, return_token_ids=True)
        task = asyncio.create_task(whole(answers_to(cluster, request)))
        logprobs = [answer_first_tokens(cluster, start) for start in await starts(cluster, 3)]
        body = json.loads(await task)
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        text = cluster.services.token_text
        for choice in body["choices"]:
            prompt = prompts[choice["index"] // 2]
            ids, given = cluster.text.ids(prompt), logprobs[choice["index"] // 2]
            tokens = [SampledToken(each, own) for each, own in zip(ids, [None, *given], strict=True)]
            tokens.append(SampledToken(66, TokenLogprobs(-1.0, 1, [(66, -1.0)])))
            assert choice["text"] == prompt + "b"
            assert choice["logprobs"] == msgspec.to_builtins(completion_logprobs(text, tokens, 3, 0, begins=True)[0])
            wanted = [None, *msgspec.to_builtins(prompt_logprobs(text, ids[1:], given, 2))]
            assert choice["prompt_logprobs"] == wanted
            assert (choice["token_ids"], choice["finish_reason"]) == ([66], "length")
        assert cluster.services.answer_budget.num_held == 0

    play(test, max_model_len=LIMITS.max_model_len)


def test_a_stream_repeats_the_prompt_once_for_each_choice() -> None:
    async def test(cluster: Cluster) -> None:
        prompt = "one 1 \N{SNOWMAN}" * 110
        request = read(cluster, prompt=prompt, n=2, echo=True, logprobs=20, max_tokens=1, stream=True)
        events = answers_to(cluster, request).events()
        task = asyncio.create_task(_joined(events))
        [start] = await starts(cluster, 1)
        logprobs = answer_first_tokens(cluster, start)
        chunks = [json.loads(event.removeprefix("data: ")) for event in (await task).split("\n\n")[:-2]]
        ids = cluster.text.ids(prompt)
        tokens = [SampledToken(each, own) for each, own in zip(ids, [None, *logprobs], strict=True)]
        tokens.append(SampledToken(66, TokenLogprobs(-1.0, 1, [(66, -1.0)])))
        wanted = msgspec.to_builtins(completion_logprobs(cluster.services.token_text, tokens, 20, 0, begins=True)[0])
        assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1]
        for chunk in chunks:
            assert chunk["choices"][0]["text"] == prompt + "b" and chunk["choices"][0]["logprobs"] == wanted
        assert cluster.services.answer_budget.num_held == 0

    play(test, max_model_len=LIMITS.max_model_len)


async def _joined(events: AsyncIterator[bytes]) -> str:
    pieces = [piece async for piece in events]
    assert len(pieces) > 4 and all(len(piece) <= 128 * 1024 for piece in pieces)
    return b"".join(pieces).decode()


def test_a_chat_has_its_prompt_logprobs_once() -> None:
    async def test(cluster: Cluster) -> None:
        messages = [{"role": "user", "content": "hello"}]
        request = read(cluster, messages=messages, n=2, prompt_logprobs=1, logprobs=True, top_logprobs=1, max_tokens=1)
        task = asyncio.create_task(whole(answers_to(cluster, request, is_chat=True)))
        [start] = await starts(cluster, 1)
        logprobs = answer_first_tokens(cluster, start)
        body = json.loads(await task)
        ids = unpack_token_ids(start.token_ids)
        text = cluster.services.token_text
        assert body["prompt_logprobs"] == [None, *msgspec.to_builtins(prompt_logprobs(text, ids[1:], logprobs, 1))]
        assert [c["message"]["content"] for c in body["choices"]] == ["b", "b"]
        assert [c["logprobs"]["content"][0]["top_logprobs"][0]["token"] for c in body["choices"]] == ["b", "b"]

    play(test, max_model_len=LIMITS.max_model_len)


def test_the_loop_runs_between_slices_of_a_large_answer() -> None:
    async def test(cluster: Cluster) -> None:
        request = read(cluster, prompt="x" * 4000, n=8, prompt_logprobs=20, max_tokens=1)
        task = asyncio.create_task(whole(answers_to(cluster, request)))
        [start] = await starts(cluster, 1)
        packed = answer_first_tokens(cluster, start)
        async with LoopTurns() as turns:
            await task
        assert turns.number >= len(packed) * 21 / 1024, "one turn for each thousand logprobs"

    play(test, max_model_len=LIMITS.max_model_len)


def limited_reader(**config: Any) -> BodyReader:
    text: Any = FakeText()
    return BodyReader(text, proxy_config(**config))


@pytest.mark.parametrize(
    ("num_tokens", "fields", "refusal"),
    [
        (4000, {"n": 128, "echo": True, "logprobs": 20, "prompt_logprobs": 20}, "256 MiB.*fewer prompts.*lower n"),
        (60_000, {"prompt_logprobs": 20}, "60000 tokens, too many for 20 log-prob.*at most 52593 tokens"),
        (60_000, {"echo": True, "logprobs": 20}, "too many for 20"),
        (600_000, {"echo": True, "n": 128}, "256 MiB"),
    ],
)
def test_an_answer_that_would_be_too_large_is_refused_before_it_is_computed(
    num_tokens: int, fields: dict[str, Any], refusal: str
) -> None:
    body = json.dumps({"prompt": [1] * num_tokens, "max_tokens": 1, **fields}).encode()
    with pytest.raises(InvalidRequest, match=refusal):
        limited_reader().read(body, "completion", LIMITS)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize(("num_prompts", "num_tokens", "num_top"), [(64, 4000, 1), (64, 4000, 5), (1, 400_000, 1)])
def test_scoring_as_evaluation_harnesses_do_it_is_not_refused(
    num_prompts: int, num_tokens: int, num_top: int, max_tokens: int
) -> None:
    fields = {"echo": True, "logprobs": num_top, "max_tokens": max_tokens}
    body = json.dumps({"prompt": [[1] * num_tokens] * num_prompts, **fields}).encode()
    request = limited_reader().read(body, "completion", LIMITS)
    assert request.num_prompt_logprobs == num_top


def test_a_chat_of_many_choices_counts_its_prompt_once() -> None:
    fields = {"messages": [{"role": "user", "content": "x" * 4000}], "n": 128, "prompt_logprobs": 20}
    limited_reader().read(json.dumps(fields).encode(), "chat", LIMITS)


@pytest.mark.parametrize("prompt", [["a"], [[1]], ['"\\', "a"]])
def test_too_many_prompts_are_refused_before_they_are_decoded(prompt: list[Any]) -> None:
    reader = limited_reader(max_waiting_requests=100)
    for n, num_prompts in ((1, 100), (2, 50), (100, 1)):
        prompts = (prompt * 200)[:num_prompts]
        rendered = reader.read(json.dumps({"prompt": prompts, "n": n}).encode(), "completion", LIMITS).prompt
        assert isinstance(rendered, RenderedPrompts) and len(rendered.prompts) == num_prompts
        with pytest.raises(InvalidRequest, match="more than 100 sequences") as refused:
            reader.decode(json.dumps({"prompt": [*prompts, *prompt[:1]], "n": n}).encode(), "completion")
        assert refused.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="more than 100 sequences"):
        reader.decode(json.dumps({"prompt": prompt[0], "n": 101}).encode(), "completion")
    with pytest.raises(InvalidRequest, match="more than 10 sequences"):
        limited_reader(max_requests_per_client=10).decode(json.dumps({"prompt": prompt * 11}).encode(), "completion")


def test_an_answer_that_grows_too_large_fails() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.services = replace(cluster.services, answer_budget=AnswerBudget(1_500_000))
        request = read(cluster, prompt="x" * 2000, prompt_logprobs=20, max_tokens=1)
        task = asyncio.create_task(whole(answers_to(cluster, request)))
        [start] = await starts(cluster, 1)
        answer_first_tokens(cluster, start)
        with pytest.raises(InvalidRequest, match="more than 1 MiB"):
            await task
        assert cluster.services.answer_budget.num_held == 0

    play(test, max_model_len=LIMITS.max_model_len)


def test_memory_for_an_answer_is_reserved_before_its_prompt_is_dispatched() -> None:
    async def test(cluster: Cluster) -> None:
        budget = AnswerBudget(max_held_bytes=40_000_000)
        cluster.services = replace(cluster.services, answer_budget=budget)
        large = {"prompt": [1] * 5000, "prompt_logprobs": 20, "max_tokens": 1}
        task = asyncio.create_task(whole(answers_to(cluster, read(cluster, **large))))
        [start] = await starts(cluster, 1)
        num_reserved = budget.num_held
        assert 5_000_000 < num_reserved < 10_000_000
        budget.take("", 20_000_000 - num_reserved)
        with pytest.raises(ClientLimitExceeded):
            await whole(answers_to(cluster, read(cluster, **large)))
        budget.take("other", 15_000_000)
        with pytest.raises(QueueFull):
            budget.take("third", 15_000_000)
        assert len(cluster.pool.of(StartPrefill)) == 1
        answer_first_tokens(cluster, start)
        assert len(await task) < num_reserved + 1_000_000
        assert budget.num_held == 35_000_000 - num_reserved

    play(test, max_model_len=LIMITS.max_model_len)


def test_the_loop_runs_while_many_sequences_start_and_end_together() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.services = replace(cluster.services, admission=Admission(AdmissionSettings(1000), time.monotonic))
        request = read(cluster, prompt=["a"] * 320, max_tokens=1)
        async with LoopTurns() as turns:
            task = asyncio.create_task(whole(answers_to(cluster, request)))
            sent = await starts(cluster, 320)
        assert turns.number >= 320
        async with LoopTurns() as turns:
            for start in sent:
                answer_first_tokens(cluster, start)
            await task
        assert turns.number >= 320 // 16

    play(test)
