"""One HTTP request for generation, from rendering to the last piece of text; streamed and whole answers share it.

`Generation.deltas` is the path of docs/request_journey.md as the proxy sees it: render, admit, dispatch, detokenise,
watch for stop strings. Closing the generator at any point aborts whatever is under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from protocol.errors import RequestAborted, TandemError
from protocol.generation import FinishReason, SamplingParams, StopConditions
from proxy.admission import Admission
from proxy.detokenizer import Detokenizer
from proxy.dispatcher import DispatchedSequence, Dispatcher, Prompt
from proxy.model_text import ModelText
from proxy.registry import Registry
from proxy.rendering import Renderer
from proxy.stop_strings import StopStrings
from proxy.validation import GenerationRequest
from telemetry.metrics import ProxyMetrics, SequenceTimer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of one sequence. index: prompt index * n + which of the n. text may be empty while it is held back."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """What every request shares."""

    text: ModelText
    renderer: Renderer
    registry: Registry
    admission: Admission
    dispatcher: Dispatcher
    metrics: ProxyMetrics
    request_timeout_s: float


@dataclass(frozen=True, slots=True)
class _PlannedPrompt:
    """A prompt and how each of the sequences that go on from it is sampled; they differ in their seeds."""

    prompt: Prompt
    samplings: list[SamplingParams]
    stop: StopConditions


class Generation:
    """`num_prompt_tokens` is right from the first delta on, `num_completion_tokens` counts the deltas seen so far."""

    def __init__(self, door: FrontDoor, request: GenerationRequest) -> None:
        self._door = door
        self._request = request
        self._arrived_at = time.monotonic()
        self.created = int(time.time())
        self.num_sequences = 0
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """All sequences' pieces as they come; each ends with one that has a finish_reason. Raises TandemError."""
        outcome = "aborted"  # what it stays when the generator is closed or cancelled
        try:
            planned = await self._plan()
            self.num_sequences = sum(len(p.samplings) for p in planned)
            async with aclosing(self._run(planned)) as deltas:
                async for delta in deltas:
                    self.num_completion_tokens += len(delta.token_ids)
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

    async def _plan(self) -> list[_PlannedPrompt]:
        request, door = self._request, self._door
        limits = door.registry.limits()
        door.admission.check(request.n)  # before the work of tokenising
        try:
            async with asyncio.timeout(self._seconds_left()):
                prompts = await door.renderer.render(request.prompt, limits)
        except TimeoutError:
            raise RequestAborted("the prompt was not tokenised in time") from None
        self.num_prompt_tokens = sum(prompt.num_tokens for prompt in prompts)
        return [
            _PlannedPrompt(
                prompt,
                [request.sampling(i) for i in range(request.n)],
                request.stop_conditions(prompt.num_tokens, limits, door.text.eos_token_ids),
            )
            for prompt in prompts
        ]

    async def _run(self, planned: list[_PlannedPrompt]) -> AsyncGenerator[TextDelta, None]:
        dispatcher = self._door.dispatcher
        self._door.admission.admit(self.num_sequences)
        # Each sequence leaves at its first token; whatever has not, leaves when the request ends.
        waiting = set(range(self.num_sequences))
        sequences: list[DispatchedSequence] = []
        try:
            for p in planned:
                sequences += dispatcher.start(p.prompt, p.samplings, p.stop, self._seconds_left())
            streams = [self._sequence(index, sequence) for index, sequence in enumerate(sequences)]
            async with aclosing(merge(streams) if len(streams) > 1 else streams[0]) as deltas:
                async for delta in deltas:
                    if delta.index in waiting:
                        waiting.remove(delta.index)
                        self._door.admission.leave()
                    yield delta
        finally:
            for sequence in sequences:
                dispatcher.drop(sequence)
            self._door.admission.leave(len(waiting))

    async def _sequence(self, index: int, sequence: DispatchedSequence) -> AsyncGenerator[TextDelta, None]:
        door = self._door
        detokenizer = Detokenizer(door.text.tokenizer, sequence.prompt.token_ids)
        stop_strings = StopStrings(self._request.stop)
        timer = SequenceTimer(door.metrics, self._arrived_at)
        tokens = door.dispatcher.tokens(sequence)
        async with aclosing(tokens):
            async for delta in tokens:
                token_ids = [token.token_id for token in delta.tokens]
                timer.on_tokens(time.monotonic(), len(token_ids))
                finish_reason = delta.finish_reason
                pieces: list[str] = []
                # A stop token ends the text without being part of it, but was generated and counts.
                num_shown = len(token_ids) - (finish_reason == "stop")
                for number, token_id in enumerate(token_ids[:num_shown], start=1):
                    piece, stopped = stop_strings.push(detokenizer.step(token_id))
                    pieces.append(piece)
                    if stopped:
                        yield TextDelta(index, "".join(pieces), token_ids[:number], "stop")
                        timer.on_finished()
                        return
                if finish_reason is not None:
                    piece, stopped = stop_strings.push(detokenizer.flush())
                    pieces += (piece, "" if stopped else stop_strings.flush())
                    if stopped:
                        finish_reason = "stop"
                    timer.on_finished()
                yield TextDelta(index, "".join(pieces), token_ids, finish_reason)

    def _seconds_left(self) -> float:
        return max(0.001, self._door.request_timeout_s - (time.monotonic() - self._arrived_at))


async def merge(streams: list[AsyncGenerator[TextDelta, None]]) -> AsyncGenerator[TextDelta, None]:
    """What any of them yields, as it comes. The first error ends all; so does closing."""
    queue: asyncio.Queue[TextDelta | BaseException | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[TextDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    queue.put_nowait(delta)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

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
