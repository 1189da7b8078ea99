"""Lets requests that name the tokens of their logprobs share steps with requests that want the most likely ones.

vLLM's first model runner, which CPUs use, reports for all sequences of a step as for those that name tokens, if there
are any: the others would get no alternatives, and a beam search beside them other beams. The second model runner keeps
them apart by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad


def keep_likeliest_tokens(runner: Any) -> None:
    """runner: vLLM's first model runner. Call once."""
    sampler, batch = runner.sampler, runner.input_batch
    gather_named = sampler.gather_specific_token_logprobs

    def gather(logprobs: torch.Tensor, named: dict[int, list[int]], sampled: torch.Tensor) -> Any:
        found, num_top = gather_named(logprobs, named, sampled), batch.max_num_logprobs
        if num_top is None or found is None:
            return found
        likeliest = sampler.gather_logprobs(logprobs, num_top, token_ids=sampled)
        names_tokens = torch.zeros(len(logprobs), 1, dtype=torch.bool, device=logprobs.device)
        names_tokens[list(named)] = True
        width = max(found.logprobs.shape[1], 1 + num_top)

        def chosen(one: torch.Tensor, other: torch.Tensor, padding: float) -> torch.Tensor:
            one, other = (pad(each, (0, width - each.shape[1]), value=padding) for each in (one, other))
            return torch.where(names_tokens, one, other)

        return found._replace(
            logprob_token_ids=chosen(found.logprob_token_ids, likeliest.logprob_token_ids, 0),
            logprobs=chosen(found.logprobs, likeliest.logprobs, float("-inf")),
        )

    sampler.gather_specific_token_logprobs = gather
