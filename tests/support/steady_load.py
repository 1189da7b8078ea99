"""Clients that send requests without pause while a test disturbs the cluster, and check every answer."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx

from tests.support.cluster import MODEL, Cluster
from tests.support.sse import events_of

NUM_CLIENTS = 3
PAUSE_S = 0.1
"""Pause of a client between two requests; leaves CPU time to processes that start meanwhile."""
NUM_TOKENS = 48
TIMEOUT_S = 90
PROMPTS = [[7 * number + step for step in range(200 + 40 * number)] for number in range(6)]


class SteadyLoad:
    """NUM_CLIENTS clients with one request each; half of the requests stream.

    Must be constructed while the cluster is undisturbed, to record the expected answers. Answers that differ by a token
    are collected in `wrong`. A client whose connection closes before the answer begins (its proxy stops) reconnects
    once.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._numbers = itertools.count()
        self._stopping = threading.Event()
        self.num_correct = 0
        self.num_reconnected = 0
        self.wrong: list[str] = []
        with httpx.Client(timeout=TIMEOUT_S + 10) as client:
            self._expected = [self._ask(client, number) for number in range(len(PROMPTS))]
        assert all(isinstance(answer, list) for answer in self._expected), self._expected

    @contextmanager
    def running(self) -> Iterator[None]:
        self._stopping.clear()
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            working = [pool.submit(self._work) for _ in range(NUM_CLIENTS)]
            try:
                yield
            finally:
                self._stopping.set()
            for each in working:
                each.result(2 * TIMEOUT_S)
        assert not self.wrong, self.wrong

    def serve(self, count: int) -> None:
        """Waits until `count` more requests have been answered."""
        goal = self.num_correct + count
        self._cluster.wait_for(lambda: self.num_correct >= goal or bool(self.wrong), 2 * TIMEOUT_S)

    def _work(self) -> None:
        with httpx.Client(timeout=TIMEOUT_S + 10) as client:
            while not self._stopping.wait(PAUSE_S):
                number = next(self._numbers)
                answer = self._ask_with_reconnect(client, number)
                if answer == self._expected[number % len(PROMPTS)]:
                    self.num_correct += 1
                else:
                    self.wrong.append(f"request {number}: {answer}")

    def _ask_with_reconnect(self, client: httpx.Client, number: int) -> list[int] | str:
        try:
            return self._ask(client, number)
        except httpx.TransportError:
            self.num_reconnected += 1
        try:
            return self._ask(client, number)
        except httpx.TransportError as error:
            return repr(error)

    def _ask(self, client: httpx.Client, number: int) -> list[int] | str:
        """Token ids, or an error text. Raises TransportError when the connection fails before the answer begins."""
        body = {
            "model": MODEL, "prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": NUM_TOKENS, "ignore_eos": True,
            "temperature": 0, "return_token_ids": True, "stream": number % 2 == 0, "timeout": TIMEOUT_S,
            "cache_salt": str(number),  # no prefix is cached: each prompt is transferred
        }  # fmt: skip
        with client.stream("POST", f"{self._cluster.url}/v1/completions", json=body) as response:
            try:
                text = response.read().decode()
            except httpx.TransportError as error:
                return f"the answer ended early: {error!r}"
        if response.status_code != 200:
            return f"{response.status_code}: {text}"
        answers = list(events_of(text.splitlines())) or [json.loads(text)]
        if any("error" in answer for answer in answers):
            return text
        return [token_id for answer in answers for token_id in answer["choices"][0]["token_ids"]]
