"""What would help and by how much, by the models of router and planner. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from tandem.deploy.diagnosis.latency import Latency
from tandem.deploy.diagnosis.model import ClusterModel
from tandem.deploy.diagnosis.observation import Observation, is_full, lacks_blocks, num_places
from tandem.deploy.diagnosis.wording import Finding, rate_text, time_text

WORTH_SHARE = 0.1
"""A change is proposed if it shortens a latency, or raises a rate, by at least this share."""
WORTH_WORKER_SHARE = 0.2
"""The same for a change that costs a worker."""
NEGLIGIBLE_S = 0.002
_MAX_MORE = 16
"""Workers that are proposed at most in addition."""
_SHARED_STEPS_SHARE = 0.25
"""Share of ITL that is not decode steps from which on a lower limit on steps with prompts is proposed."""
_LONG_PROMPT_SHARE = 0.5
_SHORT_PROMPT_S = 0.05
"""A prompt that computes faster needs no advice."""


def advice(observation: Observation, ttft: Latency | None, itl: Latency | None, model: ClusterModel) -> list[Finding]:
    """Returns changes with the latencies before and after; none if no model has measured anything."""
    if ttft is None:
        return []
    found = [
        *_more_prefill(observation, ttft, model),
        *_more_decode(observation, itl, model),
        *_more_places(observation),
        *_shorter_mixed_steps(observation, itl, model),
        *_shorter_prompts(observation, ttft, model),
    ]
    return [*found, *_planned(observation, found)]


def _more_prefill(observation: Observation, ttft: Latency, model: ClusterModel) -> Iterator[Finding]:
    now = model.num_prefill
    if not model.service_s or is_full(observation):
        return
    wait_s = model.wait_s(now)
    if wait_s < max(NEGLIGIBLE_S, WORTH_WORKER_SHARE * max(ttft.mean_s, model.service_s)):
        return
    if max(ttft.seconds("queue"), model.backlog_s) < WORTH_SHARE * ttft.mean_s:  # prompts arrive more regularly
        return
    enough = (n for n in range(now + 1, now + _MAX_MORE) if model.wait_s(n) < model.service_s / 2)
    wanted = next(enough, now + _MAX_MORE)
    change = f"falls from {time_text(wait_s)}" if math.isfinite(wait_s) else "no longer grows without limit, but falls"
    text = f"{_scale(observation, prefill=wanted - now)}: by the model, the mean wait for prefill {change} to"
    yield Finding(
        "more prefill",
        f"{text} {time_text(model.wait_s(wanted))} (prompts ask for {model.load:.2f} workers, "
        f"{time_text(model.service_s)} each).",
    )


def _more_decode(observation: Observation, itl: Latency | None, model: ClusterModel) -> Iterator[Finding]:
    now = model.num_decode
    if now and all(lacks_blocks(worker) for worker in observation.decode_workers):
        used = sum(worker.used_share for worker in observation.decode_workers) / now
        text = (
            f"{_scale(observation, decode=1)}, or a larger --kv-cache-gib: {used:.0%} of decode's KV blocks are in use"
        )
        share = used * now / (now + 1)
        yield Finding("more blocks", f"{text}; with one worker more, the same sequences take {share:.0%}.")
        return
    before_s, after_s = model.step_s(now), model.step_s(now + 1)
    if itl is None or not before_s or before_s - after_s < WORTH_WORKER_SHARE * max(itl.mean_s, before_s):
        return
    yield Finding(
        "more decode",
        f"{_scale(observation, decode=1)}: by the model, a decode step falls from {time_text(before_s)} to "
        f"{time_text(after_s)}, because each worker runs {now / (now + 1):.0%} of the sequences.",
    )


def _more_places(observation: Observation) -> Iterator[Finding]:
    for worker in observation.decode_workers:
        if not (places := num_places(worker)) or not worker.load.fixed_step_s:
            continue
        each_s = worker.load.step_s_per_sequence
        step_s, after_s = (worker.load.fixed_step_s + each_s * number for number in (places, 2 * places))
        if (gain := 2 * step_s / after_s - 1) < WORTH_SHARE:
            continue
        text = f"--max-num-seqs {2 * places}: {worker.name} always runs {places} sequences while others wait; by the"
        text += f" model, its steps then take {time_text(after_s)} instead of {time_text(step_s)}"
        yield Finding("more places", f"{text}, and it generates {gain:.0%} more tokens.")
        return


def _shorter_mixed_steps(observation: Observation, itl: Latency | None, model: ClusterModel) -> Iterator[Finding]:
    """Prompts that compute beside sequences: a lower limit on such steps, at the cost of prefill speed."""
    mixed = [worker for worker in observation.prefill_workers if worker.mean_sequences and worker.load.itl_slo_s]
    if itl is None or not mixed or itl.share("beside") < _SHARED_STEPS_SHARE or not model.service_s:
        return
    limits_s = [worker.load.itl_slo_s for worker in mixed]
    limit_s, step_s = max(limits_s), model.step_s(model.num_decode)
    lower_s = max(limit_s / 2, 2 * step_s)
    if lower_s > (1 - WORTH_SHARE) * limit_s:
        return
    cost = model.service_with(lower_s) / model.service_s
    yield Finding(
        "itl slo",
        f"--itl-slo-ms {1000 * lower_s:.0f}: steps that hold prompts beside sequences then take at most "
        f"{time_text(lower_s)} instead of {time_text(limit_s)}; by the model, a prompt takes {cost:.1f} times as long.",
    )


def _shorter_prompts(observation: Observation, ttft: Latency, model: ClusterModel) -> Iterator[Finding]:
    demand = observation.demand
    if (
        ttft.share("prefill") < _LONG_PROMPT_SHARE
        or ttft.seconds("prefill") < _SHORT_PROMPT_S
        or not demand.mean_prompt_tokens
    ):
        return
    tokens, speed = f"{demand.mean_prompt_tokens:,.0f} uncached tokens", rate_text(demand.speed, "tokens")
    text = "prompts of which more is cached, or --prefill-tensor-parallel-size on GPUs: a mean prompt has"
    half = time_text(model.service_s / 2)
    yield Finding("shorter prompts", f"{text} {tokens}, at {speed}; by the model, half of them take {half} less.")


def _scale(observation: Observation, prefill: int = 0, decode: int = 0) -> str:
    """Returns the command for more workers; elastic ones, where there are any."""
    counts = Counter(worker.info.role for worker in observation.workers)
    if counts["any"]:
        counts["any"] += prefill + decode
    else:
        counts["prefill"] += prefill
        counts["decode"] += decode
    return _command(counts["prefill"], counts["decode"], counts["any"])


def _command(prefill: int, decode: int, any_role: int) -> str:
    numbers = {"prefill": prefill, "decode": decode, "any": any_role}
    return "tandem scale " + " ".join(f"{role}={number}" for role, number in numbers.items() if number)


def _planned(observation: Observation, found: list[Finding]) -> Iterator[Finding]:
    """The planner's proposal, unless it is known already."""
    if (plan := observation.plan) is None:
        return
    current = _command(plan.prefill, plan.decode, plan.any)
    proposed = _command(plan.proposed_prefill, plan.proposed_decode, plan.proposed_any)
    if proposed != current and not any(each.text.startswith(f"{proposed}:") for each in found):
        text = f"{proposed}: the planner proposes it (prefill: {plan.prefill_reason}; decode: {plan.decode_reason})."
        yield Finding("plan", text)
