"""Computes the tokens that grammars allow in a step, on a thread beside the model, and applies them to the logits."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.batch import Sample
from tandem.engine.cuda.streams import Array, upload
from tandem.engine.sampling.grammar import GrammarState
from tandem.runtime.errors import ErrorInfo, InternalError, TandemError
from tandem.runtime.threads import show_thread_name

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMask:
    """rows: rows of the logits that have a grammar. mask_rows: for each of them, its row in `bits`.

    bits: uint8 [num_masks, 4 * num_words], one bit per token. errors: by row of the logits; such rows are not masked.
    """

    rows: list[int]
    mask_rows: list[int]
    bits: npt.NDArray[np.uint8]
    errors: dict[int, ErrorInfo]

    def apply(self, logits: torch.Tensor) -> None:
        """Sets forbidden tokens to -inf in place. logits: [num_rows, vocab_size]."""
        if not self.rows:
            return
        arrays: list[Array] = [self.bits, np.array(self.rows, np.int64), np.array(self.mask_rows, np.int64)]
        bits, index, mask_rows = upload(arrays, logits.device)
        allowed = _allowed(bits, logits.shape[-1]).index_select(0, mask_rows)
        if len(self.rows) == len(logits):
            logits.masked_fill_(~allowed, float("-inf"))
        else:
            logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(~allowed, float("-inf")))


def _allowed(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Unpacks bits [num_masks, num_bytes] to booleans [num_masks, vocab_size]; tokens beyond the bits are forbidden.

    Uses a lookup table of eight booleans per byte, which is much faster than shifting bits.
    """
    table = _table(bits.device)
    allowed = table.index_select(0, bits.flatten().int()).view(torch.bool).view(len(bits), -1)
    missing = vocab_size - allowed.shape[1]
    return torch.nn.functional.pad(allowed, (0, missing)) if missing > 0 else allowed[:, :vocab_size]


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    """Returns int64 [256]; the eight bytes of entry i are the bits of i as booleans, lowest first."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return upload([bits.view(np.int64)[:, 0].copy()], device)[0]


class GrammarMasks:
    """The thread that computes masks. It starts with the first grammar."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "grammar-masks", show_thread_name)

    def start(self, samples: Sequence[Sample]) -> Future[StepMask] | None:
        """Starts computing a step's masks. samples: one per row of the logits. None if no row has a grammar."""
        rows = [row for row, sample in enumerate(samples) if sample.grammar is not None]
        return self._thread.submit(compute_masks, samples, rows) if rows else None


def compute_masks(samples: Sequence[Sample], rows: list[int]) -> StepMask:
    """Computes the masks of the samples in `rows`. Sequences that begin together share a state and its mask."""
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
            num_words = state.num_words  # the same for all, because they share the tokeniser
        except BaseException as error:
            errors |= dict.fromkeys(users[key], _error_info(error))
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
            errors |= dict.fromkeys(users[key], _error_info(error))
    constrained = [row for row in rows if row not in errors]
    return StepMask(constrained, [mask_row_of[row] for row in constrained], bits, errors)


def _error_info(error: BaseException) -> ErrorInfo:
    """Describes a mask's error. Includes llguidance's panics (not Exceptions), which must end only their sequence."""
    if isinstance(error, TandemError):
        return ErrorInfo.of(error)
    log.error("a grammar's mask failed", exc_info=error)
    return ErrorInfo.of(InternalError(f"the grammar's mask failed: {type(error).__name__}"))
