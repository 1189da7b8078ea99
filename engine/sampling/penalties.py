"""Changes logits before sampling: bans, bias, allowed tokens, penalties, grammar masks and the forced end of thinking.

Greedy rows included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from tandem.engine.batch import Sample
from tandem.engine.sampling.grammar_mask import StepMask


def adjusted(logits: torch.Tensor, samples: Sequence[Sample], mask: StepMask | None = None) -> torch.Tensor:
    """Returns `logits` [num_rows, vocab_size] if nothing applies, else a changed float32 copy."""
    if mask is None and not any(_is_changed(s) for s in samples):
        return logits
    logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
    _ban_and_bias(logits, samples)
    for row, s in enumerate(samples):
        if s.params.allowed_token_ids:
            _allow(logits[row], s.params.allowed_token_ids)
    rows = [i for i, s in enumerate(samples) if s.params.has_penalties]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        logits.index_copy_(0, index, _penalised(logits.index_select(0, index), [samples[i] for i in rows]))
    if mask is not None:
        mask.apply(logits)
    for row, s in enumerate(samples):
        if (token_id := _forced(s)) is not None:
            logits[row] = float("-inf")
            logits[row, token_id] = 0.0
    return logits


def _forced(sample: Sample) -> int | None:
    thinking = sample.params.thinking
    return None if thinking is None else thinking.forced_token(sample.output_token_ids)


def _is_changed(sample: Sample) -> bool:
    params = sample.params
    return bool(
        sample.banned_token_ids
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.has_penalties
        or _forced(sample) is not None
    )


def _bad_next(sample: Sample) -> list[int]:
    """Returns the tokens that would complete a bad word."""
    output = sample.output_token_ids
    return [
        last
        for *before, last in sample.params.bad_words
        if not before or (len(output) >= len(before) and list(output[-len(before) :]) == before)
    ]


def _allow(row: torch.Tensor, token_ids: Sequence[int]) -> None:
    """Sets all other tokens of `row` [vocab_size] to -inf, in place."""
    index = torch.tensor([i for i in token_ids if i < len(row)], device=row.device)
    kept = row[index]
    row.fill_(float("-inf"))
    row[index] = kept


def _ban_and_bias(logits: torch.Tensor, samples: Sequence[Sample]) -> None:
    added: dict[tuple[int, int], float] = {}
    for row, s in enumerate(samples):
        added.update({(row, token_id): bias for token_id, bias in s.params.logit_bias})
        # With a grammar, the banned tokens are excluded by its mask, unless it allows nothing else.
        banned = s.banned_token_ids if s.grammar is None else ()
        added.update({(row, token_id): float("-inf") for token_id in (*banned, *_bad_next(s))})
    inside = [(row, token_id) for row, token_id in added if token_id < logits.shape[-1]]
    if not inside:
        return
    index = torch.tensor(inside, device=logits.device)
    values = torch.tensor([added[key] for key in inside], device=logits.device)
    logits.index_put_((index[:, 0], index[:, 1]), values, accumulate=True)


def _penalised(logits: torch.Tensor, samples: list[Sample]) -> torch.Tensor:
    """Applies the repetition penalty r over prompt and output, then frequency f and presence p over the output.

    `l / r` for seen tokens with l > 0, `l * r` for those with l <= 0 (CTRL, Keskar et al., 2019); then
    `l - f * count - p * [count > 0]`.
    """

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(s.params, name) for s in samples], device=logits.device)[:, None]

    num_output = _counts(logits, [s.output_token_ids for s in samples])
    seen = (num_output > 0) | (_counts(logits, [s.prompt_token_ids for s in samples]) > 0)
    penalty = column("repetition_penalty")
    logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    return logits - column("frequency_penalty") * num_output - column("presence_penalty") * (num_output > 0)


def _counts(logits: torch.Tensor, token_ids: list[Sequence[int]]) -> torch.Tensor:
    """Counts each token's occurrences per row: [num_rows, vocab_size]."""
    num_rows, vocab_size = logits.shape
    ids = [torch.tensor(row, dtype=torch.long) for row in token_ids]
    padded = pad_sequence(ids, batch_first=True, padding_value=vocab_size).to(logits.device)
    counts = torch.zeros(num_rows, vocab_size + 1, device=logits.device)
    counts.scatter_add_(1, padded, torch.ones(1, device=logits.device).expand(padded.shape))
    return counts[:, :vocab_size]
