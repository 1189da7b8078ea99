"""Names the part of the cluster in which requests wait longest. Pure."""

from __future__ import annotations

from tandem.deploy.diagnosis.latency import Latency
from tandem.deploy.diagnosis.model import ClusterModel
from tandem.deploy.diagnosis.observation import Observation, is_full, num_places
from tandem.deploy.diagnosis.wording import Finding, count_text, rate_text, speed_text, time_text

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
