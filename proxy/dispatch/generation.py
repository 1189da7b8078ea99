"""One HTTP request for generation, from rendering to the last piece of text; streamed and whole answers share it.

`Generation.deltas` is the path of docs/request_journey.md as the proxy sees it: render, admit, dispatch, detokenise,
watch for stop strings. Closing the generator at any point aborts whatever is under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

import msgspec

from tandem.protocol.messages.generation import (
    FinishReason,
    SampledToken,
    SamplingParams,
    StopConditions,
    TokenLogprobs,
)
from tandem.protocol.messages.token_ids import unpack_token_ids
from tandem.proxy.admission.admission import Admission, Ticket
from tandem.proxy.admission.rejections import rejection_reason
from tandem.proxy.api.validation import GenerationRequest
from tandem.proxy.cluster.registry import Registry
from tandem.proxy.cluster.router import NoWorkerReady
from tandem.proxy.dispatch.dispatcher import Dispatcher
from tandem.proxy.dispatch.sequence import DispatchedSequence, TokenDelta
from tandem.proxy.reading.reader_pool import ReaderPool
from tandem.proxy.text.detokenizer import Detokenizer
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.prompt import Prompt
from tandem.proxy.text.rendering import RenderedPrompts
from tandem.proxy.text.stop_strings import StopStrings
from tandem.proxy.text.token_text import TokenText
from tandem.runtime.errors import TandemError
from tandem.telemetry.metrics import ProxyMetrics, SequenceTimer
from tandem.telemetry.request_log import RequestLog, RequestRecord

TOKENS_PER_TURN = 64
"""Detokenised in one go; about half a millisecond."""


class ToldPrompt(msgspec.Struct, frozen=True):
    """logprobs: of all tokens but the first; empty where they were not asked for."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]


class TextDelta(msgspec.Struct, frozen=True):
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
class GenerationServices:
    """What every `Generation` of a proxy uses.

    ttft_slo_s: requests whose first token is predicted later are refused; None refuses none.
    """

    text: ModelText
    token_text: TokenText
    readers: ReaderPool
    registry: Registry
    admission: Admission
    dispatcher: Dispatcher
    metrics: ProxyMetrics
    requests: RequestLog
    request_timeout_s: float
    ttft_slo_s: float | None


@dataclass(frozen=True, slots=True)
class _PlannedPrompt:
    """A prompt and how each of the sequences that go on from it is sampled; they differ in their seeds."""

    prompt: Prompt
    samplings: list[SamplingParams]
    stop: StopConditions


class Generation:
    """`num_prompt_tokens` is right from the first delta on, `num_completion_tokens` counts the deltas seen so far."""

    def __init__(
        self,
        services: GenerationServices,
        request: GenerationRequest,
        record: RequestRecord,
        client: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """record: ended here. client: whose limits it counts towards.

        request: as `ReaderPool.read` gives it, its prompts tokenised. timeout_s: from arrival; None is as long as the
        server and the request allow.
        """
        limits_s = (services.request_timeout_s, timeout_s, request.timeout_s)
        self._timeout_s = min(limit_s for limit_s in limits_s if limit_s is not None)
        self.token_text = services.token_text
        self._services = services
        self._request = request
        self._record = record
        self._arrived_at = record.arrived_at
        self._client = client
        self.created = int(time.time())
        self.num_sequences = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_completion_tokens = 0

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """All sequences' pieces as they come; each ends with one that has a finish_reason. Raises TandemError."""
        services = self._services
        outcome, is_refused = "aborted", False  # what it stays when the generator is closed or cancelled
        sequences: list[DispatchedSequence] = []
        texts: list[_SequenceText] = []
        ticket: Ticket | None = None
        merged: _Merged | None = None

        def on_displaced(error: TandemError) -> None:
            for sequence in sequences:
                sequence.fail(error)

        try:
            planned = self._plan()
            # A prompt is computed once, whatever goes on from it: its first sequence waits for it.
            prompt_tokens = [0 if i else p.prompt.num_tokens for p in planned for i in range(len(p.samplings))]
            self.num_sequences = num_open = len(prompt_tokens)
            ticket = services.admission.admit(self._client, prompt_tokens, self._request.priority, on_displaced)
            for p in planned:
                sequences += services.dispatcher.start(
                    p.prompt, p.samplings, p.stop, self._seconds_left(), self._first_token_within_s()
                )
            for index, sequence in enumerate(sequences):
                texts.append(_SequenceText(self, index, sequence, ticket))
            if len(texts) > 1:
                merged = _Merged(texts)
            next_delta = merged.next_delta if merged is not None else texts[0].next_delta
            # Every token comes through here: few awaits deep, and no generator within the generator.
            while num_open:
                delta = await next_delta()
                self.num_completion_tokens += len(delta.tokens)
                num_open -= delta.finish_reason is not None
                yield delta
            assert delta.finish_reason is not None
            outcome = delta.finish_reason
        except TandemError as error:
            outcome = error.code
            if (reason := rejection_reason(error)) is not None:
                is_refused = self.num_completion_tokens == 0 and not isinstance(error, NoWorkerReady)
                services.metrics.rejected.labels(reason).inc()
            raise
        except Exception:
            outcome = "internal_error"
            raise
        finally:
            if merged is not None:
                await merged.close()
            for text in texts:
                text.timer.close()
            for sequence in sequences:
                services.dispatcher.drop(sequence)
            if ticket is not None:
                ticket.close()
            if self._request.media_lease is not None:
                self._request.media_lease.release()
            services.metrics.requests.labels(outcome).inc()
            self._record.num_prompt_tokens = self.num_prompt_tokens
            self._record.num_cached_tokens = self.num_cached_tokens
            self._record.num_completion_tokens = self.num_completion_tokens
            services.requests.end(self._record, outcome, is_refused)

    def _plan(self) -> list[_PlannedPrompt]:
        request, services = self._request, self._services
        limits = services.registry.limits()
        request.check_vocabulary(limits)
        assert isinstance(request.prompt, RenderedPrompts)
        prompts = request.prompt.prompts
        self.num_prompt_tokens = self._record.num_prompt_tokens = sum(prompt.num_tokens for prompt in prompts)
        return [
            _PlannedPrompt(
                replace(
                    prompt,
                    num_prompt_logprobs=request.num_prompt_logprobs,
                    cache_salt=request.cache_salt,
                    priority=request.priority,
                ),
                request.samplings(),
                request.stop_conditions(prompt.num_tokens, limits, services.text.eos_token_ids),
            )
            for prompt in prompts
        ]

    def _first_token_within_s(self) -> float | None:
        slo_s = self._services.ttft_slo_s
        return None if slo_s is None else slo_s - (time.monotonic() - self._arrived_at)

    def _seconds_left(self) -> float:
        return max(0.001, self._timeout_s - (time.monotonic() - self._arrived_at))


class _SequenceText:
    """One sequence from tokens to text."""

    def __init__(self, generation: Generation, index: int, sequence: DispatchedSequence, ticket: Ticket) -> None:
        services, request = generation._services, generation._request
        self._generation = generation
        self._services = services
        self._request = request
        self._index = index
        self._sequence = sequence
        self._ticket = ticket
        self._detokenizer = Detokenizer(services.text.tokenizer, sequence.prompt.token_ids, request.skip_special_tokens)
        self._stop_strings = StopStrings(request.stop, request.include_stop_string)
        self._has_begun = False
        self.timer = SequenceTimer(services.metrics, generation._arrived_at, sequence.times)
        generation._record.sequences.append(self.timer)

    async def next_delta(self) -> TextDelta:
        """What the tokens that have come since the last call add to the text."""
        delta = await self._services.dispatcher.next_tokens(self._sequence)
        tokens, finish_reason = delta.tokens, delta.finish_reason
        if self._request.is_prompt_only:  # workers generate one token at least; nobody asked for this one
            tokens, finish_reason = [], "length"
        self.timer.on_tokens(time.monotonic(), len(tokens))
        pieces: list[str] = []
        prompt: ToldPrompt | None = None
        if not self._has_begun:
            self._has_begun = True
            prompt = await self._on_first(delta, pieces)
        # A stop token ends the text without being part of it, but was generated and counts.
        num_shown = len(tokens) - (finish_reason == "stop")
        for number in range(num_shown):
            if number % TOKENS_PER_TURN == TOKENS_PER_TURN - 1:  # many come at once to a slow reader
                await asyncio.sleep(0)
            piece, stopped = self._stop_strings.push(self._detokenizer.step(tokens[number].token_id))
            pieces.append(piece)
            if stopped:
                tokens, num_shown, finish_reason = tokens[: number + 1], number + 1, "stop"
                break
        else:
            if finish_reason is not None:
                piece, stopped = self._stop_strings.push(self._detokenizer.flush())
                pieces += (piece, "" if stopped else self._stop_strings.flush())
                if stopped:
                    finish_reason = "stop"
        now = time.monotonic()
        self.timer.on_text(now)
        if finish_reason is not None:
            self.timer.on_finished(now)
            self._services.dispatcher.drop(self._sequence)  # at a stop string the workers do not know yet that it ended
        return TextDelta(self._index, "".join(pieces), tokens, num_shown, finish_reason, prompt)

    async def _on_first(self, delta: TokenDelta, pieces: list[str]) -> ToldPrompt | None:
        """What is known of the prompt now; an echo of it begins the text."""
        request = self._request
        self._ticket.on_first_token(self._index)
        if self._index % request.n == 0:
            self._generation.num_cached_tokens += delta.num_cached_tokens
        if not request.echo and request.num_prompt_logprobs is None:
            return None
        token_ids = unpack_token_ids(self._sequence.prompt.token_ids)
        if request.echo:
            pieces.append(await self._services.readers.text_of(token_ids))
        return ToldPrompt(token_ids, delta.prompt_logprobs or [])


class _Merged:
    """The deltas of several sequences, as they come. The first error ends all."""

    def __init__(self, texts: list[_SequenceText]) -> None:
        # Bounded: a slow reader's sequences wait with one delta each; their tokens go on gathering in the requests.
        self._queue: asyncio.Queue[TextDelta | Exception] = asyncio.Queue(maxsize=len(texts))
        self._tasks = [asyncio.create_task(self._pump(text)) for text in texts]

    async def next_delta(self) -> TextDelta:
        match await self._queue.get():
            case TextDelta() as delta:
                return delta
            case error:
                try:
                    raise error
                finally:
                    del error  # it would refer to this frame, and this frame to it

    async def _pump(self, text: _SequenceText) -> None:
        try:
            finish_reason = None
            while finish_reason is None:
                delta = await text.next_delta()
                finish_reason = delta.finish_reason
                await self._queue.put(delta)
        except Exception as error:
            await self._queue.put(error)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()  # what ended them refers to frames that refer to this
