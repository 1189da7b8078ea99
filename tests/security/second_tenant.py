"""A second tenant beside an attack. How it is served meanwhile is the verdict.

It has a stream, sends large prompts and other requests, runs batches, polls the proxy, and asks for probes as a kubelet
does, from a process of its own, so that the attack's Python does not delay it. Works on any URL: a cluster's, or that
of a proxy with fake workers.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec

from tests.faults.streams import descendants
from tests.support.cluster import MODEL
from tests.support.sse import END, event_of

REQUEST_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 60.0
SETTLE_S = 1.0
"""Seconds for which the tenant goes on after the attack, which may do harm late."""
POLL_S = 0.05
LARGE_PROMPT_S = 0.25
"""Pause between two large prompts."""
BATCH_S = 1.0
"""Pause between two batches."""
MEMORY_POLL_S = 0.1
PICTURE = "the picture"
"""Name of the chats with `Plan.picture` among the polls."""
REQUEST_S = 0.4
"""Pause between two requests of a kind."""
PROBE_S = 0.5
REQUESTS = ("short", "medium", "schema", "picture")
"""A prompt of a few tokens, one of 3 KB, an answer that follows a schema, and a small picture. None equals another."""


class Plan(msgspec.Struct, frozen=True):
    """What the tenant does. key: its API key, or "". stream_tokens: of each stream; a new one follows at once.

    large_prompt_bytes: size of the prompts in the body, of which the server keeps the last 16 tokens. runs_batches:
    uploads files of one line and runs each as a batch. polled: paths that are fetched every POLL_S. picture: data URL
    of what a chat shows every POLL_S; "" for none. probes: URLs, each asked on a new connection. requests: kinds of
    `REQUESTS`, each sent every REQUEST_S.
    """

    url: str
    key: str = ""
    model: str = MODEL
    stream_tokens: int = 1500
    large_prompt_bytes: int = 200_000
    runs_batches: bool = False
    polled: tuple[str, ...] = ("/live",)
    picture: str = ""
    probes: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()


class Verdict(msgspec.Struct):
    """How the tenant was served. errors: unexpected answers and broken connections, each described.

    longest_gap_s: longest time between two events of a stream. num_events: of all streams. first_events_s: from the
    request of a stream to its first event. large_prompts_s, polls_s: latencies. batches_s: from the upload of a file to
    the end of its batch. grown_bytes: by how much the server's processes grew at most, where `SecondTenant` knows them.
    """

    num_events: int = 0
    longest_gap_s: float = 0.0
    errors: list[str] = []
    first_events_s: list[float] = []
    large_prompts_s: list[float] = []
    batches_s: list[float] = []
    polls_s: dict[str, list[float]] = {}
    """Latencies of what was polled, of probes and of further requests, by path, URL and kind."""
    grown_bytes: int = 0

    def __str__(self) -> str:
        polls = ", ".join(f"{path} {max(each):.2f} s of {len(each)}" for path, each in self.polls_s.items() if each)
        return (
            f"{len(self.errors)} errors {self.errors[:3]}; longest gap {self.longest_gap_s:.2f} s of {self.num_events} "
            f"events; first events at most {max(self.first_events_s, default=0):.2f} s of {len(self.first_events_s)}; "
            f"large prompts at most {max(self.large_prompts_s, default=0):.2f} s of "
            f"{len(self.large_prompts_s)}; batches at most {max(self.batches_s, default=0):.2f} s of "
            f"{len(self.batches_s)}; polls at most {polls}; grown by {self.grown_bytes >> 20} MiB"
        )

    def check(self, max_gap_s: float, max_latency_s: float, max_grown_bytes: int, max_batch_s: float = 0.0) -> None:
        """Asserts that the tenant was served within the bounds, without an error."""
        assert not self.errors, str(self)
        assert self.num_events and self.longest_gap_s <= max_gap_s, str(self)
        latencies = [
            *self.first_events_s,
            *self.large_prompts_s,
            *(seconds for each in self.polls_s.values() for seconds in each),
        ]
        assert max(latencies) <= max_latency_s, str(self)
        assert max(self.batches_s, default=0.0) <= max_batch_s, str(self)
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


def private_bytes(pid: int) -> int:
    """Returns the memory of a process that it shares with no other; 0 of one that has ended."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    except (OSError, ValueError):  # it has ended
        return 0
    return 4096 * (resident - shared)


# ---- the tenant's own process


class _Tenant:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._verdict = self._new_verdict()
        self._waiting: dict[str, float] = {}
        """When the request of each kind that is not answered yet was sent."""
        self._last_event_at: float | None = None
        """When the running stream had its last event; None before the first."""
        self._client = httpx.AsyncClient(
            base_url=plan.url,
            headers={"authorization": f"Bearer {plan.key}"} if plan.key else {},
            timeout=REQUEST_TIMEOUT_S,
        )

    def _new_verdict(self) -> Verdict:
        plan = self._plan
        names = (*plan.polled, *plan.probes, *plan.requests, *[PICTURE] * bool(plan.picture))
        return Verdict(polls_s={name: [] for name in names})

    async def run(self) -> Verdict:
        async with self._client:
            plan = self._plan
            work = [self._streams(), self._large_prompts(), *map(self._polls, plan.polled)]
            work += [*map(self._probes, plan.probes), *map(self._requests, plan.requests)]
            if plan.picture:
                work.append(self._pictures())
            if self._plan.runs_batches:
                work.append(self._batches())
            tasks = [asyncio.create_task(each) for each in work]
            try:
                async with asyncio.timeout(READY_TIMEOUT_S):
                    await self._served()
            except TimeoutError:
                self._verdict.errors.append(f"not served within {READY_TIMEOUT_S} s")
            if self._verdict.errors:
                print(self._verdict, flush=True)
                return self._verdict
            self._begin()
            print("served", flush=True)
            while (await asyncio.to_thread(sys.stdin.readline)).strip() == "take":
                self._note_gap()
                self._note_waiting()
                print(msgspec.json.encode(self._verdict).decode(), flush=True)
                self._begin()
            await asyncio.sleep(SETTLE_S)
            self._note_gap()  # a stream that still waits counts with its wait so far
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self._verdict.errors += [repr(each) for each in ended if not isinstance(each, asyncio.CancelledError)]
            return self._verdict

    async def _served(self) -> None:
        """Waits until each kind of request has been answered once."""
        verdict, has_batches = self._verdict, self._plan.runs_batches
        while not (  # noqa: ASYNC110
            verdict.num_events
            and verdict.large_prompts_s
            and all(verdict.polls_s.values())
            and (verdict.batches_s or not has_batches)
        ):
            await asyncio.sleep(POLL_S)

    def _begin(self) -> None:
        """Forgets what was measured before the attack, when the server may have been cold."""
        self._verdict = self._new_verdict()

    def _note_waiting(self) -> None:
        for name, began in self._waiting.items():
            self._latencies(name).append(time.monotonic() - began)

    def _latencies(self, name: str) -> list[float]:
        return self._verdict.polls_s.get(name, self._verdict.large_prompts_s)

    def _on_event(self, stream_began_at: float) -> None:
        if self._last_event_at is None:
            self._verdict.first_events_s.append(time.monotonic() - stream_began_at)
        self._note_gap()
        self._last_event_at = time.monotonic()
        self._verdict.num_events += 1

    def _note_gap(self) -> None:
        if self._last_event_at is not None:
            self._verdict.longest_gap_s = max(self._verdict.longest_gap_s, time.monotonic() - self._last_event_at)

    async def _streams(self) -> None:
        body = self._body("Once upon a time", self._plan.stream_tokens) | {"stream": True}
        while True:
            if (error := await self._stream(body)) is not None:
                self._verdict.errors.append(f"stream: {error}")
                await asyncio.sleep(POLL_S)

    async def _stream(self, body: dict[str, Any]) -> str | None:
        """Returns what went wrong, if anything did."""
        began_at = time.monotonic()
        self._last_event_at = None
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    return f"{answer.status_code} {(await answer.aread())[:200]!r}"
                is_complete = False
                async for line in answer.aiter_lines():
                    if not line:
                        continue
                    self._on_event(began_at)
                    if "error" in (event_of(line) or ()):
                        return line[:200]
                    is_complete = line.endswith(END)
                return None if is_complete else "ended without [DONE]"
        except httpx.HTTPError as error:
            return repr(error)
        except asyncio.CancelledError:
            if self._last_event_at is None:
                self._verdict.first_events_s.append(time.monotonic() - began_at)
            raise

    async def _large_prompts(self) -> None:
        words = "lorem ipsum dolor sit amet " * (self._plan.large_prompt_bytes // 27 + 1)
        body = self._body(words[: self._plan.large_prompt_bytes], 1) | {"truncate_prompt_tokens": 16}
        content = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        while True:
            request = self._client.build_request("POST", "/v1/completions", content=content, headers=headers)
            await self._measure("large prompt", request)
            await asyncio.sleep(LARGE_PROMPT_S)

    async def _batches(self) -> None:
        body = self._body("Once upon a time", 4)
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        while True:
            verdict, began = self._verdict, time.monotonic()
            try:
                if (error := await self._batch(json.dumps(line).encode())) is not None:
                    verdict.errors.append(f"batch: {error}")
            except httpx.HTTPError as error:
                verdict.errors.append(f"batch: {error!r}")
            finally:
                verdict.batches_s.append(time.monotonic() - began)
            await asyncio.sleep(BATCH_S)

    async def _batch(self, content: bytes) -> str | None:
        """Returns what went wrong, if anything did."""
        upload = {"file": ("one.jsonl", content)}
        answer = await self._client.post("/v1/files", files=upload, data={"purpose": "batch"})
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text[:200]}"
        file_id = answer.json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        answer = await self._client.post("/v1/batches", json=body)
        while answer.status_code == 200 and answer.json()["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(POLL_S)
            answer = await self._client.get(f"/v1/batches/{answer.json()['id']}")
        is_complete = answer.status_code == 200 and answer.json()["request_counts"]["completed"] == 1
        return None if is_complete else f"{answer.status_code} {answer.text[:200]}"

    async def _polls(self, path: str) -> None:
        while True:
            await self._measure(path, self._client.build_request("GET", path))
            await asyncio.sleep(POLL_S)

    async def _pictures(self) -> None:
        url = {"url": self._plan.picture}
        parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": url}]
        body = {"model": self._plan.model, "max_tokens": 1, "messages": [{"role": "user", "content": parts}]}
        while True:
            await self._measure(PICTURE, self._client.build_request("POST", "/v1/chat/completions", json=body))
            await asyncio.sleep(POLL_S)

    async def _probes(self, url: str) -> None:
        """Each on a connection of its own, as a kubelet does: one that stays open meets no limit."""
        while True:
            await self._measure(url, self._client.build_request("GET", url, headers={"connection": "close"}))
            await asyncio.sleep(PROBE_S)

    async def _requests(self, kind: str) -> None:
        number = 0
        while True:
            path, body = self._request(kind, number)
            await self._measure(kind, self._client.build_request("POST", path, json=body))
            number += 1
            await asyncio.sleep(REQUEST_S)

    def _request(self, kind: str, number: int) -> tuple[str, dict[str, Any]]:
        if kind == "picture":
            from tests.support.media_proxy import data_url, image_part
            from tests.support.vision_model import encoded, picture

            image = image_part(data_url(encoded(picture(100, 80, seed=(1 << 30) + number))))
            messages = [{"role": "user", "content": [{"type": "text", "text": "what is that?"}, image]}]
            return "/v1/chat/completions", {"model": self._plan.model, "messages": messages, "max_tokens": 2}
        words = f"tenant {number} " + "lorem ipsum " * (250 if kind == "medium" else 1)
        body = self._body(words, 2) | {"truncate_prompt_tokens": 16}
        if kind == "schema":
            schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}, "required": [f"p{number}"]}
            body |= {"structured_outputs": {"json": schema}, "max_tokens": 12, "ignore_eos": False}
        return "/v1/completions", body

    async def _measure(self, name: str, request: httpx.Request) -> None:
        began = time.monotonic()
        self._waiting[name] = began
        try:
            answer = await self._client.send(request)
            if answer.status_code != 200:
                self._verdict.errors.append(f"{name}: {answer.status_code} {answer.text[:200]}")
        except httpx.HTTPError as error:
            self._verdict.errors.append(f"{name}: {error!r}")
        finally:  # also of a request that waits when the tenant ends
            self._latencies(name).append(time.monotonic() - began)
            del self._waiting[name]

    def _body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        return {"model": self._plan.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}


def main(arguments: Iterable[str]) -> None:
    [plan] = arguments
    verdict = asyncio.run(_Tenant(msgspec.json.decode(plan, type=Plan)).run())
    print(msgspec.json.encode(verdict).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
