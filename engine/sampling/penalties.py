"""Changes logits before sampling: bans, bias, allowed tokens, penalties, grammar masks and the forced end of thinking.

Greedy rows included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from tandem.engine.batch import Sample
from tandem.engine.cuda.streams import Array as HostArray
from tandem.engine.cuda.streams import Columns, Tensors
from tandem.engine.sampling.grammar_mask import StepMask, mask_tokens

T = TypeVar("T")
_MAX_KEPT_LISTS = 256
"""Token lists of requests whose arrays are kept for further steps; of the largest, half a megabyte each."""


class Adjustments:
    """All changes of a step except grammar masks, prepared on the host. vocab_size: larger token ids are left out."""

    def __init__(self, samples: Sequence[Sample], vocab_size: int, columns: Columns) -> None:
        self._bias = _bias(samples, vocab_size, columns)
        self._allowed = _AllowedTokens.of(samples, vocab_size, columns)
        rows = [i for i, s in enumerate(samples) if s.params.has_penalties]
        self._penalties = _Penalties([samples[i] for i in rows], rows, columns) if rows else None
        forced = [(row, token_id) for row, s in enumerate(samples) if (token_id := _forced(s)) is not None]
        self._forced = columns.add(forced, np.int64) if forced else None
        parts = (self._bias, self._allowed, self._penalties, self._forced)
        self.is_empty = all(part is None for part in parts)

    def apply(self, logits: torch.Tensor, tensors: Tensors, mask: StepMask | None = None) -> torch.Tensor:
        """Returns `logits` [num_rows, vocab_size] if nothing applies, else a changed float32 copy."""
        if mask is None and self.is_empty:
            return logits
        logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
        if self._bias is not None:
            index, values = (tensors[place] for place in self._bias)
            logits.index_put_((index[:, 0], index[:, 1]), values, accumulate=True)
        if self._allowed is not None:
            self._allowed.apply(logits, tensors)
        if self._penalties is not None:
            self._penalties.apply(logits, tensors)
        if mask is not None:
            mask.apply(logits)
        if self._forced is not None:
            rows, token_ids = tensors[self._forced].unbind(1)
            logits.index_fill_(0, rows, float("-inf"))
            logits.index_put_((rows, token_ids), torch.zeros((), device=logits.device))
        return logits


def _forced(sample: Sample) -> int | None:
    thinking = sample.params.thinking
    return None if thinking is None else thinking.forced_token(sample.output_token_ids)


class _MadeOnce(Generic[T]):
    """Keeps what was made of the last token lists, by identity: a request's sequences share them, step after step."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self._made: dict[int, tuple[Any, T]] = {}  # the list is kept, so that no other one gets its identity

    def __call__(self, given: Any) -> T:
        found = self._made.get(id(given))
        if found is None:
            while len(self._made) >= _MAX_KEPT_LISTS:
                del self._made[next(iter(self._made))]
            found = self._made[id(given)] = given, self._make(given)
        return found[1]


def _is_allowed(token_ids: tuple[int, ...]) -> HostArray:
    """Returns for each token up to the largest whether it is allowed, bool."""
    is_allowed = np.zeros(max(token_ids) + 1, np.bool_)
    is_allowed[np.array(token_ids)] = True
    return is_allowed


def _by_last_token(words: tuple[tuple[int, ...], ...]) -> tuple[HostArray, dict[int, list[tuple[int, ...]]]]:
    """Returns the bad words of one token, and the others by the last token but one."""
    longer: dict[int, list[tuple[int, ...]]] = {}
    for word in words:
        if len(word) > 1:
            longer.setdefault(word[-2], []).append(word)
    return np.array([word[0] for word in words if len(word) == 1], np.int64), longer


_allowed_once = _MadeOnce(_is_allowed)
_ids_once = _MadeOnce(lambda token_ids: np.fromiter(token_ids, np.int64, len(token_ids)))
_bias_once = _MadeOnce(
    lambda bias: (np.array([i for i, _ in bias], np.int64), np.array([b for _, b in bias], np.float32))
)
_bad_words_once = _MadeOnce(_by_last_token)


def _bad_next(sample: Sample) -> HostArray:
    """Returns the tokens that would complete a bad word."""
    output = sample.output_token_ids
    single, longer = _bad_words_once(sample.params.bad_words)
    found = (
        [
            last
            for *before, last in longer.get(output[-1], ())
            if len(output) >= len(before) and list(output[-len(before) :]) == before
        ]
        if output
        else []
    )
    return np.concatenate([single, np.array(found, np.int64)]) if found else single


@dataclass(frozen=True)
class _AllowedTokens:
    """Rows with allowed tokens; all others get -inf. Places among the uploaded tensors.

    rows: int64 [num_rows]. mask_rows: the mask of each, int64 [num_rows]. masks: bool [num_masks, vocab_size].
    """

    rows: int
    mask_rows: int
    masks: int

    @classmethod
    def of(cls, samples: Sequence[Sample], vocab_size: int, columns: Columns) -> _AllowedTokens | None:
        rows = [row for row, s in enumerate(samples) if s.params.allowed_token_ids]
        if not rows:
            return None
        lists = {id(each): each for each in (samples[row].params.allowed_token_ids for row in rows)}
        masks = np.zeros((len(lists), vocab_size), np.bool_)
        for mask, each in zip(masks, lists.values(), strict=True):
            is_allowed = _allowed_once(each)[:vocab_size]
            mask[: len(is_allowed)] = is_allowed
        numbers = {key: number for number, key in enumerate(lists)}
        mask_rows = [numbers[id(samples[row].params.allowed_token_ids)] for row in rows]
        return cls(columns.add(rows, np.int64), columns.add(mask_rows, np.int64), columns.add(masks, np.bool_))

    def apply(self, logits: torch.Tensor, tensors: Tensors) -> None:
        mask_tokens(logits, tensors[self.rows], tensors[self.masks].index_select(0, tensors[self.mask_rows]))


def _bias(samples: Sequence[Sample], vocab_size: int, columns: Columns) -> tuple[int, int] | None:
    """Bias and bans: (row, token id) of each, [num, 2], and what is added [num]; a token may occur more than once."""
    rows: list[int] = []
    token_ids: list[HostArray] = []
    values: list[HostArray] = []
    for row, s in enumerate(samples):
        # With a grammar, the banned tokens are excluded by its mask, unless it allows nothing else.
        banned = s.banned_token_ids if s.grammar is None else ()
        added = [_bias_once(s.params.logit_bias)] if s.params.logit_bias else []
        for each in (_ids_once(banned) if banned else None, _bad_next(s) if s.params.bad_words else None):
            if each is not None and len(each):
                added.append((each, np.full(len(each), -np.inf, np.float32)))
        for ids, value in added:
            rows.append(row)
            token_ids.append(ids)
            values.append(value)
    if not rows:
        return None
    all_rows = np.repeat(np.array(rows, np.int64), [len(each) for each in token_ids])
    index = np.stack([all_rows, np.concatenate(token_ids)], 1)
    is_inside = index[:, 1] < vocab_size
    return columns.add(index[is_inside], np.int64), columns.add(np.concatenate(values)[is_inside], np.float32)


class _Penalties:
    """The repetition penalty r over prompt and output, then frequency f and presence p over the output.

    `l / r` for seen tokens with l > 0, `l * r` for those with l <= 0 (CTRL, Keskar et al., 2019); then
    `l - f * count - p * [count > 0]`.
    """

    def __init__(self, samples: Sequence[Sample], rows: list[int], columns: Columns) -> None:
        self._rows = columns.add(rows, np.int64)
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        self._factors = columns.add([[getattr(s.params, name) for s in samples] for name in names], np.float32)
        self._output = columns.add_padded([s.output_token_ids for s in samples])
        self._prompt = columns.add_padded([s.prompt_token_ids for s in samples])

    def apply(self, all_logits: torch.Tensor, tensors: Tensors) -> None:
        rows = tensors[self._rows]
        repetition, frequency, presence = tensors[self._factors][:, :, None]
        logits = all_logits.index_select(0, rows)
        num_output = _counts(logits, tensors[self._output])
        seen = (num_output > 0) | (_counts(logits, tensors[self._prompt]) > 0)
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        all_logits.index_copy_(0, rows, logits - frequency * num_output - presence * (num_output > 0))


def _counts(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Counts each token's occurrences per row: [num_rows, vocab_size]. token_ids: [num_rows, any], padded with -1."""
    num_rows, vocab_size = logits.shape
    counts = torch.zeros(num_rows, vocab_size + 1, device=logits.device)
    places = token_ids.masked_fill(token_ids < 0, vocab_size)
    counts.scatter_add_(1, places, torch.ones(1, device=logits.device).expand(places.shape))
    return counts[:, :vocab_size]
