"""Gets the tokens that grammars allow in a step, on a thread beside the model, and applies them to the logits."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.batch import Sample
from tandem.engine.cuda.streams import Array, upload
from tandem.engine.sampling.grammar import MASKS_TIMEOUT_S, Grammar, MaskRequest
from tandem.engine.sampling.grammar_messages import Mask
from tandem.runtime.errors import ErrorInfo, InternalError, TandemError
from tandem.runtime.threads import show_thread_name

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMask:
    """Which tokens the grammars of a step allow."""

    rows: list[int]
    """Rows of the logits that have a grammar."""
    mask_rows: list[int]
    """For each of them, its row in `bits`."""
    bits: npt.NDArray[np.uint8]
    """uint8 [num_masks, 4 * num_words], one bit per token."""
    errors: dict[int, ErrorInfo]
    """Errors by row of the logits; such rows are not masked."""
    banned: dict[int, Collection[int]] = field(default_factory=dict)
    """Tokens that rows without a mask must not get, by row: their optional grammars have failed."""

    def apply(self, logits: torch.Tensor) -> None:
        """Sets forbidden tokens to -inf in place. logits: [num_rows, vocab_size]."""
        for row, token_ids in self.banned.items():
            [index] = upload(
                [np.array([each for each in token_ids if each < logits.shape[-1]], np.int64)], logits.device
            )
            logits[row].index_fill_(0, index, float("-inf"))
        if not self.rows:
            return
        arrays: list[Array] = [self.bits, np.array(self.rows, np.int64), np.array(self.mask_rows, np.int64)]
        bits, index, mask_rows = upload(arrays, logits.device)
        mask_tokens(logits, index, _allowed(bits, logits.shape[-1]).index_select(0, mask_rows))


def mask_tokens(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    """Sets forbidden tokens of some rows to -inf in place.

    logits: [num_all_rows, vocab_size]. rows: ascending, [num_rows]. allowed: bool [num_rows, vocab_size].
    """
    if len(rows) == len(logits):
        logits.masked_fill_(~allowed, float("-inf"))
    else:
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(~allowed, float("-inf")))


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
    """The thread that waits for masks. It starts with the first grammar."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "grammar-masks", show_thread_name)

    def start(self, samples: Sequence[Sample]) -> Future[StepMask] | None:
        """Starts computing a step's masks. samples: one per row of the logits. None if no row has a grammar."""
        rows = [row for row, sample in enumerate(samples) if sample.grammar is not None]
        return self._thread.submit(compute_masks, samples, rows) if rows else None


def compute_masks(samples: Sequence[Sample], rows: list[int], timeout_s: float = MASKS_TIMEOUT_S) -> StepMask:
    """Has the grammars' processes compute the masks of the samples in `rows`, all grammars at the same time.

    Sequences that begin together share a state and its mask. timeout_s: for all masks together; sequences whose masks
    are late get an error. Those whose grammar is optional go on without it instead.
    """
    deadline = time.monotonic() + timeout_s
    users: dict[int, list[int]] = {}
    requests: dict[int, dict[int, MaskRequest]] = {}  # by grammar and state
    grammars: dict[int, Grammar] = {}
    free: list[int] = []
    for row in rows:
        sample = samples[row]
        state = sample.grammar
        assert state is not None
        if state.has_failed:
            free.append(row)
            continue
        users.setdefault(id(state), []).append(row)
        grammars[id(state.grammar)] = state.grammar
        request = MaskRequest(state, sample.output_token_ids, sample.banned_token_ids)
        requests.setdefault(id(state.grammar), {}).setdefault(id(state), request)
    failed: dict[int, ErrorInfo] = {}
    for key, grammar in grammars.items():
        try:
            grammar.send(list(requests[key].values()), deadline)
        except Exception as error:
            failed[key] = _error_info(error)
    found: list[bytes] = []
    mask_row_of: dict[int, int] = {}
    errors: dict[int, ErrorInfo] = {}
    for key, grammar in grammars.items():
        of_grammar = requests[key]
        if key in failed:
            masks = [Mask(error=failed[key])] * len(of_grammar)
        else:
            masks = grammar.receive(list(of_grammar.values()), deadline)
        for state_key, mask in zip(of_grammar, masks, strict=True):
            state = of_grammar[state_key].state
            if mask.error is None:
                mask_row_of |= dict.fromkeys(users[state_key], len(found))
                found.append(mask.bits)
            elif state.is_optional:
                state.give_up(mask.error.message)
                free += users[state_key]
            else:
                errors |= dict.fromkeys(users[state_key], mask.error)
    constrained = [row for row in rows if row in mask_row_of]
    bits = np.frombuffer(bytearray().join(found), np.uint8).reshape(len(found), -1 if found else 0)
    banned = {row: samples[row].banned_token_ids for row in free if samples[row].banned_token_ids}
    return StepMask(constrained, [mask_row_of[row] for row in constrained], bits, errors, banned)


def _error_info(error: Exception) -> ErrorInfo:
    if isinstance(error, TandemError):
        return ErrorInfo.of(error)
    log.error("a grammar's mask failed", exc_info=error)
    return ErrorInfo.of(InternalError(f"the grammar's mask failed: {type(error).__name__}"))
