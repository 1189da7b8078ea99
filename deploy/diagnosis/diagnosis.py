"""Puts a diagnosis together: where the time goes, what is narrow, what would help, and what looks wrong. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import msgspec

from tandem.deploy.autoscale.planner import counts_text
from tandem.deploy.diagnosis.findings import (
    Finding,
    cache_findings,
    count_text,
    host_findings,
    pair_findings,
    proxy_findings,
    rate_text,
    speed_text,
    time_text,
    worker_findings,
)
from tandem.deploy.diagnosis.latency import Latency, itl, ttft
from tandem.deploy.diagnosis.model import ClusterModel
from tandem.deploy.diagnosis.observation import Observation, is_full, lacks_blocks, num_places

WAITING_SHARE = 0.25
"""Share of a latency from which on a wait counts. Below it the rest is work, and nothing is narrow."""
_WORK_SHARE = 0.5
"""The same for the sequences that share decode steps, which are work."""
_BUSY_SHARE = 0.5
"""Utilisation below which prefill is not what prompts wait for."""
NEGLIGIBLE_S = 0.002
"""Waits below this are the cost of a few messages."""
NEGLIGIBLE_ITL_S = 0.001
"""The same for waits per token, which each happen once in a sequence."""
WORTH_SHARE = 0.1
"""A change is proposed if it shortens a latency, or raises a rate, by at least this share."""
WORTH_WORKER_SHARE = 0.2
"""The same for a change that costs a worker."""
_MAX_MORE = 16
"""Workers that are proposed at most in addition."""
_SHARED_STEPS_SHARE = 0.25
"""Share of ITL that is not decode steps from which on a lower limit on steps with prompts is proposed."""
_LONG_PROMPT_SHARE = 0.5
_SHORT_PROMPT_S = 0.05
"""A prompt that computes faster needs no advice."""


class Diagnosis(msgspec.Struct, frozen=True):
    """What `tandem doctor` says about a cluster."""

    head: str
    """What was observed."""
    ttft: Latency | None
    """None if no request has finished, as for itl."""
    itl: Latency | None
    narrow_part: Finding | None
    advice: list[Finding]
    """What would help, by the models of router and planner."""
    findings: list[Finding]
    """What looks wrong."""

    @property
    def kinds(self) -> list[str]:
        return [finding.kind for finding in self.findings]


def diagnose(observation: Observation) -> Diagnosis:
    model, first, later = ClusterModel(observation), ttft(observation), itl(observation)
    findings = [
        *proxy_findings(observation),
        *worker_findings(observation),
        *pair_findings(observation),
        *cache_findings(observation),
        *host_findings(observation),
    ]
    if observation.is_idle:
        return Diagnosis(_head(observation), None, None, None, [], findings)
    narrow = narrow_part(observation, first, later, model)
    return Diagnosis(_head(observation), first, later, narrow, advice(observation, first, later, model), findings)


def _head(observation: Observation) -> str:
    roles = [worker.info.role for worker in observation.workers]
    counts = counts_text(roles.count("prefill"), roles.count("decode"), roles.count("any"))
    proxies = count_text(len(observation.samples[-1].reports), "proxy", "proxies")
    head = (
        f"{observation.samples[-1].reports[0].model}: {counts}, {proxies}, observed for {observation.window_s:.0f} s. "
    )
    if observation.is_idle:
        return head + (
            f"Nothing was served in the last {observation.window_s:.0f} s; send requests and run `tandem doctor` again."
        )
    recent, demand = observation.recent, observation.demand
    if not recent.num_finished:
        if observation.serving.num_finished:
            return (
                head
                + "No request has finished meanwhile, so latencies are those since the start. --seconds N looks longer."
            )
        return head + "No request has finished since the start, so latencies are not known. --seconds N looks longer."
    requests = count_text(recent.num_finished, "request")
    tokens = f" with {demand.mean_prompt_tokens:,.0f} uncached tokens a prompt" if demand.mean_prompt_tokens else ""
    text = f"{requests} finished ({rate_text(recent.finished_per_s or 0.0, 'requests')}{tokens}),"
    return f"{head}{text} {rate_text(recent.output_tokens_per_s or 0.0, 'output tokens')}."


# ---- what is narrow


def narrow_part(
    observation: Observation, ttft: Latency | None, itl: Latency | None, model: ClusterModel
) -> Finding | None:
    """Returns where requests wait, or that they do not; None if no request has finished.

    A backlog counts as much as waits that are over, because the stages are those of sequences that have finished.
    """
    if ttft is None:
        return None
    waits = {
        part.name: part.seconds
        for part in ttft.parts
        if part.name != "prefill" and part.share >= WAITING_SHARE and part.seconds >= NEGLIGIBLE_S
    }
    if model.backlog_s > max(ttft.mean_s, NEGLIGIBLE_S, waits.get("queue", 0.0)):
        waits["queue"] = model.backlog_s
    if not waits and itl is not None:
        waits = {
            part.name: part.seconds
            for part in itl.parts
            if part.name not in ("step", "detokenize")
            and part.share >= (_WORK_SHARE if part.name == "sequences" else WAITING_SHARE)
            and part.seconds >= NEGLIGIBLE_ITL_S
        }
    if not waits:
        return _nothing(observation, ttft)
    name = max(waits, key=lambda each: waits[each])
    share = ttft.share(name) or (itl.share(name) if itl is not None else 0.0)
    if name in ("queue", "reserve") and is_full(observation):
        return Finding("decode room", _room(observation, waits[name], ttft.share(name)))
    loading = [worker for worker in observation.workers if worker.grown("num_loaded_tokens")]
    if name == "queue" and loading and model.load < _BUSY_SHARE * model.num_prefill:
        speed = rate_text(min(worker.load.loaded_tokens_per_s for worker in loading), "tokens")
        text = f"Tiers of the KV cache. Prompts wait {time_text(waits[name])} on average, {share:.0%} of TTFT,"
        return Finding("tiers", f"{text} and prefill is not busy: prefixes are loaded, at {speed} at last.")
    if name == "queue":
        return Finding("prefill", _prefill(observation, ttft, model))
    return _of_stage(observation, name, waits[name], share)


def _of_stage(observation: Observation, name: str, seconds: float, share: float) -> Finding:
    of_ttft, of_itl = (f"{time_text(seconds)} on average, {share:.0%} of {latency}" for latency in ("TTFT", "ITL"))
    match name:
        case "reserve":
            text = f"The way from prefill to decode. First tokens wait until decode has reserved KV blocks: {of_ttft}."
            return Finding("reservations", f"{text} It has blocks, so the messages are slow.")
        case "dispatch":
            text = f"The way to the workers. Messages between proxies and workers take {of_ttft}"
            return Finding("messages", f"{text}: an event loop or the network is slow.")
        case "tokenize":
            proxies = count_text(len(observation.samples[-1].reports), "proxy", "proxies")
            text = f"The proxies. Reading bodies and tokenising takes {of_ttft}, on {proxies}"
            return Finding("proxies", f"{text}; a request that finds no worker waits here too.")
        case "transfer":
            return Finding("transfer", _transfer(observation, seconds, share))
        case "decode_wait":
            text = f"Decode steps. A sequence whose KV is complete waits for its first step: {of_itl}."
            return Finding("decode steps", f"{text} Steps are long, or workers run all the sequences that they may.")
        case "interrupted":
            num_preempted = sum(worker.grown("num_preempted") for worker in observation.workers)
            text = f"{num_preempted} preemptions" if num_preempted else "Workers that end or freeze"
            return Finding("lost workers", f"{text}. Sequences stop until they are computed again: {of_itl}.")
        case "sequences":
            num = sum(worker.mean_sequences for worker in observation.decode_workers)
            workers = count_text(len(observation.decode_workers), "worker")
            return Finding("decode", f"Decode. {num:.0f} sequences share the steps of {workers}: {of_itl}.")
        case _:
            text = f"Steps that decode shares with prompts. {of_itl}, is not the decode steps themselves"
            return Finding("shared steps", f"{text}: prompts are computed in the same steps, or steps begin late.")


def _nothing(observation: Observation, ttft: Latency) -> Finding:
    """What is left when nobody waits: the work itself."""
    tokens, speed = observation.demand.mean_prompt_tokens, observation.demand.speed
    work = f", {tokens:,.0f} tokens at {rate_text(speed, 'tokens')}" if tokens and speed else ""
    return Finding(
        "nothing",
        f"Nothing; requests hardly wait. Computing the prompt{work} is {ttft.share('prefill'):.0%} of TTFT "
        f"({time_text(ttft.seconds('prefill'))}), and more workers would not make it shorter.",
    )


def _prefill(observation: Observation, ttft: Latency, model: ClusterModel) -> str:
    text = f"Prefill. A prompt waits {time_text(ttft.seconds('queue'))} on average, {ttft.share('queue'):.0%} of TTFT."
    if model.service_s:
        compute = "computes" if model.num_prefill == 1 else "compute"
        text += (
            f" Prompts ask for {model.load:.2f} workers, and {model.num_prefill} {compute} them "
            f"({time_text(model.service_s)} each)."
        )
    waiting = sum(worker.mean("num_waiting") for worker in observation.prefill_workers)
    if waiting >= 1:
        text += (
            f" {count_text(waiting, 'prompt')} wait on average, and the last for about {time_text(model.backlog_s)}."
        )
    return text


def _room(observation: Observation, seconds: float, share: float) -> str:
    text = f"Room on decode. Prompts wait for it {time_text(seconds)}, {share:.0%} of TTFT."
    for worker in observation.decode_workers[:1]:
        waiting = count_text(worker.mean("num_decoding") - worker.mean_sequences, "sequence")
        if places := num_places(worker):
            text += f" {worker.name} runs {places} sequences all the time, which is its limit, and {waiting} wait."
        else:
            used = f"{worker.used_share:.0%} of the {worker.load.num_blocks:,} KV blocks of {worker.name} are in use"
            text += f" {used}, by {count_text(worker.mean_sequences, 'sequence')}, and {waiting} wait."
    return text


def _transfer(observation: Observation, seconds: float, share: float) -> str:
    text = "The way from prefill to decode. After the first token, KV is shipped for"
    text += f" {time_text(seconds)} per token, {share:.0%} of ITL."
    bandwidth = observation.serving.bandwidth
    if bandwidth:
        (prefill, decode), slowest = min(bandwidth.items(), key=lambda item: item[1])
        text += f" The slowest pair, {prefill} to {decode}, moves {speed_text(slowest)}."
    return text


# ---- what would help


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
