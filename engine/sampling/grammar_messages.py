"""Messages between a worker, the fork server that holds its tokeniser, and its grammars' processes."""

from __future__ import annotations

import msgspec

from tandem.protocol.messages.sampling import Thinking
from tandem.runtime.errors import ErrorInfo, InvalidRequest, client_reason

ENTRY = "grammar"
"""Of the fork server."""


def unusable_tokenizer(error: Exception) -> InvalidRequest:
    reason = client_reason(error)
    return InvalidRequest(f"this model does not support grammars: its tokeniser cannot be used: {reason}")


class LoadTokenizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of the fork server. vocab_size: of the logits."""

    tokenizer_json: bytes
    vocab_size: int
    eos_token_id: int | None


class CompileGrammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The first message to a grammar's process, which answers with `Mask`: empty, or an error."""

    text: str


class NewState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stop_token_ids: list[int]
    thinking: Thinking | None


class FillMask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for the next mask of a sequence."""

    state_id: int
    """Of the sequence, unique in the worker."""
    new_state: NewState | None
    """Set in the first request for a sequence."""
    token_ids: list[int]
    """Generated tokens since the last request."""
    banned_token_ids: list[int]


class FillMasks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The process answers with one `Mask` for each request, in their order."""

    requests: list[FillMask]
    ended_state_ids: list[int]
    """Sequences that need no more masks."""
    budget_s: float
    """Processor time after which no further mask is begun: the rest are late."""


class Mask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bits: bytes = b""
    """One bit for each token; empty after an error."""
    error: ErrorInfo | None = None
    cpu_s: float = 0.0
    """Processor time that it took."""
    is_late: bool = False
    """Whether it was not computed, because those before it had used up the budget."""
