"""Chooses tokens from logits, vectorised over the batch.

The only randomness is one uniform number per row, a pure function of (seed, position): the same request gives the
same text in any batch, on any worker, also when it moves. The number picks from the filtered distribution by its
cumulative sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch import Sample
from protocol.generation import SampledToken, SamplingParams

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: two rounds of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    return (_splitmix64(_splitmix64(seed & _MASK) ^ position) >> 11) * 2.0**-53


def _splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def sample(logits: torch.Tensor, samples: Sequence[Sample], positions: Sequence[int]) -> list[SampledToken]:
    """One token per row of `logits` [num_rows, vocab_size]; `positions` are those of the tokens to be."""
    params = [s.params for s in samples]
    greedy: list[int] = logits.max(-1).indices.tolist()  # argmax takes four times as long on CPU
    # Rows with and without a filter take their numbers through the vocabulary in different orders, so they are apart:
    # a row must not depend on what else is in the batch.
    plain = [i for i, p in enumerate(params) if p.temperature > 0 and not _is_filtered(p)]
    filtered = [i for i, p in enumerate(params) if p.temperature > 0 and _is_filtered(p)]
    chosen = greedy
    for rows, choose in ((plain, _sample_plain), (filtered, _sample_filtered)):
        if rows:
            scaled, u = _scale(logits, rows, params, positions)
            for row, token_id in zip(rows, choose(scaled, u, [params[i] for i in rows]), strict=True):
                chosen[row] = token_id
    return [SampledToken(token_id) for token_id in chosen]


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0


def _scale(
    logits: torch.Tensor, rows: list[int], params: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' logits over their temperature [num_rows, vocab_size], and their uniform numbers [num_rows, 1]."""
    device = logits.device
    temperatures = torch.tensor([params[i].temperature for i in rows], device=device)[:, None]
    numbers = [uniform(params[i].seed, positions[i]) for i in rows]
    scaled = logits.index_select(0, torch.tensor(rows, device=device)).float() / temperatures
    return scaled, torch.tensor(numbers, dtype=torch.float64, device=device)[:, None]


def _pick(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Where the cumulative sum of each row passes its number, [num_rows, 1]."""
    cumulative = probs.cumsum(-1)
    picked = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
    return picked.clamp_(max=probs.shape[-1] - 1)


def _sample_plain(logits: torch.Tensor, u: torch.Tensor, params: list[SamplingParams]) -> list[int]:
    chosen: list[int] = _pick(logits.softmax(-1).double(), u)[:, 0].tolist()
    return chosen


def _sample_filtered(logits: torch.Tensor, u: torch.Tensor, params: list[SamplingParams]) -> list[int]:
    """By falling probability, the most likely first; the sort is stable, so equal logits keep one order."""
    device, vocab_size = logits.device, logits.shape[-1]
    logits, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = logits.softmax(-1).double()
    top_k = torch.tensor([p.top_k or vocab_size for p in params], device=device)[:, None]
    probs = probs * (torch.arange(vocab_size, device=device) < top_k)
    probs = probs / probs.sum(-1, keepdim=True)
    # Nucleus sampling (Holtzman et al., ICLR 2020): the fewest tokens whose mass reaches top_p.
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]
    probs = probs * (probs.cumsum(-1) - probs < top_p)
    chosen: list[int] = order.gather(-1, _pick(probs, u))[:, 0].tolist()
    return chosen
