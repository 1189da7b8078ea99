"""Gets the tokens that grammars allow in a step, on a thread beside the model, and applies them to the logits."""

from __future__ import annotations

import functools
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.batch import Sample
from tandem.engine.cuda.streams import Array, upload
from tandem.engine.sampling.grammar import MASKS_TIMEOUT_S, MaskRequest
from tandem.engine.sampling.grammar_messages import Mask
from tandem.runtime.errors import ErrorInfo, InternalError, TandemError
from tandem.runtime.threads import show_thread_name

SHARE = 0.5
"""Part of the time that a client's masks may take. They are computed beside the model: a step takes longer only where
they need more than the model."""
BURST_S = 0.05
"""Most that a client may save up, and what its masks may take in a step that only it waits for."""
UNLIMITED_S = 1e6


class MaskBudgets:
    """Of one worker."""

    def __init__(self) -> None:
        self._saved_s: dict[str, float] = {}  # of clients with a grammar in the last step; may be negative
        self._last_at = 0.0

    def begin_step(self, now: float, clients: Collection[str], is_shared: bool) -> dict[str, float]:
        """Returns what the masks of each client may take in this step; nothing for one whose masks took too long.

        clients: those with a grammar in the step. is_shared: whether there are other sequences or prompts in it.
        """
        earned_s = SHARE * (now - self._last_at)
        self._last_at = now
        is_shared = is_shared or len(clients) > 1
        saved = self._saved_s
        # One that is not in this step may be back in the next, and still owes what it has taken.
        self._saved_s = {each: min(BURST_S, saved[each] + earned_s) for each in saved} | {
            each: BURST_S for each in clients if each not in saved or not is_shared
        }
        self._saved_s = {each: s for each, s in self._saved_s.items() if each in clients or s < BURST_S}
        return {each: max(0.0, self._saved_s[each]) for each in clients}

    def spend(self, cpu_s: Mapping[str, float]) -> None:
        """cpu_s: what the masks of each client have taken in this step."""
        for client, spent_s in cpu_s.items():
            self._saved_s[client] = self._saved_s.get(client, BURST_S) - spent_s


def fitting(costs_s: Iterable[float], budget_s: float) -> int:
    """Returns how many of these masks are worth beginning: at least one, unless there is no budget at all."""
    number = 0
    for cost_s in costs_s:
        if budget_s <= 0.0:
            break
        budget_s -= cost_s
        if number and budget_s < 0.0:
            break
        number += 1
    return number


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
    late: frozenset[int] = frozenset()
    """Rows that skip the step: their masks are not computed yet."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Processor time of the masks of each client, with the step's waits for processes that it has lost."""
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
        self._budgets = MaskBudgets()

    def start(self, samples: Sequence[Sample], is_shared: bool) -> Future[StepMask] | None:
        """Starts computing a step's masks. samples: one per row of the logits. None if no row has a grammar.

        is_shared: whether the step also computes what has no grammar.
        """
        rows = [row for row, sample in enumerate(samples) if sample.grammar is not None]
        return self._thread.submit(self._compute, samples, rows, is_shared) if rows else None

    def _compute(self, samples: Sequence[Sample], rows: list[int], is_shared: bool) -> StepMask:
        states = (samples[row].grammar for row in rows)
        clients = {state.client for state in states if state is not None}
        budgets_s = self._budgets.begin_step(time.monotonic(), clients, is_shared)
        mask = compute_masks(samples, rows, budgets_s=budgets_s)
        self._budgets.spend(mask.cpu_s)
        return mask


def compute_masks(
    samples: Sequence[Sample],
    rows: list[int],
    timeout_s: float = MASKS_TIMEOUT_S,
    budgets_s: Mapping[str, float] | None = None,
) -> StepMask:
    """Has the grammars' processes compute the masks of the samples in `rows`, all grammars at the same time.

    Sequences that begin together share a state and its mask. timeout_s: for all masks together; sequences whose masks
    do not arrive by then get an error. Those whose grammar is optional go on without it instead. budgets_s: processor
    time for the masks of each client; rows whose masks do not fit are late. None has no limit.
    """
    deadline = time.monotonic() + timeout_s
    users: dict[int, list[int]] = {}
    wanted: dict[int, MaskRequest] = {}  # by state
    free: list[int] = []
    for row in rows:
        sample = samples[row]
        state = sample.grammar
        assert state is not None
        if state.has_failed:
            free.append(row)
            continue
        users.setdefault(id(state), []).append(row)
        wanted.setdefault(id(state), MaskRequest(state, sample.output_token_ids, sample.banned_token_ids))
    late = {row for key in _take_late(wanted, budgets_s) for row in users[key]}
    grammars = {id(each.state.grammar): each.state.grammar for each in wanted.values()}
    requests: dict[int, dict[int, MaskRequest]] = {key: {} for key in grammars}  # by grammar and state
    # Of the clients that share a grammar, the largest: one that has little left does not make the others late.
    limits_s: dict[int, float] = dict.fromkeys(grammars, UNLIMITED_S if budgets_s is None else 0.0)
    for key, request in wanted.items():
        state = request.state
        requests[id(state.grammar)][key] = request
        if budgets_s is not None:
            limits_s[id(state.grammar)] = max(limits_s[id(state.grammar)], budgets_s[state.client])
    failed: dict[int, ErrorInfo] = {}
    cpu_s: defaultdict[str, float] = defaultdict(float)
    for key, grammar in grammars.items():
        of_grammar, begun_at = list(requests[key].values()), time.monotonic()
        try:
            grammar.send(of_grammar, deadline, limits_s[key])
        except Exception as error:
            failed[key] = _error_info(error)
        if (waited_s := time.monotonic() - begun_at) > BURST_S:  # a process had to be started
            cpu_s[of_grammar[0].state.client] += waited_s
    found: list[bytes] = []
    mask_row_of: dict[int, int] = {}
    errors: dict[int, ErrorInfo] = {}
    for key, grammar in grammars.items():
        if key in failed:
            masks = [Mask(error=failed[key])] * len(requests[key])
        else:
            masks = grammar.receive(list(requests[key].values()), deadline, limits_s[key])
        for (state_key, request), mask in zip(requests[key].items(), masks, strict=True):
            state = request.state
            state.on_mask(mask)
            cpu_s[state.client] += mask.cpu_s
            if mask.is_late:
                late.update(users[state_key])
            elif mask.error is None:
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
    mask_rows = [mask_row_of[row] for row in constrained]
    return StepMask(constrained, mask_rows, bits, errors, frozenset(late), cpu_s, banned)


def _take_late(wanted: dict[int, MaskRequest], budgets_s: Mapping[str, float] | None) -> list[int]:
    """Takes out of `wanted` what its clients' budgets have no room for, and returns it. What was late goes first."""
    if budgets_s is None:
        return []
    by_client: dict[str, list[int]] = {}
    for key, request in sorted(wanted.items(), key=lambda each: -each[1].state.num_late):
        wanted[key] = wanted.pop(key)  # in this order
        by_client.setdefault(request.state.client, []).append(key)
    late = []
    for client, keys in by_client.items():
        expected_s = [wanted[key].state.expected_s for key in keys]
        late += keys[fitting(expected_s, budgets_s[client]) :]
    for key in late:
        wanted.pop(key).state.on_mask(Mask(is_late=True))
    return late


def _error_info(error: Exception) -> ErrorInfo:
    if isinstance(error, TandemError):
        return ErrorInfo.of(error)
    log.error("a grammar's mask failed", exc_info=error)
    return ErrorInfo.of(InternalError(f"the grammar's mask failed: {type(error).__name__}"))
