"""The clients of `bench.chaos`: requests of all sizes at a given rate; some leave, and each answer is compared."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from bench.reference_answers import ReferenceModel

NUM_BODIES = 24
LEAVES = 0.1
"""Of the clients, before their answer is whole."""
REFUSALS = (429, 503)
MAX_DIFFERENCES = 20
MIN_MARGIN = 1e-4
"""Of a token's probability: rounding in another batch changes it by some 1e-6 of itself."""


class Question(NamedTuple):
    """A request's body, and by choice the tokens that are right."""

    body: dict[str, Any]
    answers: dict[int, list[int]]


def make_questions(rng: random.Random, model: ReferenceModel) -> list[Question]:
    """Of all sizes; some greedy, some seeded; some with several sequences. None hangs on the rounding of a number."""
    questions: list[Question] = []
    while len(questions) < NUM_BODIES:
        prompt = [rng.randrange(4, 2000) for _ in range(rng.choice([4, 60, 300, 900]))]
        num_tokens, n, temperature = rng.choice([1, 20, 100, 300]), rng.choice([1, 1, 1, 2]), rng.choice([0, 0.9])
        seed = rng.randrange(1 << 32)
        answers = [model.answer(prompt, num_tokens, temperature, seed + choice) for choice in range(n)]
        if min(answer.margin for answer in answers) < MIN_MARGIN:
            continue
        body = {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "n": n,
            "seed": seed,
            "temperature": temperature,
        }
        questions.append(Question(body, dict(enumerate(answer.tokens for answer in answers))))
    return questions


class Refused(Exception):
    """No room at present, as it should be said: with a code and Retry-After."""


class Failed(Exception):
    """The request got an error in place of its answer."""


@dataclass
class Tally:
    """right, wrong: answers that are, or are not, those of transformers alone. left: by their clients. refused: by
    code. cut: connections that ended while a proxy was killed, at most as many as it had. failed: all else, by what was
    said. longest_pause_s: of any stream. differences: what is known of the first wrong answers.
    """

    right: int = 0
    wrong: int = 0
    left: int = 0
    cut: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    longest_pause_s: float = 0.0
    differences: list[dict[str, Any]] = field(default_factory=list)


class Clients:
    """proxy_kills: monotonic times at which a proxy was killed, kept by who does it, as are strikes: all that was done
    to anybody, with its time."""

    def __init__(self, session: aiohttp.ClientSession, url: str, questions: list[Question], rng: random.Random) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._rng = rng
        self._questions = questions
        self._asking: set[asyncio.Task[None]] = set()
        self.proxy_kills: list[float] = []
        self.strikes: list[tuple[float, str]] = []
        self.tally = Tally()

    async def check_each(self) -> None:
        """Each by itself, undisturbed. Raises Failed where the cluster does not answer as transformers does."""
        for number, question in enumerate(self._questions):
            if (answer := await self._ask(question.body)) != question.answers:
                raise Failed(f"undisturbed, and wrong: {number}, {_difference(answer, question.answers)}")

    async def capacity_per_s(self, seconds: float, num_at_once: int) -> float:
        """Answers a second with so many requests always under way."""
        end = time.monotonic() + seconds
        num_answers = 0

        async def again_and_again() -> None:
            nonlocal num_answers
            while time.monotonic() < end:
                await self._ask(self._rng.choice(self._questions).body)
                num_answers += 1

        started_at = time.monotonic()
        await asyncio.gather(*(again_and_again() for _ in range(num_at_once)))
        return num_answers / (time.monotonic() - started_at)

    async def arrive(self, per_s: float, end: float) -> None:
        """At random times, whatever becomes of those before."""
        while time.monotonic() < end:
            self._begin(may_leave=True)
            await asyncio.sleep(self._rng.expovariate(per_s))

    def burst(self, num_requests: int) -> None:
        for _ in range(num_requests):
            self._begin(may_leave=False)

    async def first_burst(self, num_requests: int) -> None:
        """Undisturbed, and before anything counts. Raises RuntimeError where one is answered wrongly, or not at all."""
        tally, self.tally = self.tally, Tally()
        self.burst(num_requests)
        await self.wait()
        first, self.tally = self.tally, tally
        if first.right + first.refused.total() != num_requests:
            raise RuntimeError(f"an undisturbed burst: {first}")

    async def wait(self) -> None:
        """Until all have their answers."""
        while self._asking:
            await asyncio.wait(self._asking)

    def _begin(self, may_leave: bool) -> None:
        task = asyncio.create_task(self._one(may_leave))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _one(self, may_leave: bool) -> None:
        number, tally = self._rng.randrange(len(self._questions)), self.tally
        question = self._questions[number]
        asking = asyncio.create_task(self._ask(question.body))
        leaves_after_s = self._rng.uniform(0, 2) if may_leave and self._rng.random() < LEAVES else None
        began_at = time.monotonic()
        done, _ = await asyncio.wait([asking], timeout=leaves_after_s)
        if not done:
            asking.cancel()
            await asyncio.wait([asking])
            tally.left += 1
            return
        try:
            answer = asking.result()
        except Refused as refusal:
            tally.refused[str(refusal)] += 1
        except aiohttp.ClientError as error:
            if any(killed_at >= began_at for killed_at in self.proxy_kills):
                tally.cut += 1
            else:
                tally.failed[f"{type(error).__name__}: {error}"[:100] + self._lately(began_at)] += 1
        except Failed as error:
            tally.failed[str(error)[:100]] += 1
        else:
            is_right = answer == question.answers
            tally.right += is_right
            tally.wrong += not is_right
            if not is_right and len(tally.differences) < MAX_DIFFERENCES:
                tally.differences.append({"body": number, **_difference(answer, question.answers)})

    def _lately(self, began_at: float) -> str:
        """What had been done last when a request that failed began, and what since."""
        done_at, last = next(
            ((at, what) for at, what in reversed(self.strikes) if at < began_at), (began_at, "nothing")
        )
        since = [what for at, what in self.strikes if at >= began_at]
        return f" (began {began_at - done_at:.2f} s after {last}; since: {', '.join(since) or 'nothing'})"

    async def _ask(self, body: dict[str, Any]) -> dict[int, list[int]]:
        """Token ids by choice. Raises Refused, Failed or aiohttp.ClientError."""
        tokens: dict[int, list[int]] = defaultdict(list)
        ends: Counter[int] = Counter()
        async with self._session.post(self._url, json=body) as answer:
            if answer.status != 200:
                code = f"{answer.status} {(await answer.json())['error']['code']}"
                if answer.status in REFUSALS and int(answer.headers.get("retry-after", "0")) > 0:
                    raise Refused(code)
                raise Failed(code)
            heard_at = time.monotonic()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                self.tally.longest_pause_s = max(self.tally.longest_pause_s, time.monotonic() - heard_at)
                heard_at = time.monotonic()
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise Failed(f"stream: {event['error']['code']}")
                for choice in event["choices"]:
                    tokens[choice["index"]] += choice.get("token_ids") or []
                    ends[choice["index"]] += choice["finish_reason"] is not None
        if set(ends.values()) != {1}:
            raise Failed(f"a stream ended with {sorted(ends.values())} terminal messages")
        return dict(tokens)


def _difference(answer: dict[int, list[int]], expected: dict[int, list[int]]) -> dict[str, Any]:
    """Of the first choice that differs: its index, how long both are, and the first place where they differ."""
    for index in sorted(answer.keys() | expected.keys()):
        got, wanted = answer.get(index, []), expected.get(index, [])
        if got != wanted:
            both = zip(got, wanted, strict=False)
            place = next((i for i, (a, b) in enumerate(both) if a != b), min(len(got), len(wanted)))
            told = got[place : place + 3], wanted[place : place + 3]
            return {"choice": index, "place": place, "lengths": [len(got), len(wanted)], "tokens": told}
    return {}
