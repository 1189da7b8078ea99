"""Brings streams of a cluster with vLLM's workers to a phase, and holds them there until a test goes on.

The engine of one worker is held in a step (`faulty_model`), so a phase lasts as long as a test needs, on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tandem.protocol.messages.membership import WorkerInfo
from tests.faults.streams import Stream
from tests.integration.vllm.dozen_streams import bodies
from tests.integration.vllm.faulty_model import Faults
from tests.support.cluster import Cluster

PHASES = ("computing", "shipping", "shipped", "decoding")
"""Of the first stream. The others wait for prefill in the first two, and are anywhere in the last two."""
CHUNK = 64
"""Tokens of a step (`--max-num-batched-tokens`)."""
NUMBERS = (11, 10, 8, 5)
"""The streams, as numbers of the dozen, in the order in which they begin. The first one has the longest sequence."""
_PROMPT = 1500
"""Tokens of the first stream's prompt; no other sequence reaches that length."""
_SHIPPING = 600
"""Position at which prefill is held: some chunks are computed and shipped by then."""
NUM_DECODED = 80
"""Tokens that the first stream has while it is held in "decoding"."""
RESUMED_CHUNK = _PROMPT + 40
"""Position in the second chunk of the resumed stream, whose prompt prefill has cached, but not the answer."""


@dataclass(frozen=True)
class Held:
    """streams: the first one is in the phase. decode: worker that decodes it, or is going to. other: the other one."""

    streams: list[Stream]
    prefill: WorkerInfo
    decode: WorkerInfo
    other: WorkerInfo


class HeldPhases:
    """Of a cluster with one prefill and two decode workers, of which nothing else is asked meanwhile."""

    def __init__(self, cluster: Cluster, faults: Faults) -> None:
        self._cluster = cluster
        self._faults = faults
        self._pids: list[int] = []

    @contextmanager
    def held(self, phase: str) -> Iterator[Held]:
        """Asserts that the phase was reached. Its end releases what is still held."""
        [prefill], decodes = self._workers("prefill"), self._workers("decode")
        self._pids = [each.pid for each in (prefill, *decodes)]
        num_bytes = self._cluster.worker(prefill.worker_id).load.num_transferred_bytes
        try:
            match phase:
                case "computing":
                    self.hold(prefill, 0)
                case "shipping":
                    self.hold(prefill, _SHIPPING)
                case "shipped":
                    self._hold_all(decodes, _PROMPT)
                case "decoding":
                    self._hold_all(decodes, _PROMPT + NUM_DECODED - 1)
            streams, decode = self._begin()
            [other] = [each for each in decodes if each != decode]
            if phase in ("computing", "shipping"):
                self.wait_until_held(prefill)
                self._cluster.wait_for(lambda: self._all_are_with(prefill))
                if phase == "shipping":
                    self._cluster.wait_for(lambda: self._has_shipped(prefill, num_bytes))
                assert not any(each.token_ids for each in streams)
            else:
                num_tokens = 1 if phase == "shipped" else NUM_DECODED
                self.wait_until_held(decode)
                self._cluster.wait_for(lambda: len(streams[0].token_ids) >= num_tokens)
                assert len(streams[0].token_ids) == num_tokens
            yield Held(streams, prefill, decode, other)
        finally:
            self.release()

    def release(self) -> None:
        for pid in self._pids:
            self._faults.release(pid)

    def hold(self, worker: WorkerInfo, position: int) -> None:
        self._faults.hold(worker.pid, position)

    def wait_until_held(self, worker: WorkerInfo) -> None:
        self._cluster.wait_for(lambda: self._faults.is_held(worker.pid))

    def _hold_all(self, workers: list[WorkerInfo], position: int) -> None:
        for each in workers:
            self.hold(each, position)

    def _workers(self, role: str) -> list[WorkerInfo]:
        return [each.worker for each in self._cluster.status().workers if each.worker.role == role]

    def _begin(self) -> tuple[list[Stream], WorkerInfo]:
        """Begins each stream when the one before it is with its workers. Returns the first one's decode worker too."""
        streams, first, dozen = [], "", bodies()
        for number in NUMBERS:
            streams.append(Stream(self._cluster, {**dozen[number], "cache_salt": str(time.monotonic())}))
            self._cluster.wait_for(lambda: bool(self._dispatched(streams[-1])))
            first = first or self._dispatched(streams[0])[0]["decode"]
        return streams, self._cluster.worker(first).worker

    def _dispatched(self, stream: Stream) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self._cluster.admin_url}/debug/requests/{stream.request_id}", timeout=10)
        events = answer.json()["events"] if answer.status_code == 200 else []
        return [each for each in events if each["event"] == "dispatched"]

    def _all_are_with(self, prefill: WorkerInfo) -> bool:
        load = self._cluster.worker(prefill.worker_id).load
        return load.num_waiting + load.num_running >= len(NUMBERS)

    def _has_shipped(self, prefill: WorkerInfo, num_bytes: float) -> bool:
        """Whether more was shipped than that."""
        return self._cluster.worker(prefill.worker_id).load.num_transferred_bytes > num_bytes
