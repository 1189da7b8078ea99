"""A second tenant beside an attack. How it is served meanwhile is the verdict.

It does what a `Plan` says in a process of its own, so that the attack's Python does not delay it: a stream, large
prompts, other requests, batches, polls, and probes as a kubelet sends them. Works on any URL: a cluster's, or that of a
proxy with fake workers.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec

from tests.support.cluster import MODEL
from tests.support.processes import descendants, private_bytes
from tests.support.sse import END, event_of

REQUEST_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 60.0
SETTLE_S = 1.0
"""Seconds for which the tenant goes on after the attack, which may do harm late."""
POLL_S = 0.05
MEMORY_POLL_S = 0.1
PROBE_S = 0.5
PAUSES_S = {"large": 0.25, "batch": 1.0, "same picture": POLL_S}
REQUEST_S = 0.4
"""Pause between two requests of a kind that PAUSES_S does not name."""
STREAM, LARGE, BATCH = "stream", "large", "batch"
REQUESTS = ("short", "medium", "schema", "picture")
"""A prompt of a few tokens, one of 3 KB, an answer that follows a schema, and a small picture. None equals another."""
GAP, FIRST_EVENT = "gap", "first event"
"""Waits of a stream: between two of its events, and from its request to its first event."""


class Plan(msgspec.Struct, frozen=True):
    url: str
    key: str = ""
    model: str = MODEL
    does: tuple[str, ...] = (STREAM, LARGE)
    """What it does again and again: STREAM, LARGE (prompts of which the server keeps the last 16 tokens), BATCH (files
    of one line that are uploaded and run), REQUESTS, and "same picture", whose tensors are cached."""
    gets: tuple[str, ...] = ("/live",)
    """Paths that are polled, and URLs of probes, each of which has a new connection: an open one meets no limit."""
    stream_tokens: int = 1500
    """Tokens of each stream. A new one follows at once."""
    large_prompt_bytes: int = 200_000
    address: str = ""
    """The tenant's own, where clients have no keys."""


class Verdict(msgspec.Struct):
    num_events: int = 0
    """Of all streams."""
    errors: list[str] = []
    """Unexpected answers and broken connections, each described."""
    waits_s: dict[str, list[float]] = {}
    """Latencies by what was done or fetched; GAP has the longest one of all streams only."""
    grown_bytes: int = 0
    """By how much the server's processes grew at most, where `SecondTenant` knows them."""

    @property
    def longest_s(self) -> dict[str, float]:
        return {name: max(each) for name, each in self.waits_s.items() if each}

    def __str__(self) -> str:
        waits = ", ".join(f"{name} {each:.2f} s of {len(self.waits_s[name])}" for name, each in self.longest_s.items())
        grown = f"grown by {self.grown_bytes >> 20} MiB"
        return f"{len(self.errors)} errors {self.errors[:3]}; {self.num_events} events; longest waits: {waits}; {grown}"

    def check(self, max_latency_s: float, max_grown_bytes: int, **max_s: float) -> None:
        """Asserts that the tenant was served within the bounds, without an error. max_s: for some kinds of waits."""
        assert not self.errors, str(self)
        assert self.longest_s and not (GAP in self.waits_s and not self.num_events), str(self)
        assert all(each <= max_s.get(name, max_latency_s) for name, each in self.longest_s.items()), str(self)
        assert self.grown_bytes <= max_grown_bytes, str(self)


class SecondTenant:
    """Context manager around an attack: starts when the tenant is being served, ends with the `verdict`.

    server_pid: the process whose descendants, it included, are the server; 0 measures no memory.
    """

    verdict: Verdict

    def __init__(self, plan: Plan, server_pid: int = 0) -> None:
        self._plan = plan
        self._memory = _Memory(server_pid) if server_pid else None

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.security.second_tenant", msgspec.json.encode(self._plan).decode()]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if line != "served":
            self._process.kill()
            self._process.communicate()
            raise AssertionError(f"the second tenant was not served before the attack: {line}")
        if self._memory is not None:
            self._memory.start()
        return self

    def take(self) -> Verdict:
        """Returns how the tenant was served since the start or the last call. Requests that wait count as long as
        they have waited."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("take\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Verdict)

    def __exit__(self, *exc_info: object) -> None:
        try:
            output, _ = self._process.communicate("end\n", timeout=REQUEST_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        self.verdict = msgspec.json.decode(output, type=Verdict)
        if self._memory is not None:
            self.verdict.grown_bytes = self._memory.stop()


class _Memory:
    """Samples the memory of a process and of its descendants that they share with nobody."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._first = self._most = 0

    def start(self) -> None:
        self._first = self._most = self._used()
        self._thread.start()

    def stop(self) -> int:
        """Returns by how many bytes it grew at most."""
        self._stopped.set()
        self._thread.join()
        return self._most - self._first

    def _sample(self) -> None:
        while not self._stopped.wait(MEMORY_POLL_S):
            self._most = max(self._most, self._used())

    def _used(self) -> int:
        return sum(private_bytes(pid) for pid in (self._pid, *descendants(self._pid)))


# ---- the tenant's own process


class _Tenant:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._verdict = Verdict()
        self._begin()
        self._waiting: dict[str, float] = {}
        """When the request of each kind that is not answered yet was sent."""
        self._last_event_at: float | None = None
        """When the running stream had its last event; None before the first."""
        self._client = httpx.AsyncClient(
            base_url=plan.url,
            headers={"authorization": f"Bearer {plan.key}"} if plan.key else {},
            timeout=REQUEST_TIMEOUT_S,
            transport=httpx.AsyncHTTPTransport(local_address=plan.address or None),
        )

    def _begin(self) -> None:
        """Forgets what was measured so far: before the attack the server may have been cold."""
        names = [*self._plan.does, *self._plan.gets]
        if STREAM in names:
            names[names.index(STREAM)] = FIRST_EVENT
            names.append(GAP)
        self._verdict = Verdict(waits_s={name: [] for name in names})

    async def run(self) -> Verdict:
        async with self._client:
            others = {STREAM: self._streams, BATCH: self._batches}
            work = [others[kind]() if kind in others else self._requests(kind) for kind in self._plan.does]
            tasks = [asyncio.create_task(each) for each in (*work, *map(self._polls, self._plan.gets))]
            try:
                async with asyncio.timeout(READY_TIMEOUT_S):
                    while not all(each for name, each in self._verdict.waits_s.items() if name != GAP):  # noqa: ASYNC110
                        await asyncio.sleep(POLL_S)
            except TimeoutError:
                self._verdict.errors.append(f"not served within {READY_TIMEOUT_S} s")
            if self._verdict.errors:
                print(self._verdict, flush=True)
                return self._verdict
            self._begin()
            print("served", flush=True)
            while (await asyncio.to_thread(sys.stdin.readline)).strip() == "take":
                self._note_gap()
                for name, began in self._waiting.items():
                    self._note(name, began)
                print(msgspec.json.encode(self._verdict).decode(), flush=True)
                self._begin()
            await asyncio.sleep(SETTLE_S)
            self._note_gap()  # a stream that still waits counts with its wait so far
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self._verdict.errors += [repr(each) for each in ended if not isinstance(each, asyncio.CancelledError)]
            return self._verdict

    def _note(self, name: str, began: float) -> None:
        self._verdict.waits_s[name].append(time.monotonic() - began)

    def _note_gap(self) -> None:
        if self._last_event_at is not None:
            gaps = self._verdict.waits_s[GAP]
            gaps[:] = [max(*gaps, time.monotonic() - self._last_event_at, 0.0)]

    async def _streams(self) -> None:
        body = self._body("Once upon a time", self._plan.stream_tokens) | {"stream": True}
        while True:
            if (error := await self._stream(body)) is not None:
                self._verdict.errors.append(f"stream: {error}")
                await asyncio.sleep(POLL_S)

    async def _stream(self, body: dict[str, Any]) -> str | None:
        """Returns what went wrong, if anything did."""
        began = time.monotonic()
        self._last_event_at = None
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    return f"{answer.status_code} {(await answer.aread())[:200]!r}"
                is_complete = False
                async for line in answer.aiter_lines():
                    if not line:
                        continue
                    if self._last_event_at is None:
                        self._note(FIRST_EVENT, began)
                    self._note_gap()
                    self._last_event_at = time.monotonic()
                    self._verdict.num_events += 1
                    if "error" in (event_of(line) or ()):
                        return line[:200]
                    is_complete = line.endswith(END)
                return None if is_complete else "ended without [DONE]"
        except httpx.HTTPError as error:
            return repr(error)
        except asyncio.CancelledError:
            if self._last_event_at is None:
                self._note(FIRST_EVENT, began)
            raise

    async def _batches(self) -> None:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": self._body("Once upon a time", 4)}
        while True:
            began = time.monotonic()
            try:
                if (error := await self._batch(json.dumps(line).encode())) is not None:
                    self._verdict.errors.append(f"batch: {error}")
            except httpx.HTTPError as error:
                self._verdict.errors.append(f"batch: {error!r}")
            finally:
                self._note(BATCH, began)
            await asyncio.sleep(PAUSES_S[BATCH])

    async def _batch(self, content: bytes) -> str | None:
        """Returns what went wrong, if anything did."""
        upload = {"file": ("one.jsonl", content)}
        answer = await self._client.post("/v1/files", files=upload, data={"purpose": "batch"})
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text[:200]}"
        body = {"input_file_id": answer.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        answer = await self._client.post("/v1/batches", json=body)
        while answer.status_code == 200 and answer.json()["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(POLL_S)
            answer = await self._client.get(f"/v1/batches/{answer.json()['id']}")
        is_complete = answer.status_code == 200 and answer.json()["request_counts"]["completed"] == 1
        return None if is_complete else f"{answer.status_code} {answer.text[:200]}"

    async def _polls(self, path: str) -> None:
        is_probe = path.startswith("http")
        while True:
            headers = {"connection": "close"} if is_probe else {}
            await self._measure(path, self._client.build_request("GET", path, headers=headers))
            await asyncio.sleep(PROBE_S if is_probe else POLL_S)

    async def _requests(self, kind: str) -> None:
        number = 0
        while True:
            path, content = self._request(kind, number)
            headers = {"content-type": "application/json"}
            await self._measure(kind, self._client.build_request("POST", path, content=content, headers=headers))
            number += kind != LARGE
            await asyncio.sleep(PAUSES_S.get(kind, REQUEST_S))

    def _request(self, kind: str, number: int) -> tuple[str, bytes]:
        """Returns a path and a body; number: makes it different from others of its kind."""
        if kind.endswith("picture"):
            from tests.support.media_proxy import data_url, image_part
            from tests.support.vision_model import encoded, picture

            seed = 1 if kind == "same picture" else (1 << 30) + number
            image = image_part(data_url(encoded(picture(70, 70, seed=seed))))
            messages = [{"role": "user", "content": [{"type": "text", "text": "what is that?"}, image]}]
            body = {"model": self._plan.model, "messages": messages, "max_tokens": 2}
            return "/v1/chat/completions", json.dumps(body).encode()
        if kind == LARGE:
            words = "lorem ipsum dolor sit amet " * (self._plan.large_prompt_bytes // 27 + 1)
            body = self._body(words[: self._plan.large_prompt_bytes], 1)
        else:
            body = self._body(f"tenant {number} " + "lorem ipsum " * (250 if kind == "medium" else 1), 2)
        if kind == "schema":
            schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}, "required": [f"p{number}"]}
            body |= {"structured_outputs": {"json": schema}, "max_tokens": 12, "ignore_eos": False}
        return "/v1/completions", json.dumps(body | {"truncate_prompt_tokens": 16}).encode()

    async def _measure(self, name: str, request: httpx.Request) -> None:
        began = self._waiting[name] = time.monotonic()
        try:
            answer = await self._client.send(request)
            if answer.status_code != 200:
                self._verdict.errors.append(f"{name}: {answer.status_code} {answer.text[:200]}")
        except httpx.HTTPError as error:
            self._verdict.errors.append(f"{name}: {error!r}")
        finally:  # also of a request that waits when the tenant ends
            self._note(name, began)
            del self._waiting[name]

    def _body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        return {"model": self._plan.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}


if __name__ == "__main__":
    verdict = asyncio.run(_Tenant(msgspec.json.decode(sys.argv[1], type=Plan)).run())
    print(msgspec.json.encode(verdict).decode(), flush=True)
