"""Beams of `BeamSearch` against an exhaustive search, and requests with beams against played workers."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from dataclasses import replace
from typing import Any

import pytest

from tandem.protocol.messages.dispatch import FirstToken, StartPrefill
from tandem.protocol.messages.generation import SampledToken, TokenLogprobs
from tandem.protocol.messages.token_ids import unpack_token_ids
from tandem.proxy.admission.admission import Admission
from tandem.proxy.answers.completions import CompletionAnswers
from tandem.proxy.dispatch.beam_search import Beam, BeamSearch
from tandem.proxy.dispatch.generation import Generation
from tandem.runtime.errors import DeadlineExceeded, TandemError, WorkerLost
from tandem.telemetry.request_log import RequestRecord
from tests.support.proxy_cluster import EOS, PREFILL, Cluster, play, whole

NUM_TOKENS = 3
END = 0


def distribution(history: tuple[int, ...]) -> list[float]:
    """Returns the logprobs of the next token, which depend on the last two."""
    seed = sum(10**place * (token + 1) for place, token in enumerate(history[-2:]))
    weights = [1 + (seed * (token + 7)) % 11 for token in range(NUM_TOKENS)]
    return [math.log(weight / sum(weights)) for weight in weights]


def next_token(history: tuple[int, ...]) -> TokenLogprobs:
    logprobs = distribution(history)
    top = sorted(enumerate(logprobs), key=lambda pair: pair[1], reverse=True)
    return TokenLogprobs(top[0][1], 1, top)


def ids(beam: Beam) -> tuple[int, ...]:
    return tuple(token.token_id for token in beam.tokens)


def all_sequences(
    max_tokens: int, num_prompt_tokens: int, length_penalty: float
) -> list[tuple[float, tuple[int, ...]]]:
    """Returns (score, tokens) of every sequence that ends or has max_tokens tokens, the best first."""
    found = []
    for length in range(max_tokens + 1):
        for tokens in itertools.product(range(1, NUM_TOKENS), repeat=length):
            logprob = sum(distribution(tokens[:i])[token] for i, token in enumerate(tokens))
            if length < max_tokens:
                logprob += distribution(tokens)[END]
            found.append((logprob / (num_prompt_tokens + length) ** length_penalty, tokens))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_a_wide_search_finds_the_best_sequences(length_penalty: float) -> None:
    max_tokens = 4
    search = BeamSearch(64, max_tokens, frozenset({END}), length_penalty, num_prompt_tokens=5)
    while not search.is_over:
        search.advance([next_token(ids(beam)) for beam in search.running])
    best = search.best()
    expected = all_sequences(max_tokens, 5, length_penalty)
    assert {ids(beam) for beam in best} == {tokens for _, tokens in expected}
    scores = [beam.logprob / (5 + len(beam.tokens)) ** length_penalty for beam in best]
    assert scores == pytest.approx([score for score, _ in expected]), "the best first"
    assert {len(beam.tokens) < max_tokens for beam in best if beam.end is not None} == {True}


def test_beams_do_not_end_where_no_token_ends_them() -> None:
    search = BeamSearch(2, 3, frozenset(), 1.0, num_prompt_tokens=1)
    while not search.is_over:
        search.advance([next_token(ids(beam)) for beam in search.running])
    assert [len(beam.tokens) for beam in search.best()] == [3, 3]
    assert all(beam.end is None for beam in search.best())


def test_the_search_is_over_when_every_beam_has_ended() -> None:
    search = BeamSearch(2, 9, frozenset({1, 2}), 1.0, num_prompt_tokens=1)
    search.advance([TokenLogprobs(-0.5, 1, [(2, -0.5), (1, -1.0)])])
    assert search.is_over
    assert [beam.end.token_id for beam in search.best() if beam.end is not None] == [2, 1]


def test_a_search_keeps_no_more_than_its_answer_needs() -> None:
    """Otherwise one beam that ends in each step of each beam, and the candidates of each token, take gigabytes."""
    search = BeamSearch(4, 300, frozenset({END}), 1.0, num_prompt_tokens=1, num_top=1)
    while not search.is_over:
        search.advance([next_token(ids(beam)) for beam in search.running])
        assert len(search._finished) <= 4
    tokens = [token for beam in [*search.running, *search._finished] for token in (*beam.tokens, beam.end) if token]
    assert {len(token.logprobs.top) for token in tokens if token.logprobs is not None} == {1}


class KeepingAll(BeamSearch):
    def _best_of(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=self._score, reverse=True)


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0])
def test_forgotten_beams_would_not_have_been_among_the_best(width: int, length_penalty: float) -> None:
    searches = [kind(width, 6, frozenset({END}), length_penalty, 2) for kind in (BeamSearch, KeepingAll)]
    for search in searches:
        while not search.is_over:
            search.advance([next_token(ids(beam)) for beam in search.running])
    found, expected = (search.best() for search in searches)
    assert found == expected[:width] and len(expected) > width


# ---- requests


def answers(cluster: Cluster, **fields: Any) -> tuple[Generation, CompletionAnswers]:
    body = json.dumps({"prompt": "ab", "use_beam_search": True, "n": 2, "max_tokens": 3, **fields}).encode()
    request = cluster.reader.read(body, "completion", cluster.worker_table.limits())
    made = Generation(cluster.services, request, RequestRecord("r", "completion"))
    return made, CompletionAnswers(made, "m")


async def step(cluster: Cluster, num_before: int, tops: list[list[tuple[int, float]]]) -> None:
    """Answers the next prompts, one for each beam."""
    while len(starts := [m for _, m in cluster.pool.of(StartPrefill)]) < num_before + len(tops):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    for start, top in zip(starts[num_before:], tops, strict=True):
        assert start.decode_worker_id is None and start.sampling.logprobs == 4
        [attempt_id] = start.attempt_ids
        token = SampledToken(top[0][0], TokenLogprobs(top[0][1], 1, top))
        cluster.dispatcher.on_message(PREFILL, FirstToken(attempt_id, token, "length", 0.1, 0.2))


def test_a_request_gets_its_best_beams() -> None:
    async def test(cluster: Cluster) -> None:
        x, y = cluster.text.ids("xy")
        made, completion = answers(cluster, logprobs=1, return_token_ids=True, echo=False)
        task = asyncio.create_task(whole(completion))
        await step(cluster, 0, [[(x, -0.5), (y, -1.0)]])
        await step(cluster, 1, [[(EOS, -0.1), (x, -3.0)], [(y, -0.2), (x, -4.0)]])
        await step(cluster, 3, [[(x, -0.1), (y, -5.0)], [(x, -9.0), (y, -9.5)]])
        body = json.loads(await task)
        prompts = [unpack_token_ids(m.token_ids) for _, m in cluster.pool.of(StartPrefill)]
        assert [prompt[2:] for prompt in prompts] == [[], [x], [y], [y, y], [x, x]]
        assert [choice["text"] for choice in body["choices"]] == ["x", "yyx"]
        assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
        assert [choice["token_ids"] for choice in body["choices"]] == [[x], [y, y, x]]
        assert body["choices"][1]["logprobs"]["token_logprobs"] == [-1.0, -0.2, -0.1]
        assert body["usage"]["completion_tokens"] == 4
        assert cluster.dispatcher.num_running == 0 and made.record.outcome == "length"

    play(test)


@pytest.mark.parametrize("error", [WorkerLost("gone"), DeadlineExceeded("late")], ids=lambda error: error.code)
def test_a_failed_beam_fails_the_request(error: TandemError) -> None:
    async def test(cluster: Cluster) -> None:
        x, y = cluster.text.ids("xy")
        _, completion = answers(cluster)
        task = asyncio.create_task(whole(completion))
        await step(cluster, 0, [[(x, -0.5), (y, -1.0)]])
        while cluster.dispatcher.num_running != 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        cluster.dispatcher.fail_all(error)
        with pytest.raises(type(error)):
            await task
        assert cluster.dispatcher.num_running == 0

    play(test)


def test_many_beams_are_started_between_turns_of_the_loop() -> None:
    async def test(cluster: Cluster) -> None:
        services = replace(cluster.services, admission=Admission(100, time.monotonic))
        body = json.dumps({"prompt": ["ab"] * 100, "use_beam_search": True}).encode()
        request = cluster.reader.read(body, "completion", cluster.worker_table.limits())
        generation = Generation(services, request, RequestRecord("r", "completion"))
        task = asyncio.create_task(whole(CompletionAnswers(generation, "m")))
        counts = [0]
        while counts[-1] < 100:
            await asyncio.sleep(0)
            counts.append(len(cluster.pool.of(StartPrefill)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert max(after - before for before, after in itertools.pairwise(counts)) <= 16

    play(test)
