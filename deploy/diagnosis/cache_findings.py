"""Prefix caches that are never hit, and tiers that cost more than they save. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.deploy.diagnosis.observation import Observation, ObservedWorker
from tandem.deploy.diagnosis.wording import Finding, names_text, rate_text
from tandem.protocol.messages.membership import TierFigures

MIN_PROMPTS = 20
"""Prompts from which on missing hits mean something."""
HIT_SHARE = 0.01
"""Share of the prompt tokens below which hits count as missing."""


def cache_findings(observation: Observation) -> Iterator[Finding]:
    yield from _hits(observation)
    for worker in observation.workers:
        for tier, before in zip(worker.load.tiers, worker.loads[0].tiers, strict=False):
            yield from _of_tier(worker, tier, before)
        load = worker.load
        if 0 < load.loaded_tokens_per_s < load.prompt_tokens_per_s:
            slow, fast = rate_text(load.loaded_tokens_per_s, "tokens"), rate_text(load.prompt_tokens_per_s, "tokens")
            names = names_text([tier.name for tier in load.tiers])
            text = f"{worker.name} loads KV from its tiers ({names}) at {slow} and computes {fast}"
            yield Finding("slow tier", f"{text}: a hit there costs more than it saves. Leave out the slowest tier.")


def _hits(observation: Observation) -> Iterator[Finding]:
    """Since the start of the workers: prompts that resemble each other may be minutes apart."""
    workers = observation.prefill_workers
    num_tokens = sum(worker.load.num_prompt_tokens for worker in workers)
    num_cached = sum(worker.load.num_cached_tokens for worker in workers)
    num_prompts = sum(max(0, worker.load.num_finished - worker.load.num_received) for worker in workers)
    block_size = max((worker.report.block_size for worker in workers), default=0)
    if num_prompts < MIN_PROMPTS or num_tokens < 2 * block_size * num_prompts or num_cached >= HIT_SHARE * num_tokens:
        return
    kept = sum(worker.load.num_cached_blocks for worker in workers)
    found = f"{num_cached:,}" if num_cached else "None"
    text = f"{found} of {num_tokens:,} prompt tokens were found in a prefix cache since the start"
    if kept * block_size < num_tokens / num_prompts:
        text += f"; the pools keep {kept} blocks that no request uses, and prefixes are evicted before they return."
    else:
        text += f", although {kept:,} blocks are kept. Text that prompts have in common must be at their beginning:"
        text += " a date or an id before it makes every prompt new."
    yield Finding("no hits", text)


def _of_tier(worker: ObservedWorker, tier: TierFigures, before: TierFigures) -> Iterator[Finding]:
    if tier.error:
        yield Finding("tier fails", f"The tier {tier.name} of {worker.name} is not used: {tier.error}.")
    elif (num_skipped := tier.num_skipped - before.num_skipped) > (tier.num_stored - before.num_stored):
        text = f"The tier {tier.name} of {worker.name} cannot keep up: it skipped {num_skipped:,} blocks"
        yield Finding("tier behind", f"{text} and stored {tier.num_stored - before.num_stored:,}.")
    elif tier.num_stored > 2 * worker.load.num_blocks and not tier.num_loaded:
        text = f"The tier {tier.name} of {worker.name} has stored {tier.num_stored:,} blocks and loaded none"
        yield Finding("unused tier", f"{text}: it costs copies and saves nothing, unless prompts return later.")
    if tier.num_corrupt > before.num_corrupt:
        text = (
            f"{tier.num_corrupt - before.num_corrupt} blocks of the tier {tier.name} of {worker.name} were not whole."
        )
        yield Finding("tier corrupt", text)
