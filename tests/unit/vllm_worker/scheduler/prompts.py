"""Prompts with defaults."""

from __future__ import annotations

from typing import Any

from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions


def start(
    attempt_ids: list[str],
    num_tokens: int = 10,
    transfer_id: str = "t",
    max_tokens: int = 4,
    stop_token_ids: frozenset[int] = frozenset(),
    **fields: Any,
) -> StartPrefill:
    return StartPrefill(
        proxy_id=fields.pop("proxy_id", "proxy"),
        attempt_ids=attempt_ids,
        transfer_id=transfer_id,
        token_ids=pack_token_ids(range(num_tokens)),
        sampling=fields.pop("sampling", SamplingParams()),
        seeds=[0] * len(attempt_ids),
        stop=StopConditions(max_tokens, stop_token_ids),
        deadline_s=fields.pop("deadline_s", 100.0),
        decode_worker_id="d",
        decode_epoch="d1",
        **fields,
    )
