"""Plays a recorded trace on a simulated cluster, to know the latencies of a cluster that one does not have yet.

Simulated are processes, messages, steps and transfers. Not simulated are the costs of HTTP and of the tokeniser, and
processes that share cores or a link: each worker takes the times of its steps, whatever the others do.
"""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.engine.batch import Batch
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.protocol.prefix_hash import BlockHasher, pack_short_hashes
from tandem.proxy.dispatch.sequence import DispatchedSequence, PromptTask
from tandem.proxy.text.prompt import Prompt
from tandem.runtime.errors import ConfigError, TandemError
from tandem.runtime.tasks import start
from tandem.simulator.cluster import SimulatedCluster
from tandem.simulator.engine import next_timed_token
from tandem.simulator.processes import SimulatedProxy
from tandem.simulator.run import hidden_logs, seeded_ids
from tandem.simulator.sampling import VOCAB_SIZE
from tandem.simulator.scenario import NO_TIMEOUT_S, ClusterShape, SimulatedStepTimes
from tandem.simulator.timeline import Timeline

START_S = 60
"""Limit on the time until all workers and pairs are ready, once they have started."""
HASHED_TOKENS = 512
"""Tokens of a block that `hash_ids` names."""


@dataclass(frozen=True)
class TraceRequest:
    """One request. at: seconds after the first one. follows: number of the turn before it in its chat, or None."""

    at: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()
    follows: int | None = None


@dataclass(frozen=True)
class MeasuredStepTimes(SimulatedStepTimes):
    """The model that workers fit to their steps (`engine.steps.step_times`)."""

    def of(self, batch: Batch) -> float:
        lengths = [len(item.token_ids) for item in batch.items]
        num_sequences = lengths.count(1)
        decode_s = self.fixed_s + num_sequences * self.per_sequence_s if num_sequences else 0.0
        return max(self.fixed_s, decode_s + (sum(lengths) - num_sequences) * self.per_prompt_token_s)


@dataclass
class Served:
    """One request. Times in seconds after the start of the trace. error: a code, "" if it has its whole answer."""

    sent_at: float
    first_at: float = math.nan
    last_at: float = math.nan
    num_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.sent_at

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first one; 0 for answers of one token."""
        return (self.last_at - self.first_at) / max(1, self.num_tokens - 1)


@dataclass
class Played:
    """What came of a trace. gaps_s: between the tokens of all requests. duration_s: to the last token."""

    served: list[Served]
    gaps_s: array[float]
    duration_s: float
    cluster: SimulatedCluster

    def summary(self, ttft_s: float = math.inf, itl_s: float = math.inf) -> dict[str, Any]:
        """Returns figures for JSON. ttft_s, itl_s: limits on TTFT and mean ITL of a request that counts as good."""
        whole = [each for each in self.served if not each.error]
        good = sum(each.ttft_s <= ttft_s and each.tpot_s <= itl_s for each in whole)
        duration_s = self.duration_s or 1.0
        return {
            "requests": len(self.served),
            "errors": dict(Counter(each.error for each in self.served if each.error)),
            "duration_s": round(self.duration_s, 3),
            "output_tokens_per_s": round(sum(each.num_tokens for each in whole) / duration_s, 2),
            "goodput": round(good / len(self.served), 4),
            "goodput_per_s": round(good / duration_s, 3),
            "ttft_ms": spread_ms([each.ttft_s for each in whole]),
            "itl_ms": spread_ms(self.gaps_s),
            "tpot_ms": spread_ms([each.tpot_s for each in whole if each.num_tokens > 1]),
            "e2e_ms": spread_ms([each.last_at - each.sent_at for each in whole]),
        }


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Returns mean and percentiles in milliseconds; nothing for no values."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    shown = {f"p{percent}": ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] for percent in (50, 90, 99)}
    shown = {"mean": sum(ordered) / len(ordered), **shown, "max": ordered[-1]}
    return {name: round(1000 * value, 2) for name, value in shown.items()}


class Player:
    """Plays one trace. seed: of the order of events and the proxies' choices.

    A turn of a chat is not sent before the one that it follows has ended.
    """

    def __init__(self, trace: Sequence[TraceRequest], shape: ClusterShape, seed: int = 0) -> None:
        self._trace = trace
        self._shape = shape
        self._ttft_slo_s = shape.config.admission.ttft_slo_s
        self._served: dict[int, Served] = {}
        self._num_ended = 0
        self._gaps_s = array("d")
        self._held: defaultdict[int, list[int]] = defaultdict(list)  # turns by the one that they follow
        self._hasher = BlockHasher(shape.block_size, "simulated")
        rng = random.Random(f"plan {seed}")
        with hidden_logs(), seeded_ids(rng):
            self._timeline = Timeline(rng, self._on_error)
            self.cluster = SimulatedCluster(shape, self._timeline, rng, self._on_report, lambda *_: None)
            self._rng = rng
            for second in range(1, START_S + int(shape.boot_s)):
                self._timeline.run(lambda: False, second)
                if (missing := self.cluster.not_whole()) is None:
                    break
            else:
                raise ConfigError(f"the simulated cluster is not ready after {second} s: {missing}")
        self._began_at = self._timeline.now

    def _on_error(self, name: str, error: BaseException) -> None:
        raise error

    def _on_report(self, rule: str, details: str) -> None:
        raise RuntimeError(f"{rule}: {details}")

    @property
    def now(self) -> float:
        """Seconds after the start of the trace."""
        return self._timeline.now - self._began_at

    def play(self) -> Played:
        """Returns when all requests have ended."""
        self.cluster.world.call_at(self._began_at, self._arrive, 0)
        with hidden_logs(), seeded_ids(self._rng):
            self._timeline.run(lambda: self._num_ended == len(self._trace), math.inf)
            for loop in self._timeline.loops:
                loop.discard()
        served = [self._served[number] for number in range(len(self._trace))]
        duration_s = max((each.last_at for each in served if not each.error), default=0.0)
        return Played(served, self._gaps_s, duration_s, self.cluster)

    def _arrive(self, number: int) -> None:
        """Sends a request, unless it must wait, and lets the next one come at its time."""
        request = self._trace[number]
        if number + 1 < len(self._trace):
            self.cluster.world.call_at(self._began_at + self._trace[number + 1].at, self._arrive, number + 1)
        parent = request.follows
        if parent is not None and not self._has_ended(parent):
            self._held[parent].append(number)
        else:
            self._send(number)

    def _has_ended(self, number: int) -> bool:
        served = self._served.get(number)
        return served is not None and (bool(served.error) or served.num_tokens == self._trace[number].num_output_tokens)

    def _send(self, number: int) -> None:
        proxies = list(self.cluster.proxies.values())
        proxy = proxies[number % len(proxies)]
        self._served[number] = Served(self.now)
        proxy.loop.call_soon(lambda: start(self._serve(number, proxy)))

    async def _serve(self, number: int, proxy: SimulatedProxy) -> None:
        request, served = self._trace[number], self._served[number]
        tokens = pack_token_ids(prompt_of(self._trace, number))
        prompt = Prompt(
            tokens, request.num_prompt_tokens, prefix_hashes=pack_short_hashes(self._hasher.prompt_hashes(tokens))
        )
        ready: asyncio.Queue[DispatchedSequence] = asyncio.Queue()
        task = PromptTask(prompt, StopConditions(request.num_output_tokens), NO_TIMEOUT_S, self._ttft_slo_s)
        try:
            [sequence] = proxy.dispatcher.start(task, [SamplingParams(temperature=0.0)], ready.put_nowait)
            is_open = True
            while is_open:
                await ready.get()
                if (delta := proxy.dispatcher.take(sequence)) is None:
                    continue
                if served.num_tokens:
                    self._gaps_s.append(self.now - served.last_at)
                else:
                    served.first_at = self.now
                served.last_at = self.now
                served.num_tokens += len(delta.tokens)
                is_open = delta.finish_reason is None
            proxy.dispatcher.drop(sequence)
        except TandemError as error:
            served.error = error.code
        self._num_ended += 1
        for turn in self._held.pop(number, ()):
            self.cluster.world.call_soon(self._send, turn)


def prompt_of(trace: Sequence[TraceRequest], number: int) -> list[int]:
    """Returns the tokens of a prompt. No other prompt has the tokens that it does not share."""
    chain = [number]
    while (parent := trace[chain[-1]].follows) is not None:
        chain.append(parent)
    tokens: list[int] = []
    for each in reversed(chain):
        request = trace[each]
        if not tokens:
            for hash_id in request.hash_ids:
                tokens += _unique_tokens(2 * hash_id, HASHED_TOKENS)
        missing = max(0, request.num_prompt_tokens - len(tokens))
        tokens += _unique_tokens(2 * each + 1, missing)
        del tokens[request.num_prompt_tokens :]
        if each != number:
            for _ in range(request.num_output_tokens):
                tokens.append(next_timed_token(len(tokens), tokens[-1]))
    return tokens


def _unique_tokens(number: int, length: int) -> list[int]:
    """Returns tokens that begin with the number, as digits; the others may be the same everywhere."""
    digits: list[int] = []
    while number:
        number, digit = divmod(number, VOCAB_SIZE)
        digits.append(digit)
    return (digits + [0] * (length - len(digits)))[:length]
