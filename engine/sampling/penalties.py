"""Changes logits before sampling: bans, bias, allowed tokens, penalties, grammar masks and the forced end of thinking.

Greedy rows included.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tandem.engine.batch import Sample
from tandem.engine.sampling.columns import Columns, Tensors
from tandem.engine.sampling.grammar_mask import StepMask


class Adjustments:
    """All changes of a step except grammar masks, prepared on the host. vocab_size: larger token ids are left out."""

    def __init__(self, samples: Sequence[Sample], vocab_size: int, columns: Columns) -> None:
        self._bias = _bias(samples, vocab_size, columns)
        self._allowed = _allowed(samples, vocab_size, columns)
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
            rows, index = (tensors[place] for place in self._allowed)
            kept = logits[index[:, 0], index[:, 1]]
            logits.index_fill_(0, rows, float("-inf"))
            logits.index_put_((index[:, 0], index[:, 1]), kept)
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


def _bad_next(sample: Sample) -> list[int]:
    """Returns the tokens that would complete a bad word."""
    output = sample.output_token_ids
    return [
        last
        for *before, last in sample.params.bad_words
        if not before or (len(output) >= len(before) and list(output[-len(before) :]) == before)
    ]


def _allowed(samples: Sequence[Sample], vocab_size: int, columns: Columns) -> tuple[int, int] | None:
    """Rows with allowed tokens [num_rows], and (row, token id) of each such token [num_tokens, 2]. All others get
    -inf."""
    rows = [row for row, s in enumerate(samples) if s.params.allowed_token_ids]
    if not rows:
        return None
    kept = [(row, i) for row in rows for i in samples[row].params.allowed_token_ids if i < vocab_size]
    return columns.add(rows, np.int64), columns.add(np.reshape(kept, (-1, 2)), np.int64)


def _bias(samples: Sequence[Sample], vocab_size: int, columns: Columns) -> tuple[int, int] | None:
    """Bias and bans: (row, token id) of each, [num, 2], and what is added [num]."""
    added: dict[tuple[int, int], float] = {}
    for row, s in enumerate(samples):
        added.update({(row, token_id): bias for token_id, bias in s.params.logit_bias})
        # With a grammar, the banned tokens are excluded by its mask, unless it allows nothing else.
        banned = s.banned_token_ids if s.grammar is None else ()
        added.update({(row, token_id): float("-inf") for token_id in (*banned, *_bad_next(s))})
    inside = [(row, token_id) for row, token_id in added if token_id < vocab_size]
    if not inside:
        return None
    return columns.add(inside, np.int64), columns.add([added[key] for key in inside], np.float32)


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
