"""One HTTP request for generation, from the tokenised prompts to the last text delta.

`Generation.deltas` is the request's path through the proxy: admit, dispatch, detokenise, watch for stop strings.
Streamed and whole answers share it. Closing the generator at any point aborts whatever is in flight.

Three objects stand for each sequence of a request, each for one reader: `DispatchedSequence` (its tokens, whichever
workers generate them), `SequenceText` (their text) and the endpoint's `Answers` (its choice in the answer).

Text that may be the beginning of a stop string is held back, and so are bytes that are no whole character yet. So a
delta may have tokens without text, and the last one text of tokens before it.

A beam search takes the same path, but asks prefill workers for one token of each beam at a time. They find all but the
last block of a beam cached. `proxy.dispatch.beam_search` chooses the beams.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import lru_cache

import msgspec

from tandem.protocol.messages.media import MediaKind
from tandem.protocol.messages.packed import BYTES_PER_TOKEN
from tandem.protocol.messages.sampling import FinishReason, SampledToken, SamplingParams, StopConditions, TokenLogprobs
from tandem.proxy.admission.admission import Admission, ClientLimitExceeded, QueueFull, Ticket
from tandem.proxy.admission.api_key import ApiKey
from tandem.proxy.admission.budgets import AnswerBudget, HeldAnswer
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.cluster.router import NoWorkerReady, SLOUnreachable
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.dispatch.beam_search import Beam, BeamSearch, check_search_size
from tandem.proxy.dispatch.dispatcher import Dispatcher
from tandem.proxy.dispatch.sequence import DispatchedSequence, PromptTask, TokenDelta
from tandem.proxy.reading.reader_pool import ReaderPool
from tandem.proxy.records.record_store import RecordStore
from tandem.proxy.records.recording import Recording
from tandem.proxy.text.detokenizer import Detokenizer
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.prompt import Prompt, RenderedPrompts
from tandem.proxy.text.token_text import TokenText
from tandem.runtime.errors import ClientShareExceeded, Overloaded, TandemError
from tandem.runtime.tasks import LoopTurns
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.telemetry.request_log import RequestLog, RequestRecord, SequenceTimer

_MAX_TOKENS_AT_ONCE = 64
"""Tokens detokenised before yielding to the event loop (about 0.5 ms). Many wait when a client reads slowly."""


class PromptTokens(msgspec.Struct, frozen=True):
    """A prompt as its client sees it."""

    token_ids: bytes
    """Packed, see `protocol.messages.packed`."""
    text: str
    """Empty unless it is echoed."""
    logprobs: list[bytes]
    """Those of all tokens but the first, packed; empty unless requested."""
    skips_special: bool = True
    """Whether the text is without special tokens."""


class TextDelta(msgspec.Struct, frozen=True):
    """The next piece of one sequence's text, and its tokens."""

    index: int
    """Prompt index * n + number of the sequence."""
    text: str
    """May be empty while a possible stop string is held back."""
    tokens: list[SampledToken]
    num_shown: int
    """How many of the tokens are part of the text; a stop token is not."""
    finish_reason: FinishReason | None
    is_first: bool = False
    """Whether no delta of the sequence came before."""
    prompt: PromptTokens | None = None
    """On the first delta of all sequences of the prompt, if the client asked for it; not part of the text."""
    stop_reason: int | str | None = None
    """The stop string or the token of `stop_token_ids` that ended the sequence."""
    embedding: bytes | None = None
    """Embedding of the prompt, if one was asked for instead of text; float32, packed."""
    begins_text: bool = False
    """Whether the detokeniser sees these tokens as the first of a text, whose leading blank may not be shown."""


class SequenceText:
    """Turns the tokens of one sequence into text deltas.

    stop_token_ids: those that the client named; a sequence that ends with another token has no stop reason. min_tokens:
    stop strings that are complete within this many tokens do not end the text.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stop_strings: StopStrings,
        timer: SequenceTimer,
        clock: Callable[[], float],
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._num_tokens = 0  # of all attempts
        self._has_ended = False
        self.index = index
        self.timer = timer
        self._clock = clock
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings

    async def push(
        self,
        tokens: list[SampledToken],
        finish_reason: FinishReason | None,
        is_first: bool,
        prompt: PromptTokens | None,
    ) -> TextDelta:
        """Returns the delta for these tokens. It ends earlier than they do when a stop string is complete."""
        assert not self._has_ended
        pieces: list[str] = []
        begins_text = self._detokenizer.begins_text
        # A stop token ends the text without being part of it, but was generated and counts.
        num_shown = len(tokens) - (finish_reason == "stop")
        for number in range(num_shown):
            if number % _MAX_TOKENS_AT_ONCE == _MAX_TOKENS_AT_ONCE - 1:
                await asyncio.sleep(0)
            self._num_tokens += 1
            text = self._detokenizer.step(tokens[number].token_id)
            piece, stopped = self._stop_strings.push(text, may_end=self._num_tokens > self._min_tokens)
            pieces.append(piece)
            if stopped:
                tokens, num_shown, finish_reason = tokens[: number + 1], number + 1, "stop"
                break
        else:
            if finish_reason is not None:
                may_end = self._num_tokens > self._min_tokens
                piece, stopped = self._stop_strings.push(self._detokenizer.flush(), may_end)
                pieces += (piece, "" if stopped else self._stop_strings.flush())
                if stopped:
                    finish_reason = "stop"
        now = self._clock()
        self.timer.on_text(now)
        if finish_reason is not None:
            self._has_ended = True
            self.timer.on_finished(now)
        assert 0 <= num_shown <= len(tokens)
        stop_reason: int | str | None = self._stop_strings.matched
        if finish_reason == "stop" and stop_reason is None and tokens[-1].token_id in self._stop_token_ids:
            stop_reason = tokens[-1].token_id
        return TextDelta(
            self.index,
            "".join(pieces),
            tokens,
            num_shown,
            finish_reason,
            is_first,
            prompt,
            stop_reason,
            None,
            begins_text,
        )


class StopStrings:
    """Stop strings of one sequence. The match that ends first wins, however the text is split into pieces.

    is_shown: the text includes the stop string. matched: the stop string that has ended the text.
    """

    def __init__(self, stops: Sequence[str], is_shown: bool = False) -> None:
        assert all(stops), "validation refuses empty stop strings"
        self._stops = [_Stop(stop) for stop in stops]
        self._is_shown = is_shown
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, may_end: bool = True) -> tuple[str, bool]:
        """Returns (text that can be shown, whether a stop string has ended it).

        may_end: whether a stop string that this text completes ends it. One that was completed earlier never does.
        """
        if not self._stops or not text:
            return text, False
        ends = [(end, stop.text) for stop in self._stops if (end := stop.push(text, may_end)) is not None]
        num_before, text = len(self._held), self._held + text
        if ends:
            self._held = ""
            end = num_before + min(end for end, _ in ends)
            self.matched = max((stop for each, stop in ends if num_before + each == end), key=len)
            return text[: end if self._is_shown else end - len(self.matched)], True
        num_held = max(stop.num_matched for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """Returns the held text at the end of the sequence."""
        held, self._held = self._held, ""
        return held


class _Stop:
    """Searches text that comes in pieces for one stop string, in time linear in the text (Knuth, Morris and Pratt).

    num_matched: characters at the end of the text that are the beginning of the stop string.
    """

    __slots__ = ("_failure", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._failure = _failure(text)

    def push(self, piece: str, may_end: bool) -> int | None:
        """Returns where in the piece the stop string ends first, if it does and may."""
        stop, failure, number, place = self.text, self._failure, self.num_matched, 0
        while place < len(piece):
            if not number:
                place = piece.find(stop[0], place)
                if place < 0:
                    break
            character = piece[place]
            while number and stop[number] != character:
                number = failure[number - 1]
            number += stop[number] == character
            place += 1
            if number == len(stop):
                if may_end:
                    return place
                number = failure[number - 1]
        self.num_matched = number
        return None


@lru_cache(maxsize=1024)
def _failure(text: str) -> array[int]:
    """Returns for each beginning of the text how long a shorter beginning is that it ends with."""
    lengths = array("H", [0])
    number = 0
    for place in range(1, len(text)):
        while number and text[number] != text[place]:
            number = lengths[number - 1]
        number += text[number] == text[place]
        lengths.append(number)
    return lengths


CAPACITY_REASONS = ("queue_full", "slo", "no_room")
"""Reasons of rejections, see `rejection_reason`, that more workers would remedy. A client that exceeds its own limit is
not among them."""
_SEQUENCES_PER_TURN = 16
"""Sequences or beams of one request that are started or served before the event loop runs again (about 2 ms). A request
may have a thousand."""
_LOGPROBS_PER_SLICE = 1024
"""Encoding them takes about 2 ms of the event loop."""
_PARSED_TOKENS_PER_SLICE = 256
"""Looking for thinking and tool calls in their text takes a few milliseconds of the event loop at most."""
_TOKENS_PER_SLICE = 4096
"""Collecting a beam's tokens takes about 0.5 ms for so many."""


@dataclass(frozen=True, slots=True)
class GenerationServices:
    """The parts of a proxy that every request for generation uses."""

    text: ModelText
    token_text: TokenText
    readers: ReaderPool
    worker_table: WorkerTable
    admission: Admission
    answer_budget: AnswerBudget
    dispatcher: Dispatcher
    metrics: ProxyMetrics
    requests: RequestLog
    request_timeout_s: float
    ttft_slo_s: float | None
    """A request whose first token is predicted later is refused; None for no SLO."""
    records: RecordStore | None = field(default=None, kw_only=True)
    """None where no requests are recorded."""
    turns: LoopTurns = field(default_factory=LoopTurns, kw_only=True)
    """Of all answers that are being encoded, one goes on in each turn of the loop."""


@dataclass(eq=False)
class _PromptSearch:
    """The beam search over one prompt."""

    prompt: Prompt
    beams: BeamSearch
    numerics: str = ""
    """See `DispatchedSequence`: all steps of an exact search are computed alike."""


class Generation:
    """Generates the sequences of one request.

    `record` counts the tokens: those of the prompts from the first delta on, the others of the deltas so far. `held` is
    the memory of the answer, which its maker releases. `turn` is awaited after each slice of the answer. `prompt_sizes`
    (tokens of each prompt) and `media_tokens` (placeholder tokens by kind) are known from the first delta on.
    """

    def __init__(
        self,
        services: GenerationServices,
        request: GenerationRequest,
        record: RequestRecord,
        client: str = "",
        timeout_s: float | None = None,
        api_key: ApiKey | None = None,
        recording: Recording | None = None,
    ) -> None:
        """request: with tokenised prompts, as `ReaderPool.read` returns it. record: ended by `deltas`.

        client: whose limits the request counts towards. timeout_s: the client's, from arrival; the server's and the
        request's own hold as well. api_key: ends the request when it is revoked. recording: gets the prompts and the
        answer; None for no record.
        """
        limits_s = (services.request_timeout_s, timeout_s, request.timeout)
        self._timeout_s = min(limit_s for limit_s in limits_s if limit_s is not None)
        self.token_text = services.token_text
        self.held = HeldAnswer(services.answer_budget, client)
        self.turn = services.turns.next
        self.request = request
        self.record = record
        self.created = int(time.time())
        self._services = services
        self._client = client
        self.prompt_sizes: list[int] = []
        self.media_tokens: dict[MediaKind, int] = {}
        self._shown_prompts: set[int] = set()  # numbers of the prompts that a delta had
        self._api_key = api_key
        self._recording = recording

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Yields the text of all sequences as it comes. The last delta of each has a finish_reason.

        Raises TandemError; the first error of a sequence ends all.
        """
        services = self._services
        outcome, is_refused = "aborted", False  # unless the generator runs to its end
        opened: dict[DispatchedSequence, None] = {}
        ticket: Ticket | None = None

        def fail(error: TandemError) -> None:
            for sequence in opened:
                sequence.fail(error)

        try:
            if self._api_key is not None:
                self._api_key.begin(fail)
            prompts = self._prompts()
            # A prompt is computed once for all its sequences, so it counts for the first of them.
            prompt_tokens = [0 if i else prompt.num_tokens for prompt in prompts for i in range(self.request.n)]
            self.held.reserve(self.request.num_held_bytes(self.record.num_prompt_tokens))
            ticket = services.admission.admit(self._client, prompt_tokens, self.request.priority, fail)
            num_open = len(prompt_tokens)
            generate = self._beams if self.request.use_beam_search else self._sampled
            async with aclosing(generate(prompts, opened, ticket)) as deltas:
                async for delta in deltas:
                    if delta.finish_reason is not None:
                        num_open -= 1
                        outcome = delta.finish_reason if not num_open else outcome
                    yield delta
        except TandemError as given:
            error = self._lasting(given) if isinstance(given, SLOUnreachable) else given
            outcome = error.code
            if (reason := rejection_reason(error)) is not None:
                is_refused = self.record.num_completion_tokens == 0 and not isinstance(error, NoWorkerReady)
                services.metrics.rejected.labels(reason).inc()
            if error is not given:
                raise error from given
            raise
        except Exception:
            outcome = "internal_error"
            raise
        finally:
            if self._api_key is not None:
                self._api_key.end(fail)
            services.metrics.per_token.flush()
            for sequence in opened:
                services.dispatcher.drop(sequence)
            if ticket is not None:
                ticket.close()
            self.request.release_media()
            if self._recording is not None and services.records is not None:
                services.records.put(self._recording, outcome)
            services.metrics.requests.labels(outcome).inc()
            services.requests.end(self.record, outcome, is_refused)

    async def _sampled(
        self, prompts: list[Prompt], opened: dict[DispatchedSequence, None], ticket: Ticket
    ) -> AsyncGenerator[TextDelta, None]:
        """Yields the deltas of n sequences for each prompt. opened: receives the sequences."""
        services = self._services
        texts: dict[DispatchedSequence, SequenceText] = {}
        ready: asyncio.Queue[DispatchedSequence] = asyncio.Queue()
        for prompt in prompts:
            self._start(prompt, texts, opened, ready)
            await asyncio.sleep(0)  # starting a thousand sequences takes 0.1 s
        num_open, num_taken = len(texts), 0
        begun: dict[DispatchedSequence, int] = {}  # number of the attempt that has had a delta
        siblings: dict[int, list[DispatchedSequence]] = {}  # by prompt, until its logprobs have come
        while num_open:
            num_taken += 1
            if num_taken % _SEQUENCES_PER_TURN == 0:  # while `ready` is not empty, getting from it does not yield
                await asyncio.sleep(0)
            sequence = await ready.get()
            number, is_sibling = divmod(texts[sequence].index, self.request.n)
            if self.request.num_prompt_logprobs is not None and is_sibling and number not in self._shown_prompts:
                # An answer begins with its prompt, whose log-probabilities come with the first token of the first
                # sequence. An engine may compute the others sooner.
                siblings.setdefault(number, []).append(sequence)
                continue
            if (taken := services.dispatcher.take(sequence)) is None:
                continue
            attempt, text, is_first, shown = sequence.attempt, texts[sequence], taken.is_first, None
            text.timer.on_tokens(services.dispatcher.clock(), 0 if self.request.is_prompt_only else len(taken.tokens))
            if begun.get(sequence) != (attempt_number := len(sequence.times)):
                begun[sequence] = attempt_number
                if len(begun) == len(texts) and all(each.has_encoded_media for each in texts):
                    self.request.release_pixels()
            if is_first:
                ticket.on_first_token(text.index)
                if text.index % self.request.n == 0:
                    self.record.num_cached_tokens += taken.num_cached_tokens
                shown = await self._shown_prompt(sequence.prompt, text.index, taken.prompt_logprobs)
                for sibling in siblings.pop(number, ()):
                    ready.put_nowait(sibling)
            for slice_number, (tokens, finish_reason) in enumerate(self._slices(taken)):
                if slice_number:
                    await asyncio.sleep(0)
                delta = await text.push(tokens, finish_reason, is_first, shown)
                is_first, shown = False, None
                if taken.embedding is not None:
                    delta = msgspec.structs.replace(delta, embedding=taken.embedding)
                self.record.num_completion_tokens += len(delta.tokens)
                if self._recording is not None and attempt is not None:
                    self._recording.on_tokens(
                        text.index, delta.tokens, delta.finish_reason, attempt_number, attempt.route
                    )
                if delta.finish_reason is not None:
                    num_open -= 1
                    services.dispatcher.drop(sequence)  # the workers do not know of a stop string
                yield delta
                if delta.finish_reason is not None:
                    break

    async def _beams(
        self, prompts: list[Prompt], opened: dict[DispatchedSequence, None], ticket: Ticket
    ) -> AsyncGenerator[TextDelta, None]:
        """Yields one delta for each of the n best beams of each prompt. opened: receives the sequences."""
        request = self.request
        searches = [_PromptSearch(prompt, self._search(prompt)) for prompt in prompts]
        check_search_size(request.n, [(each.prompt.num_tokens, each.beams.max_tokens) for each in searches])
        is_first_step = True
        while running := [each for each in searches if not each.beams.is_over]:
            beams = [(search, token_ids) for search in running for token_ids in search.beams.token_ids]
            found = await self._next_tokens(beams, opened, is_first_step)
            if is_first_step:
                for index in range(len(prompts) * request.n):
                    ticket.on_first_token(index)
            is_first_step = False
            number = 0
            for search in running:
                for _ in search.beams.running:
                    search.beams.add(found[number])
                    number += 1
                    if number % _SEQUENCES_PER_TURN == 0:
                        await asyncio.sleep(0)
                search.beams.advance()
        for number, search in enumerate(searches):
            for index, beam in enumerate(search.beams.best(), start=number * request.n):
                yield await self._beam_delta(search.prompt, beam, index)

    def _search(self, prompt: Prompt) -> BeamSearch:
        request, services = self.request, self._services
        stop = request.stop_conditions(prompt.num_tokens, services.worker_table.limits(), services.text.eos_token_ids)
        return BeamSearch(
            request.n,
            stop.max_tokens,
            stop.stop_token_ids,
            request.length_penalty,
            prompt.num_tokens,
            request.base_sampling.logprobs or 0,
        )

    async def _next_tokens(
        self, beams: list[tuple[_PromptSearch, bytes]], opened: dict[DispatchedSequence, None], is_first_step: bool
    ) -> list[TokenLogprobs]:
        """Returns the most likely next tokens of each beam. beams: (search, packed tokens that follow its prompt)."""
        dispatcher, request = self._services.dispatcher, self.request
        num_top = max(BeamSearch.num_candidates(request.n), request.base_sampling.logprobs or 0)
        sampling = SamplingParams(temperature=0.0, logprobs=num_top)
        ready: asyncio.Queue[DispatchedSequence] = asyncio.Queue()
        deadline_s, first_deadline_s = self._deadlines()
        max_ttft_s = first_deadline_s if is_first_step else None
        waiting: dict[DispatchedSequence, int] = {}
        for number, (search, token_ids) in enumerate(beams):
            if number % _SEQUENCES_PER_TURN == _SEQUENCES_PER_TURN - 1:
                await asyncio.sleep(0)
            prompt = _extended(search.prompt, token_ids)
            task = PromptTask(prompt, StopConditions(1), deadline_s, max_ttft_s, numerics=search.numerics)
            [sequence] = dispatcher.start(task, [sampling], ready.put_nowait)
            waiting[sequence] = number
            opened[sequence] = None
        found: dict[int, TokenLogprobs] = {}
        num_taken = 0
        while len(found) < len(beams):
            num_taken += 1
            if num_taken % _SEQUENCES_PER_TURN == 0:
                await asyncio.sleep(0)
            sequence = await ready.get()
            if (taken := dispatcher.take(sequence)) is None:
                continue
            if is_first_step:
                self.record.num_cached_tokens += taken.num_cached_tokens
            logprobs = taken.tokens[0].logprobs
            assert logprobs is not None
            number = waiting[sequence]
            found[number] = logprobs
            beams[number][0].numerics = sequence.numerics
            dispatcher.drop(sequence)
            del opened[sequence]
        return [found[number] for number in range(len(beams))]

    async def _beam_delta(self, prompt: Prompt, beam: Beam, index: int) -> TextDelta:
        services, request = self._services, self.request
        timer = SequenceTimer(services.metrics, self.record.arrived_at, [])
        self.record.sequences.append(timer)
        timer.on_tokens(services.dispatcher.clock(), beam.length)
        detokenizer = Detokenizer(services.text.tokenizer, prompt.token_ids, request.skip_special_tokens)
        text = SequenceText(index, detokenizer, StopStrings([]), timer, services.dispatcher.clock)
        tokens: list[SampledToken] = []
        for token in beam.backwards():
            tokens.append(token)
            if len(tokens) % _TOKENS_PER_SLICE == 0:
                await asyncio.sleep(0)
        tokens.reverse()
        shown = await self._shown_prompt(prompt, index)
        if beam.end is None:
            delta = await text.push(tokens, "length", True, shown)
        else:
            delta = await text.push([*tokens, beam.end], "stop", True, shown)
            kept = delta.tokens if request.include_stop_str_in_output else tokens
            delta = msgspec.structs.replace(delta, tokens=kept, stop_reason=beam.end.token_id)
        self.record.num_completion_tokens += len(delta.tokens)
        return delta

    def _prompts(self) -> list[Prompt]:
        """Returns the prompts as they are dispatched. Raises InvalidRequest for tokens that the model does not have."""
        request = self.request
        request.check_vocabulary(self._services.worker_table.limits())
        assert isinstance(request.prompt, RenderedPrompts)
        prompts = request.prompt.prompts
        self.prompt_sizes = [prompt.num_tokens for prompt in prompts]
        self.record.num_prompt_tokens = sum(self.prompt_sizes)
        for item in (item for prompt in prompts for item in prompt.media):
            self.media_tokens[item.kind] = self.media_tokens.get(item.kind, 0) + item.num_tokens
        return [
            replace(
                prompt,
                num_prompt_logprobs=request.num_prompt_logprobs,
                cache_salt=request.cache_salt,
                priority=request.priority,
                adapter=request.adapter.ref if request.adapter is not None else None,
                pooling=request.embedding.pooling if request.embedding is not None else None,
            )
            for prompt in prompts
        ]

    def _start(
        self,
        prompt: Prompt,
        texts: dict[DispatchedSequence, SequenceText],
        opened: dict[DispatchedSequence, None],
        ready: asyncio.Queue[DispatchedSequence],
    ) -> None:
        """Dispatches a prompt. Adds its sequences to both dicts. Raises SLOUnreachable or ContextLengthExceeded."""
        request, services = self.request, self._services
        stop = request.stop_conditions(prompt.num_tokens, services.worker_table.limits(), services.text.eos_token_ids)
        deadline_s, max_ttft_s = self._deadlines()
        samplings = request.samplings()
        if self._recording is not None:
            samplings = self._recording.on_prompt(prompt, stop, samplings)
        task = PromptTask(prompt, stop, deadline_s, max_ttft_s, request.media_lease)
        for sequence in services.dispatcher.start(task, samplings, ready.put_nowait):
            timer = SequenceTimer(services.metrics, self.record.arrived_at, sequence.times)
            self.record.sequences.append(timer)
            opened[sequence] = None
            texts[sequence] = SequenceText(
                len(texts),
                Detokenizer(services.text.tokenizer, prompt.token_ids, request.skip_special_tokens),
                StopStrings(request.stop, request.include_stop_str_in_output),
                timer,
                services.dispatcher.clock,
                request.named_stop_token_ids(services.text.eos_token_ids),
                request.min_tokens,
            )

    def _deadlines(self) -> tuple[float, float]:
        """Returns the seconds from now until the last token and until the first one."""
        waited_s = self._services.dispatcher.clock() - self.record.arrived_at
        deadline_s = max(0.001, self._timeout_s - waited_s)
        return deadline_s, min(deadline_s, self._first_token_limit_s - waited_s)

    @property
    def _first_token_limit_s(self) -> float:
        """Seconds from arrival to the first token."""
        slo_s = self._services.ttft_slo_s
        return self._timeout_s if slo_s is None else min(self._timeout_s, slo_s)

    def _lasting(self, error: SLOUnreachable) -> SLOUnreachable:
        """Returns the error for a request that would be refused as well if nothing else ran."""
        services = self._services
        read_s = services.dispatcher.clock() - self.record.arrived_at
        if services.dispatcher.num_running:  # others may have delayed its reading
            read_s = 0.0
        return error.within(self._first_token_limit_s, read_s)

    def _slices(self, delta: TokenDelta) -> Iterator[tuple[list[SampledToken], FinishReason | None]]:
        """Yields the tokens in slices that are quick to encode. Many come at once when a client reads slowly."""
        if self.request.is_prompt_only:  # workers generate at least one token, which the client did not ask for
            yield [], "length"
            return
        num_top, tokens = self.request.base_sampling.logprobs, delta.tokens
        length = len(tokens) if num_top is None else max(1, _LOGPROBS_PER_SLICE // (1 + num_top))
        if self.request.is_parsed:
            length = min(length, _PARSED_TOKENS_PER_SLICE)
        for start in range(0, len(tokens), length):
            is_last = start + length >= len(tokens)
            yield tokens[start : start + length], delta.finish_reason if is_last else None

    async def _shown_prompt(
        self, prompt: Prompt, index: int, logprobs: list[bytes] | None = None
    ) -> PromptTokens | None:
        """Returns what the answer shows of a prompt, or None if it shows nothing or has it already.

        index: of the sequence. logprobs: of the prompt, packed.
        """
        request, number = self.request, index // self.request.n
        shows_prompt = request.echo or request.return_token_ids or request.num_prompt_logprobs is not None
        if not shows_prompt or number in self._shown_prompts:
            return None
        self._shown_prompts.add(number)
        echo = ""
        if request.echo:
            echo = await self._services.readers.text_of(prompt.token_ids, prompt.is_text, self._client)
        return PromptTokens(prompt.token_ids, echo, logprobs or [], prompt.is_text)


def _extended(prompt: Prompt, token_ids: bytes) -> Prompt:
    """Returns the prompt with a beam's tokens. Its hashes are of the prompt alone, which is enough for routing."""
    num_tokens = prompt.num_tokens + len(token_ids) // BYTES_PER_TOKEN
    return replace(prompt, token_ids=prompt.token_ids + token_ids, num_tokens=num_tokens)


def rejection_reason(error: TandemError) -> str | None:
    """Returns the label of a refusal by a limit, or None for any other error."""
    match error:
        case ClientLimitExceeded() | ClientShareExceeded():
            return "client_limit"
        case QueueFull():
            return "queue_full"
        case SLOUnreachable():
            return "slo"
        case Overloaded():
            return "no_room"
        case _:
            return None
