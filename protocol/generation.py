"""What a request asks of the workers: sampling and stopping, and why it ended."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length"]


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one sequence is sampled. Ranges are checked by `proxy`; workers trust them.

    temperature: 0 is greedy. top_k: 0 keeps all. top_p: in (0, 1], 1 keeps all.
    seed: always set; the proxy draws one where the client gave none, so noise is a function of (seed, position).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


class StopConditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the workers end a sequence. Stop strings are the proxy's, which alone sees text.

    max_tokens: how many tokens may be generated, at least 1; prompt + max_tokens fits the model.
    stop_token_ids: these end the sequence (the end-of-sequence ids are among them unless the client ignores them).
    """

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()

    def check(self, token_id: int, num_generated: int) -> FinishReason | None:
        """Why the sequence ends with `token_id` as its `num_generated`-th generated token, or None if it goes on."""
        if token_id in self.stop_token_ids:
            return "stop"
        return "length" if num_generated >= self.max_tokens else None
