"""Takes TTFT and ITL apart into parts that add up. Pure."""

from __future__ import annotations

from itertools import islice

import msgspec

from tandem.deploy.diagnosis.observation import Observation
from tandem.telemetry.stages import STAGES

TTFT_STAGES = tuple(islice(STAGES, 5))
LATER_STAGES = tuple(islice(STAGES, 5, None))

TTFT_WORDS = {
    "tokenize": "reading and tokenising, until there is a worker",
    "dispatch": "messages between proxy and worker",
    "queue": "waiting for prefill",
    "prefill": "computing the prompt",
    "reserve": "waiting until decode has KV blocks",
}
LATER_WORDS = {
    "transfer": "shipping KV after the first token",
    "decode_wait": "waiting for the first decode step",
    "interrupted": "lost workers, until another one continued",
    "detokenize": "from tokens to text",
}
_FIXED, _SEQUENCES, _REST = "step", "sequences", "beside"
_DECODE_WORDS = {
    _FIXED: "a decode step as such",
    _SEQUENCES: "the sequences that share the step",
    _REST: "prompts in the same steps, and between steps",
}


class LatencyPart(msgspec.Struct, frozen=True):
    """One of the parts of a latency, which add up to it. share: of the latency."""

    name: str
    text: str
    seconds: float
    share: float


class Latency(msgspec.Struct, frozen=True):
    """One latency and its parts. mean_s: their sum; p50_s, p99_s: percentiles, None without samples."""

    mean_s: float
    p50_s: float | None
    p99_s: float | None
    parts: list[LatencyPart]

    def share(self, name: str) -> float:
        return sum(part.share for part in self.parts if part.name == name)

    def seconds(self, name: str) -> float:
        return sum(part.seconds for part in self.parts if part.name == name)


def ttft(observation: Observation) -> Latency | None:
    """The mean time to first token of the sequences that have finished; None if there were none."""
    serving = observation.serving
    if not serving.num_finished:
        return None
    seconds = {name: serving.stages_s.get(name, 0.0) for name in TTFT_STAGES}
    return _latency(seconds, TTFT_WORDS, serving.ttft_s)


def itl(observation: Observation) -> Latency | None:
    """The mean time per token behind the first one; None if no sequence with two tokens has finished.

    Decoding is divided by the workers' own fit of their steps; what exceeds it is due to prompts in the same steps and
    to the time between steps.
    """
    serving = observation.serving
    after_first_s = sum(serving.stages_s.get(name, 0.0) for name in LATER_STAGES)
    num_tokens = _tokens_after_first(observation, after_first_s)
    if not serving.num_finished or num_tokens <= 0 or after_first_s <= 0:
        return None
    seconds = {name: serving.stages_s.get(name, 0.0) / num_tokens for name in LATER_WORDS}
    decode_s = serving.stages_s.get("decode", 0.0) / num_tokens
    fixed_s, sequences_s = _step_parts(observation)
    fitted = min(1.0, decode_s / (fixed_s + sequences_s)) if fixed_s + sequences_s else 0.0
    seconds |= {_FIXED: fitted * fixed_s, _SEQUENCES: fitted * sequences_s}
    seconds[_REST] = max(0.0, decode_s - seconds[_FIXED] - seconds[_SEQUENCES])
    return _latency(seconds, _DECODE_WORDS | LATER_WORDS, serving.itl_s)


def _tokens_after_first(observation: Observation, after_first_s: float) -> float:
    """Mean number of tokens of a sequence behind its first one, at best by the mean TPOT that proxies measure."""
    serving = observation.serving
    measured = serving.predictions.get("itl")
    if measured is not None and measured.measured_s > 0:
        return after_first_s / measured.measured_s
    if serving is observation.recent:
        return (serving.output_tokens_per_s or 0.0) * observation.window_s / max(1, serving.num_finished) - 1
    figures = observation.samples[-1].figures().values()
    return sum(each.num_output_tokens for each in figures) / max(1, serving.num_finished) - 1


def _step_parts(observation: Observation) -> tuple[float, float]:
    """Returns the fixed part of a decode step and that of its sequences, means over the sequences of all workers."""
    decodes = [worker for worker in observation.decode_workers if worker.mean_sequences > 0]
    total = sum(worker.mean_sequences for worker in decodes)
    if not total:
        return 0.0, 0.0
    fixed_s = sum(worker.mean_sequences * worker.load.fixed_step_s for worker in decodes) / total
    sequences_s = sum(worker.mean_sequences**2 * worker.load.step_s_per_sequence for worker in decodes) / total
    return fixed_s, sequences_s


def _latency(seconds: dict[str, float], words: dict[str, str], quantiles: list[float | None]) -> Latency:
    total_s = sum(seconds.values())
    parts = [
        LatencyPart(name, words[name], seconds[name], seconds[name] / total_s if total_s else 0.0) for name in words
    ]
    return Latency(total_s, quantiles[0], quantiles[-1], parts)
