"""Collects what the record of one request will have, while its answer is generated. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.messages.sampling import FinishReason, SampledToken, SamplingParams, StopConditions
from tandem.proxy.cluster.router import Route
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.records.record import (
    ANSWER_TOKEN_BYTES,
    MAX_RECORD_BYTES,
    PROMPT_TOKEN_BYTES,
    SEQUENCE_BYTES,
    RecordedMedia,
    RecordedPrompt,
    RecordedSequence,
    RecordedWorker,
    RecordHead,
    encode_line,
    numbers,
    token_numbers,
)
from tandem.proxy.text.prompt import Prompt

_HEAD_BYTES = 4096
"""Names, digests, single settings and a few workers."""
_NUMBER_BYTES, _CHARACTER_BYTES = 24, 6
"""Largest size in JSON of a number in the lists of settings, and of a character of texts."""


@dataclass(slots=True)
class _NotedSequence:
    """What is noted of one sequence."""

    prompt: int
    seed: int
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    computed_by: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_attempts: int = 0


class Recording:
    """The prompts and the answer of one request. A record that would be too large is given up (`is_too_large`).

    owner: whose record it is. head: with what is known before the prompts are dispatched. describe: returns what is
    known of a worker.
    """

    def __init__(self, owner: str, head: RecordHead, describe: Callable[[WorkerInfo], RecordedWorker]) -> None:
        self.owner = owner
        self.num_bytes = _HEAD_BYTES + sum(_CHARACTER_BYTES * len(text) + 3 for text in head.bad_words)
        """Expected size of the record."""
        self._head = head
        self._describe = describe
        self._sampling = head.sampling
        self._prompts: list[tuple[Prompt, StopConditions]] = []
        self._sequences: list[_NotedSequence] = []
        self._workers: dict[str, int] = {}  # numbers by epoch
        self._described: list[RecordedWorker] = []

    @property
    def request_id(self) -> str:
        return self._head.request_id

    @property
    def is_empty(self) -> bool:
        return not self._sequences

    @property
    def is_too_large(self) -> bool:
        return self.num_bytes > MAX_RECORD_BYTES

    def on_prompt(
        self, prompt: Prompt, stop: StopConditions, samplings: Sequence[SamplingParams]
    ) -> list[SamplingParams]:
        """Notes a prompt with its sequences. Returns the samplings, for which workers report log-probabilities."""
        wanted = [
            each if each.logprobs is not None else msgspec.structs.replace(each, logprobs=0) for each in samplings
        ]
        if not self._prompts:
            self._sampling = msgspec.structs.replace(wanted[0], seed=0)
            self.num_bytes += _num_bytes(self._sampling)
        num_numbers = len(stop.stop_token_ids) + sum(4 + 2 * len(item.spans) for item in prompt.media)
        self.num_bytes += PROMPT_TOKEN_BYTES * prompt.num_tokens + _NUMBER_BYTES * num_numbers
        self.num_bytes += SEQUENCE_BYTES * len(wanted)
        self._sequences += [_NotedSequence(len(self._prompts), each.seed) for each in wanted]
        self._prompts.append((prompt, stop))
        return wanted

    def on_tokens(
        self,
        index: int,
        tokens: Sequence[SampledToken],
        finish_reason: FinishReason | None,
        num_attempts: int,
        route: Route,
    ) -> None:
        """Notes the next tokens of a sequence, which one attempt has computed.

        index: of the sequence, in the order of `on_prompt`. num_attempts: number of its attempts up to this one. route:
        of this attempt; its prefill worker has computed the attempt's first token, and its decode worker the others.
        """
        sequence = self._sequences[index]
        sequence.finish_reason = finish_reason
        self.num_bytes += ANSWER_TOKEN_BYTES * len(tokens)
        if self.is_too_large or not tokens:
            return
        first, decode = len(sequence.token_ids), route.decode or route.prefill
        if sequence.num_attempts != num_attempts:
            sequence.num_attempts = num_attempts
            self._note(sequence, first, route.prefill)
            if len(tokens) > 1:
                self._note(sequence, first + 1, decode)
        else:
            self._note(sequence, first, decode)
        sequence.token_ids.extend(token.token_id for token in tokens)
        sequence.logprobs.extend(
            token.logprobs.logprob if token.logprobs is not None else float("nan") for token in tokens
        )

    def _note(self, sequence: _NotedSequence, first: int, worker: WorkerInfo) -> None:
        """Notes that a worker computes the tokens from `first` on."""
        number = self._workers.get(worker.epoch)
        if number is None:
            number = self._workers[worker.epoch] = len(self._described)
            self._described.append(self._describe(worker))
        if not sequence.computed_by or sequence.computed_by[-1][1] != number:
            sequence.computed_by.append((first, number))

    def lines(self, outcome: str) -> Iterator[bytes]:
        """Encodes the record. outcome: of the request."""
        yield encode_line(
            msgspec.structs.replace(
                self._head,
                outcome=outcome,
                sampling=self._sampling,
                prompts=[_recorded(prompt, stop) for prompt, stop in self._prompts],
                num_sequences=len(self._sequences),
                workers=self._described,
            )
        )
        for each in self._sequences:
            yield encode_line(
                RecordedSequence(
                    prompt=each.prompt,
                    seed=each.seed,
                    finish_reason=each.finish_reason,
                    computed_by=each.computed_by,
                    token_ids=numbers(each.token_ids),
                    logprobs=numbers(each.logprobs),
                )
            )


def described(workers: WorkerTable, worker: WorkerInfo) -> RecordedWorker:
    """Returns what a record says of a worker, which may have been lost meanwhile."""
    numerics = workers.numerics_of(worker.epoch)
    if numerics == Numerics():  # it has not said
        return RecordedWorker(worker.worker_id)
    return RecordedWorker(worker.worker_id, numerics.digest, msgspec.structs.asdict(numerics))


def _recorded(prompt: Prompt, stop: StopConditions) -> RecordedPrompt:
    media = [RecordedMedia(item.kind, item.digest.hex(), item.spans) for item in prompt.media]
    return RecordedPrompt(token_numbers(prompt.token_ids), stop, media)


def _num_bytes(sampling: SamplingParams) -> int:
    """Estimates the size of sampling parameters in JSON."""
    num_numbers = (
        2 * len(sampling.logit_bias)
        + len(sampling.allowed_token_ids)
        + len(sampling.logprob_token_ids)
        + sum(map(len, sampling.bad_words))
    )
    return _NUMBER_BYTES * num_numbers + _CHARACTER_BYTES * len(sampling.grammar or "")
