"""Chooses tokens from logits, vectorised over the batch.

The only randomness is one uniform number per row, a pure function of (seed, position): the same request gives the
same text in any batch, on any worker, also when it moves. The number picks from the filtered distribution by its
cumulative sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protocol.generation import SamplingParams

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: two rounds of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    return (_splitmix64(_splitmix64(seed & _MASK) ^ position) >> 11) * 2.0**-53


def _splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """One token id per row of `logits` [num_rows, vocab_size]; `positions` are those of the tokens to be."""
    greedy: list[int] = logits.argmax(-1).tolist()
    rows = [i for i, p in enumerate(params) if p.temperature > 0]
    if not rows:
        return greedy
    index = torch.tensor(rows, device=logits.device)
    chosen = _sample_rows(
        logits.index_select(0, index).float(), [params[i] for i in rows], [positions[i] for i in rows]
    )
    for row, token_id in zip(rows, chosen, strict=True):
        greedy[row] = token_id
    return greedy


def _sample_rows(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    device, vocab_size = logits.device, logits.shape[-1]
    column = lambda values, dtype: torch.tensor(values, dtype=dtype, device=device)[:, None]  # noqa: E731
    logits = logits / column([p.temperature for p in params], torch.float32)
    u = column([uniform(p.seed, position) for p, position in zip(params, positions, strict=True)], torch.float64)
    filtered = any(p.top_k or p.top_p < 1.0 for p in params)
    order: torch.Tensor | None = None
    if filtered:
        # Stable, so that equal logits keep one order whatever the batch.
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = logits.softmax(-1).double()
    if filtered:
        ranks = torch.arange(vocab_size, device=device)
        keep = ranks < column([p.top_k or vocab_size for p in params], torch.int64)
        probs = probs * keep
        probs = probs / probs.sum(-1, keepdim=True)
        # Nucleus sampling (Holtzman et al., ICLR 2020): the fewest tokens whose mass reaches top_p.
        before = probs.cumsum(-1) - probs
        probs = probs * (before < column([p.top_p for p in params], torch.float64))
    cumulative = probs.cumsum(-1)
    picked = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).clamp_(max=vocab_size - 1)
    if order is not None:
        picked = order.gather(-1, picked)
    chosen: list[int] = picked[:, 0].tolist()
    return chosen
