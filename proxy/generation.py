"""One HTTP request for generation, from rendering to the last piece of text; streamed and whole answers share it.

`Generation.deltas` is the path of docs/request_journey.md as the proxy sees it: render, admit, dispatch, detokenise,
watch for stop strings. Closing the generator at any point aborts whatever is under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from dataclasses import dataclass, replace

from protocol.errors import TandemError
from protocol.generation import FinishReason, SampledToken, SamplingParams, StopConditions, TokenLogprobs
from protocol.token_ids import unpack_token_ids
from proxy.admission import Admission
from proxy.detokenizer import Detokenizer
from proxy.dispatcher import DispatchedSequence, Dispatcher, Prompt, TokenDelta
from proxy.model_text import ModelText
from proxy.reader_pool import ReaderPool
from proxy.registry import Registry
from proxy.rendering import RenderedPrompts
from proxy.request_body import RequestBodies
from proxy.scrapes import Scrapes
from proxy.stop_strings import StopStrings
from proxy.token_text import TokenText
from proxy.turns import Turns
from proxy.validation import GenerationRequest
from telemetry.metrics import ProxyMetrics, SequenceTimer

TOKENS_PER_TURN = 64
"""Detokenised in one go; about half a millisecond."""


@dataclass(frozen=True, slots=True)
class ToldPrompt:
    """logprobs: of all tokens but the first; empty where they were not asked for."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of one sequence. index: prompt index * n + which of the n. text may be empty while it is held back.

    num_shown: of the tokens, those that are part of the text; a stop token is not. prompt: on the first piece, when the
    client wants to see it; an echoed one is part of the text already.
    """

    index: int
    text: str
    tokens: list[SampledToken]
    num_shown: int
    finish_reason: FinishReason | None
    prompt: ToldPrompt | None = None


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """What every request shares."""

    text: ModelText
    token_text: TokenText
    bodies: RequestBodies
    readers: ReaderPool
    registry: Registry
    admission: Admission
    dispatcher: Dispatcher
    metrics: ProxyMetrics
    scrapes: Scrapes
    turns: Turns
    request_timeout_s: float


@dataclass(frozen=True, slots=True)
class _PlannedPrompt:
    """A prompt and how each of the sequences that go on from it is sampled; they differ in their seeds."""

    prompt: Prompt
    samplings: list[SamplingParams]
    stop: StopConditions


class Generation:
    """`num_prompt_tokens` is right from the first delta on, `num_completion_tokens` counts the deltas seen so far."""

    def __init__(self, door: FrontDoor, request: GenerationRequest, arrived_at: float, client: str = "") -> None:
        """arrived_at: on the monotonic clock. client: whose limits it counts towards.

        request: as `ReaderPool.read` gives it, its prompts tokenised.
        """
        self.token_text = door.token_text
        self._door = door
        self._request = request
        self._arrived_at = arrived_at
        self._client = client
        self.created = int(time.time())
        self.num_sequences = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_completion_tokens = 0

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """All sequences' pieces as they come; each ends with one that has a finish_reason. Raises TandemError."""
        outcome = "aborted"  # what it stays when the generator is closed or cancelled
        try:
            planned = self._plan()
            self.num_sequences = sum(len(p.samplings) for p in planned)
            async with aclosing(self._run(planned)) as deltas:
                async for delta in deltas:
                    self.num_completion_tokens += len(delta.tokens)
                    yield delta
                    outcome_if_last = delta.finish_reason
            assert outcome_if_last is not None
            outcome = outcome_if_last
        except TandemError as error:
            outcome = error.code
            raise
        except Exception:
            outcome = "internal_error"
            raise
        finally:
            self._door.metrics.requests.labels(outcome).inc()

    def _plan(self) -> list[_PlannedPrompt]:
        request, door = self._request, self._door
        limits = door.registry.limits()
        request.check_vocabulary(limits)
        assert isinstance(request.prompt, RenderedPrompts)
        prompts = request.prompt.prompts
        self.num_prompt_tokens = sum(prompt.num_tokens for prompt in prompts)
        return [
            _PlannedPrompt(
                replace(prompt, num_prompt_logprobs=request.num_prompt_logprobs, cache_salt=request.cache_salt),
                request.samplings(),
                request.stop_conditions(prompt.num_tokens, limits, door.text.eos_token_ids),
            )
            for prompt in prompts
        ]

    async def _run(self, planned: list[_PlannedPrompt]) -> AsyncGenerator[TextDelta, None]:
        dispatcher = self._door.dispatcher
        # A prompt is computed once, whatever goes on from it: its first sequence waits for it.
        prompt_tokens = [0 if i else p.prompt.num_tokens for p in planned for i in range(len(p.samplings))]
        ticket = self._door.admission.admit(self._client, prompt_tokens)
        sequences: list[DispatchedSequence] = []
        try:
            for p in planned:
                sequences += dispatcher.start(p.prompt, p.samplings, p.stop, self._seconds_left())
            streams = [self._sequence(index, sequence) for index, sequence in enumerate(sequences)]
            async with aclosing(merge(streams) if len(streams) > 1 else streams[0]) as deltas:
                async for delta in deltas:
                    ticket.on_first_token(delta.index)
                    yield delta
        finally:
            for sequence in sequences:
                dispatcher.drop(sequence)
            ticket.close()

    async def _sequence(self, index: int, sequence: DispatchedSequence) -> AsyncGenerator[TextDelta, None]:
        door, request = self._door, self._request
        detokenizer = Detokenizer(door.text.tokenizer, sequence.prompt.token_ids, request.skip_special_tokens)
        stop_strings = StopStrings(request.stop, request.include_stop_string)
        timer = SequenceTimer(door.metrics, self._arrived_at)
        tokens = door.dispatcher.tokens(sequence)
        is_first = True
        with closing(timer):
            async with aclosing(tokens):
                async for delta in tokens:
                    await door.turns.take()
                    if request.is_prompt_only:  # workers generate one token at least; nobody asked for this one
                        delta = replace(delta, tokens=[], finish_reason="length")
                    timer.on_tokens(time.monotonic(), len(delta.tokens))
                    pieces: list[str] = []
                    prompt: ToldPrompt | None = None
                    if is_first:
                        is_first = False
                        prompt = await self._on_first(index, sequence, delta, pieces)
                    finish_reason = delta.finish_reason
                    # A stop token ends the text without being part of it, but was generated and counts.
                    num_shown = len(delta.tokens) - (finish_reason == "stop")
                    for number, token in enumerate(delta.tokens[:num_shown], start=1):
                        if number % TOKENS_PER_TURN == 0:  # many come at once after a pause, to a slow reader above all
                            await door.turns.take()
                        piece, stopped = stop_strings.push(detokenizer.step(token.token_id))
                        pieces.append(piece)
                        if stopped:
                            yield TextDelta(index, "".join(pieces), delta.tokens[:number], number, "stop", prompt)
                            timer.on_finished()
                            return
                    if finish_reason is not None:
                        piece, stopped = stop_strings.push(detokenizer.flush())
                        pieces += (piece, "" if stopped else stop_strings.flush())
                        if stopped:
                            finish_reason = "stop"
                        timer.on_finished()
                    yield TextDelta(index, "".join(pieces), delta.tokens, num_shown, finish_reason, prompt)

    async def _on_first(
        self, index: int, sequence: DispatchedSequence, delta: TokenDelta, pieces: list[str]
    ) -> ToldPrompt | None:
        """What is known of the prompt now; an echo of it begins the text."""
        request = self._request
        if index % request.n == 0:
            self.num_cached_tokens += delta.num_cached_tokens
        if not request.echo and request.num_prompt_logprobs is None:
            return None
        token_ids = unpack_token_ids(sequence.prompt.token_ids)
        if request.echo:
            pieces.append(await self._door.readers.text_of(token_ids))
        return ToldPrompt(token_ids, delta.prompt_logprobs or [])

    def _seconds_left(self) -> float:
        return max(0.001, self._door.request_timeout_s - (time.monotonic() - self._arrived_at))


async def merge(streams: list[AsyncGenerator[TextDelta, None]]) -> AsyncGenerator[TextDelta, None]:
    """What any of them yields, as it comes. The first error ends all; so does closing."""
    # Bounded: where the reader is slow each stream waits with one delta, and its tokens go on gathering in the request.
    queue: asyncio.Queue[TextDelta | BaseException | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: AsyncGenerator[TextDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    await queue.put(delta)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    num_open = len(tasks)
    try:
        while num_open:
            match await queue.get():
                case None:
                    num_open -= 1
                case TextDelta() as delta:
                    yield delta
                case error:
                    raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
