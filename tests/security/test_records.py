"""The largest records: what they cost the proxy, and that no answer waits for them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.protocol.messages.dispatch import FirstToken, StartPrefill
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, StopConditions, TokenLogprobs
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.records.record import ANSWER_TOKEN_BYTES, MAX_FILE_BYTES, MAX_RECORD_BYTES, decode_record
from tandem.proxy.records.record_store import MAX_PENDING_BYTES, Outcome, RecordStore
from tandem.proxy.records.recording import Recording
from tandem.proxy.text.prompt import Prompt
from tests.support.proxy_cluster import PREFILL, Cluster, play, turn, whole
from tests.unit.proxy.records.test_record import described, recording, route
from tests.unit.proxy.records.test_record_store import path_of
from tests.unit.proxy.records.test_recording import recorded

LARGEST: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": list(range(65_536))},
    "logit_bias": {"logit_bias": {str(number): -99.12345678901 for number in range(1024)}},
    "bad_words": {"bad_words": ["\x01ü" * 128] * 128},
    "grammar": {"structured_outputs": {"grammar": 'start: "a"\n//' + "\x01" * 100_000}},
    "stop_token_ids": {"stop_token_ids": list(range(2**31 - 1024, 2**31))},
}
"""The largest value of each field of which a record has a list or a text."""


def largest(cluster: Cluster, fields: dict[str, Any]) -> GenerationRequest:
    body = json.dumps({"prompt": "abc", "n": 8, "max_tokens": 2, **fields}).encode()
    return cluster.reader.read(body, "completion", cluster.worker_table.limits())


@pytest.mark.parametrize("field", LARGEST)
def test_the_expected_size_of_a_record_bounds_the_largest_value_of_each_field(field: str) -> None:
    async def test(cluster: Cluster) -> None:
        request = largest(cluster, LARGEST[field])
        head = msgspec.structs.replace(recording()._head, bad_words=request.bad_words)
        made = Recording("alice", head, described)
        stop = StopConditions(2, frozenset(request.stop_token_ids))
        made.on_prompt(Prompt(pack_token_ids([1]), 1), stop, request.samplings())
        content = b"".join(made.lines("stop"))
        assert len(content) <= made.num_bytes < MAX_RECORD_BYTES and decode_record(content)

    play(test)


def answers(number: int) -> Recording:
    """A recording of `number` tokens, of which each has as many digits as a token may have."""
    made = recording()
    made.on_prompt(Prompt(pack_token_ids([2**31 - 1] * 1000), 1000), StopConditions(number), [recording()._sampling])
    token = SampledToken(2**31 - 1, TokenLogprobs(-12.345678329467773, 1, []))
    for first in range(0, number, 4096):
        made.on_tokens(0, [token] * min(4096, number - first), None, 1, route())
    return made


def test_the_largest_record_is_whole_and_the_next_larger_one_is_none(tmp_path: Path) -> None:
    outcomes: list[Outcome] = []
    most = (MAX_RECORD_BYTES - 100_000) // ANSWER_TOKEN_BYTES

    async def test() -> None:
        store = RecordStore(tmp_path, on_outcome=outcomes.append)
        store.put(answers(most), "length")
        file = await path_of(store, "alice", "r-1")
        assert file.stat().st_size <= MAX_FILE_BYTES
        assert len(decode_record(file.read_bytes()).sequences[0].token_ids) == most
        store.put(answers(most + 10_000), "length")
        await store.close()

    asyncio.run(test())
    assert outcomes == ["written", "too_large"]


def test_records_are_encoded_and_written_on_a_thread_and_wait_within_their_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, threads, may_write = Recording.lines, set(), threading.Event()

    def noted(self: Recording, outcome: str) -> Iterator[bytes]:
        assert may_write.wait(60)
        threads.add(threading.current_thread())
        yield from lines(self, outcome)

    monkeypatch.setattr(Recording, "lines", noted)
    outcomes: list[Outcome] = []

    async def test() -> None:
        store = RecordStore(tmp_path, on_outcome=outcomes.append)
        one = answers(100_000)
        for _ in range(100):
            store.put(one, "length")
        assert store._pending_bytes.num_held <= MAX_PENDING_BYTES * 0.75
        may_write.set()
        await store.close()

    asyncio.run(test())
    assert threading.current_thread() not in threads and len(threads) == 1
    assert set(outcomes) == {"written", "slow_disk"} and len(outcomes) == 100


def test_an_answer_is_complete_while_its_record_waits_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = threading.Event()
    monkeypatch.setattr(RecordStore, "_write_now", lambda *_: disk.wait(60))

    async def test(cluster: Cluster) -> None:
        store = RecordStore(tmp_path)
        for number in range(3):
            reader = asyncio.create_task(whole(recorded(cluster, store, max_tokens=1)))
            await turn()
            attempt_id = cluster.pool.of(StartPrefill)[number][1].attempt_ids[0]
            cluster.dispatcher.on_message(
                PREFILL, FirstToken(attempt_id, SampledToken(cluster.text.ids("a")[0]), "length", 0.1, 0.2)
            )
            assert json.loads(await reader)["choices"][0]["text"] == "a"
        assert not disk.is_set()
        disk.set()
        await store.close()

    play(test)
