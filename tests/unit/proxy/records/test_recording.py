"""What is noted of a request: every token once, over migrations, with the workers that computed it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.protocol.messages.dispatch import FirstToken, NewToken, StartPrefill, TokenBatch
from tandem.protocol.messages.membership import PROTOCOL_VERSION, RegisterWorker, WorkerInfo
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import FinishReason, SampledToken, StopConditions, TokenLogprobs
from tandem.proxy.answers.completions import CompletionAnswers
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.records import recording as recording_module
from tandem.proxy.records.record import Record, RecordHead, decode_record
from tandem.proxy.records.record_store import RecordStore
from tandem.proxy.records.recording import Recording, described
from tandem.proxy.text.prompt import Prompt
from tandem.telemetry.request_log import RequestRecord
from tests.support.proxy_cluster import DECODE, PREFILL, Cluster, play, played, turn, whole
from tests.unit.proxy.records.test_record import SAMPLING, recording, route, sampled

OTHER_DECODE = WorkerInfo("decode-1", "d2", "decode", "ipc://d2", 4)


class Kept(RecordStore):
    """Keeps the recordings in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def put(self, recording: Recording, outcome: str) -> None:
        assert not recording.is_empty
        self.records.append(decode_record(b"".join(recording.lines(outcome))))


def recorded(cluster: Cluster, store: RecordStore | None, **fields: Any) -> CompletionAnswers:
    body = json.dumps({"prompt": "abc", "max_tokens": 20, **fields}).encode()
    request = cluster.reader.read(body, "completion", cluster.worker_table.limits())
    head = RecordHead(request_id="r", api="completion", created=1, model="m", model_id="m")
    made = Recording("me", head, lambda worker: described(cluster.worker_table, worker)) if store is not None else None
    services = replace(cluster.services, records=store)
    return CompletionAnswers(Generation(services, request, RequestRecord("r", "completion"), recording=made), "m")


def first(cluster: Cluster, attempt_id: str, token: SampledToken, worker: WorkerInfo = PREFILL) -> None:
    cluster.dispatcher.on_message(worker, FirstToken(attempt_id, token, None, 0.1, 0.2))


def later(
    cluster: Cluster, attempt_id: str, token: SampledToken, worker: WorkerInfo, end: FinishReason | None = None
) -> None:
    cluster.dispatcher.on_message(worker, TokenBatch([NewToken(attempt_id, token, end)]))


def test_a_migrated_answer_has_every_token_once_and_who_computed_it() -> None:
    store = Kept()

    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(whole(recorded(cluster, store, seed=7)))
        await turn()
        [(_, start)] = cluster.pool.of(StartPrefill)
        assert start.sampling.logprobs == 0
        [old] = start.attempt_ids
        first(cluster, old, sampled(97, -0.25))
        later(cluster, old, sampled(98, -0.5), DECODE)
        await turn()
        cluster.join(OTHER_DECODE)
        cluster.lose(DECODE)
        await turn()
        again = cluster.pool.of(StartPrefill)[1][1]
        [new] = again.attempt_ids
        assert again.num_generated == 2
        later(cluster, old, sampled(99, -9.0), DECODE)  # of the lost attempt
        first(cluster, new, sampled(99, -0.75))
        later(cluster, new, sampled(100, -1.0), OTHER_DECODE, "length")
        answer = json.loads(await reader)
        assert answer["choices"][0]["logprobs"] is None, "the client has not asked for them"

    play(test, worker_wait_s=60)
    [record] = store.records
    [sequence] = record.sequences
    assert (sequence.seed, record.head.outcome, sequence.finish_reason) == (7, "length", "length")
    assert sequence.token_ids == [97, 98, 99, 100] and sequence.logprobs == [-0.25, -0.5, -0.75, -1.0]
    by = [(start, record.head.workers[number].worker_id) for start, number in sequence.computed_by]
    assert by == [(0, "prefill-0"), (1, "decode-0"), (2, "prefill-0"), (3, "decode-1")]


def test_the_numerics_of_a_worker_that_was_lost_are_known() -> None:
    store, numerics = Kept(), Numerics(engine="tandem 1", dtype="bfloat16")

    async def test(cluster: Cluster) -> None:
        gone = WorkerInfo("decode-9", "d9", "decode", "ipc://d9", 9)
        cluster.worker_table.on_register(
            0, RegisterWorker(PROTOCOL_VERSION, gone, 100, 500, "m", 64, numerics=numerics)
        )
        cluster.lose(gone)
        assert cluster.worker_table.numerics_of("d9") == numerics
        found = described(cluster.worker_table, gone)
        assert found.numerics_digest == numerics.digest and found.numerics["dtype"] == "bfloat16"
        assert described(cluster.worker_table, DECODE).numerics == {}, "it has not said"

    play(test)
    assert not store.records


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_client_asks_for_is_what_workers_report(stream: bool) -> None:
    store = Kept()

    async def test(cluster: Cluster) -> None:
        answers = recorded(cluster, store, logprobs=3, stream=stream, n=2)
        reader = asyncio.create_task(_events(answers) if stream else whole(answers))
        await turn()
        [(_, start)] = cluster.pool.of(StartPrefill)
        assert start.sampling.logprobs == 3
        for number, attempt_id in enumerate(start.attempt_ids):
            top = TokenLogprobs(-0.5, 1, [(97, -0.5), (98, -1.0), (99, -2.0)])
            first(cluster, attempt_id, SampledToken(97 + number, top))
            later(cluster, attempt_id, SampledToken(100, top), DECODE, "length")
        assert b"top_logprobs" in await reader

    play(test)
    [record] = store.records
    assert [each.token_ids for each in record.sequences] == [[97, 100], [98, 100]]
    assert record.sequences[1].seed == record.sequences[0].seed + 1


async def _events(answers: CompletionAnswers) -> bytes:
    return b"".join([event async for event in answers.events()])


def test_an_answer_that_its_client_left_is_recorded_as_far_as_it_came() -> None:
    store = Kept()

    async def test(cluster: Cluster) -> None:
        reader = asyncio.create_task(_events(recorded(cluster, store, stream=True)))
        await turn()
        attempt_id = cluster.started()
        first(cluster, attempt_id, sampled(97, -0.25))
        later(cluster, attempt_id, sampled(98, -0.5), DECODE)
        await turn()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)

    play(test)
    [record] = store.records
    assert record.head.outcome == "aborted" and record.sequences[0].finish_reason is None
    assert record.sequences[0].token_ids == [97, 98]


def test_tokens_after_a_stop_string_are_not_part_of_the_answer() -> None:
    store = Kept()

    async def test(cluster: Cluster) -> None:
        ids = cluster.text.ids("abcd")
        reader = asyncio.create_task(whole(recorded(cluster, store, stop=["bc"])))
        await turn()
        attempt_id = cluster.started()
        first(cluster, attempt_id, sampled(ids[0], -1.0))
        for token_id in ids[1:]:
            later(cluster, attempt_id, sampled(token_id, -2.0), DECODE)
        await reader
        assert store.records[0].sequences[0].token_ids == ids[:3]

    play(test)
    assert store.records[0].sequences[0].finish_reason == "stop"


@played()
async def test_a_request_without_a_recording_asks_for_no_log_probabilities(cluster: Cluster) -> None:
    reader = asyncio.create_task(whole(recorded(cluster, None)))
    await turn()
    [(_, start)] = cluster.pool.of(StartPrefill)
    assert start.sampling.logprobs is None
    cluster.first(start.attempt_ids[0], 97, "length")
    await reader


def test_a_record_that_would_be_too_large_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recording_module, "MAX_RECORD_BYTES", 10_000)
    made = recording()
    small = msgspec.structs.replace(SAMPLING, grammar=None)
    made.on_prompt(Prompt(pack_token_ids([1]), 1), StopConditions(10_000), [small])
    for number in range(400):
        made.on_tokens(0, [sampled(number, -1.0)], None, 1, route())
    assert made.is_too_large
    noted = made._sequences[0].token_ids
    assert len(noted) <= 10_000 // 32, "it holds no more than a record may have"


@pytest.mark.parametrize(
    "sampling",
    [
        msgspec.structs.replace(SAMPLING, grammar="x" * 50_000),
        msgspec.structs.replace(SAMPLING, allowed_token_ids=tuple(range(50_000))),
        msgspec.structs.replace(SAMPLING, logit_bias=tuple((number, 0.5) for number in range(50_000))),
    ],
)
def test_the_expected_size_counts_large_settings(sampling: Any) -> None:
    made = recording()
    made.on_prompt(Prompt(pack_token_ids([1]), 1), StopConditions(1), [sampling])
    assert made.num_bytes >= sum(map(len, made.lines("stop")))
