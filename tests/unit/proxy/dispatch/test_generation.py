"""A generation: several sequences of one request, their usage, errors and refusals."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct
from prometheus_client import CollectorRegistry

from tandem.protocol.messages.dispatch import (
    FirstToken,
    StartPrefill,
)
from tandem.protocol.messages.membership import PairChanges, PairStatus, WorkerInfo, WorkerLoad, WorkerStatus
from tandem.protocol.messages.packed import pack_logprobs
from tandem.protocol.messages.sampling import FinishReason, SampledToken, TokenLogprobs
from tandem.proxy.answers.completions import CompletionAnswers
from tandem.proxy.answers.http_answers import ClientDisconnected, unless_disconnected
from tandem.proxy.cluster.router import SLOUnreachable
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.dispatch.sequence import TokenDelta
from tandem.runtime.errors import InternalError, Overloaded
from tandem.telemetry.request_log import RequestRecord
from tests.support.proxy_cluster import DECODE, EOS, PREFILL, Cluster, collect, played, turn, whole

OTHER_DECODE = WorkerInfo("decode-1", "d2", "decode", "ipc://d2", 4)


def generation(cluster: Cluster, **fields: Any) -> tuple[Generation, Any]:
    body = json.dumps({"prompt": "abc", "max_tokens": 20, **fields}).encode()
    request = cluster.reader.read(body, "completion", cluster.worker_table.limits())
    made = Generation(cluster.services, request, RequestRecord("r", "completion"))
    return made, CompletionAnswers(made, "m")


async def prefills(cluster: Cluster, number: int) -> list[str]:
    """Waits until `number` attempts were started and returns their ids."""
    while len(ids := [i for _, m in cluster.pool.of(StartPrefill) for i in m.attempt_ids]) < number:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return ids


def feed(cluster: Cluster, attempt_id: str, text: str, last: FinishReason) -> None:
    """Plays the workers that generate `text`, followed by an end-of-sequence token when `last` is "stop"."""
    token_ids = cluster.text.ids(text) + ([EOS] if last == "stop" else [])
    cluster.first(attempt_id, token_ids[0])
    for token_id in token_ids[1:-1]:
        cluster.token(attempt_id, token_id)
    cluster.token(attempt_id, token_ids[-1], last)


def outcomes(registry: CollectorRegistry) -> dict[str, float]:
    return {
        sample.labels["outcome"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "tandem_requests_total"
    }


@played()
async def test_usage_counts_the_stop_token_but_does_not_show_it(cluster: Cluster) -> None:
    _, answers = generation(cluster)
    task = asyncio.create_task(whole(answers))
    [attempt_id] = await prefills(cluster, 1)
    feed(cluster, attempt_id, "né 👩", "stop")
    body = json.loads(await task)
    num_tokens = len("né 👩".encode()) + 1
    assert body["choices"][0]["text"] == "né 👩"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": 3, "completion_tokens": num_tokens, "total_tokens": 3 + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "multimodal_tokens": None},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    assert outcomes(cluster.metrics.registry) == {"stop": 1.0}


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
@played()
async def test_the_log_probabilities_of_the_prompt_come_first_whichever_sequence_does(
    cluster: Cluster, order: tuple[int, ...]
) -> None:
    """They come with the first sequence's first token, and an engine may compute the others sooner."""
    _, answers = generation(cluster, n=3, prompt_logprobs=0, echo=True)
    task = asyncio.create_task(whole(answers))
    attempt_ids = await prefills(cluster, 3)
    for number in order:
        found = [TokenLogprobs(-0.5, 1, []), TokenLogprobs(-0.25, 1, [])]
        logprobs = pack_logprobs(found) if number == 0 else None
        message = FirstToken(attempt_ids[number], SampledToken(65 + number), None, 0.1, 0.2, logprobs)
        cluster.dispatcher.on_message(PREFILL, message)
        cluster.token(attempt_ids[number], EOS, "stop")
        await turn()
    choices = json.loads(await task)["choices"]
    assert [choice["text"] for choice in choices] == ["abca", "abcb", "abcc"]
    for choice in choices:
        shown = choice["prompt_logprobs"]
        assert [each and next(iter(each.values()))["logprob"] for each in shown] == [None, -0.5, -0.25]


@played()
async def test_a_stop_string_ends_the_request_on_the_workers_too(cluster: Cluster) -> None:
    _, answers = generation(cluster, stop=["END"])
    task = asyncio.create_task(whole(answers))
    [attempt_id] = await prefills(cluster, 1)
    token_ids = cluster.text.ids("so END and more")
    cluster.first(attempt_id, token_ids[0])
    for token_id in token_ids[1:8]:
        cluster.token(attempt_id, token_id)
    body = json.loads(await task)
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("so ", "stop")
    assert body["usage"]["completion_tokens"] == 6, "up to the token that completed it"
    assert cluster.aborted() == ["decode-0", "prefill-0"]


@played()
async def test_a_stop_string_ends_one_of_several_sequences_on_the_workers_at_once(cluster: Cluster) -> None:
    made, _ = generation(cluster, stop=["END"], n=2)
    deltas = made.deltas()
    first = asyncio.create_task(anext(deltas))
    stopped, _ = await prefills(cluster, 2)
    token_ids = cluster.text.ids("END")
    cluster.first(stopped, token_ids[0])
    for token_id in token_ids[1:]:
        cluster.token(stopped, token_id)
    delta = await first
    while delta.finish_reason is None:
        delta = await anext(deltas)
    assert cluster.dispatcher.num_running == 1, "the other one goes on"
    assert cluster.aborted() == ["decode-0", "prefill-0"]
    await deltas.aclose()


@played()
async def test_several_prompts_and_n_are_numbered_as_openai_does(cluster: Cluster) -> None:
    _, answers = generation(cluster, prompt=["a", "b"], n=2, seed=5)
    task = asyncio.create_task(whole(answers))
    attempt_ids = await prefills(cluster, 4)
    starts = [message for _, message in cluster.pool.of(StartPrefill)]
    assert [start.seeds for start in starts] == [[5, 6], [5, 6]]  # one prefill for the n of a prompt
    for number in (3, 1, 0, 2):
        feed(cluster, attempt_ids[number], f"text {number}", "length")
    body = json.loads(await task)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(i, f"text {i}") for i in range(4)]
    assert body["usage"]["prompt_tokens"] == 2


@played()
async def test_one_failed_sequence_of_several_fails_and_aborts_the_rest(cluster: Cluster) -> None:
    _, answers = generation(cluster, n=3)
    task = asyncio.create_task(whole(answers))
    attempt_ids = await prefills(cluster, 3)
    cluster.failed(PREFILL, attempt_ids[1], InternalError("x"))
    with pytest.raises(InternalError):
        await task
    assert cluster.aborted() == ["decode-0"] * 3 + ["prefill-0"] * 2
    assert outcomes(cluster.metrics.registry) == {"internal_error": 1.0}


@pytest.mark.parametrize("limits", [*itertools.permutations([10.0, 20.0, 50.0])])
@played()
async def test_the_shortest_time_limit_holds(cluster: Cluster, limits: tuple[float, float, float]) -> None:
    server, client, own = limits
    services = replace(cluster.services, request_timeout_s=server)
    made, _ = generation(cluster, timeout=own)
    record = RequestRecord("r", "completion", arrived_at=cluster.dispatcher.clock())
    reader = asyncio.create_task(collect(Generation(services, made.request, record, timeout_s=client).deltas()))
    await prefills(cluster, 1)
    [(_, start)] = cluster.pool.of(StartPrefill)
    assert 8.0 < start.deadline_s <= 10.0
    reader.cancel()
    await turn()


@played()
async def test_the_time_that_a_request_has_waited_counts(cluster: Cluster) -> None:
    """A request may wait for a reader process, or for the first worker, before it is dispatched."""
    services = replace(cluster.services, request_timeout_s=60.0, ttft_slo_s=30.0)
    made, _ = generation(cluster)
    now = 130.0
    cluster.dispatcher.clock = lambda: now
    for waited_s, deadline_s, max_ttft_s in ((0.0, 60.0, 30.0), (20.0, 40.0, 10.0), (50.0, 10.0, -20.0)):
        record = RequestRecord("r", "completion", arrived_at=now - waited_s)
        limits_s = Generation(services, made.request, record)._deadlines()
        assert limits_s == pytest.approx((deadline_s, max_ttft_s))
    late = RequestRecord("r", "completion", arrived_at=now - 100.0)
    assert 0 < Generation(services, made.request, late)._deadlines()[0] < 0.01


@pytest.mark.parametrize(
    ("fields", "is_shown"), [({"echo": True}, True), ({"return_token_ids": True}, True), ({}, False)]
)
@played()
async def test_each_prompt_is_shown_once_if_it_was_asked_for(
    cluster: Cluster, fields: dict[str, Any], is_shown: bool
) -> None:
    made, _ = generation(cluster, prompt=["abc", "de"], n=2, **fields)

    async def shown() -> list[tuple[int, int]]:
        deltas = [delta async for delta in made.deltas()]
        return sorted((each.index, len(each.prompt.token_ids)) for each in deltas if each.prompt is not None)

    task = asyncio.create_task(shown())
    for attempt_id in await prefills(cluster, 4):
        feed(cluster, attempt_id, "xy", "length")
    found = await task
    assert [(index // 2, num_bytes) for index, num_bytes in found] == ([(0, 12), (1, 8)] if is_shown else [])


@pytest.mark.parametrize(("num_top", "length"), [(None, 3000), (0, 1024), (1, 512), (20, 48), (5000, 1)])
@played()
async def test_many_tokens_are_encoded_in_slices_of_which_the_last_one_ends(
    cluster: Cluster, num_top: int | None, length: int
) -> None:
    made, _ = generation(cluster)
    sampling = replace_struct(made.request.base_sampling, logprobs=num_top)
    made.request = replace_struct(made.request, base_sampling=sampling)
    tokens = [SampledToken(number) for number in range(3000)]
    for num_tokens in (1, length - 1, length, length + 1, 2 * length, 3000):
        delta = TokenDelta(tokens[: max(1, num_tokens)], "length")
        slices = list(made._slices(delta))
        assert [token for part, _ in slices for token in part] == delta.tokens
        assert [len(part) for part, _ in slices[:-1]] == [length] * (len(slices) - 1) and len(slices[-1][0]) <= length
        assert [reason for _, reason in slices] == [None] * (len(slices) - 1) + ["length"]


@played()
async def test_tokens_found_in_the_cache_count_once_for_each_prompt(cluster: Cluster) -> None:
    made, answers = generation(cluster, prompt=["abc", "de"], n=2)
    task = asyncio.create_task(whole(answers))
    for number, attempt_id in enumerate(await prefills(cluster, 4)):
        num_cached_tokens = 2 if number < 2 else 1
        cluster.dispatcher.on_message(
            PREFILL, FirstToken(attempt_id, SampledToken(5), "length", 0.1, 0.2, None, num_cached_tokens)
        )
    await task
    assert made.record.num_cached_tokens == 3


@played()
async def test_an_error_before_the_first_event_is_raised_and_after_it_is_the_last_event(cluster: Cluster) -> None:
    body = b'{"prompt": "abc", "max_tokens": 20, "stream": true}'
    request = cluster.reader.read(body, "completion", cluster.worker_table.limits())
    for has_begun in (False, True):
        made = Generation(cluster.services, request, RequestRecord("r", "completion"))
        events = CompletionAnswers(made, "m").events()
        waiting = asyncio.ensure_future(anext(events))
        attempt_id = (await prefills(cluster, 1 + has_begun))[-1]
        if has_begun:
            cluster.first(attempt_id, cluster.text.ids("a")[0])
            cluster.reserved(attempt_id)
            assert json.loads((await waiting).removeprefix(b"data: "))["choices"][0]["text"] == "a"
        cluster.failed(DECODE, attempt_id, InternalError("gone"))
        if has_begun:
            [last] = [event async for event in events]
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "internal_error"
        else:
            with pytest.raises(InternalError):
                await waiting


@played()
async def test_a_disconnect_while_queued_aborts_at_once(cluster: Cluster) -> None:
    gone = asyncio.Event()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    _, answers = generation(cluster)
    task = asyncio.create_task(unless_disconnected(receive, whole(answers)))
    await prefills(cluster, 1)
    gone.set()
    with pytest.raises(ClientDisconnected):
        await task
    assert cluster.aborted() == ["decode-0", "prefill-0"]
    assert outcomes(cluster.metrics.registry) == {"aborted": 1.0}


@played()
async def test_too_many_waiting_are_refused(cluster: Cluster) -> None:
    made, answers = generation(cluster, n=8)
    task = asyncio.create_task(whole(answers))
    attempt_ids = await prefills(cluster, 8)
    with pytest.raises(Overloaded, match="8 requests are waiting"):
        await whole(generation(cluster)[1])
    for attempt_id in attempt_ids:
        feed(cluster, attempt_id, "ab", "length")
    await task
    assert made.record.num_completion_tokens == 16


@played()
async def test_a_first_token_predicted_after_the_deadline_is_refused(cluster: Cluster) -> None:
    pairs = PairChanges(0, [PairStatus(DECODE.worker_id, DECODE.epoch, "ready")])

    def report(num_waiting_tokens: int, speed: float = 1000.0) -> None:
        load = WorkerLoad(prompt_tokens_per_s=speed, waiting_tokens=[(0, num_waiting_tokens)])
        cluster.worker_table.on_status(0, WorkerStatus(PREFILL.worker_id, PREFILL.epoch, PREFILL.role, load, pairs))

    report(100_000)  # 100 s; the server's deadline is 60 s
    with pytest.raises(
        SLOUnreachable, match=r"predicted after 100\.\d+ s, but only (60\.00|59\.\d+) s are left"
    ) as late:
        await whole(generation(cluster)[1])
    assert cluster.pool.sent == [] and not late.value.is_lasting
    report(100_000, speed=0.001)  # late even if nothing else waited, so another attempt is of no use
    with pytest.raises(SLOUnreachable, match=r"although nothing else waits, but it must come within 60\.00 s") as late:
        await whole(generation(cluster)[1])
    assert late.value.is_lasting
    report(50_000)
    task = asyncio.create_task(generation(cluster)[1].whole())
    [attempt_id] = await prefills(cluster, 1)
    feed(cluster, attempt_id, "ab", "length")
    await task
