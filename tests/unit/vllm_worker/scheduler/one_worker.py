"""A scheduler of a vLLM worker, driven by hand."""

from __future__ import annotations

from typing import Any

from tandem.handover.actions import SendToPeer, SendToProxy
from tandem.protocol.messages.dispatch import AttemptFailed, TokenBatch
from tandem.protocol.messages.sampling import FinishReason, SampledToken
from tandem.runtime.errors import InternalError
from tandem.vllm_worker.scheduler.engine_orders import (
    AddRequest,
    AllocatedBlocks,
    ComputedBlocks,
    EngineFigures,
    EngineOutput,
    StepReport,
    VllmAction,
)
from tandem.vllm_worker.scheduler.vllm_scheduler import VllmScheduler

NUM_BLOCKS, BLOCK_SIZE, LEASE_S = 100, 4, 10.0


def scheduler() -> VllmScheduler:
    return VllmScheduler(NUM_BLOCKS, BLOCK_SIZE, 1000, LEASE_S, 0.05)


def report(
    *outputs: EngineOutput,
    begun: list[str] | None = None,
    allocated: AllocatedBlocks | None = None,
    computed: ComputedBlocks | None = None,
    lost: list[str] | None = None,
    **fields: Any,
) -> StepReport:
    figures = EngineFigures(fields.pop("num_running", 0))
    given = [allocated] if allocated is not None else []
    done = [computed] if computed is not None else []
    return StepReport(begun or [], given, done, list(outputs), lost or [], figures, **fields)


def output(engine_id: str, *token_ids: int, reason: FinishReason | None = None, error: str = "") -> EngineOutput:
    tokens = [SampledToken(token_id) for token_id in token_ids]
    return EngineOutput(engine_id, tokens, reason, InternalError(error) if error else None)


def orders(actions: list[VllmAction]) -> list[AddRequest]:
    return [action for action in actions if isinstance(action, AddRequest)]


def to_proxy(actions: list[VllmAction]) -> list[Any]:
    return [action.message for action in actions if isinstance(action, SendToProxy)]


def to_peer(actions: list[VllmAction]) -> list[Any]:
    return [action.message for action in actions if isinstance(action, SendToPeer)]


def failures(actions: list[VllmAction]) -> dict[str, str]:
    """Returns (attempt: text of its error)."""
    messages = to_proxy(actions)
    return {each.attempt_id: each.error.message for each in messages if isinstance(each, AttemptFailed)}


def new_tokens(actions: list[VllmAction]) -> list[tuple[str, int, FinishReason | None]]:
    batches = [each for each in to_proxy(actions) if isinstance(each, TokenBatch)]
    return [(t.attempt_id, t.token.token_id, t.finish_reason) for batch in batches for t in batch.tokens]
