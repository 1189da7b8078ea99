"""What one step computes: pure data between the schedulers and the model runner."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from protocol.generation import SamplingParams


class BatchItem(msgspec.Struct, frozen=True):
    """One sequence's share of a step: its tokens at positions `start` to `start + len(token_ids)`.

    block_table: covers at least those positions. sampling: None when no token is sampled, because the prompt goes on.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sampling: SamplingParams | None
