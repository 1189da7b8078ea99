"""The fault matrix: strikes a process while a request is in a given phase, and checks the outcome.

`python -m tests.faults.fault_matrix` goes through all of it, tests/faults/test_matrix.py through a part.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.deploy.processes.runtime_dir import runtime_dir
from tandem.media_cache.media_client import MediaCacheClient
from tandem.protocol.messages.membership import Role as WorkerRole
from tandem.protocol.messages.membership import StatusReport
from tandem.runtime.errors import TandemError
from tests.faults.fault_cases import CLOSES, PLACED_PHASES, Case, Layout, Result
from tests.faults.leaks import Footprint, shared_memory
from tests.faults.phases import ELASTIC, LOCAL_PREFILL, NUM_TOKENS, Held, Missed, Phases
from tests.faults.streams import Stream
from tests.support.cluster import Cluster
from tests.support.media_proxy import ask_cache, data_url, image_part
from tests.support.vision_model import encoded, picture, save_model
from tests.support.waiting import comes_true

HEARD_S = 0.3
"""Time after which running processes have noticed a disconnect, and frozen ones have not been declared lost."""
FROZEN_S = 4.0
"""Longer than the silence after which a worker is lost, shorter than that of a proxy."""
STOPPED_S = 30.0
"""A stopped process that nobody has killed is woken after this time, so that the next case can begin."""
END_LIMIT_S = 180.0
WHOLE_LIMIT_S = 240.0
LEAK_LIMIT_S = 30.0
MAX_TRIES = 6
NUM_PROMPT_TOKENS, NUM_LOCAL_PROMPT_TOKENS = 1400, 1000
"""Prompt lengths of other phases and of LOCAL_PREFILL."""
NUM_LAYERS = 10
"""Enough that each phase lasts longer than a worker takes to report it."""
ROLES_OF_LAYOUT = {"fixed": ("--prefill", "2", "--decode", "2"), "any": ("--workers", "2")}
OPTIONS = (
    "--proxies", "2", "--dtype", "float32", "--threads-per-worker", "1",
    "--max-num-batched-tokens", "16", "--block-size", "16", "--kv-cache-gib", "0.05", "--worker-wait-s", "240",
    "--media-cache-mib", "64", "--decode-prefill-threshold", str(NUM_LOCAL_PROMPT_TOKENS),
)  # fmt: skip


class Matrix:
    """Runs cases on one cluster that was started with OPTIONS and a model that takes images.

    layout: see ROLES_OF_LAYOUT. In PLACED_PHASES, elastic workers have fixed roles until the fault has struck. In other
    phases the router places the request.
    """

    def __init__(self, cluster: Cluster, shared_before: set[str], layout: Layout = "fixed", seed: int = 0) -> None:
        self._cluster = cluster
        self._is_elastic = layout == "any"
        self._phases = Phases(cluster, ELASTIC, ELASTIC) if self._is_elastic else Phases(cluster)
        self._shared_before = shared_before
        self._rng = random.Random(seed)
        self._num_tracebacks = self._num_corrupt_blocks = 0
        self._num_bodies = 0
        self._known: dict[int, tuple[dict[str, Any], list[int]]] = {}  # requests by prompt length, and their tokens
        self._have_taken: set[tuple[int, int]] = set()  # (media cache, process that has used an image of it)
        self._bystander_body = self._body(takes_image=False, num_tokens=400, num_prompt_tokens=30)
        self._bystander_tokens = self._undisturbed(self._bystander_body).token_ids

    def _undisturbed(self, body: dict[str, Any]) -> Stream:
        """Uses a salt, so that its blocks serve no other request."""
        stream = Stream(self._cluster, body | {"cache_salt": "reference"})
        assert stream.wait(END_LIMIT_S) and stream.outcome == "length", stream.outcome
        return stream

    def _request_of(self, case: Case) -> tuple[dict[str, Any], list[int]]:
        """Returns a request of which nothing is cached, and its tokens in an undisturbed run."""
        if case.role == "media cache":  # a new image
            body = self._body(takes_image=True)
            return body, self._undisturbed(body).token_ids
        num_prompt_tokens = NUM_LOCAL_PROMPT_TOKENS if case.phase == LOCAL_PREFILL else NUM_PROMPT_TOKENS
        if num_prompt_tokens not in self._known:
            body = self._body(takes_image=False, num_prompt_tokens=num_prompt_tokens)
            self._known[num_prompt_tokens] = body, self._undisturbed(body).token_ids
        body, token_ids = self._known[num_prompt_tokens]
        self._num_bodies += 1
        return body | {"cache_salt": f"case {self._num_bodies}"}, token_ids

    def _show_images(self) -> None:
        """Sends images to each proxy, which starts its media process, and to each prefill worker."""
        cache = self._phases.pid("media-cache")
        for _ in range(30):
            proxies = {self._phases.pid(name) for name in ("proxy-0", "proxy-1")}
            prefills = {self._phases.pid(name) for name in self._phases.prefills}
            have_taken = {pid for of, pid in self._have_taken if of == cache}
            if proxies | prefills <= have_taken:
                return
            done = proxies & have_taken
            not_on = done.pop() if len(done) == 1 else 0
            # Concurrent, because sequential requests would all go to the fastest worker.
            bodies = [self._body(takes_image=True, num_tokens=2) for _ in range(4)]
            for stream in [Stream(self._cluster, body, not_on) for body in bodies]:
                assert stream.wait(END_LIMIT_S) and stream.outcome == "length", stream.outcome
                [prefill] = [each["prefill"] for each in self._phases.events(stream) if each["event"] == "dispatched"]
                self._have_taken |= {(cache, stream.proxy_pid), (cache, self._phases.pid(prefill))}
        raise AssertionError("no image reached one of the proxies or prefill workers")

    def _settle(self) -> None:
        """Waits until the cluster is idle, with everything open that processes open on first use."""
        if not comes_true(self.is_whole, WHOLE_LIMIT_S):
            raise AssertionError(f"the cluster is not whole: {self.why_not_whole()}")
        roles: tuple[WorkerRole, ...] = ("prefill", "any")  # the first change opens a thread and writes a file
        for name, role in product(ELASTIC if self._is_elastic else (), roles):
            assert not self._cluster.give_role(name, role)
        for _ in range(12):  # any proxy can answer
            httpx.get(f"{self._cluster.admin_url}/debug/requests/unknown", timeout=10)

    def run(self, case: Case) -> Result:
        """Raises AssertionError if the phase cannot be reached or the cluster does not recover in time."""
        for num_missed in range(MAX_TRIES):
            body, reference = self._request_of(case)
            self._show_images()
            self._settle()
            before = Footprint.of(self._cluster, self._shared_before)
            if case.role == "media cache":  # keeps the pixels and the embedding of this client's image
                before.open_files[self._phases.pid("media-cache")]["/memfd:media"] += 2
            pairs = self._cluster.ready_pairs()
            try:
                with self._bystander() as bystander:
                    if self._is_elastic and case.phase in PLACED_PHASES:
                        self._place(bystander)
                    result = self._strike(case, body, reference, bystander, before, num_missed)
                if case.fault == CLOSES and self._cluster.ready_pairs() != pairs:
                    result.problems.append("a pair was made anew")
                return result
            except Missed as missed:
                print(f"{case}: missed, {missed}", flush=True)
                self._make_elastic()
        raise AssertionError(f"{case}: the phase was not reached in {MAX_TRIES} tries")

    # ---- one case

    def _strike(
        self,
        case: Case,
        body: dict[str, Any],
        reference: list[int],
        bystander: _Bystander,
        before: Footprint,
        num_missed: int,
    ) -> Result:
        with self._phases.held(body, case.phase, not_on=bystander.stream.proxy_pid) as held:
            pid = self._pid_of(case, held)
            struck_at = time.monotonic()
            if case.fault == CLOSES:
                held.stream.abandon()
                time.sleep(HEARD_S)
                held.frozen.thaw()
            elif case.fault in ("SIGKILL", "SIGTERM"):
                os.kill(pid, getattr(signal, case.fault))
                held.frozen.thaw()
            else:
                held.frozen.freeze(pid)
                held.frozen.thaw(pid)
            stream, woken_s = held.stream, None
            if case.fault == "SIGSTOP then SIGCONT":
                time.sleep(FROZEN_S)
                held.frozen.thaw()
            elif case.fault == "SIGSTOP":
                # The launcher does not restart stopped workers, but other stopped processes.
                is_worker = case.role in ("prefill", "decode")
                comes_true(lambda: stream.has_ended and (is_worker or self._is_replaced(pid)), STOPPED_S)
                if not self._is_replaced(pid):
                    woken_s = time.monotonic() - struck_at
                held.frozen.thaw()
        recovers_from = time.monotonic() if woken_s is not None else struck_at
        has_ended = stream.wait(END_LIMIT_S)
        self._make_elastic()
        pause_s = stream.longest_pause_s(struck_at, time.monotonic())
        must_be_gone = pid if case.fault in ("SIGKILL", "SIGTERM") else 0
        is_whole = comes_true(lambda: self.is_whole(must_be_gone), WHOLE_LIMIT_S)
        assert is_whole, f"{case}: the cluster is not whole: {self.why_not_whole()}"
        result = Result(
            case,
            stream.outcome if has_ended else "no end",
            stream.token_ids == reference[: len(stream.token_ids)],
            bystander.end(),
            round(pause_s, 2),
            round(time.monotonic() - recovers_from, 2),
            self._phases.happened(stream, "dispatched"),
            num_missed,
            None if woken_s is None else round(woken_s, 1),
        )
        result.problems = self._problems(result, stream, before)
        return result

    def _problems(self, result: Result, stream: Stream, before: Footprint) -> list[str]:
        problems = []
        case = result.case
        if result.outcome != "length" and not (case.may_fail and result.outcome == "connection ended"):
            problems.append(f"the request ended with {result.outcome}")
        if case.fault == CLOSES and case.phase != "finishing":  # if all its tokens have arrived
            ends = [event["outcome"] for event in self._phases.events(stream) if event["event"] == "ended"]
            if (result.outcome, ends) != ("connection ended", ["aborted"]):
                problems.append(f"its client went, and it ended there with {result.outcome}, in the proxy with {ends}")
        if not result.is_same or (result.outcome == "length" and len(stream.token_ids) != NUM_TOKENS):
            problems.append(f"other tokens than in the undisturbed run, or not as many: {len(stream.token_ids)}")
        if stream.num_ends != (result.outcome != "connection ended"):
            problems.append(f"{stream.num_ends} terminal messages came")
        if result.bystander != "length":
            problems.append(f"a stream on the other proxy: {result.bystander}")
        leaks: list[str] = []

        def is_clean() -> bool:
            leaks[:] = Footprint.of(self._cluster, self._shared_before).leaked_since(before)
            return not leaks

        comes_true(is_clean, LEAK_LIMIT_S)
        num_tracebacks = self._cluster.logs().count("Traceback")
        if num_tracebacks > self._num_tracebacks:
            problems.append(f"{num_tracebacks - self._num_tracebacks} tracebacks in the logs")
        self._num_tracebacks = num_tracebacks
        loads = [report.load for report in self._cluster.status().workers]
        num_corrupt_blocks = sum(load.num_corrupt_blocks for load in loads)
        if num_corrupt_blocks > self._num_corrupt_blocks:
            problems.append(f"{num_corrupt_blocks - self._num_corrupt_blocks} blocks held what was not sent to them")
        self._num_corrupt_blocks = num_corrupt_blocks
        return problems + leaks

    def _pid_of(self, case: Case, held: Held) -> int:
        match case.role:
            case "proxy":
                return held.stream.proxy_pid
            case "media cache":
                return self._phases.pid("media-cache")
            case "prefill":
                return self._phases.pid(held.prefill)
            case "decode":
                return self._phases.pid(held.decode)
            case "client":
                return 0

    def _place(self, bystander: _Bystander) -> None:
        """Has the bystander's worker decode and the other one compute prompts, but for those below the threshold."""
        *_, event = [each for each in self._phases.events(bystander.stream) if each["event"] == "dispatched"]
        [free] = [name for name in self._phases.prefills if name != event["decode"]]
        assert not self._cluster.give_role(free, "prefill")
        assert not self._cluster.give_role(event["decode"], "decode")

    def _make_elastic(self) -> None:
        """Ends `_place`, also for a worker that restarts with the role that it had."""
        if self._is_elastic:
            names = self._phases.prefills
            assert comes_true(lambda: not any(self._cluster.give_role(name, "any") for name in names), WHOLE_LIMIT_S)

    def _is_replaced(self, pid: int) -> bool:
        return pid not in {self._phases.pid(name) for name in self._phases.names()}

    # ---- the cluster

    def is_whole(self, must_be_gone: int = 0) -> bool:
        return not self.why_not_whole(must_be_gone)

    def why_not_whole(self, must_be_gone: int = 0) -> str:
        """The cluster is whole if all processes answer, all pairs are ready, and no request, block or lease is left."""
        try:
            reports = asyncio.run(ClusterClient(self._cluster.port).status())
        except TandemError as silent:  # starting, or slow
            return silent.message
        if len(reports) < 2:
            return "a proxy is silent"
        if must_be_gone and not self._is_replaced(must_be_gone):
            return f"process {must_be_gone} is still there"
        for report in reports:
            if must_be_gone in [worker.worker.pid for worker in report.workers]:
                return f"{report.proxy_id} still counts on process {must_be_gone}"
            num_workers, num_pairs = (2, 2) if self._is_elastic else (4, 4)
            if why := _why_not_whole(report, num_workers, num_pairs):
                return f"{report.proxy_id}: {why}"
        if not self._cluster.is_healthy():
            return "/health is not 200"
        try:
            media = ask_cache(f"ipc://{runtime_dir(self._cluster.port)}/media-cache.sock", _quick_status)
        except (TimeoutError, TandemError):
            return "the media cache is silent"
        return f"{media.num_leases} media leases are open" if media.num_leases else ""

    @contextmanager
    def _bystander(self) -> Iterator[_Bystander]:
        """A stream that decodes during the case, on the proxy that is not struck."""
        stream = Stream(self._cluster, self._bystander_body)
        assert comes_true(lambda: len(stream.token_ids) > 2, END_LIMIT_S)
        try:
            yield _Bystander(stream, self._bystander_tokens)
        finally:
            stream.wait(END_LIMIT_S)

    def _body(
        self, takes_image: bool, num_tokens: int = NUM_TOKENS, num_prompt_tokens: int = NUM_PROMPT_TOKENS
    ) -> dict[str, Any]:
        """Returns a new prompt, so that none of it is cached."""
        self._num_bodies += 1
        fields = {
            "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        if not takes_image:
            return fields | {"prompt": [self._rng.randrange(256) for _ in range(num_prompt_tokens)]}
        image = image_part(data_url(encoded(picture(seed=self._num_bodies))))
        text = "".join(self._rng.choice("abcdefghij ") for _ in range(num_prompt_tokens))
        return fields | {"messages": [{"role": "user", "content": [image, {"type": "text", "text": text}]}]}


@dataclass
class _Bystander:
    stream: Stream
    reference: list[int]

    def end(self) -> str:
        """Returns the outcome; "length" only if its tokens are those of the undisturbed run."""
        if not self.stream.wait(END_LIMIT_S):
            return "no end"
        if self.stream.outcome == "length" and self.stream.token_ids != self.reference:
            return "other tokens"
        return self.stream.outcome


async def _quick_status(client: MediaCacheClient) -> Any:
    return await asyncio.wait_for(client.status(), 2.0)


def _why_not_whole(report: StatusReport, num_workers: int, num_pairs: int) -> str:
    if len(report.workers) != num_workers or any(worker.draining for worker in report.workers):
        return f"{len(report.workers)} workers, {sum(worker.draining for worker in report.workers)} of them drain"
    states = [pair.state for worker in report.workers for pair in worker.pairs]
    if states != ["ready"] * num_pairs:
        return f"pairs are {states}"
    if report.num_requests:
        return f"{report.num_requests} requests are in flight"
    for worker in report.workers:
        load = worker.load
        if load.num_free_blocks != load.num_blocks or load.num_running or load.num_waiting:
            held = load.num_blocks - load.num_free_blocks
            return f"{worker.worker.worker_id} holds {held} blocks, {load.num_quarantined_blocks} in quarantine"
    return ""


@contextmanager
def matrix(
    folder: Path,
    connector: str = "auto",
    layout: Layout = "fixed",
    env: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Matrix]:
    """folder: for the model. env: further variables of the cluster's processes."""
    shared_before = shared_memory()
    model = str(save_model(folder, NUM_LAYERS))
    options = (*ROLES_OF_LAYOUT[layout], *OPTIONS, "--kv-connector", connector)
    env = {"TANDEM_KV_CHECKSUMS": "1", **env}
    with Cluster("--model", model, "--served-model-name", "m", *options, env=env) as cluster:
        yield Matrix(cluster, shared_before, layout)
