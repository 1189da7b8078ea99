"""The tokens that grammars allow in one step: computed on a thread of their own while the model runs, then applied."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from tandem.engine.batch import Sample
from tandem.engine.sampling.grammar import GrammarState
from tandem.runtime.errors import ErrorInfo, InternalError, TandemError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMask:
    """rows: of the logits, those with a grammar; mask_rows: which of bits' rows is each one's.

    bits: uint8 [num_masks, 4 * num_words], a bit per token. errors: by row of the logits; such a row is free.
    """

    rows: list[int]
    mask_rows: list[int]
    bits: torch.Tensor
    errors: dict[int, ErrorInfo]

    def apply(self, logits: torch.Tensor) -> None:
        """Put -inf where a token is not allowed, in place: logits [num_rows, vocab_size]."""
        if not self.rows:
            return
        allowed = _allowed(self.bits.to(logits.device), logits.shape[-1])
        index = torch.tensor(self.rows, device=logits.device)
        allowed = allowed.index_select(0, torch.tensor(self.mask_rows, device=logits.device))
        if len(self.rows) == len(logits):
            logits.masked_fill_(~allowed, float("-inf"))
        else:
            logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(~allowed, float("-inf")))


def _allowed(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """bits [num_masks, num_bytes] as booleans [num_masks, vocab_size]; tokens beyond the bits are not allowed.

    Through a table of eight booleans per byte: a tenth of the time of shifting each bit into its place.
    """
    table = _table(bits.device)
    allowed = table.index_select(0, bits.flatten().int()).view(torch.bool).view(len(bits), -1)
    missing = vocab_size - allowed.shape[1]
    return torch.nn.functional.pad(allowed, (0, missing)) if missing > 0 else allowed[:, :vocab_size]


_tables: dict[torch.device, torch.Tensor] = {}


def _table(device: torch.device) -> torch.Tensor:
    """int64 [256]: the eight bytes of each are the booleans of a byte's bits, the lowest first."""
    if device not in _tables:
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        _tables[device] = torch.from_numpy(bits).view(torch.int64)[:, 0].contiguous().to(device)
    return _tables[device]


class GrammarMasks:
    """Belongs to the model runner; its thread starts with the first grammar."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def start(self, samples: Sequence[Sample]) -> Future[StepMask] | None:
        """Begin the masks of a step, whose samples are one per row of its logits; None where no row has a grammar."""
        rows = [row for row, sample in enumerate(samples) if sample.grammar is not None]
        if not rows:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        return self._thread.submit(compute_masks, samples, rows)


def compute_masks(samples: Sequence[Sample], rows: list[int]) -> StepMask:
    """Of the samples in `rows`. Those of sequences that begin together share a state, and one mask."""
    users: dict[int, list[int]] = {}
    states: dict[int, tuple[GrammarState, Sample]] = {}
    errors: dict[int, ErrorInfo] = {}
    for row in rows:
        state = samples[row].grammar
        assert state is not None
        users.setdefault(id(state), []).append(row)
        states[id(state)] = (state, samples[row])
    num_words = 0
    for key, (state, _) in states.items():
        try:
            state.begin()
            num_words = state.num_words  # all are of one tokeniser
        except BaseException as error:
            errors |= dict.fromkeys(users[key], _told(error))
    bits = np.full((len(states), 4 * num_words), 0xFF, dtype=np.uint8)
    mask_row_of: dict[int, int] = {}
    for mask_row, (key, (state, sample)) in enumerate(states.items()):
        mask_row_of |= dict.fromkeys(users[key], mask_row)
        if users[key][0] in errors:
            continue
        try:
            state.fill(sample.output_token_ids, sample.banned_token_ids, bits[mask_row])
        except BaseException as error:
            bits[mask_row] = 0xFF
            errors |= dict.fromkeys(users[key], _told(error))
    constrained = [row for row in rows if row not in errors]
    return StepMask(constrained, [mask_row_of[row] for row in constrained], torch.from_numpy(bits), errors)


def _told(error: BaseException) -> ErrorInfo:
    """A panic of the library is no Exception; it must end the sequence alone, and not the engine's thread."""
    if isinstance(error, TandemError):
        return ErrorInfo.of(error)
    log.error("a grammar's mask failed", exc_info=error)
    return ErrorInfo.of(InternalError(f"the grammar's mask failed: {type(error).__name__}"))
