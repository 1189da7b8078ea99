"""Batches of a simulated cluster: the real runner of each proxy, over real files in a folder of the run.

A batch outlives proxies. So its lines are counted here, beside the runners: where each runs, how many proxies have died
while it ran, and what it was answered.
"""

from __future__ import annotations

import asyncio
import io
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tandem.proxy.admission.fair_slots import FairSlots
from tandem.proxy.answers.errors import error_body, status_of
from tandem.proxy.batches.batch import FINAL, BatchObject, BatchRequest, Endpoint, LineResult
from tandem.proxy.batches.batch_lines import LOWEST_PRIORITY
from tandem.proxy.batches.batch_run import MAX_CONCURRENT, MAX_CONCURRENT_PER_CLIENT, MAX_DEATHS
from tandem.proxy.batches.batch_store import BatchFiles, BatchStore, Owner
from tandem.proxy.batches.runner import BatchRunner
from tandem.runtime.errors import TandemError
from tandem.runtime.tasks import keep_running
from tandem.runtime.threads import Threads
from tandem.simulator.cluster import new_folder
from tandem.simulator.processes import SimulatedProxy
from tandem.simulator.scenario import MODEL, Request

ENDPOINT: Endpoint = "/v1/completions"
RESTART_S = 5.0
THREAD_S = 0.002
"""In which a thread does what blocks, at most."""

Report = Callable[[str, str], None]
Serve = Callable[[Request, SimulatedProxy], Awaitable[tuple[str, TandemError | None]]]
"""Answers a request. Returns what it came to, and the error that it got."""
T = TypeVar("T")
_RESULTS = msgspec.json.Decoder(LineResult)


class _Body(msgspec.Struct):
    """A line's body, as its proxy sends it to itself."""

    number: int
    """Of the request."""
    priority: int
    model: str = MODEL


@dataclass
class _TriedLine:
    """One request of a batch."""

    request: Request
    client: str
    store: BatchStore
    batch_id: str
    runs_on: str = ""
    """Id of the proxy."""
    num_deaths: int = 0
    """Proxies that were killed while it ran."""
    answers: list[str] = field(default_factory=list)

    @property
    def custom_id(self) -> str:
        return f"request {self.request.number}"


class Batches:
    """All batches of one run. report(rule, details): called when a rule is broken. serve: answers a line.

    on_end(request, outcome): called for each line when its batch has ended.
    """

    def __init__(self, report: Report, serve: Serve, on_end: Callable[[Request, str], None]) -> None:
        self._report = report
        self._serve = serve
        self._on_end = on_end
        self._folder = new_folder()
        self._lines: dict[int, _TriedLine] = {}  # by number of the request
        self._open: dict[str, list[_TriedLine]] = {}  # by id of the batch
        self._num_deaths = 0  # of proxies
        self._runners: dict[str, _Runner] = {}  # by id of the proxy

    def start(self, proxy: SimulatedProxy) -> asyncio.Task[None]:
        """Starts the batches of a proxy, which ends them before it ends."""
        delay_s = proxy.timeline.rng.uniform
        runner = _Runner(Path(self._folder.name), self._report, lambda: delay_s(0.0, THREAD_S))
        self._runners[proxy.proxy_id] = runner
        return keep_running(partial(runner.run, partial(self._answer, proxy)), "running batches", RESTART_S)

    def submit(self, client: str, requests: Sequence[Request], proxy: SimulatedProxy) -> None:
        """A client sends a file and makes a batch of it."""
        runner = self._runners[proxy.proxy_id]
        content, store = b"\n".join(map(_line_of, requests)), runner.store(client)
        stored = store.files.add(io.BytesIO(content), len(content), "lines.jsonl", "batch")
        wanted = BatchRequest(input_file_id=stored.id, endpoint=ENDPOINT, completion_window="24h")
        batch = store.create(wanted, Owner("", client))
        self._open[batch.id] = [_TriedLine(request, client, store, batch.id) for request in requests]
        self._lines.update((line.request.number, line) for line in self._open[batch.id])
        runner.wake()

    def on_proxy_end(self, proxy_id: str) -> None:
        if (runner := self._runners.pop(proxy_id, None)) is None:
            return
        runner.release_locks()
        self._num_deaths += 1
        for line in self._lines.values():
            if line.runs_on == proxy_id:
                line.runs_on, line.num_deaths = "", line.num_deaths + 1

    def check(self) -> None:
        """Looks for batches that have ended, and at their results."""
        for batch_id, lines in list(self._open.items()):
            batch = lines[0].store.get(batch_id)
            if batch.status in FINAL:
                del self._open[batch_id]
                self._check_results(batch, lines)

    def close(self) -> None:
        for runner in self._runners.values():
            runner.release_locks()
        self._folder.cleanup()

    # ---- a line

    async def _answer(self, proxy: SimulatedProxy, scope: Any, receive: Any, send: Any) -> None:
        """The application of a proxy, which runs the lines."""
        body = msgspec.json.decode((await receive())["body"], type=_Body)
        line = self._lines[body.number]
        self._check_begin(line, body, proxy)
        line.runs_on = proxy.proxy_id
        try:
            outcome, error = await self._serve(line.request, proxy)
        finally:
            if not proxy.loop.is_dead:
                line.runs_on = ""
        line.answers.append(outcome)
        content = msgspec.json.encode(body.number) if error is None else error_body(error)
        await send({"type": "http.response.start", "status": 200 if error is None else status_of(error), "headers": []})
        await send({"type": "http.response.body", "body": content})

    def _check_begin(self, line: _TriedLine, body: _Body, proxy: SimulatedProxy) -> None:
        details = f"{proxy.name}: {line.custom_id}"
        beside = [each for each in self._lines.values() if each.runs_on == proxy.proxy_id]
        if body.priority != LOWEST_PRIORITY:
            self._report("a line of a batch runs at another priority than the lowest", f"{details}: {body.priority}")
        if line.runs_on:
            self._report("a line of a batch runs twice at a time", f"{details}, and on {line.runs_on}")
        if any(each.custom_id == line.custom_id for each in _results_so_far(line)):
            self._report("a line of a batch that has a result is run again", details)
        if line.num_deaths >= MAX_DEATHS:
            self._report("a line of a batch is run again after too many deaths", f"{details}: {line.num_deaths}")
        if beside and (line.num_deaths or any(each.num_deaths for each in beside)):
            self._report("a line of a batch that may end its proxy runs beside others", f"{details}, {len(beside)} run")
        held = Counter(each.client for each in (line, *beside))
        if held.total() > MAX_CONCURRENT or held[line.client] > MAX_CONCURRENT_PER_CLIENT:
            self._report("more lines of batches run than may", f"{details}: {dict(held)}")

    # ---- the end of a batch

    def _check_results(self, batch: BatchObject, lines: list[_TriedLine]) -> None:
        results: dict[str, LineResult] = {}
        num_results = 0
        for file_id in (batch.output_file_id, batch.error_file_id):
            found = _decoded(lines[0].store.files.path(file_id)) if file_id is not None else []
            results.update((each.custom_id, each) for each in found)
            num_results += len(found)
        if batch.status != "completed" or results.keys() != {line.custom_id for line in lines}:
            self._report("a batch ends without all results", f"{batch.status}: {sorted(results)}")
            return
        num_right = sum(each.is_success for each in results.values())
        counts = batch.request_counts
        if num_results > len(lines) or (counts.completed, counts.failed) != (num_right, len(lines) - num_right):
            self._report(
                "a batch counts other results than it has", f"{counts}: {num_results}, {num_right} of them right"
            )
        for line in lines:
            self._on_end(line.request, self._outcome(line, results[line.custom_id]))

    def _outcome(self, line: _TriedLine, result: LineResult) -> str:
        if result.response is None:
            code = result.error.code if result.error is not None else ""
            if code != "server_ended" or self._num_deaths < MAX_DEATHS:
                self._report("a line of a batch was not run", f"{line.custom_id}: {code}")
            return code
        outcome = line.answers[-1] if line.answers else "nothing"
        if result.response.status_code in (429, 503):
            self._report("a line of a batch that was refused is not tried again", f"{line.custom_id}: {outcome}")
        if result.is_success != (outcome == "finished"):
            self._report("a line of a batch has another result", f"{line.custom_id}: {outcome}, {result.response}")
        elif result.is_success and msgspec.json.decode(result.response.body) != line.request.number:
            self._report("a line of a batch has the answer to another", f"{line.custom_id}: {result.response}")
        return outcome


def _line_of(request: Request) -> bytes:
    """Returns a line of a batch's input, whose priority does not count."""
    body = _Body(request.number, request.number % 3)
    line = {"custom_id": f"request {request.number}", "method": "POST", "url": ENDPOINT, "body": body}
    return msgspec.json.encode(line)


def _results_so_far(line: _TriedLine) -> list[LineResult]:
    files = (line.store._folder / f"{line.batch_id}{kind}" for kind in (".output", ".error"))
    return [result for file in files if file.exists() for result in _decoded(file)]


def _decoded(file: Path) -> list[LineResult]:
    return _RESULTS.decode_lines(file.read_bytes())


class _Threads(Threads):
    """Does the work on the loop, so that the seed decides when."""

    def __init__(self, delay_s: Callable[[], float]) -> None:
        self._delay_s = delay_s

    async def run(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(self._delay_s())
        return work()

    def close(self) -> None:
        pass


class _Runner(BatchRunner):
    """The runner of one proxy. Its locks end with the process, as the kernel closes its descriptors."""

    def __init__(self, folder: Path, report: Report, delay_s: Callable[[], float]) -> None:
        super().__init__(folder, None, new_threads=lambda name, num_threads: _Threads(delay_s))
        self._slots = CheckedSlots(report)
        self._locked: list[BatchFiles] = []

    def _hold(self) -> list[tuple[Path, BatchFiles]]:
        found = super()._hold()
        self._locked += [held for _, held in found]
        return found

    def _on_end(self, folder: Path, held: BatchFiles, task: asyncio.Task[None]) -> None:
        super()._on_end(folder, held, task)
        try:
            os.fstat(held._lock)
        except OSError:
            self._locked.remove(held)

    def release_locks(self) -> None:
        for held in self._locked:
            held.close()
        self._locked.clear()


class CheckedSlots(FairSlots):
    """Checks whose turn it is: that of a client that holds fewer slots, or as few and was not served since it waits."""

    def __init__(
        self, report: Report, num_slots: int = MAX_CONCURRENT, max_per_client: int = MAX_CONCURRENT_PER_CLIENT
    ) -> None:
        super().__init__(num_slots, max_per_client)
        self._report = report
        self._num_given = 0
        self._given_at: dict[str, int] = {}  # the number of its last slot, by client
        self._waits_since: dict[str, int] = {}
        # (client, both of its numbers before, its number since) of slots whose callers do not run yet
        self._given: dict[asyncio.Future[None], tuple[str, tuple[int, int], int]] = {}

    async def acquire(self, client: str) -> None:
        if not self._waits(client):
            self._waits_since[client] = self._num_given
        await super().acquire(client)

    def _waits(self, client: str) -> bool:
        return client in self._waiting and any(not turn.done() for turn in self._waiting[client].turns)

    def _give(self, client: str, turn: asyncio.Future[None]) -> None:
        if turn is not self._alone:  # which is in no order with the others
            self._check_turn(client)
            before = self._given_at.get(client, -1), self._waits_since[client]
            self._num_given += 1
            self._given = {each: given for each, given in self._given.items() if each in self._granted}
            self._given[turn] = client, before, self._num_given
            self._given_at[client] = self._waits_since[client] = self._num_given
        super()._give(client, turn)

    def _take_back(self, turn: asyncio.Future[None]) -> None:
        super()._take_back(turn)
        client, before, number = self._given.pop(turn)
        for each, (other, later_before, later) in self._given.items():
            if other == client and later_before[0] == number:
                self._given[each] = client, before, later
                return
        if self._given_at[client] == number:
            self._given_at[client], self._waits_since[client] = before

    def _check_turn(self, client: str) -> None:
        for other in self._waiting:
            if other == client or not self._waits(other) or self._held[other] >= self._max_per_client:
                continue
            was_served = self._given_at.get(client, -1) > self._waits_since[other]
            if (self._held[other], not was_served) < (self._held[client], True):
                self._report("a client is passed by another", f"{other} by {client}: {dict(self._held)}")
