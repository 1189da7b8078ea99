"""Orders of the scheduler (`vllm_scheduler.VllmScheduler`) to vLLM's engine, and what the engine reports. Pure."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tandem.handover.actions import HandoverAction
from tandem.protocol.messages.dispatch import PromptMessage
from tandem.protocol.messages.sampling import FinishReason, SampledToken
from tandem.runtime.errors import TandemError
from tandem.vllm_worker.scheduler.request_media import RequestMedia


class AddRequest(msgspec.Struct, frozen=True):
    """Compute one sequence."""

    engine_id: str
    message: PromptMessage
    number: int
    """Number of the sequence among those that share the prompt."""
    token_ids: list[int]
    """The prompt, and then tokens that were generated before."""
    num_generated: int
    max_tokens: int
    """Limit on generated tokens, with those before."""
    receives: bool = False
    """Its KV comes from another worker."""
    ships: bool = False
    """Its blocks must be kept until EndShipping."""
    media: RequestMedia | None = None


class AbortRequests(msgspec.Struct, frozen=True):
    engine_ids: list[str]


class KVArrived(msgspec.Struct, frozen=True):
    """All KV of a request is there, and the token that follows its prompt is known."""

    engine_id: str
    first_token_id: int


class EndReceiving(msgspec.Struct, frozen=True):
    """Nothing more is written to the blocks of an aborted request, if it has any."""

    engine_id: str


class EndShipping(msgspec.Struct, frozen=True):
    """Nothing more is read from the blocks of a request."""

    engine_id: str


EngineOrder = AddRequest | AbortRequests | KVArrived | EndReceiving | EndShipping
VllmAction = HandoverAction | EngineOrder


class AllocatedBlocks(NamedTuple):
    """Blocks of a request whose KV comes from another worker, which is needed after the tokens that are cached here."""

    engine_id: str
    num_cached_tokens: int
    groups: list[tuple[int, list[int]]]
    """For each group of vLLM's blocks: the number of the first one that must be written, and that one and all after it.
    Those before it are cached, or outside of the window of the group's layers."""


class ComputedBlocks(NamedTuple):
    """Blocks of a request that ships whose content is complete, from the first on."""

    engine_id: str
    groups: list[list[int]]
    """NO_BLOCK for one that has left the window of its group's layers."""


class EngineOutput(NamedTuple):
    """Tokens of one request in one step. error: why it has ended without being finished."""

    engine_id: str
    tokens: list[SampledToken]
    finish_reason: FinishReason | None = None
    error: TandemError | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[bytes] | None = None
    """Packed, with the first token."""


class EngineFacts(NamedTuple):
    """What does not change while the engine runs."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    quantization: str
    max_item_tokens: int
    """Of an image or video."""
    group_block_sizes: list[int]
    """Tokens of a block in each group of layers. A layer with a state, in place of keys and values, has it in the last
    block of its group."""
    speculates: bool = False
    """Whether it decodes speculatively."""


class EngineFigures(NamedTuple):
    """State of the engine after a step. Counts of blocks leave out the one that vLLM uses for padding."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_preempted: int = 0
    num_drafted: int = 0
    """Tokens that were proposed, since the start."""
    num_accepted: int = 0
    """Of these, tokens that were generated."""


class StepReport(NamedTuple):
    """What has happened in the engine since the report before."""

    begun: list[str]
    """Requests that were scheduled for the first time, or again after a preemption."""
    allocated: list[AllocatedBlocks]
    computed: list[ComputedBlocks]
    outputs: list[EngineOutput]
    lost: list[str]
    """Requests that ship and were preempted: their blocks are no longer theirs."""
    figures: EngineFigures
    step_s: float = 0.0
    """Duration of the step; 0 if nothing was computed."""
    gap_s: float | None = None
    """Time from the end of the step before to the start of this one, if there was work meanwhile and both computed."""
    num_decoding: int = 0
    num_prompt_tokens: int = 0
    num_media_encoded: int = 0
    added: list[bytes] = []  # noqa: RUF012
    """Prefix hashes that the cache has gained."""
    evicted: list[bytes] = []  # noqa: RUF012
