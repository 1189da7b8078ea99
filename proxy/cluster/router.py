"""Chooses the workers of each request. Pure policy: knows the registry and what this proxy has under way.

Prefill goes where the first token is predicted soonest: prompt tokens ahead plus those of this prompt that the worker
has not cached, over its measured speed; what several hold spreads a little before it must. Decode goes where there are
few sequences, room for the blocks, and much of the prompt already. A short rest of a prompt is computed by the decode
worker itself, and so is every prompt when no prefill worker is left. docs/routing.md has the formulas and their
reasons.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

from tandem.protocol.messages.membership import WorkerInfo
from tandem.proxy.cluster.prefix_index import NO_DEPTHS, Depths
from tandem.proxy.cluster.registry import Candidates, Registry, WorkerRecord
from tandem.proxy.cluster.worker_load import WorkerUse
from tandem.runtime.errors import Overloaded

_SLACK_S = 0.001
_SLACK = 0.05
"""Prefill workers whose prediction is the best one's, to this time and part, are as good: one is drawn."""
_ENOUGH_COPIES = 0.25
"""Of a prefix that more than this part of the prefill workers hold no more copies are made on purpose."""
_SHARED_BY = 3
"""Prefill workers that hold a prefix which many prompts begin with. A conversation that had to move once has two."""
_DECODE_SLACK = 0.5
"""The same for decode workers, in sequences."""
_CACHED_WEIGHT = 2.0
"""A prompt that is wholly in a decode worker's cache is worth as many sequences."""
_NO_ROOM = 1e6
_AVOIDED = 1e9
_MAX_LOCAL_PROMPTS = 4
"""Prompt tokens of so many thresholds may be under way on a decode worker; more would slow its streams."""
_LEARNING_RATE = 0.1
_MIN_TTFT_S = 0.002
"""What a first token takes with nothing to compute: dispatch and one step."""


class SLOUnreachable(Overloaded):
    """The first token is predicted to come later than `--ttft-slo-ms` allows. retry_after_s: by then it might not."""

    code = "ttft_slo_unreachable"

    def __init__(self, predicted_s: float, limit_s: float) -> None:
        super().__init__(
            f"The first token is predicted after {predicted_s:.2f} s, {max(0.0, limit_s):.2f} s are left of the limit. "
            "Try again later."
        )
        self.retry_after_s = min(60, max(1, math.ceil(predicted_s - limit_s)))


class NoWorkerReady(Overloaded):
    """No worker of a role is there at present. retry_after_s: a worker that is started again may take so long."""

    code = "no_worker_ready"
    retry_after_s = 5


class PromptShape(msgspec.Struct, frozen=True):
    """What routing needs to know of a prompt. hashes: short ones of its full blocks; priority: lower is sooner.

    needs_decode: False when one token is all that is asked, so that there is nothing to ship. can_be_cached: False
    where every token must be computed for its logprobs. avoid: epochs of workers that are taken only when no others are
    left. near: epoch of a decode worker that may have kept blocks of the prompt from an attempt that failed elsewhere.
    """

    num_tokens: int
    num_sequences: int = 1
    needs_decode: bool = True
    hashes: Sequence[int] = ()
    priority: int = 0
    can_be_cached: bool = True
    avoid: frozenset[str] = frozenset()
    has_media: bool = False
    near: str = ""


class Route(msgspec.Struct, frozen=True):
    """decode: None when one token is all that is asked. prefill: None when the decode worker computes the prompt.

    num_uncached_tokens: expected, of the prompt. predicted_s: seconds to the first token before the correction that is
    learned. num_blocks: promised on decode. compute_use, decode_use: the accounts that both were added to: a worker
    that is lost and registers again, be it under the same epoch, has new ones.
    """

    prefill: WorkerInfo | None
    decode: WorkerInfo | None
    compute_use: WorkerUse
    decode_use: WorkerUse | None
    priority: int = 0
    num_uncached_tokens: int = 0
    predicted_s: float = 0.0
    num_blocks: int = 0

    @property
    def computes_prompt(self) -> WorkerInfo:
        worker = self.prefill or self.decode
        assert worker is not None
        return worker


class Router:
    """`pick` counts the prompt as under way; the caller owes one `prefill_ended`, and one `ended` for each sequence.

    decode_prefill_threshold: uncached tokens that decode computes itself; 0 never. num_proxies: that share the workers.
    """

    def __init__(
        self,
        registry: Registry,
        decode_prefill_threshold: int = 0,
        num_proxies: int = 1,
        rng: random.Random | None = None,
    ) -> None:
        self._registry = registry
        self._threshold = decode_prefill_threshold
        self._num_proxies = num_proxies
        self._rng = rng or random.Random()
        self._correction = 1.0  # what first tokens took, over what was predicted

    def pick(self, prompt: PromptShape, max_ttft_s: float | None = None, may_copy: bool = True) -> Route:
        """Raises NoWorkerReady, which says what is missing, when nobody can take the request.

        max_ttft_s: raises SLOUnreachable when the first token is predicted later (early rejection: Qin et al.,
        Mooncake, FAST 2025, section 7). may_copy: may wait longer, by computing what is shared where it is missing.
        """
        registry = self._registry
        depths = NO_DEPTHS
        if prompt.can_be_cached and prompt.hashes:
            depths = registry.prefixes.depths(prompt.hashes)
        block_size = registry.block_size
        prefills = registry.prefill_workers
        if prompt.needs_decode:
            prefills = registry.paired_prefill_workers
        prefill: WorkerRecord | None = None
        decode: WorkerRecord | None = None
        num_on_decode = 0
        if prefills:
            prefill = self._pick_prefill(prefills, prompt, depths, block_size, may_copy)
            if prompt.needs_decode:
                decode = self._pick_decode(prefill.decode_peers, prompt, depths, block_size)
                num_on_decode = self._num_held(decode, prompt, depths)
                if self._threshold and not prompt.has_media:
                    num_uncached = _num_uncached(prompt, num_on_decode, block_size)
                    if self._is_short(decode, num_uncached):
                        prefill = None
        elif self._threshold and not prompt.has_media and registry.decode_workers:
            decode = self._pick_decode(registry.decode_workers, prompt, depths, block_size)
            num_on_decode = self._num_held(decode, prompt, depths)
        else:
            raise self.no_worker()
        if prefill is not None:
            computing, num_held = prefill, self._num_held(prefill, prompt, depths)
        else:
            assert decode is not None
            computing, num_held = decode, num_on_decode
        num_uncached = _num_uncached(prompt, num_held, block_size)
        queue = computing.use.prompts
        predicted_s = (queue.ahead_of(prompt.priority) + num_uncached) * queue.s_per_token
        if max_ttft_s is not None:
            expected_s = (predicted_s + _MIN_TTFT_S) * self._correction
            if expected_s > max_ttft_s:
                if may_copy and int(_ENOUGH_COPIES * len(prefills.records)) >= _SHARED_BY:
                    return self.pick(prompt, max_ttft_s, may_copy=False)
                raise SLOUnreachable(expected_s, max_ttft_s)
        computing.use.prompts.add(prompt.priority, num_uncached, self._num_proxies)
        num_blocks = 0
        if decode is not None:
            num_blocks = _num_new_blocks(prompt, num_on_decode, block_size)
            decode.use.add(prompt.num_sequences, num_blocks, self._num_proxies)
        return Route(
            prefill.worker if prefill is not None else None,
            decode.worker if decode is not None else None,
            computing.use,
            decode.use if decode is not None else None,
            prompt.priority,
            num_uncached,
            predicted_s,
            num_blocks,
        )

    def no_worker(self) -> NoWorkerReady:
        return NoWorkerReady(self._registry.why_not_ready() or "no prefill worker is ready")

    def on_first_token(self, route: Route, ttft_s: float) -> None:
        """How long the first token took from its dispatch: corrects what is predicted from now on."""
        ratio = ttft_s / (route.predicted_s + _MIN_TTFT_S)
        corrected = self._correction + _LEARNING_RATE * (min(ratio, 10.0) - self._correction)
        self._correction = min(4.0, max(0.5, corrected))

    def prefill_ended(self, route: Route) -> None:
        """The first token came, or never will. What is owed for a worker that is lost is paid into nothing."""
        route.compute_use.prompts.remove(route.priority, route.num_uncached_tokens)
        if route.decode_use is not None:
            route.decode_use.end_promise(route.num_blocks)

    def ended(self, route: Route) -> None:
        if route.decode_use is not None:
            route.decode_use.end_sequence()

    # ---- who

    def _pick_prefill(
        self, candidates: Candidates, prompt: PromptShape, depths: Depths, block_size: int, may_copy: bool
    ) -> WorkerRecord:
        priority, queues = prompt.priority, candidates.queues
        charged = _charged_tokens(prompt, depths, block_size, candidates, may_copy)
        work = charged[depths.common]
        costs = [
            ((queue.total if priority >= queue.latest else queue.ahead_of(priority)) + work) * queue.s_per_token
            for queue in queues
        ]
        by_bit = candidates.by_bit
        for bit, depth in depths.other.items():
            if (number := by_bit.get(bit)) is not None:
                costs[number] += (charged[depth] - work) * queues[number].s_per_token
        costs = _shun(candidates, costs, prompt.avoid)
        best = min(costs)
        return candidates.records[self._draw(costs, best + _SLACK_S + _SLACK * best)]

    def _pick_decode(
        self, candidates: Candidates, prompt: PromptShape, depths: Depths, block_size: int
    ) -> WorkerRecord:
        num_full = prompt.num_tokens // block_size
        num_own = prompt.num_sequences * ((prompt.num_tokens + block_size) // block_size - num_full)
        needed, worth = num_full + num_own - depths.common, _CACHED_WEIGHT / (num_full or 1)
        uses = candidates.uses
        costs = [
            use.busy + needed * use.block_weight + (0.0 if use.num_free_blocks >= needed else _NO_ROOM) for use in uses
        ]
        by_bit = candidates.by_bit
        for bit, depth in depths.other.items():
            if (number := by_bit.get(bit)) is not None:
                use, deeper = uses[number], depth - depths.common
                costs[number] -= deeper * (worth + use.block_weight)
                if needed > use.num_free_blocks >= needed - deeper:
                    costs[number] -= _NO_ROOM
                elif needed <= use.num_free_blocks < needed - deeper:
                    costs[number] += _NO_ROOM
        costs = _shun(candidates, costs, prompt.avoid)
        if prompt.near:  # as if it had all: what has just arrived there is in no report yet
            for number, record in enumerate(candidates.records):
                costs[number] -= _CACHED_WEIGHT if record.worker.epoch == prompt.near else 0.0
        return candidates.records[self._draw(costs, min(costs) + _DECODE_SLACK)]

    def _draw(self, costs: list[float], most: float) -> int:
        """One of those that cost no more than `most`: where proxies all took the first, they would crowd it."""
        good = [number for number, cost in enumerate(costs) if cost <= most]
        return good[0] if len(good) == 1 else good[int(self._rng.random() * len(good))]

    def _is_short(self, decode: WorkerRecord, num_uncached: int) -> bool:
        """Whether the decode worker is to compute what it has not cached of the prompt."""
        under_way = decode.use.prompts.total
        return num_uncached <= self._threshold and under_way + num_uncached <= _MAX_LOCAL_PROMPTS * self._threshold

    def _num_held(self, record: WorkerRecord, prompt: PromptShape, depths: Depths) -> int:
        """Exactly, in blocks: what is near enough to choose by is not for what is computed where."""
        if depths is NO_DEPTHS:
            return 0
        return self._registry.prefixes.depth(prompt.hashes, record.bit, depths.of(record.bit))


def _shun(candidates: Candidates, costs: list[float], avoid: frozenset[str]) -> list[float]:
    """The same costs, but of those to avoid, which are nearly always none."""
    if not avoid:
        return costs
    return [
        cost + (_AVOIDED if record.worker.epoch in avoid else 0.0)
        for cost, record in zip(costs, candidates.records, strict=True)
    ]


def _charged_tokens(
    prompt: PromptShape, depths: Depths, block_size: int, candidates: Candidates, may_copy: bool
) -> dict[int, float]:
    """What a worker is charged for computing the prompt, by the leading blocks that it holds.

    may_copy: blocks that n workers hold, several but not yet enough of them, are charged at an nth: many prompts begin
    with these, and those that come for the new copy repay the rest.
    """
    max_holders = int(_ENOUGH_COPIES * len(candidates.records)) if may_copy else 0
    end = _num_usable_blocks(prompt, block_size)
    tokens, num_holders, bits = float(prompt.num_tokens - block_size * end), 0, candidates.bits
    charged = {}
    for _, depth, mask in depths.groups:
        if depth < end:
            is_to_spread = _SHARED_BY <= num_holders <= max_holders
            tokens += block_size * (end - depth) / (num_holders if is_to_spread else 1)
            end = depth
        charged[depth] = tokens
        if num_holders <= max_holders:
            num_holders += (mask & bits).bit_count()
    return charged


def _num_usable_blocks(prompt: PromptShape, block_size: int) -> int:
    """Of the cached ones: the last token is always computed, since its logits are needed."""
    return (prompt.num_tokens - 1) // block_size


def _num_uncached(prompt: PromptShape, num_held: int, block_size: int) -> int:
    """Tokens. num_held: blocks."""
    return prompt.num_tokens - block_size * min(num_held, _num_usable_blocks(prompt, block_size))


def _num_new_blocks(prompt: PromptShape, num_held: int, block_size: int) -> int:
    """That a decode worker which holds so many needs, without those of generated tokens but the first."""
    num_full = prompt.num_tokens // block_size
    num_own = prompt.num_sequences * ((prompt.num_tokens + block_size) // block_size - num_full)
    return max(0, num_full - num_held) + num_own
