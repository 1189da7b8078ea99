"""Messages between a proxy (DEALER) and a worker (ROUTER): commands to the worker, facts to the proxy.

`attempt_id` names one dispatch of one sequence, on one proxy. Sequences that share a prompt (n > 1) are prefilled and
shipped once, under one `transfer_id`. When a sequence is dispatched again, e.g. after a preemption, both ids are new
and the prompt ends with the tokens generated before. Commands about one attempt travel on one connection, in order.
"""

from __future__ import annotations

import msgspec

from tandem.protocol.messages.media import MediaItem
from tandem.protocol.messages.sampling import (
    FinishReason,
    Pooling,
    SampledToken,
    SamplingParams,
    StopConditions,
)
from tandem.runtime.errors import ErrorInfo


class AdapterRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter as requests name it.

    digest: of the adapter's files (`runtime.files.lora_files`); part of prefix hashes. folder: absolute path from
    which workers load it."""

    digest: str
    folder: str


class PromptMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Fields that StartPrefill and PrepareDecode share."""

    proxy_id: str
    attempt_ids: list[str]
    """One for each sequence that shares the prompt."""
    transfer_id: str
    token_ids: bytes
    """Prompt, see `protocol.messages.packed`; the last `num_generated` tokens come from earlier attempts."""
    sampling: SamplingParams
    seeds: list[int]
    """One for each attempt, which replaces `sampling.seed`."""
    stop: StopConditions
    deadline_s: float
    """Seconds from the receipt of the message."""
    num_generated: int = 0
    cache_salt: str = ""
    """Prompts with different salts share no cached KV."""
    priority: int = 0
    """A lower one is served sooner."""
    media: tuple[MediaItem, ...] = ()
    """Images and videos, see `protocol.messages.media`."""
    media_cache: str = ""
    """tcp endpoint of the media cache that holds the media; empty if the worker can map their segments."""
    adapter: AdapterRef | None = None
    """LoRA adapter to compute with; None for the base model."""

    @property
    def adapter_digest(self) -> str:
        """The digest of the adapter; "" for the base model."""
        return self.adapter.digest if self.adapter is not None else ""


class StartPrefill(PromptMessage, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Proxy to the worker that prefills: compute this prompt and report its first tokens."""

    decode_worker_id: str | None
    """Worker that decodes, to which the prompt's KV is shipped unless it is the receiver; None if only one token is
    requested."""
    decode_epoch: str | None
    """Epoch of that worker."""
    num_prompt_logprobs: int | None = None
    """Number of top tokens to report for each prompt token but the first; None reports none."""
    pooling: Pooling | None = None
    """Embedding of the prompt to return instead of tokens; then nothing is decoded."""


class PrepareDecode(PromptMessage, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Proxy to the worker that decodes, if it is not the one that prefills: sequences will arrive from there."""

    prefill_worker_id: str
    prefill_epoch: str


class AbortAttempt(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker: the client has disconnected, or the proxy has ended the request. No answer."""

    proxy_id: str
    attempt_id: str


class AbortAllAttempts(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker: the proxy has given the worker up, or their connection broke and messages may be lost.

    All of the proxy's attempts end, also those that the proxy has aborted by a lost message. No answer.
    """

    proxy_id: str


class Ping(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Proxy to worker, when it has connected or the connection has broken. The worker gets no prompts before its Pong.

    A worker whose reports reach a proxy need not be reached by it: its address may be wrong, or a firewall open in one
    direction.
    """

    number: int
    """Grows with each ping to a worker, so that the proxy knows an answer from before the connection broke."""


class Pong(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Worker to proxy: the answer to a Ping."""

    epoch: str
    """Of the worker that answers: another one may listen at the address."""
    number: int


class FirstToken(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Worker to proxy: the prompt is computed. Terminal if `finish_reason` is set."""

    attempt_id: str
    token: SampledToken
    """Has no meaning if `embedding` is set."""
    finish_reason: FinishReason | None
    queue_s: float
    """Seconds from receipt to the first chunk."""
    prefill_s: float
    """Seconds from the first chunk to this token."""
    prompt_logprobs: list[bytes] | None = None
    """For every prompt token but the first, if requested, packed (`protocol.messages.packed`)."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    embedding: bytes | None = None
    """float32 values, packed, if `StartPrefill.pooling` asks for them."""
    keeps_media: bool = False
    """Whether the worker has the prompt's media mapped until the sequence ends, as vLLM's engine does. Their memory is
    then not free before, whatever the proxy releases."""


class DecodeReserved(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Decode to proxy: blocks are reserved, so a stream that begins now does not wait for them."""

    attempt_id: str


class NewToken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One sequence's token of one step. Terminal if `finish_reason` is set."""

    attempt_id: str
    token: SampledToken
    finish_reason: FinishReason | None = None


class DecodeBegan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Sent with the first token that decode samples for a sequence. Durations, because clocks differ between hosts."""

    attempt_id: str
    decode_wait_s: float
    """From the arrival of all KV to the sequence's first step."""
    step_s: float
    """Duration of that step."""
    num_kv_bytes: int = 0
    """KV that arrived for its prompt."""


class TokenBatch(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Decode to proxy: one step's tokens for this proxy. began: an entry for each sequence whose first step this
    was."""

    tokens: list[NewToken]
    began: list[DecodeBegan] = []


class AttemptPreempted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Worker to proxy: terminal. No blocks were left for the sequence; dispatch it again."""

    attempt_id: str


class AttemptFailed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Worker to proxy: terminal."""

    attempt_id: str
    error: ErrorInfo


ToWorker = StartPrefill | PrepareDecode | AbortAttempt | AbortAllAttempts | Ping
AttemptEvent = FirstToken | DecodeReserved | TokenBatch | AttemptPreempted | AttemptFailed
ToProxy = AttemptEvent | Pong
