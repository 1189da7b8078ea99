"""Messages between a proxy (DEALER) and a worker (ROUTER): commands down, facts up.

`attempt_id` names one attempt to generate one sequence, on one proxy. Sequences that share a prompt (n > 1) are
prefilled and shipped as one, under one `transfer_id`. Both are minted anew when a sequence is dispatched again, which
it is after a preemption: then the prompt ends with the tokens that were generated before. Commands about one attempt
travel on one connection, so they arrive in the order they were sent.
"""

from __future__ import annotations

import msgspec

from tandem.protocol.messages.generation import (
    FinishReason,
    SampledToken,
    SamplingParams,
    StopConditions,
    TokenLogprobs,
)
from tandem.protocol.messages.media import MediaItem
from tandem.runtime.errors import ErrorInfo


class StartPrefill(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to prefill: compute this prompt, report its first tokens, ship its KV to `decode_worker_id`.

    attempt_ids: one for each sequence that shares the prompt; seeds: theirs, in place of `sampling.seed`.
    token_ids: see `protocol.messages.token_ids`; the last `num_generated` of them were generated in earlier attempts.
    cache_salt: prompts with different salts share no cached KV. deadline_s: from receipt; then the request fails.
    decode_worker_id: None when one token is all that is asked, so that there is nothing to ship.
    num_prompt_logprobs: None, or how many top tokens to report for each prompt token but the first. priority: lower is
    sooner. media: its images and videos, see `protocol.messages.media`. media_cache: tcp endpoint of the media cache
    that holds
    them, for a worker of another host; empty for one that can map their segments.
    """

    proxy_id: str
    attempt_ids: list[str]
    transfer_id: str
    token_ids: bytes
    sampling: SamplingParams
    seeds: list[int]
    stop: StopConditions
    decode_worker_id: str | None
    decode_epoch: str | None
    deadline_s: float
    num_prompt_logprobs: int | None = None
    num_generated: int = 0
    cache_salt: str = ""
    priority: int = 0
    media: tuple[MediaItem, ...] = ()
    media_cache: str = ""


class PrepareDecode(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to decode: sequences are on their way from `prefill_worker_id`. The fields are those of StartPrefill.

    prefill_worker_id, prefill_epoch: None when the decode worker is to compute the prompt itself. Then it sends
    FirstToken, and num_prompt_logprobs counts. That is for prompts without media only.
    """

    proxy_id: str
    attempt_ids: list[str]
    transfer_id: str
    token_ids: bytes
    sampling: SamplingParams
    seeds: list[int]
    stop: StopConditions
    prefill_worker_id: str | None
    prefill_epoch: str | None
    deadline_s: float
    num_prompt_logprobs: int | None = None
    num_generated: int = 0
    cache_salt: str = ""
    priority: int = 0
    media: tuple[MediaItem, ...] = ()


class AbortAttempt(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker: the client is gone, or the proxy has ended the request. No answer is expected."""

    proxy_id: str
    attempt_id: str


class FirstToken(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Whoever computes the prompt, prefill or decode, to proxy: it is done. Terminal when `finish_reason` is set.

    queue_s: from receipt to the first chunk; prefill_s: from there to this token. prompt_logprobs: for every prompt
    token but the first, where they were asked for. num_cached_tokens: of the prompt, those that were not computed.
    """

    attempt_id: str
    token: SampledToken
    finish_reason: FinishReason | None
    queue_s: float
    prefill_s: float
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0


class DecodeReserved(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to proxy: blocks are set aside, so a stream that begins now will not wait for room."""

    attempt_id: str


class NewToken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One sequence's token of one step. Terminal when `finish_reason` is set."""

    attempt_id: str
    token: SampledToken
    finish_reason: FinishReason | None = None


class DecodeBegan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Travels with the first token that decode chose for a sequence. Durations, since clocks differ between hosts.

    decode_wait_s: from the KV cache being whole to the sequence's first step; step_s: that step.
    """

    attempt_id: str
    decode_wait_s: float
    step_s: float


class TokenBatch(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Decode to proxy: the tokens of one step that belong to this proxy; began: of those that are first ones."""

    tokens: list[NewToken]
    began: list[DecodeBegan] = []


class AttemptPreempted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to proxy: terminal for this attempt. There was no room to go on; dispatch the sequence again."""

    attempt_id: str


class AttemptFailed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Worker to proxy: terminal."""

    attempt_id: str
    error: ErrorInfo


ToPrefill = StartPrefill | AbortAttempt
ToDecode = PrepareDecode | AbortAttempt
ToProxy = FirstToken | DecodeReserved | TokenBatch | AttemptPreempted | AttemptFailed
