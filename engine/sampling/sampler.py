"""Samples tokens from logits, vectorised over the batch.

Order: bans, bias, penalties and grammars (`engine.sampling.penalties`), temperature, min_p, top_k, top_p, noise.
Logprobs are of the unchanged logits. The noise is a pure function of (seed, position, token id)
(`engine.sampling.noise`): a request gives the same text in any batch and on any worker.

A row of NaN logits gives an arbitrary token and does not affect other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.engine.batch import Sample
from tandem.engine.sampling.grammar_mask import StepMask
from tandem.engine.sampling.logprobs import token_logprobs
from tandem.engine.sampling.noise import first_to_arrive, noise_keys
from tandem.engine.sampling.penalties import adjusted
from tandem.protocol.messages.generation import SampledToken, SamplingParams, TokenLogprobs

_FULL_SORT_VOCAB_SIZE = 4096
"""Up to this size a full sort is faster than top-k."""
_NUM_CANDIDATES = (128, 1024)
"""Candidates that are tried before a full sort: the smaller number for a small top_k."""
_SEGMENT_SIZE = 512
"""Tokens in a segment of a row; `argmax` first finds the segment, then the token in it."""


def sample(
    logits: torch.Tensor, samples: Sequence[Sample], positions: Sequence[int], mask: StepMask | None = None
) -> list[SampledToken]:
    """Samples one token per row of `logits` [num_rows, vocab_size]. positions: of the sampled tokens."""
    params = [s.params for s in samples]
    shaped = adjusted(logits, samples, mask)
    is_any_greedy = any(p.temperature == 0 for p in params)
    chosen = argmax(shaped) if is_any_greedy else torch.empty(len(params), dtype=torch.long, device=logits.device)
    # Rows with and without a filter use different algorithms, so that a row's result is independent of the batch.
    plain = [i for i, p in enumerate(params) if p.temperature > 0 and not _is_filtered(p)]
    filtered = [i for i, p in enumerate(params) if p.temperature > 0 and _is_filtered(p)]
    for rows, choose in ((plain, _sample_plain), (filtered, _sample_filtered)):
        if rows:
            index = torch.tensor(rows, device=logits.device)
            selected = shaped if len(rows) == len(params) else shaped.index_select(0, index)
            keys = noise_keys([params[i].seed for i in rows], [positions[i] for i in rows], logits.device)
            chosen.index_copy_(0, index, choose(selected, keys, [params[i] for i in rows]))
    logprobs = _logprobs(logits, params, chosen)
    return [SampledToken(token_id, logprobs.get(i)) for i, token_id in enumerate(chosen.tolist())]


def argmax(rows: torch.Tensor) -> torch.Tensor:
    """Returns the index of each row's maximum: rows [num_rows, size], result [num_rows].

    On CPU it works by segments, because there torch's amax is about four times as fast as its argmax.
    """
    size = rows.shape[1]
    num_segments = size // _SEGMENT_SIZE
    if num_segments < 2 or rows.device.type != "cpu":
        return rows.argmax(-1)
    covered = num_segments * _SEGMENT_SIZE
    segments = rows[:, :covered].reshape(len(rows), num_segments, _SEGMENT_SIZE)
    largest, segment = segments.amax(-1).max(-1)
    row = torch.arange(len(rows), device=rows.device)
    found: torch.Tensor = segments[row, segment].argmax(-1) + segment * _SEGMENT_SIZE
    if covered == size:
        return found
    rest = rows[:, covered:].max(-1)
    return torch.where(rest.values > largest, rest.indices + covered, found)


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _logprobs(logits: torch.Tensor, params: list[SamplingParams], chosen: torch.Tensor) -> dict[int, TokenLogprobs]:
    rows = [i for i, p in enumerate(params) if p.logprobs is not None]
    if not rows:
        return {}
    index = torch.tensor(rows, device=logits.device)
    named = [params[i].logprob_token_ids for i in rows]
    nums_top = [0 if ids else params[i].logprobs or 0 for i, ids in zip(rows, named, strict=True)]
    logprobs = token_logprobs(logits.index_select(0, index), chosen.index_select(0, index), nums_top, named)
    return dict(zip(rows, logprobs, strict=True))


def _temperatures(params: list[SamplingParams], device: torch.device) -> torch.Tensor:
    """Returns [num_rows, 1]."""
    return torch.tensor([p.temperature for p in params], device=device)[:, None]


def _sample_plain(logits: torch.Tensor, keys: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Samples without filters in two races: among segments by their total weight, then among the winner's tokens.

    P(token) = P(segment) * P(token | segment), so the distribution is unchanged, but only about sqrt(vocab_size) random
    numbers are drawn.
    """
    num_rows, size = logits.shape
    segment_size = race_segment_size(size)
    num_segments = -(-size // segment_size)
    weights = torch.zeros(num_rows, num_segments * segment_size, device=logits.device)  # padded with zero weights
    own = weights[:, :size].copy_(logits)
    own -= own.amax(-1, keepdim=True)
    if any(p.temperature != 1 for p in params):
        own /= _temperatures(params, logits.device)
    own.exp_()
    segments = weights.view(num_rows, num_segments, segment_size)
    numbers = torch.arange(max(num_segments, segment_size), device=logits.device)
    segment = first_to_arrive(segments.sum(-1).double(), keys, segment_ids(numbers[:num_segments]))
    in_segment = segments[torch.arange(num_rows, device=logits.device), segment[:, 0]].double()
    token_ids = segment * segment_size + numbers[:segment_size]
    place = first_to_arrive(in_segment, keys, token_ids)
    return token_ids.gather(-1, place)[:, 0].clamp_(max=size - 1)


def race_segment_size(vocab_size: int) -> int:
    """Returns the tokens per segment, near the square root of the vocabulary size."""
    return 128 if vocab_size <= 1 << 14 else 512


def segment_ids(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the ids of segments for their noise; negative, so that they differ from token ids."""
    return -1 - numbers


def _sample_filtered(logits: torch.Tensor, keys: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Samples with top_k, top_p or min_p, among each row's most likely candidates; fall back to a full sort.

    The number of candidates depends only on the row's own parameters, and both ways give the same token.
    """
    vocab_size = logits.shape[-1]
    logits = logits.float() / _temperatures(params, logits.device)
    chosen = torch.empty(len(params), dtype=torch.long, device=logits.device)
    groups: dict[int, list[int]] = {}
    for i, p in enumerate(params):
        few, many = _NUM_CANDIDATES
        num_candidates = few if 0 < p.top_k <= few // 2 else many
        groups.setdefault(vocab_size if vocab_size <= _FULL_SORT_VOCAB_SIZE else num_candidates, []).append(i)
    for num_candidates, rows in groups.items():
        index = torch.tensor(rows, device=logits.device)
        selected = logits.index_select(0, index), keys.index_select(0, index), [params[i] for i in rows]
        tokens, is_exact = _sample_among(num_candidates, *selected)
        if num_candidates < vocab_size and not bool(is_exact.all()):
            tokens = torch.where(is_exact, tokens, _sample_among(vocab_size, *selected)[0])
        chosen.index_copy_(0, index, tokens)
    return chosen


def _sample_among(
    num_candidates: int, logits: torch.Tensor, keys: torch.Tensor, params: list[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples among each row's `num_candidates` likeliest tokens.

    Returns the tokens, and per row whether the candidates include every token that the filters keep.
    """
    device = logits.device
    values, order = most_likely(logits, num_candidates)
    probs = (values.double() - logits.double().logsumexp(-1, keepdim=True)).exp()
    top_k = torch.tensor([p.top_k or logits.shape[-1] for p in params], device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]
    # min_p: p >= min_p * max(p) (Nguyen et al., ICLR 2025).
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)[:, None]
    ranks = torch.arange(num_candidates, device=device)
    # Tokens of probability zero are never kept: a grammar may leave fewer than top_k tokens.
    kept = (ranks < top_k) & (probs >= min_p * probs[:, :1]) & (probs > 0)
    probs = probs * kept
    is_whole = torch.tensor([p.top_k == 0 and p.min_p == 0 for p in params], device=device)[:, None]
    total = torch.where(is_whole, 1.0, probs.sum(-1, keepdim=True))
    # Nucleus sampling: the fewest tokens whose mass reaches top_p (Holtzman et al., ICLR 2020).
    nucleus = kept & ((probs.cumsum(-1) - probs) / total < top_p)
    # The kept tokens come first. Counting them saves work on CPU; on a GPU it would wait for the device.
    width = max(1, int(nucleus.sum(-1).max())) if device.type == "cpu" else num_candidates
    place = first_to_arrive((probs * nucleus)[:, :width], keys, order[:, :width])
    tokens = order.gather(-1, place)[:, 0]
    # Ties with the last candidate may be missing, so all kept tokens must be strictly more likely.
    num_sure = (values > values[:, -1:]).sum(-1)
    num_counted = torch.where(is_whole[:, 0], nucleus.sum(-1), kept.sum(-1))
    return tokens, num_counted <= num_sure


def most_likely(logits: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the highest logits and their ids, [num_rows, num_tokens], in descending order, ties by id."""
    if num_tokens == logits.shape[-1]:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
        return values, order
    values, order = logits.topk(num_tokens, dim=-1)
    order, by_id = order.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, order.gather(-1, by_value)
