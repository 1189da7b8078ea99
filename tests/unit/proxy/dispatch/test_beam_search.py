"""Beams of `BeamSearch` against an exhaustive search, and requests with beams against played workers."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tandem.protocol.messages.dispatch import FirstToken, StartPrefill
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.messages.packed import unpack_token_ids
from tandem.protocol.messages.sampling import SampledToken, TokenLogprobs
from tandem.proxy.admission.admission import Admission
from tandem.proxy.answers.completions import CompletionAnswers
from tandem.proxy.dispatch.beam_search import Beam, BeamSearch, check_search_size
from tandem.proxy.dispatch.dispatcher import Dispatcher
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.dispatch.sequence import DispatchedSequence, TokenDelta
from tandem.proxy.proxy_settings import AdmissionSettings
from tandem.runtime.errors import DeadlineExceeded, InvalidRequest, TandemError, WorkerLost
from tandem.telemetry.request_log import RequestRecord
from tests.support.proxy_cluster import DECODE, EOS, PREFILL, Cluster, play, played, turn, whole

OTHER_PREFILLS = [WorkerInfo(f"prefill-{number}", f"e{number}", "prefill", "ipc://", number) for number in (3, 4)]
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


def advance(search: BeamSearch, next_tokens: list[TokenLogprobs]) -> None:
    for given in next_tokens:
        search.add(given)
    search.advance()


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
        advance(search, [next_token(ids(beam)) for beam in search.running])
    best = search.best()
    expected = all_sequences(max_tokens, 5, length_penalty)
    assert {ids(beam) for beam in best} == {tokens for _, tokens in expected}
    scores = [beam.logprob / (5 + len(beam.tokens)) ** length_penalty for beam in best]
    assert scores == pytest.approx([score for score, _ in expected]), "the best first"
    assert {len(beam.tokens) < max_tokens for beam in best if beam.end is not None} == {True}


def test_beams_do_not_end_where_no_token_ends_them() -> None:
    search = BeamSearch(2, 3, frozenset(), 1.0, num_prompt_tokens=1)
    while not search.is_over:
        advance(search, [next_token(ids(beam)) for beam in search.running])
    assert [len(beam.tokens) for beam in search.best()] == [3, 3]
    assert all(beam.end is None for beam in search.best())


def test_the_search_is_over_when_every_beam_has_ended() -> None:
    search = BeamSearch(2, 9, frozenset({1, 2}), 1.0, num_prompt_tokens=1)
    advance(search, [TokenLogprobs(-0.5, 1, [(2, -0.5), (1, -1.0)])])
    assert search.is_over
    assert [beam.end.token_id for beam in search.best() if beam.end is not None] == [2, 1]


def test_a_search_keeps_no_more_than_its_answer_needs() -> None:
    """Otherwise one beam that ends in each step of each beam, and the candidates of each token, take gigabytes."""
    search = BeamSearch(4, 300, frozenset({END}), 1.0, num_prompt_tokens=1, num_top=1)
    while not search.is_over:
        advance(search, [next_token(ids(beam)) for beam in search.running])
        assert len(search._finished) <= 4
    beams = [*search.running, *(beam for _, _, beam in search._finished)]
    tokens = [token for beam in beams for token in (*beam.tokens, beam.end) if token]
    assert {len(token.logprobs.top) for token in tokens if token.logprobs is not None} == {1}


class Naive:
    """Keeps every candidate of every step: tokens, log-probability, and the token that ended it."""

    def __init__(self, width: int, max_tokens: int, length_penalty: float, num_prompt_tokens: int) -> None:
        self.width, self.max_tokens = width, max_tokens
        self.length_penalty, self.num_prompt_tokens = length_penalty, num_prompt_tokens
        self.running: list[tuple[tuple[int, ...], float, int | None]] = [((), 0.0, None)]
        self.finished: list[tuple[tuple[int, ...], float, int | None]] = []

    def run(self) -> list[tuple[tuple[int, ...], float, int | None]]:
        while self.running and len(self.running[0][0]) < self.max_tokens:
            extended: list[tuple[tuple[int, ...], float, int | None]] = []
            for tokens, logprob, _ in self.running:
                for token_id, more in next_token(tokens).top[: 2 * self.width]:
                    if token_id == END:
                        self.finished.append((tokens, logprob + more, token_id))
                    else:
                        extended.append(((*tokens, token_id), logprob + more, None))
            extended.sort(key=lambda beam: beam[1], reverse=True)
            self.running = extended[: self.width]
        return sorted([*self.finished, *self.running], key=self.score, reverse=True)

    def score(self, beam: tuple[tuple[int, ...], float, int | None]) -> float:
        return beam[1] / float(self.num_prompt_tokens + len(beam[0])) ** self.length_penalty


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0])
def test_forgotten_beams_would_not_have_been_among_the_best(width: int, length_penalty: float) -> None:
    search = BeamSearch(width, 6, frozenset({END}), length_penalty, 2)
    while not search.is_over:
        advance(search, [next_token(ids(beam)) for beam in search.running])
    expected = Naive(width, 6, length_penalty, 2).run()
    found = [(ids(beam), beam.logprob, beam.end.token_id if beam.end else None) for beam in search.best()]
    assert found == expected[:width] and len(expected) > width


def test_the_packed_tokens_are_those_of_the_running_beams() -> None:
    search = BeamSearch(3, 9, frozenset({END}), 1.0, 2)
    while not search.is_over:
        advance(search, [next_token(ids(beam)) for beam in search.running])
        assert [tuple(unpack_token_ids(packed)) for packed in search.token_ids] == [ids(b) for b in search.running]


def test_a_step_of_a_wide_search_costs_the_same_however_long_its_beams_are() -> None:
    """It creates `width` beams and no copies of their tokens; between two `add`s the event loop may run."""
    width = 128
    top = [(token_id, -0.01 * token_id) for token_id in range(1, 2 * width + 1)]
    given, costs = TokenLogprobs(top[0][1], 1, top), []
    for length in (10, 4000):
        search = BeamSearch(width, 100_000, frozenset({END}), 1.0, 10)
        while search.running[0].length < length:
            advance(search, [TokenLogprobs(-0.1, 1, [(1, -0.1)])])
        advance(search, [given])
        for _ in range(3):
            begun = time.thread_time()
            advance(search, [given] * len(search.running))
            costs.append(time.thread_time() - begun)
        tracemalloc.start()
        try:
            advance(search, [given] * len(search.running))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 4 << 20, "1 GB when each candidate had a copy of its beam's tokens"
    short_s, long_s = min(costs[:3]), min(costs[3:])
    assert short_s < 0.2 and long_s < 3 * short_s, "3.1 s with the copies"


@pytest.mark.parametrize(("sizes", "word"), [([(10, 2**11 + 1)], "generate"), ([(2**15, 1)], "prompts")])
def test_a_search_that_is_too_large_is_refused(sizes: list[tuple[int, int]], word: str) -> None:
    check_search_size(128, [(10, 2**10), (10, 2**10)])
    with pytest.raises(InvalidRequest, match=f"{word}.*smaller n"):
        check_search_size(128, sizes)


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
        assert start.decode_worker_id is None and start.sampling.logprobs == max(4, len(top))
        [attempt_id] = start.attempt_ids
        token = SampledToken(top[0][0], TokenLogprobs(top[0][1], 1, top))
        cluster.dispatcher.on_message(PREFILL, FirstToken(attempt_id, token, "length", 0.1, 0.2))


@played()
async def test_a_request_gets_its_best_beams(cluster: Cluster) -> None:
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


@played(workers=())
async def test_all_steps_of_an_exact_search_are_computed_alike(cluster: Cluster) -> None:
    x, y = cluster.text.ids("xy")
    cluster.join(PREFILL, DECODE, numerics=Numerics(instruction_set="avx512"))
    task = asyncio.create_task(whole(answers(cluster)[1]))
    await step(cluster, 0, [[(x, -0.5), (y, -1.0)]])
    await turn()
    cluster.join(*OTHER_PREFILLS, numerics=Numerics(instruction_set="avx2"))
    await step(cluster, 1, [[(x, -0.1), (y, -3.0)], [(y, -0.2), (x, -4.0)]])
    await step(cluster, 3, [[(x, -0.1), (y, -5.0)], [(x, -9.0), (y, -9.5)]])
    await task
    assert {worker_id for worker_id, _ in cluster.pool.of(StartPrefill)} == {PREFILL.worker_id}


@played()
async def test_the_beams_of_several_prompts_are_numbered_as_openai_does(cluster: Cluster) -> None:
    x, y, z = cluster.text.ids("xyz")
    _, completion = answers(cluster, prompt=["ab", "cd", "ef"], max_tokens=1)
    task = asyncio.create_task(whole(completion))
    await step(cluster, 0, [[(x, -0.5), (y, -1.0)], [(y, -0.5), (z, -1.0)], [(z, -0.5), (x, -1.0)]])
    choices = json.loads(await task)["choices"]
    assert [(each["index"], each["text"]) for each in choices] == list(enumerate("xyyzzx"))


@pytest.mark.parametrize("error", [WorkerLost("gone"), DeadlineExceeded("late")], ids=lambda error: error.code)
@played()
async def test_a_failed_beam_fails_the_request(cluster: Cluster, error: TandemError) -> None:
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


@played()
async def test_many_beams_are_started_between_turns_of_the_loop(cluster: Cluster) -> None:
    services = replace(cluster.services, admission=Admission(AdmissionSettings(100), time.monotonic))
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


def test_the_loop_runs_while_the_tokens_of_the_widest_search_are_taken_and_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The 32,768 candidates of a step were compared in one turn of the loop, which took seconds."""
    width, turns = 128, 0
    added_in_turn: Counter[int] = Counter()
    taken_in_turn: Counter[int] = Counter()
    add, take = BeamSearch.add, Dispatcher.take

    def take_counted(dispatcher: Dispatcher, sequence: DispatchedSequence) -> TokenDelta | None:
        taken_in_turn[turns] += 1
        return take(dispatcher, sequence)

    def counted(search: BeamSearch, given: TokenLogprobs) -> None:
        added_in_turn[turns] += 1
        add(search, given)

    monkeypatch.setattr(BeamSearch, "add", counted)
    monkeypatch.setattr(Dispatcher, "take", take_counted)

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def test(cluster: Cluster) -> None:
        cluster.services = replace(cluster.services, admission=Admission(AdmissionSettings(width), time.monotonic))
        _, completion = answers(cluster, n=width, max_tokens=2)
        counting, task = asyncio.create_task(count_turns()), asyncio.create_task(whole(completion))
        top = [(token_id, -0.01 * token_id) for token_id in range(1, 2 * width + 1)]
        await step(cluster, 0, [top])
        await step(cluster, 1, [top] * width)
        assert len(json.loads(await task)["choices"]) == width
        counting.cancel()

    play(test)
    assert added_in_turn.total() == 1 + width and max(added_in_turn.values()) <= 16
    assert taken_in_turn.total() >= 1 + width and max(taken_in_turn.values()) <= 16
