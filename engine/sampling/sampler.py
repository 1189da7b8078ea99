"""Samples tokens from logits, vectorised over the batch.

Order: bans, bias, penalties and grammars (`engine.sampling.penalties`), temperature, min_p, top_k, top_p, noise.
Logprobs are of the unchanged logits. The noise is a pure function of (seed, position, token id)
(`engine.sampling.noise`): a request gives the same text in any batch and on any worker.

What a step needs of its samples goes to the device before the model runs, in one copy with the step's other indices,
and the tokens come back in one copy (`SamplingStep`, `SampledRows`). The next step may use them on the device before.

A row of NaN logits gives an arbitrary token and does not affect other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.engine.batch import Sample
from tandem.engine.cuda.layer_operators import has_kernels
from tandem.engine.cuda.streams import Columns, Tensors, download
from tandem.engine.sampling.grammar_mask import StepMask
from tandem.engine.sampling.logprobs import logprob_columns, read_logprobs, row_sums, running_sums
from tandem.engine.sampling.noise import first_to_arrive, signed_noise_key
from tandem.engine.sampling.penalties import Adjustments
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, TokenLogprobs

_FULL_SORT_VOCAB_SIZE = 4096
"""Up to this size a full sort is faster than top-k."""
_NUM_CANDIDATES = (128, 1024)
"""Candidates that are tried before a full sort: the smaller number for a small top_k."""
_SEGMENT_SIZE = 512
"""Tokens of a row whose weights `log_total` adds in float32."""


@dataclass(frozen=True)
class _Rows:
    """Rows that are sampled in one way: places of their columns among the uploaded tensors."""

    rows: int
    """int64 [num_rows]"""
    keys: int
    """int64 [num_rows, 1], noise."""
    temperatures: int | None
    """float32 [num_rows, 1]; None if all are 1."""

    @classmethod
    def of(cls, rows: list[int], params: Sequence[SamplingParams], positions: Sequence[int], columns: Columns) -> _Rows:
        keys = [[signed_noise_key(params[i].seed, positions[i])] for i in rows]
        temperatures = [[params[i].temperature] for i in rows]
        is_hot = any(temperature != [1.0] for temperature in temperatures)
        return cls(
            columns.add(rows, np.int64),
            columns.add(keys, np.int64),
            columns.add(temperatures, np.float32) if is_hot else None,
        )


@dataclass(frozen=True)
class _Filtered:
    """Rows with top_k, top_p or min_p that consider the same number of candidates.

    limits: float64 [3, num_rows, 1]: top_k, or the vocabulary's size for none; top_p; min_p. is_whole: bool
    [num_rows, 1], whether neither top_k nor min_p applies.
    """

    num_candidates: int
    rows: _Rows
    limits: int
    is_whole: int


class SamplingStep:
    """The sampling of one step. Made on the host before the model runs; `arrays` go to the device.

    samples, positions: of the sampled tokens, one per row of the logits. vocab_size: of the logits.
    """

    def __init__(self, samples: Sequence[Sample], positions: Sequence[int], vocab_size: int) -> None:
        self._columns = Columns()
        self._num_rows = len(samples)
        self._vocab_size = vocab_size
        params = [s.params for s in samples]
        self._adjustments = Adjustments(samples, vocab_size, self._columns)
        self._is_any_greedy = any(p.temperature == 0 for p in params)
        # Rows with and without a filter use different algorithms, so that a row's result is independent of the batch.
        plain = [i for i, p in enumerate(params) if p.temperature > 0 and not _is_filtered(p)]
        self._plain = _Rows.of(plain, params, positions, self._columns) if plain else None
        groups: dict[int, list[int]] = {}
        for i, p in enumerate(params):
            if p.temperature > 0 and _is_filtered(p):
                groups.setdefault(_num_candidates(p, vocab_size), []).append(i)
        self._filtered = [self._filter(number, rows, params, positions) for number, rows in groups.items()]
        logged = [i for i, p in enumerate(params) if p.logprobs is not None]
        self._logged = logged
        self._named = [params[i].logprob_token_ids for i in logged]
        self._nums_top = [0 if params[i].logprob_token_ids else params[i].logprobs or 0 for i in logged]
        self._logged_rows = self._columns.add(logged, np.int64) if logged else None
        self._named_ids = self._columns.add_padded(self._named) if any(self._named) else None
        self.arrays = self._columns.arrays

    def _filter(
        self, num_candidates: int, rows: list[int], params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> _Filtered:
        chosen = [params[i] for i in rows]
        limits = [
            [[p.top_k or self._vocab_size] for p in chosen],
            [[p.top_p] for p in chosen],
            [[p.min_p] for p in chosen],
        ]
        return _Filtered(
            num_candidates,
            _Rows.of(rows, params, positions, self._columns),
            self._columns.add(limits, np.float64),
            self._columns.add([[p.top_k == 0 and p.min_p == 0] for p in chosen], np.bool_),
        )

    def run(self, logits: torch.Tensor, tensors: Tensors, mask: StepMask | None = None) -> SampledRows:
        """Samples one token per row of `logits` [num_rows, vocab_size], without waiting for the device.

        tensors: `arrays`, on the device. `logits` is not read after the return.
        """
        shaped = self._adjustments.apply(logits, tensors, mask)
        if self._is_any_greedy:
            chosen = argmax(shaped)
        else:
            chosen = torch.empty(self._num_rows, dtype=torch.long, device=logits.device)
        if self._plain is not None:
            rows, keys, temperatures = self._parts(self._plain, tensors)
            chosen.index_copy_(0, rows, _sample_plain(self._select(shaped, rows), keys, temperatures))
        filtered = [(group, self._filtered_logits(group, shaped, tensors)) for group in self._filtered]
        logged = None if self._logged_rows is None else logits.index_select(0, tensors[self._logged_rows])
        return SampledRows(self, chosen, tensors, filtered, logged)

    def _filtered_logits(self, group: _Filtered, shaped: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """Returns a float32 copy of the group's rows, divided by their temperatures."""
        rows, _, temperatures = self._parts(group.rows, tensors)
        selected = self._select(shaped, rows).to(torch.float32, copy=True)
        return selected if temperatures is None else selected.div_(temperatures)

    def sample_filtered(
        self, group: _Filtered, selected: torch.Tensor, chosen: torch.Tensor, tensors: Tensors, num_candidates: int
    ) -> torch.Tensor:
        """Samples the group's rows into `chosen`. Returns per row whether `num_candidates` suffice.

        The number of candidates depends only on the row's own parameters, and a full sort gives the same token where
        they suffice.
        """
        rows, keys, _ = self._parts(group.rows, tensors)
        top_k, top_p, min_p = tensors[group.limits]
        tokens, is_exact = _sample_among(num_candidates, selected, keys, top_k, top_p, min_p, tensors[group.is_whole])
        chosen.index_copy_(0, rows, tokens)
        return is_exact if num_candidates < self._vocab_size else torch.ones_like(is_exact)

    def columns(
        self, chosen: torch.Tensor, tensors: Tensors, logged: torch.Tensor | None, are_exact: list[torch.Tensor]
    ) -> torch.Tensor:
        """Returns what `parse` reads: the token ids, `are_exact` and the logprobs of `logged`, in one tensor."""
        if self._logged_rows is None and not are_exact:
            return chosen
        columns: list[torch.Tensor] = [chosen, *are_exact]
        if self._logged_rows is not None and logged is not None:
            named = None if self._named_ids is None else tensors[self._named_ids]
            token_ids = chosen.index_select(0, tensors[self._logged_rows])
            columns.append(logprob_columns(logged, token_ids, max(self._nums_top), named).view(-1))
        return torch.cat([column.double() for column in columns])

    def parse(self, values: list[float], num_exact: int) -> tuple[list[SampledToken], bool]:
        """Returns the tokens, and whether the candidates of all `num_exact` filtered rows suffice."""
        end = self._num_rows + num_exact
        logprobs: dict[int, TokenLogprobs] = {}
        if self._logged:
            width = (len(values) - end) // len(self._logged)
            rows = [values[first : first + width] for first in range(end, len(values), width)]
            found = read_logprobs(rows, self._nums_top, self._vocab_size, self._named)
            logprobs = dict(zip(self._logged, found, strict=True))
        tokens = [SampledToken(int(value), logprobs.get(i)) for i, value in enumerate(values[: self._num_rows])]
        return tokens, all(values[self._num_rows : end])

    def _parts(self, rows: _Rows, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        temperatures = None if rows.temperatures is None else tensors[rows.temperatures]
        return tensors[rows.rows], tensors[rows.keys], temperatures

    def _select(self, shaped: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return shaped if len(rows) == self._num_rows else shaped.index_select(0, rows)


class SampledRows:
    """The sampled tokens of one step, on the device; `result` brings them to the host.

    token_ids: int64 [num_rows]. `result` corrects them if a row had too few candidates, which is rare. was_corrected:
    whether it has; work that has read them before must be repeated.
    """

    def __init__(
        self,
        step: SamplingStep,
        token_ids: torch.Tensor,
        tensors: Tensors,
        filtered: list[tuple[_Filtered, torch.Tensor]],
        logged: torch.Tensor | None,
    ) -> None:
        """filtered: rows with filters, and their logits. logged: logits of rows with logprobs."""
        self.token_ids = token_ids
        self.was_corrected = False
        self._step = step
        self._tensors = tensors
        self._filtered = filtered
        self._logged = logged
        are_exact = [
            step.sample_filtered(group, selected, token_ids, tensors, group.num_candidates)
            for group, selected in filtered
        ]
        self._num_exact = sum(map(len, are_exact))
        self._read = download(step.columns(token_ids, tensors, logged, are_exact))

    def result(self) -> list[SampledToken]:
        """Waits for the device and returns the tokens."""
        tokens, is_exact = self._step.parse(self._read(), self._num_exact)
        if is_exact:
            return tokens
        for group, selected in self._filtered:
            self._step.sample_filtered(group, selected, self.token_ids, self._tensors, selected.shape[1])
        self.was_corrected = True
        columns = self._step.columns(self.token_ids, self._tensors, self._logged, [])
        return self._step.parse(download(columns)(), 0)[0]


def argmax(rows: torch.Tensor) -> torch.Tensor:
    """Returns the index of each row's maximum: rows [num_rows, size], result [num_rows].

    On CPU torch's `max` is several times as fast as its `argmax`.
    """
    return rows.max(-1).indices if rows.device.type == "cpu" else rows.argmax(-1)


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _num_candidates(params: SamplingParams, vocab_size: int) -> int:
    if vocab_size <= _FULL_SORT_VOCAB_SIZE:
        return vocab_size
    few, many = _NUM_CANDIDATES
    return few if 0 < params.top_k <= few // 2 else many


def _sample_plain(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
    """Samples without filters in two races: among segments by their total weight, then among the winner's tokens.

    P(token) = P(segment) * P(token | segment), so the distribution is unchanged, but only about sqrt(vocab_size) random
    numbers are drawn.
    """
    num_rows, size = logits.shape
    segments = race_weights(logits, temperatures)
    num_segments, segment_size = segments.shape[1:]
    numbers = torch.arange(max(num_segments, segment_size), device=logits.device)
    segment = first_to_arrive(row_sums(segments), keys, segment_ids(numbers[:num_segments]))
    in_segment = segments[torch.arange(num_rows, device=logits.device), segment[:, 0]].double()
    token_ids = segment * segment_size + numbers[:segment_size]
    place = first_to_arrive(in_segment, keys, token_ids)
    return token_ids.gather(-1, place)[:, 0].clamp_(max=size - 1)


def race_weights(logits: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
    """Returns weights in proportion to the tokens' probabilities, float32 [num_rows, num_segments, segment_size]. Those
    after the last token are zero."""
    num_rows, size = logits.shape
    segment_size = race_segment_size(size)
    num_segments = -(-size // segment_size)
    weights = torch.zeros(num_rows, num_segments * segment_size, device=logits.device)
    own = weights[:, :size].copy_(logits)
    own -= own.amax(-1, keepdim=True)
    if temperatures is not None:
        own /= temperatures
    own.exp_()
    return weights.view(num_rows, num_segments, segment_size)


def race_segment_size(vocab_size: int) -> int:
    """Returns the tokens per segment, near the square root of the vocabulary size."""
    return 128 if vocab_size <= 1 << 14 else 512


def segment_ids(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the ids of segments for their noise; negative, so that they differ from token ids."""
    return -1 - numbers


def _sample_among(
    num_candidates: int,
    logits: torch.Tensor,
    keys: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    is_whole: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples among each row's `num_candidates` likeliest tokens.

    Returns the tokens, and per row whether the candidates include every token that the filters keep. min_p keeps
    tokens with p >= min_p * max(p) (Nguyen et al., ICLR 2025).
    """
    values, order = most_likely(logits, num_candidates)
    probs = (values.double() - log_total(logits)).exp()
    ranks = torch.arange(num_candidates, device=logits.device)
    # Tokens of probability zero are never kept: a grammar may leave fewer than top_k tokens.
    kept = (ranks < top_k) & (probs >= min_p * probs[:, :1]) & (probs > 0)
    probs = probs * kept
    sums = running_sums(probs)
    total = torch.where(is_whole, 1.0, sums[:, -1:])
    # Nucleus sampling: the fewest tokens whose mass reaches top_p (Holtzman et al., ICLR 2020).
    nucleus = kept & ((sums - probs) / total < top_p)
    # The kept tokens come first. Counting them saves work on CPU; on a GPU it would wait for the device.
    width = max(1, int(nucleus.sum(-1).max())) if logits.device.type == "cpu" else num_candidates
    place = first_to_arrive((probs * nucleus)[:, :width], keys, order[:, :width])
    tokens = order.gather(-1, place)[:, 0]
    # Ties with the last candidate may be missing, so all kept tokens must be strictly more likely.
    num_sure = (values > values[:, -1:]).sum(-1)
    num_counted = torch.where(is_whole[:, 0], nucleus.sum(-1), kept.sum(-1))
    return tokens, num_counted <= num_sure


def log_total(logits: torch.Tensor) -> torch.Tensor:
    """Returns the logarithm of each row's sum of exponentials, float64 [num_rows, 1], within about 1e-7.

    The exponentials are not computed in float64, because that is slow on many GPUs.
    """
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest).exp_()
    if has_kernels(logits.device):
        return row_sums(weights)[:, None].log_() + largest.double()
    covered = weights.shape[1] // _SEGMENT_SIZE * _SEGMENT_SIZE
    sums = weights[:, :covered].view(len(weights), -1, _SEGMENT_SIZE).sum(-1).double().sum(-1, keepdim=True)
    return (sums + weights[:, covered:].sum(-1, keepdim=True).double()).log_() + largest.double()


def most_likely(logits: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the highest logits and their ids, [num_rows, num_tokens], in descending order, ties by id."""
    if num_tokens == logits.shape[-1]:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
        return values, order
    values, order = logits.topk(num_tokens, dim=-1)
    order, by_id = order.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, order.gather(-1, by_value)
