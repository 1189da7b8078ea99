"""Messages of the decode role to proxies. Pure."""

from __future__ import annotations

from tandem.decode_worker.actions import Action
from tandem.decode_worker.sequence import DecodeSequence
from tandem.handover.actions import SendToProxy
from tandem.protocol.messages.dispatch import AttemptFailed, AttemptPreempted, DecodeBegan, NewToken, TokenBatch
from tandem.protocol.messages.sampling import FinishReason, SampledToken
from tandem.runtime.errors import ErrorInfo, TandemError


def failure(sequence: DecodeSequence, error: TandemError) -> Action:
    message = AttemptFailed(sequence.attempt_id, ErrorInfo.of(error))
    return SendToProxy(sequence.prompt.request.proxy_id, message)


def preempted(sequence: DecodeSequence) -> Action:
    return SendToProxy(sequence.prompt.request.proxy_id, AttemptPreempted(sequence.attempt_id))


class StepTokens:
    """Collects the tokens of a step into one TokenBatch for each proxy."""

    def __init__(self) -> None:
        self._batches: dict[str, TokenBatch] = {}

    def add(
        self, now: float, sequence: DecodeSequence, token: SampledToken, finish_reason: FinishReason | None
    ) -> None:
        request = sequence.prompt.request
        batch = self._batches.setdefault(request.proxy_id, TokenBatch([], []))
        batch.tokens.append(NewToken(sequence.attempt_id, token, finish_reason))
        if len(sequence.output_token_ids) == request.num_generated + 2:
            batch.began.append(_began(now, sequence))

    def actions(self) -> list[Action]:
        return [SendToProxy(proxy_id, batch) for proxy_id, batch in self._batches.items()]


def _began(now: float, sequence: DecodeSequence) -> DecodeBegan:
    stepped_at = sequence.stepped_at if sequence.stepped_at is not None else now
    return DecodeBegan(
        sequence.attempt_id, stepped_at - sequence.joined_at, now - stepped_at, sequence.prompt.num_kv_bytes
    )
