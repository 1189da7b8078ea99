"""Clients of `tests.faults.chaos`: send requests of all sizes, sometimes disconnect early, and check every response.

Tokens and log-probabilities must be those of `tests.support.exact_engine`, bit for bit.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from tandem.deploy.commands.replay import Token
from tandem.protocol.messages.sampling import SamplingParams
from tandem.worker.lone_engine import LoneEngine
from tests.support.exact_engine import tokens_alone
from tests.support.sse import event_of

NUM_QUESTIONS = 24
CANCEL_SHARE = 0.1
"""Share of the clients that disconnect before their response is complete."""
REFUSALS = (429, 503)
MAX_DIFFERENCES = 20
Choices = dict[int, list[Token]]
"""Tokens by choice."""


class ChaosQuestion(NamedTuple):
    """Body of a request and the expected answer."""

    body: dict[str, Any]
    expected: Choices


def make_questions(rng: random.Random, engine: LoneEngine) -> list[ChaosQuestion]:
    """Makes greedy and seeded requests of all sizes, some with two choices."""
    questions: list[ChaosQuestion] = []
    for _ in range(NUM_QUESTIONS):
        prompt = [rng.randrange(4, 2000) for _ in range(rng.choice([4, 60, 300, 900]))]
        num_tokens, n, temperature = rng.choice([1, 20, 100, 300]), rng.choice([1, 1, 1, 2]), rng.choice([0, 0.9])
        seed = rng.randrange(1 << 32)
        samplings = [SamplingParams(temperature=temperature, seed=seed + choice) for choice in range(n)]
        expected = {choice: tokens_alone(engine, prompt, each, num_tokens) for choice, each in enumerate(samplings)}
        body = {
            "prompt": prompt, "max_tokens": num_tokens, "n": n, "seed": seed, "temperature": temperature,
            "logprobs": 0, "ignore_eos": True, "return_token_ids": True, "stream": True,
        }  # fmt: skip
        questions.append(ChaosQuestion(body, expected))
    return questions


class Refused(Exception):
    """The cluster refused the request with a code and Retry-After, as it should without capacity."""


class Failed(Exception):
    """The request got an error instead of its tokens."""


@dataclass
class Tally:
    """Number of requests by outcome.

    `right` and `wrong`: tokens and log-probabilities equal to, or different from, those of a sequence that is computed
    alone. `cancelled`: by their client.
    `cut`: connections lost when a proxy was killed. `refused`: by code. `failed`: everything else, by message.
    `longest_pause_s`: of any stream. `differences`: details of the first wrong responses.
    """

    right: int = 0
    wrong: int = 0
    cancelled: int = 0
    cut: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    longest_pause_s: float = 0.0
    differences: list[dict[str, Any]] = field(default_factory=list)


class Clients:
    """Sends the questions at random."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, questions: list[ChaosQuestion], rng: random.Random
    ) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._rng = rng
        self._questions = questions
        self._in_flight: set[asyncio.Task[None]] = set()
        self._proxy_kills: list[float] = []  # seconds of the monotonic clock
        self.tally = Tally()

    def on_fault(self, process: str, fault: str) -> None:
        """Must be called for each fault. Answers through a killed proxy may be cut off."""
        if fault == "SIGKILL" and process.startswith("proxy"):
            self._proxy_kills.append(time.monotonic())

    async def check_each(self) -> None:
        """Sends each question by itself and without faults. Raises Failed where its answer differs."""
        for number, question in enumerate(self._questions):
            if (tokens := await self._send(question.body)) != question.expected:
                raise Failed(f"question {number} without faults: {_difference(tokens, question.expected)}")

    async def capacity_per_s(self, seconds: float, num_at_once: int) -> float:
        """Returns responses per second with `num_at_once` requests always in flight."""
        end = time.monotonic() + seconds
        num_responses = 0

        async def send_repeatedly() -> None:
            nonlocal num_responses
            while time.monotonic() < end:
                await self._send(self._rng.choice(self._questions).body)
                num_responses += 1

        started_at = time.monotonic()
        await asyncio.gather(*(send_repeatedly() for _ in range(num_at_once)))
        return num_responses / (time.monotonic() - started_at)

    async def send_at_rate(self, per_s: float, end: float) -> None:
        """Sends requests at random times, independent of earlier responses, until the monotonic time `end`."""
        while time.monotonic() < end:
            self._start(may_cancel=True)
            await asyncio.sleep(self._rng.expovariate(per_s))

    def burst(self, num_requests: int) -> None:
        for _ in range(num_requests):
            self._start(may_cancel=False)

    async def warm_up_burst(self, num_requests: int) -> None:
        """Sends an uncounted burst without faults. Raises RuntimeError when a response is wrong or missing."""
        tally, self.tally = self.tally, Tally()
        self.burst(num_requests)
        await self.wait()
        found, self.tally = self.tally, tally
        if found.right + found.refused.total() != num_requests:
            raise RuntimeError(f"a burst without faults failed: {found}")

    async def wait(self) -> None:
        """Waits until no request is in flight."""
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    def _start(self, may_cancel: bool) -> None:
        task = asyncio.create_task(self._one(may_cancel))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)

    async def _one(self, may_cancel: bool) -> None:
        number, tally = self._rng.randrange(len(self._questions)), self.tally
        question = self._questions[number]
        sending = asyncio.create_task(self._send(question.body))
        cancel_after_s = self._rng.uniform(0, 2) if may_cancel and self._rng.random() < CANCEL_SHARE else None
        started_at = time.monotonic()
        done, _ = await asyncio.wait([sending], timeout=cancel_after_s)
        if not done:
            sending.cancel()
            await asyncio.wait([sending])
            tally.cancelled += 1
            return
        try:
            tokens = sending.result()
        except Refused as refusal:
            tally.refused[str(refusal)] += 1
        except aiohttp.ClientError as error:
            if any(killed_at >= started_at for killed_at in self._proxy_kills):
                tally.cut += 1
            else:
                tally.failed[f"{type(error).__name__}: {error}"[:100]] += 1
        except Failed as error:
            tally.failed[str(error)[:100]] += 1
        else:
            is_right = tokens == question.expected
            tally.right += is_right
            tally.wrong += not is_right
            if not is_right and len(tally.differences) < MAX_DIFFERENCES:
                tally.differences.append({"question": number, **_difference(tokens, question.expected)})

    async def _send(self, body: dict[str, Any]) -> Choices:
        """Returns the answer. Raises Refused, Failed or aiohttp.ClientError."""
        tokens: Choices = defaultdict(list)
        num_finished: Counter[int] = Counter()
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200:
                code = f"{response.status} {(await response.json())['error']['code']}"
                if response.status in REFUSALS and int(response.headers.get("retry-after", "0")) > 0:
                    raise Refused(code)
                raise Failed(code)
            last_at = time.monotonic()
            async for line in response.content:
                if (event := event_of(line)) is None:
                    continue
                self.tally.longest_pause_s = max(self.tally.longest_pause_s, time.monotonic() - last_at)
                last_at = time.monotonic()
                if "error" in event:
                    raise Failed(f"stream: {event['error']['code']}")
                for choice in event["choices"]:
                    if token_ids := choice.get("token_ids"):
                        tokens[choice["index"]] += map(Token, token_ids, choice["logprobs"]["token_logprobs"])
                    num_finished[choice["index"]] += choice["finish_reason"] is not None
        if set(num_finished.values()) != {1}:
            raise Failed(f"a stream had {sorted(num_finished.values())} finish reasons per choice")
        return dict(tokens)


def _difference(tokens: Choices, expected: Choices) -> dict[str, Any]:
    """Describes the first differing choice: its index, both lengths, and the first position that differs."""
    for index in sorted(tokens.keys() | expected.keys()):
        got, wanted = tokens.get(index, []), expected.get(index, [])
        if got != wanted:
            both = zip(got, wanted, strict=False)
            position = next((i for i, (a, b) in enumerate(both) if a != b), min(len(got), len(wanted)))
            excerpts = got[position : position + 3], wanted[position : position + 3]
            return {"choice": index, "position": position, "lengths": [len(got), len(wanted)], "tokens": excerpts}
    return {}
