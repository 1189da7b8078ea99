"""Beam search as a way to generate: each step asks prefill workers for one token of each beam.

They find all but the last block of a beam cached. `proxy.dispatch.beam_search` chooses the beams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace

import msgspec

from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions, TokenLogprobs
from tandem.protocol.messages.token_ids import BYTES_PER_TOKEN
from tandem.proxy.admission.admission import Ticket
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.dispatch.beam_search import Beam, BeamSearch, check_search_size
from tandem.proxy.dispatch.generation_services import GenerationServices
from tandem.proxy.dispatch.sequence import DispatchedSequence
from tandem.proxy.dispatch.sequence_text import PromptTokens, SequenceText, TextDelta
from tandem.proxy.text.detokenizer import Detokenizer
from tandem.proxy.text.prompt import Prompt
from tandem.proxy.text.stop_strings import StopStrings
from tandem.telemetry.proxy_metrics import SequenceTimer
from tandem.telemetry.request_log import RequestRecord

_BEAMS_PER_TURN = 16
"""Beams of one request that are started or served before the event loop runs again."""
_TOKENS_PER_SLICE = 4096
"""Collecting a beam's tokens takes about 0.5 ms for so many."""


@dataclass(eq=False)
class _PromptSearch:
    """The search over one prompt."""

    prompt: Prompt
    beams: BeamSearch
    numerics: str = ""
    """See `DispatchedSequence`: all steps of an exact search are computed alike."""


class BeamGeneration:
    """Generates the n best beams of each prompt of one request."""

    def __init__(
        self,
        services: GenerationServices,
        request: GenerationRequest,
        record: RequestRecord,
        deadlines: Callable[[], tuple[float, float]],
        shown_prompt: Callable[[Prompt, int], Awaitable[PromptTokens | None]],
    ) -> None:
        """deadlines: returns the seconds until the last token and until the first one. shown_prompt: returns what the
        answer shows of a prompt, which has the sequence with this index."""
        self._services = services
        self._request = request
        self._record = record
        self._deadlines = deadlines
        self._shown_prompt = shown_prompt

    async def deltas(
        self, prompts: list[Prompt], opened: dict[DispatchedSequence, None], ticket: Ticket
    ) -> AsyncGenerator[TextDelta, None]:
        """Yields one delta for each beam. opened: has the sequences that are dispatched."""
        request = self._request
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
                    if number % _BEAMS_PER_TURN == 0:
                        await asyncio.sleep(0)
                search.beams.advance()
        for number, search in enumerate(searches):
            for index, beam in enumerate(search.beams.best(), start=number * request.n):
                yield await self._delta(search.prompt, beam, index)

    def _search(self, prompt: Prompt) -> BeamSearch:
        request, services = self._request, self._services
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
        dispatcher, request = self._services.dispatcher, self._request
        num_top = max(BeamSearch.num_candidates(request.n), request.base_sampling.logprobs or 0)
        sampling = SamplingParams(temperature=0.0, logprobs=num_top)
        ready: asyncio.Queue[DispatchedSequence] = asyncio.Queue()
        deadline_s, first_deadline_s = self._deadlines()
        max_ttft_s = first_deadline_s if is_first_step else None
        waiting: dict[DispatchedSequence, int] = {}
        for number, (search, token_ids) in enumerate(beams):
            if number % _BEAMS_PER_TURN == _BEAMS_PER_TURN - 1:
                await asyncio.sleep(0)
            [sequence] = dispatcher.start(
                _extended(search.prompt, token_ids),
                [sampling],
                StopConditions(1),
                deadline_s,
                ready.put_nowait,
                max_ttft_s,
                numerics=search.numerics,
            )
            waiting[sequence] = number
            opened[sequence] = None
        found: dict[int, TokenLogprobs] = {}
        num_taken = 0
        while len(found) < len(beams):
            num_taken += 1
            if num_taken % _BEAMS_PER_TURN == 0:
                await asyncio.sleep(0)
            sequence = await ready.get()
            if (taken := dispatcher.take(sequence)) is None:
                continue
            if is_first_step:
                self._record.num_cached_tokens += taken.num_cached_tokens
            logprobs = taken.tokens[0].logprobs
            assert logprobs is not None
            number = waiting[sequence]
            found[number] = logprobs
            beams[number][0].numerics = sequence.numerics
            dispatcher.drop(sequence)
            del opened[sequence]
        return [found[number] for number in range(len(beams))]

    async def _delta(self, prompt: Prompt, beam: Beam, index: int) -> TextDelta:
        services, request = self._services, self._request
        timer = SequenceTimer(services.metrics, self._record.arrived_at, [])
        self._record.sequences.append(timer)
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
        self._record.num_completion_tokens += len(delta.tokens)
        return delta


def _extended(prompt: Prompt, token_ids: bytes) -> Prompt:
    """Returns the prompt with a beam's tokens. Its hashes are of the prompt alone, which is enough for routing."""
    num_tokens = prompt.num_tokens + len(token_ids) // BYTES_PER_TOKEN
    return replace(prompt, token_ids=prompt.token_ids + token_ids, num_tokens=num_tokens)
