"""The sequences that a vLLM worker computes, one engine request each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.handover.actions import HandoverAction, SendToProxy
from tandem.protocol.messages.dispatch import (
    AttemptFailed,
    DecodeBegan,
    FirstToken,
    NewToken,
    PromptMessage,
    StartPrefill,
    TokenBatch,
)
from tandem.protocol.messages.packed import BYTES_PER_TOKEN
from tandem.protocol.messages.sampling import FinishReason, SampledToken, TokenLogprobs
from tandem.runtime.errors import ErrorInfo, TandemError
from tandem.vllm_worker.scheduler.engine_orders import EngineOutput
from tandem.vllm_worker.scheduler.request_media import RequestMedia


def with_named_logprobs(token: SampledToken, named: Sequence[int]) -> SampledToken:
    """Returns the token with its own logprob and those of the named tokens, as Tandem's engine reports them.

    vLLM reports the named tokens only, and fills up to the longest list of a step. Other tokens stay as they are.
    """
    if not named or token.logprobs is None:
        return token
    given = token.logprobs
    others = [each for each in given.top[: len(named)] if each[0] != token.token_id]
    top = [(token.token_id, given.logprob), *others]
    return SampledToken(token.token_id, TokenLogprobs(given.logprob, given.rank, top))


@dataclass(eq=False)
class Stream:
    """One attempt from its arrival until its last message to the proxy."""

    message: PromptMessage
    attempt_id: str
    number: int
    """Number among the sequences that share the prompt."""
    engine_id: str
    arrived_at: float
    num_generated: int
    """Generated tokens, with those of earlier attempts."""
    first_is_due: bool
    """Whether the proxy gets the next token as FirstToken."""
    goes_on: bool
    """Whether this worker decodes it after its first token."""
    owns_request: bool = False
    """Whether its engine request ends with it: not while the request moves KV for all sequences of the prompt."""
    started_at: float | None = None
    joined_at: float = 0.0
    """When its prompt was complete, here or by the arrival of its KV."""
    num_kv_bytes: int = 0
    has_begun_decode: bool = False
    media: RequestMedia | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.message.proxy_id, self.attempt_id

    @property
    def deadline(self) -> float:
        return self.arrived_at + self.message.deadline_s

    def fail(self, error: TandemError) -> HandoverAction:
        return SendToProxy(self.message.proxy_id, AttemptFailed(self.attempt_id, ErrorInfo.of(error)))

    @property
    def is_shipping(self) -> bool:
        """Whether the proxy has its first token and another worker does not have all of its KV."""
        return not (self.first_is_due or self.goes_on)

    def first_token(
        self, now: float, output: EngineOutput, token: SampledToken, ended: FinishReason | None
    ) -> FirstToken:
        """Returns the message for the token that follows the prompt, and counts it. ended: see `StepBatches.add`."""
        assert self.first_is_due, "the proxy takes one FirstToken of an attempt"
        self.first_is_due = False
        self.num_generated += 1
        self.joined_at = now
        started_at = self.started_at if self.started_at is not None else self.arrived_at
        wants_prompt = isinstance(self.message, StartPrefill) and self.message.num_prompt_logprobs is not None
        return FirstToken(
            self.attempt_id,
            token,
            self.message.stop.check(token.token_id, self.num_generated) or (ended if self.goes_on else None),
            started_at - self.arrived_at,
            now - started_at,
            (output.prompt_logprobs or []) if wants_prompt and self.number == 0 else None,
            output.num_cached_tokens,
            keeps_media=self.media is not None,
        )


class Streams:
    """All streams of one worker, by engine request and by attempt."""

    def __init__(self) -> None:
        self._by_engine_id: dict[str, Stream] = {}
        self._by_key: dict[tuple[str, str], Stream] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, stream: Stream) -> None:
        assert stream.key not in self._by_key and stream.engine_id not in self._by_engine_id, "refused before"
        self._by_engine_id[stream.engine_id] = self._by_key[stream.key] = stream
        if stream.media is not None:
            stream.media.num_streams += 1

    def remove(self, stream: Stream) -> None:
        """Forgets a stream after its last message, if it is still there."""
        if self._by_key.pop(stream.key, None) is not None:
            del self._by_engine_id[stream.engine_id]
            if stream.media is not None:
                stream.media.drop()

    def of_engine(self, engine_id: str) -> Stream | None:
        return self._by_engine_id.get(engine_id)

    def get(self, proxy_id: str, attempt_id: str) -> Stream | None:
        return self._by_key.get((proxy_id, attempt_id))

    def holds(self, message: PromptMessage) -> bool:
        return any((message.proxy_id, attempt_id) in self._by_key for attempt_id in message.attempt_ids)

    def of_message(self, message: PromptMessage) -> list[Stream]:
        """Returns the open streams of a prompt, in the order of its attempts."""
        found = (self._by_key.get((message.proxy_id, attempt_id)) for attempt_id in message.attempt_ids)
        return [stream for stream in found if stream is not None and stream.message is message]

    def of_proxy(self, proxy_id: str) -> list[Stream]:
        return [stream for stream in self._by_key.values() if stream.message.proxy_id == proxy_id]

    def late(self, now: float) -> list[Stream]:
        return [stream for stream in self._by_key.values() if now >= stream.deadline]

    def waiting_tokens(self) -> list[tuple[int, int]]:
        """Returns (priority, tokens of prompts that are not computed yet). Each prompt counts once."""
        prompts = {id(each.message): each.message for each in self._by_key.values() if each.first_is_due}
        tokens: dict[int, int] = {}
        for message in prompts.values():
            tokens[message.priority] = tokens.get(message.priority, 0) + len(message.token_ids) // BYTES_PER_TOKEN
        return sorted(tokens.items())

    @property
    def num_decoding(self) -> int:
        return sum(stream.goes_on and not stream.first_is_due for stream in self._by_key.values())

    @property
    def num_shipping(self) -> int:
        return sum(stream.is_shipping for stream in self._by_key.values())


class StepBatches:
    """Collects a step's tokens: the first ones, and then one TokenBatch for each proxy."""

    def __init__(self) -> None:
        self._firsts: list[HandoverAction] = []
        self._batches: dict[str, TokenBatch] = {}

    def add_first(self, stream: Stream, message: FirstToken) -> None:
        self._firsts.append(SendToProxy(stream.message.proxy_id, message))

    def add(self, now: float, step_s: float, stream: Stream, token: SampledToken, ended: FinishReason | None) -> bool:
        """Counts the token. Returns whether it is the last one. ended: why the engine has ended the request with it."""
        stream.num_generated += 1
        reason = stream.message.stop.check(token.token_id, stream.num_generated) or ended
        batch = self._batches.setdefault(stream.message.proxy_id, TokenBatch([], []))
        batch.tokens.append(NewToken(stream.attempt_id, token, reason))
        if not stream.has_begun_decode:
            stream.has_begun_decode = True
            wait_s = max(0.0, now - step_s - stream.joined_at)
            batch.began.append(DecodeBegan(stream.attempt_id, wait_s, step_s, stream.num_kv_bytes))
        return reason is not None

    def actions(self) -> list[HandoverAction]:
        return self._firsts + [SendToProxy(proxy_id, batch) for proxy_id, batch in self._batches.items()]
