"""Messages between a proxy (DEALER) and a worker (ROUTER): commands down, facts up.

`request_id` names one sequence on one proxy; `transfer_id` names one attempt to move its KV cache and is minted anew
for each attempt. Commands about one request travel on one connection, so they arrive in the order they were sent.
"""

from __future__ import annotations

import msgspec

from protocol.errors import ErrorInfo
from protocol.generation import FinishReason, SampledToken, SamplingParams, StopConditions, TokenLogprobs


class StartPrefill(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to prefill: compute this prompt, report its first token, ship its KV to `decode_worker_id`.

    token_ids: see `protocol.token_ids`. deadline_s: from receipt; then the request fails.
    decode_worker_id: None when one token is all that is asked, so that there is nothing to ship.
    num_prompt_logprobs: None, or how many top tokens to report for each prompt token but the first.
    """

    proxy_id: str
    request_id: str
    transfer_id: str
    token_ids: bytes
    sampling: SamplingParams
    stop: StopConditions
    decode_worker_id: str | None
    decode_epoch: str | None
    deadline_s: float
    num_prompt_logprobs: int | None = None


class PrepareDecode(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to decode: a request is on its way by `transfer_id` from `prefill_worker_id`."""

    proxy_id: str
    request_id: str
    transfer_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopConditions
    prefill_worker_id: str
    prefill_epoch: str
    deadline_s: float


class AbortRequest(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker: the client is gone, or the proxy has ended the request. No answer is expected."""

    proxy_id: str
    request_id: str


class FirstToken(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Prefill to proxy: the prompt is done. Terminal when `finish_reason` is set.

    queue_s: from receipt to the first chunk; prefill_s: from there to this token. prompt_logprobs: for every prompt
    token but the first, where they were asked for.
    """

    request_id: str
    token: SampledToken
    finish_reason: FinishReason | None
    queue_s: float
    prefill_s: float
    prompt_logprobs: list[TokenLogprobs] | None = None


class DecodeReserved(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to proxy: blocks are set aside, so a stream that begins now will not wait for room."""

    request_id: str


class NewToken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One sequence's token of one step. Terminal when `finish_reason` is set."""

    request_id: str
    token: SampledToken
    finish_reason: FinishReason | None = None


class TokenBatch(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to proxy: all tokens of one step that belong to this proxy."""

    tokens: list[NewToken]


class RequestFailed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Worker to proxy: terminal."""

    request_id: str
    error: ErrorInfo


ToPrefill = StartPrefill | AbortRequest
ToDecode = PrepareDecode | AbortRequest
ToProxy = FirstToken | DecodeReserved | TokenBatch | RequestFailed
