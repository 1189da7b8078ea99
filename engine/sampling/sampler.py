"""Chooses tokens from logits, vectorised over the batch.

In order: bans, bias, penalties and grammars (`engine.sampling.penalties`), temperature, min_p, top_k, top_p, noise.
Log-probabilities are those of the logits as they came. The only randomness is a number for each token, a pure function
of (seed, position, token id): the same request gives the same text in any batch, on any worker, also when it moves. The
filtered distribution decides by a race (`engine.sampling.noise`), so what a row gets depends neither on its
neighbours nor, all
but never, on how a kernel rounds. What a row costs is passes over its vocabulary: without a filter a few in float32,
and two races, one of its parts and one of the tokens in the part that wins.

A row of logits that are not numbers gives some token of the vocabulary and leaves the others alone.
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
"""Up to this, sorting all costs less than looking for a few."""
_NUM_CANDIDATES = (128, 1024)
"""How many of the most likely tokens are looked at before all are sorted: the fewer for a small top_k."""
_PART = 512
"""Of a row: the right one is found first, by its largest value, and then the place in it."""


def sample(
    logits: torch.Tensor, samples: Sequence[Sample], positions: Sequence[int], mask: StepMask | None = None
) -> list[SampledToken]:
    """One token per row of `logits` [num_rows, vocab_size]; `positions` are those of the tokens to be."""
    params = [s.params for s in samples]
    shaped = adjusted(logits, samples, mask)
    is_any_greedy = any(p.temperature == 0 for p in params)
    chosen = argmax(shaped) if is_any_greedy else torch.empty(len(params), dtype=torch.long, device=logits.device)
    # Rows with and without a filter take their numbers through the vocabulary in different orders, so they are apart:
    # a row must not depend on what else is in the batch.
    plain = [i for i, p in enumerate(params) if p.temperature > 0 and not _is_filtered(p)]
    filtered = [i for i, p in enumerate(params) if p.temperature > 0 and _is_filtered(p)]
    for rows, choose in ((plain, _sample_plain), (filtered, _sample_filtered)):
        if rows:
            index = torch.tensor(rows, device=logits.device)
            of_rows = shaped if len(rows) == len(params) else shaped.index_select(0, index)
            keys = noise_keys([params[i].seed for i in rows], [positions[i] for i in rows], logits.device)
            chosen.index_copy_(0, index, choose(of_rows, keys, [params[i] for i in rows]))
    logprobs = _logprobs(logits, params, chosen)
    return [SampledToken(token_id, logprobs.get(i)) for i, token_id in enumerate(chosen.tolist())]


def argmax(rows: torch.Tensor) -> torch.Tensor:
    """The place of each row's largest value: rows [num_rows, size], the result [num_rows].

    First the part of the row, then the place in it: on CPU torch finds values four times as fast as their places.
    """
    size = rows.shape[1]
    num_parts = size // _PART
    if num_parts < 2:
        return rows.argmax(-1)
    parts = rows[:, : num_parts * _PART].reshape(len(rows), num_parts, _PART)
    largest, part = parts.amax(-1).max(-1)
    found: torch.Tensor = parts[torch.arange(len(rows), device=rows.device), part].argmax(-1) + part * _PART
    if num_parts * _PART == size:
        return found
    last = rows[:, num_parts * _PART :].max(-1)
    return torch.where(last.values > largest, last.indices + num_parts * _PART, found)


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _logprobs(logits: torch.Tensor, params: list[SamplingParams], chosen: torch.Tensor) -> dict[int, TokenLogprobs]:
    rows = [i for i, p in enumerate(params) if p.logprobs is not None]
    if not rows:
        return {}
    index = torch.tensor(rows, device=logits.device)
    nums_top = [params[i].logprobs or 0 for i in rows]
    told = token_logprobs(logits.index_select(0, index), chosen.index_select(0, index), nums_top)
    return dict(zip(rows, told, strict=True))


def _temperatures(params: list[SamplingParams], device: torch.device) -> torch.Tensor:
    """[num_rows, 1]"""
    return torch.tensor([p.temperature for p in params], device=device)[:, None]


def _sample_plain(logits: torch.Tensor, keys: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Two races: of the parts of the row, each with the sum of its tokens' weights, and of the tokens in the first."""
    num_rows, size = logits.shape
    part_size = race_part_size(size)
    num_parts = -(-size // part_size)
    weights = torch.zeros(num_rows, num_parts * part_size, device=logits.device)  # zero after the vocabulary's end
    own = weights[:, :size].copy_(logits)
    own -= own.amax(-1, keepdim=True)
    if any(p.temperature != 1 for p in params):
        own /= _temperatures(params, logits.device)
    own.exp_()
    parts = weights.view(num_rows, num_parts, part_size)
    places = torch.arange(max(num_parts, part_size), device=logits.device)
    part = first_to_arrive(parts.sum(-1).double(), keys, part_ids(places[:num_parts]))
    in_part = parts[torch.arange(num_rows, device=logits.device), part[:, 0]].double()
    token_ids = part * part_size + places[:part_size]
    place = first_to_arrive(in_part, keys, token_ids)
    return token_ids.gather(-1, place)[:, 0].clamp_(max=size - 1)


def race_part_size(vocab_size: int) -> int:
    """Tokens in a part: so that parts and tokens of one, each of which costs a number, are few."""
    return 128 if vocab_size <= 1 << 14 else 512


def part_ids(numbers: torch.Tensor) -> torch.Tensor:
    """Of parts, for their noise: such as no token has."""
    return -1 - numbers


def _sample_filtered(logits: torch.Tensor, keys: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Among the likeliest. Most distributions need a few candidates only; rows that need more are sorted whole.

    How many a row is given depends on its own parameters alone, and both ways give the same token.
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
        of_rows = logits.index_select(0, index), keys.index_select(0, index), [params[i] for i in rows]
        tokens, is_sure = _sample_among(num_candidates, *of_rows)
        if num_candidates < vocab_size and not bool(is_sure.all()):
            tokens = torch.where(is_sure, tokens, _sample_among(vocab_size, *of_rows)[0])
        chosen.index_copy_(0, index, tokens)
    return chosen


def _sample_among(
    num_candidates: int, logits: torch.Tensor, keys: torch.Tensor, params: list[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The choice among each row's most likely tokens, and whether it is sure to be the choice among all."""
    device = logits.device
    values, order = most_likely(logits, num_candidates)
    probs = (values.double() - logits.double().logsumexp(-1, keepdim=True)).exp()
    top_k = torch.tensor([p.top_k or logits.shape[-1] for p in params], device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]
    # Minimum relative to the most likely (Nguyen et al., 2024).
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)[:, None]
    ranks = torch.arange(num_candidates, device=device)
    # What is impossible is never kept: a grammar may leave fewer than top_k, and then these few decide.
    kept = (ranks < top_k) & (probs >= min_p * probs[:, :1]) & (probs > 0)
    probs = probs * kept
    is_whole = torch.tensor([p.top_k == 0 and p.min_p == 0 for p in params], device=device)[:, None]
    total = torch.where(is_whole, 1.0, probs.sum(-1, keepdim=True))
    # Nucleus sampling (Holtzman et al., ICLR 2020): the fewest tokens whose mass reaches top_p.
    nucleus = kept & ((probs.cumsum(-1) - probs) / total < top_p)
    width = max(1, int(nucleus.sum(-1).max()))  # all that is kept comes first: no noise for the rest
    place = first_to_arrive((probs * nucleus)[:, :width], keys, order[:, :width])
    tokens = order.gather(-1, place)[:, 0]
    # Tokens as likely as the last candidate may have been left out: all that counts must come before those.
    num_sure = (values > values[:, -1:]).sum(-1)
    num_counted = torch.where(is_whole[:, 0], nucleus.sum(-1), kept.sum(-1))
    return tokens, num_counted <= num_sure


def most_likely(logits: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and ids [num_rows, num_tokens], the highest first and equal ones by id."""
    if num_tokens == logits.shape[-1]:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
        return values, order
    values, order = logits.topk(num_tokens, dim=-1)
    order, by_id = order.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, order.gather(-1, by_value)
