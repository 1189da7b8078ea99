"""One step of the prefill role: how its tokens are shared among the prompts. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.engine.batch import Batch, Encode
from tandem.engine.vision.prompt_media import EncodeUnit
from tandem.prefill_worker.prompt import PrefillPrompt

AGING_S = 2.0
"""Waiting this long outweighs one level of priority, so that no priority starves."""
MAX_LOGPROB_TOKENS = 512
"""Tokens in a step of prompts whose log-probabilities are wanted. Each costs a row of logits, and work on the host."""
MAX_PROMPT_LOGPROB_TOKENS = 256
"""Of one prompt, so that long prompts leave room for others."""


@dataclass(frozen=True)
class PrefillStep:
    """What one step computes, in the order in which its prompts arrived."""

    chunks: list[tuple[PrefillPrompt, int]] = field(default_factory=list)
    """Prompts, and how many of their tokens the step computes."""
    encodes: list[tuple[PrefillPrompt, list[EncodeUnit]]] = field(default_factory=list)
    """Prompts, and the units of their media that the step encodes."""

    @property
    def prompts(self) -> list[PrefillPrompt]:
        """All prompts of the step; one with media may occur twice."""
        return [prompt for prompt, _ in self.chunks] + self.encoding

    @property
    def encoding(self) -> list[PrefillPrompt]:
        return [prompt for prompt, _ in self.encodes]

    def batch(self) -> Batch:
        encodes = [Encode(p.media, unit) for p, units in self.encodes if p.media is not None for unit in units]
        return Batch([prompt.next_item(num_tokens) for prompt, num_tokens in self.chunks], encodes=encodes)


def plan_step(
    candidates: Sequence[PrefillPrompt], max_tokens: int, begin: Callable[[PrefillPrompt, bool], bool]
) -> PrefillStep:
    """Shares the tokens of a step among prompts that may compute.

    begin: gives blocks to a prompt that has none and returns True, or returns False. Its second argument is whether the
    prompt is the first one.

    The prompt that is first by priority and age gets half of the step's tokens. The rest goes by priority, then to the
    prompts with the fewest tokens left. So short prompts pass long ones, but cannot starve them. Encoding one
    placeholder of an image counts as one token. An image above the budget is encoded in a step that it begins. Prompts
    whose log-probabilities are wanted have short chunks, because a step with their logits takes several times as long.
    """
    if not candidates:
        return PrefillStep()
    budget = max_tokens
    first = min(candidates, key=lambda p: (p.arrived_at + AGING_S * p.request.priority, p.number))
    by_turn = sorted(candidates, key=lambda p: (p.request.priority, p.num_remaining_tokens, p.number))
    logprob_budget = MAX_LOGPROB_TOKENS
    shares: dict[int, int] = {}
    units: dict[int, list[EncodeUnit]] = defaultdict(list)
    for prompt, limit in [(first, budget - budget // 2), *((p, budget) for p in by_turn)]:
        if budget <= 0:
            break
        wants_logprobs = prompt.request.num_prompt_logprobs is not None
        if wants_logprobs:
            limit = min(limit, logprob_budget, MAX_PROMPT_LOGPROB_TOKENS - shares.get(prompt.number, 0))
            if limit <= 0:
                continue
        if not prompt.has_begun and not begin(prompt, prompt is first):
            continue
        number, planned = prompt.number, shares.get(prompt.number, 0)
        may_exceed = budget == max_tokens  # the step is still empty
        share, new_units, cost = prompt.next_work(planned, min(budget, limit), units[number], may_exceed)
        shares[number] = planned + share
        units[number] += new_units
        budget -= share + cost
        logprob_budget -= share if wants_logprobs else 0
    in_order = sorted(candidates, key=lambda p: p.number)
    return PrefillStep(
        [(p, shares[p.number]) for p in in_order if shares.get(p.number)],
        [(p, units[p.number]) for p in in_order if units.get(p.number)],
    )
