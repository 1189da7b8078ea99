"""Brings a request to a phase of its life and holds it there by freezing the processes that would continue it.

Holds are shorter than the silence after which a worker is lost, and are verified. If the request has gone on meanwhile,
or a hold took too long, `Missed` is raised and the caller tries another request.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.deploy.processes.runtime_dir import runtime_dir
from tandem.protocol.messages.membership import StatusReport, WorkerLoad
from tests.faults.streams import Stream
from tests.support.cluster import Cluster
from tests.support.waiting import comes_true

PHASES = ("queued", "prefilling", "shipping", "first token", "decoding", "finishing")
LOCAL_PREFILL = "local prefill"
"""Phase of prompts that a decode worker computes itself."""
PREFILLS, DECODES, ELASTIC = (tuple(f"{name}-{i}" for i in range(2)) for name in ("prefill", "decode", "worker"))
"""Names of the workers of each role."""
HOLD_LIMIT_S, PROXY_HOLD_LIMIT_S = 2.0, 4.0
"""Below `WORKER_SILENCE_S`, 3.5 s, and the 5 s after which workers give up a proxy."""
NUM_TOKENS = 200
"""Tokens that a request of the matrix generates."""


class Missed(Exception):
    """The request left the phase before it could be held."""


class Frozen:
    """Processes stopped by SIGSTOP."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def freeze(self, *pids: int) -> None:
        """Returns once the processes have stopped."""
        for pid in pids:
            self._since.setdefault(pid, time.monotonic())
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            if not comes_true(lambda pid=pid: is_stopped(pid), 5):
                raise AssertionError(f"process {pid} does not stop")

    def thaw(self, *but: int) -> None:
        for pid in [pid for pid in self._since if pid not in but]:
            del self._since[pid]
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue

    @property
    def longest_s(self) -> float:
        return max((time.monotonic() - since for since in self._since.values()), default=0.0)


def is_stopped(pid: int) -> bool:
    """Returns whether all threads of the process have stopped."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return set(states) == {"T"}


@dataclass
class Held:
    """A request held in a phase. prefill, decode: workers of its first attempt; prefill may be ""."""

    stream: Stream
    prefill: str
    decode: str
    frozen: Frozen


class Phases:
    """Holds requests of a cluster with two proxies and little other load.

    prefills, decodes: workers that compute prompts, and that decode; the same ones if they are elastic.
    """

    def __init__(self, cluster: Cluster, prefills: Sequence[str] = PREFILLS, decodes: Sequence[str] = DECODES) -> None:
        self.cluster = cluster
        self.prefills, self.decodes = prefills, decodes
        self._folder = runtime_dir(cluster.port)

    def pid(self, name: str) -> int:
        """Returns the process id of a child of the launcher: a name in `tandem status`, or media-cache."""
        return int((self._folder / f"{name}.pid").read_text())

    def names(self) -> list[str]:
        return sorted(path.stem for path in self._folder.glob("*.pid") if path.stem != "launcher")

    def name_of(self, pid: int) -> str:
        return next(name for name in self.names() if self.pid(name) == pid)

    async def ask(self, proxy: str) -> StatusReport:
        """Asks this proxy only, as others may be frozen."""
        return (await ClusterClient(self.cluster.port, [f"ipc://{self._folder}/{proxy}.sock"]).status())[0]

    def load(self, worker: str, proxy: str = "proxy-0") -> WorkerLoad:
        report = asyncio.run(self.ask(proxy))
        found = [each.load for each in report.workers if each.worker.worker_id == worker]
        if not found:
            raise Missed(f"{worker} is not in the cluster")
        return found[0]

    def events(self, stream: Stream) -> list[dict[str, Any]]:
        """Returns the request's timeline; empty if there is none yet."""
        answer = httpx.get(f"{self.cluster.admin_url}/debug/requests/{stream.request_id}", timeout=10)
        return list(answer.json()["events"]) if answer.status_code == 200 else []

    def happened(self, stream: Stream, event: str) -> int:
        """Returns how often the event happened."""
        return sum(each["event"] == event for each in self.events(stream))

    @contextmanager
    def held(self, body: dict[str, Any], phase: str, not_on: int = 0) -> Iterator[Held]:
        """Holds a request for the duration of the context. Raises Missed."""
        hold: Callable[[Frozen, dict[str, Any], int], Held] = getattr(self, "_" + phase.replace(" ", "_"))
        frozen = Frozen()
        try:
            held = hold(frozen, body, not_on)
            if held.stream.has_ended:
                raise Missed(f"it has ended: {held.stream.outcome}")
            if frozen.longest_s > (PROXY_HOLD_LIMIT_S if phase == "finishing" else HOLD_LIMIT_S):
                raise Missed(f"the hold took {frozen.longest_s:.1f} s")
            yield held
        finally:
            frozen.thaw()

    # ---- the phases

    def _queued(self, frozen: Frozen, body: dict[str, Any], not_on: int) -> Held:
        """Dispatched, and not computed yet."""
        frozen.freeze(*map(self.pid, self.prefills))
        return self._dispatched(frozen, body, not_on)

    def _prefilling(self, frozen: Frozen, body: dict[str, Any], not_on: int) -> Held:
        """Chunks are computed, but nothing is shipped, because decode is frozen."""
        frozen.freeze(*map(self.pid, self.decodes))
        held = self._dispatched(frozen, body, not_on)
        self._reach(lambda: self.load(held.prefill).num_running > 0)
        frozen.freeze(self.pid(held.prefill))
        self._must_not("first token computed", held)
        return held

    def _shipping(self, frozen: Frozen, body: dict[str, Any], not_on: int) -> Held:
        """Some blocks have arrived on decode."""
        held = self._shipping_begun(frozen, body, not_on)
        frozen.freeze(self.pid(held.prefill))
        self._must_not("first token computed", held)
        return held

    def _first_token(self, frozen: Frozen, body: dict[str, Any], not_on: int) -> Held:
        """The client has the first token, and decode has not begun."""
        held = self._shipping_begun(frozen, body, not_on)
        frozen.freeze(self.pid(held.decode))
        self._reach(lambda: bool(held.stream.token_ids))
        if len(held.stream.token_ids) != 1:
            raise Missed(f"it had {len(held.stream.token_ids)} tokens")
        return held

    def _decoding(self, frozen: Frozen, body: dict[str, Any], not_on: int) -> Held:
        held = self._dispatched(frozen, body, not_on)
        self._reach(lambda: len(held.stream.token_ids) >= 10, 60)
        frozen.freeze(self.pid(held.decode))
        return held

    def _finishing(self, frozen: Frozen, body: dict[str, Any], not_on: int) -> Held:
        """Decode has finished; the last tokens are in flight to a frozen proxy."""
        held = self._dispatched(frozen, body, not_on)
        proxy = self.name_of(held.stream.proxy_pid)
        other = "proxy-1" if proxy == "proxy-0" else "proxy-0"
        before = self.load(held.decode, other).num_finished
        self._reach(lambda: len(held.stream.token_ids) >= NUM_TOKENS - 50, 60)
        frozen.freeze(held.stream.proxy_pid)
        if len(held.stream.token_ids) == NUM_TOKENS:
            raise Missed("it had all its tokens")
        self._reach(lambda: self.load(held.decode, other).num_finished > before)
        return held

    def _local_prefill(self, frozen: Frozen, body: dict[str, Any], not_on: int) -> Held:
        """The worker that will decode has computed some chunks of the prompt."""
        held = self._dispatched(frozen, body, not_on)
        if held.prefill != held.decode:
            raise Missed("another worker computes it")
        self._reach(lambda: 0 < self.load(held.decode).num_waiting_tokens < len(body["prompt"]))
        frozen.freeze(self.pid(held.decode))
        self._must_not("first token computed", held)
        return held

    def _dispatched(self, frozen: Frozen, body: dict[str, Any], not_on: int) -> Held:
        stream = Stream(self.cluster, body, not_on)
        found: list[dict[str, Any]] = []

        def is_dispatched() -> bool:
            found[:] = [each for each in self.events(stream) if each["event"] == "dispatched"]
            return bool(found) or stream.has_ended

        self._reach(is_dispatched, 30)
        if not found:
            raise Missed(f"it was not dispatched: {stream.outcome}")
        return Held(stream, found[0].get("prefill", ""), found[0]["decode"], frozen)

    def _shipping_begun(self, frozen: Frozen, body: dict[str, Any], not_on: int) -> Held:
        before = {name: self.load(name).num_transferred_bytes for name in self.prefills}
        held = self._dispatched(frozen, body, not_on)
        if held.prefill == held.decode:
            raise Missed("one worker does both phases")
        self._reach(lambda: self.load(held.prefill).num_transferred_bytes > before[held.prefill])
        return held

    def _must_not(self, event: str, held: Held) -> None:
        if self.happened(held.stream, event):
            raise Missed(f"it was too late: {event}")
        if self.happened(held.stream, "dispatched") != 1:
            raise Missed("it has moved already")

    @staticmethod
    def _reach(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        if not comes_true(condition, timeout_s):
            raise Missed(f"it did not come so far within {timeout_s:.0f} s")
