"""Chooses the workers of each request from the worker table and from what this proxy has in flight. Pure policy.

Prefill goes where the first token is predicted soonest: the prompt tokens ahead plus this prompt's uncached tokens,
divided by the worker's measured speed, which is lower beside running sequences. Tokens that the worker can load from a
tier below its KV pool count as a share of uncached ones. Decode goes where few sequences run, where the blocks fit,
where no prompts wait, and where much of the prompt is cached; it may be the same worker, without a transfer. A worker
of role decode computes a prompt that is short there, or that would wait much longer elsewhere. docs/routing.md explains
the formulas.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tandem.protocol.messages.membership import WorkerInfo
from tandem.proxy.cluster.worker_record import WorkerRecord, WorkerUse
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.runtime.errors import Overloaded
from tandem.telemetry.stages import Placement

_MIN_TTFT_S = 0.002
"""Seconds to a first token with nothing to compute: two messages and one step."""
_PREFILL_TIE_SHARE = 0.05
"""Prefill workers predicted within this share of the soonest are tied; one is drawn, so that proxies spread."""
_DECODE_TIE = 0.5
"""Decode workers within half a sequence of the least loaded are tied; one is drawn, so that proxies spread."""
_CACHED_WEIGHT = 2.0
"""A prompt that is wholly cached on a decode worker outweighs this many running sequences there."""
_NO_ROOM_COST = 1e6
"""Added for a decode worker without room for the prompt, so that it is chosen only when none has room."""
_NO_TRANSFER_GAIN = 0.5
"""Decoding where the prompt was computed outweighs this many running sequences, because no KV is transferred."""
_GATHERING_PROMPT_SHARE = 0.25
"""Sequences gather on few elastic workers while prompts are computed for this share of the time, summed over them."""
_SHARED_STEPS_COST = 4.0
"""Sequences that prompts waiting on an elastic worker count as, because their chunks slow its steps."""
_OVER_SLO_COST = 64.0
"""Added for an elastic worker whose steps would take longer than the ITL's SLO."""
_DEFLECTION_SHARE = 0.75
"""A worker that runs sequences computes a prompt if its first token comes within this share of the time elsewhere."""
_MAX_LOCAL_PROMPTS = 4
"""Prompts of the threshold's length that one decode worker may have in flight; more would slow its streams."""
_LEARNING_RATE = 0.1
"""Weight of the newest first token in the moving average that corrects predictions."""
_MIN_CORRECTION, _MAX_CORRECTION = 0.5, 4.0
"""Limits of measured over predicted time, so that one outlier cannot distort predictions."""


class SLOUnreachable(Overloaded):
    """The first token is predicted later than the SLO or the deadline allows. retry_after_s: the predicted excess.

    alone_s: prediction for the same prompt if the workers had nothing else to compute; 0 if it is not known.
    """

    code = "ttft_slo_unreachable"

    def __init__(self, predicted_s: float, max_ttft_s: float, alone_s: float = 0.0) -> None:
        super().__init__(
            f"The first token is predicted after {predicted_s:.2f} s, but only {max(0.0, max_ttft_s):.2f} s are left. "
            "Try again later."
        )
        self.alone_s = alone_s
        self.retry_after_s = min(60, max(1, math.ceil(predicted_s - max_ttft_s)))

    def within(self, limit_s: float, read_s: float) -> SLOUnreachable:
        """Returns the error for a request that may take limit_s from its arrival to its first token.

        read_s: what reading it takes by itself, as far as is known.
        """
        alone_s = read_s + self.alone_s
        return NeverInTime(alone_s, limit_s) if alone_s > limit_s else self


class NeverInTime(SLOUnreachable):
    """The first token would come too late even if nothing else ran."""

    is_lasting = True

    def __init__(self, alone_s: float, limit_s: float) -> None:
        super().__init__(alone_s, limit_s, alone_s)
        self.message = (
            f"The first token takes {alone_s:.2f} s although nothing else waits, but it must come within {limit_s:.2f} "
            "s. Send a shorter prompt or smaller media, or allow more time."
        )
        self.args = (self.message,)


class NoWorkerReady(Overloaded):
    """No worker of a required role is ready. retry_after_s: the time that a restarted worker may need."""

    code = "no_worker_ready"
    retry_after_s = 5


class PromptShape(msgspec.Struct, frozen=True):
    """The properties of a prompt that routing depends on."""

    num_tokens: int
    num_sequences: int = 1
    needs_decode: bool = True
    """False when only one token is requested, so that no KV cache is transferred."""
    hashes: Sequence[int] = ()
    """Short hashes of its full blocks."""
    priority: int = 0
    """A lower one is served sooner."""
    can_be_cached: bool = True
    """False when every token must be computed for its logprobs."""
    avoid: frozenset[str] = frozenset()
    """Epochs of workers that are chosen only when no other is left."""
    exclude: frozenset[str] = frozenset()
    """Epochs of workers that are not chosen."""
    near: str = ""
    """Epoch of a decode worker that may have kept the prompt's blocks from an earlier attempt."""
    numerics: str = ""
    """Digest of the numerics with which an exact answer began, and must continue; empty for any."""


class Route(msgspec.Struct, frozen=True):
    """The chosen workers of one dispatch, and what it added to their use."""

    prefill: WorkerInfo
    decode: WorkerInfo | None
    """The same worker as prefill, another one, or None when only one token is requested."""
    compute_use: WorkerUse
    """Object that the dispatch was added to; a worker that registers again gets a new one."""
    decode_use: WorkerUse | None
    """The same of the worker that decodes."""
    priority: int
    num_uncached_tokens: int
    """Tokens that are expected to be computed, plus those to load times their cost."""
    computing_s: float
    """Predicted seconds to the first token, before the learned correction."""
    ttft_s: float
    """Predicted seconds to the first token, after the correction."""
    itl_s: float
    """Predicted seconds between tokens; 0 if unknown."""
    num_blocks: int
    """Blocks promised on the decode worker."""
    is_deflected: bool
    """Whether the worker that computes the prompt has the decode role."""
    numerics: str = ""
    """Digest of the workers' numerics if they are exact, else empty."""

    @property
    def is_shipped(self) -> bool:
        """Whether the prompt's KV travels to another worker."""
        return self.decode is not None and self.decode != self.prefill

    @property
    def placement(self) -> Placement:
        if self.is_deflected:
            return "deflected"
        if self.decode is None:
            return "prefill_only"
        return "two" if self.is_shipped else "same"

    @property
    def workers(self) -> list[WorkerInfo]:
        return [self.prefill, self.decode] if self.decode is not None and self.is_shipped else [self.prefill]


class Router:
    """Chooses workers. After `pick` the caller owes one `prefill_ended`, and one `sequence_ended` for each sequence.

    decode_prefill_threshold: uncached tokens up to which decode computes a prompt itself; 0 turns this off.
    num_proxies: proxies that share the workers.
    """

    def __init__(
        self,
        table: WorkerTable,
        decode_prefill_threshold: int = 0,
        num_proxies: int = 1,
        rng: random.Random | None = None,
    ) -> None:
        self._table = table
        self._threshold = decode_prefill_threshold
        self._num_proxies = num_proxies
        self._rng = rng or random.Random()
        self._correction = 1.0  # moving average of measured over predicted time to the first token

    def pick(self, prompt: PromptShape, max_ttft_s: float | None = None) -> Route:
        """Chooses the workers of a prompt and counts it as in flight there.

        Raises NoWorkerReady, which names what is missing, or SLOUnreachable when the first token is predicted later
        than max_ttft_s from now (early rejection: Qin et al., Mooncake, FAST 2025, section 7).
        """
        table = self._table
        if prompt.numerics:
            unlike = table.epochs_of_other_numerics(prompt.numerics)
            prompt = msgspec.structs.replace(prompt, exclude=prompt.exclude | unlike)
        held = find_held_prefixes(table, prompt.num_tokens, prompt.hashes if prompt.can_be_cached else ())
        prefill, predicted_s = self._pick_prefill(prompt, held)
        decode = self._pick_decode(prefill, prompt, held) if prompt.needs_decode else None
        if max_ttft_s is not None and predicted_s * self._correction > max_ttft_s:
            alone_s = self._alone_s(prompt, held) * self._correction
            raise SLOUnreachable(predicted_s * self._correction, max_ttft_s, alone_s)
        num_uncached = held.num_uncached(prefill)
        assert 0 <= num_uncached <= prompt.num_tokens and prefill.worker.epoch not in prompt.exclude
        assert decode is None or decode is prefill or decode.worker.epoch in prefill.decode_peers
        num_blocks, itl_s = 0, 0.0
        if decode is not None:
            itl_s = decode.use.itl_slo_s if decode.use.prompts.total else decode.use.itl_s(prompt.num_sequences)
            num_blocks = self._num_new_blocks(prompt, held.num_blocks.get(decode.bit, 0))
            decode.use.add(prompt.num_sequences, num_blocks, self._num_proxies)
        prefill.use.prompts.add(prompt.priority, num_uncached, self._num_proxies)
        return Route(
            prefill.worker,
            decode.worker if decode is not None else None,
            prefill.use,
            decode.use if decode is not None else None,
            prompt.priority,
            num_uncached,
            predicted_s,
            predicted_s * self._correction,
            itl_s,
            num_blocks,
            prefill.role == "decode",
            prefill.registered.numerics.digest if prefill.registered.exact else "",
        )

    def prefill_ended(self, route: Route, ttft_s: float | None = None) -> None:
        """The first token came ttft_s after the dispatch, or (None) will not come."""
        route.compute_use.prompts.remove(route.priority, route.num_uncached_tokens)
        if route.decode_use is not None:
            route.decode_use.end_promise(route.num_blocks)
        if ttft_s is not None:
            ratio = min(_MAX_CORRECTION, max(_MIN_CORRECTION, ttft_s / route.computing_s))
            self._correction += _LEARNING_RATE * (ratio - self._correction)

    def sequence_ended(self, route: Route) -> None:
        if route.decode_use is not None:
            route.decode_use.end_sequence()

    def withdraw(self, route: Route, num_sequences: int) -> None:
        """Takes back a `pick` that is not dispatched."""
        self.prefill_ended(route)
        for _ in range(num_sequences):
            self.sequence_ended(route)

    def _pick_prefill(self, prompt: PromptShape, held: HeldPrefixes) -> tuple[WorkerRecord, float]:
        """Returns the worker with the soonest predicted first token, and that prediction. Raises NoWorkerReady."""
        of_role, others = self._candidates(prompt)
        if not of_role and not others:
            raise NoWorkerReady(self._table.why_not_ready() or _why_none_may_take(prompt))
        candidates = _without(of_role, prompt.avoid)
        predicted = self._predict(candidates, prompt, held)
        prefill, soonest_s = None, math.inf
        if candidates:
            costs = [
                predicted_s / (_DEFLECTION_SHARE if record.role == "any" and record.use.num_sequences else 1)
                for record, predicted_s in zip(candidates, predicted, strict=True)
            ]
            prefill = self._draw(candidates, costs, min(costs) * (1 + _PREFILL_TIE_SHARE))
            soonest_s = predicted[candidates.index(prefill)]
        if prefill is not None and not self._may_deflect_any(prefill, held):
            return prefill, soonest_s
        others = _without(others, prompt.avoid)
        allowed = [
            (record, predicted_s)
            for record, predicted_s in zip(others, self._predict(others, prompt, held), strict=True)
            if self._may_deflect(record, prefill, prompt, held, predicted_s, soonest_s)
        ]
        if allowed:
            deflected = self._cheapest_decode([record for record, _ in allowed], None, prompt, held)
            return deflected, next(predicted_s for record, predicted_s in allowed if record is deflected)
        assert prefill is not None  # others are allowed when there is none
        return prefill, soonest_s

    def _candidates(self, prompt: PromptShape) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
        """Returns the workers that may compute the prompt: those of a prefill role, and decode workers."""
        table = self._table
        of_role = table.paired_prefill_workers if prompt.needs_decode else table.prefill_workers
        others = table.decode_only_workers if self._threshold else []
        if prompt.exclude:
            of_role = [record for record in of_role if _may_take(record, prompt)]
            others = [record for record in others if _may_take(record, prompt)]
        return of_role, others

    def _alone_s(self, prompt: PromptShape, held: HeldPrefixes) -> float:
        """Returns the seconds to the first token on the fastest worker if it had nothing else to compute."""
        of_role, others = self._candidates(prompt)
        return _MIN_TTFT_S + min(record.use.alone_s(held.num_uncached(record)) for record in (*of_role, *others))

    def _may_deflect_any(self, prefill: WorkerRecord, held: HeldPrefixes) -> bool:
        """Whether a worker of role decode could compute the prompt. It spares most decisions a look at each of them."""
        fewest = held.fewest_beyond()
        return fewest <= self._threshold or fewest < held.num_uncached(prefill) or bool(prefill.use.prompts.total)

    def _predict(self, candidates: list[WorkerRecord], prompt: PromptShape, held: HeldPrefixes) -> list[float]:
        """Returns the seconds from now to the first token on each candidate, before the learned correction."""
        return [record.use.ttft_s(prompt.priority, held.num_uncached(record)) + _MIN_TTFT_S for record in candidates]

    def _may_deflect(
        self,
        record: WorkerRecord,
        prefill: WorkerRecord | None,
        prompt: PromptShape,
        held: HeldPrefixes,
        predicted_s: float,
        soonest_s: float,
    ) -> bool:
        """Whether a worker of role decode may compute the prompt instead of `prefill`, the best of the role.

        It may if the uncached rest is short. It also may if the first token comes much sooner, and the worker runs no
        sequences that would be disturbed or holds more of the prompt.
        """
        if prefill is None:
            return True
        num_uncached, in_flight = held.num_uncached(record), record.use.prompts.total
        is_short = num_uncached <= self._threshold and prompt.needs_decode  # it saves a transfer
        if is_short and in_flight + num_uncached <= _MAX_LOCAL_PROMPTS * self._threshold:
            return True
        if predicted_s >= _DEFLECTION_SHARE * soonest_s:
            return False
        return not record.use.num_sequences or num_uncached < held.num_uncached(prefill)

    def _pick_decode(self, prefill: WorkerRecord, prompt: PromptShape, held: HeldPrefixes) -> WorkerRecord:
        """Returns the worker that decodes what `prefill` computes: the same one, or one that it has a pair with."""
        if prefill.role == "decode":
            return prefill
        peers = [record for record in prefill.decode_peers.values() if record.worker.epoch not in prompt.exclude]
        return self._cheapest_decode(_without(peers, prompt.avoid), prefill, prompt, held)

    def _cheapest_decode(
        self,
        candidates: list[WorkerRecord],
        prefill: WorkerRecord | None,
        prompt: PromptShape,
        held: HeldPrefixes,
    ) -> WorkerRecord:
        num_full = prompt.num_tokens // self._table.block_size
        num_needed = self._num_new_blocks(prompt, 0)
        elastic = [record.use for record in candidates if record.role == "any"]
        gather = sum(use.prompt_share for use in elastic) >= _GATHERING_PROMPT_SHARE
        costs = []
        for record in candidates:
            use, num_held = record.use, held.num_blocks.get(record.bit, 0)
            num_new = num_needed - num_held
            # Blocks that have just arrived on the `near` worker are in no report yet, so all count as cached there.
            cached_share = 1.0 if record.worker.epoch == prompt.near else num_held / (num_full or 1)
            cost = use.decode_cost(num_new) - _CACHED_WEIGHT * cached_share
            if record is prefill:
                cost -= _NO_TRANSFER_GAIN
            if record.role == "any":
                if gather:  # fills one worker before the next, so that others are free for prompts
                    cost -= 2 * min(use.num_sequences, use.num_comfortable)
                cost += _SHARED_STEPS_COST if use.prompts.total else 0.0
                cost += _OVER_SLO_COST if 0 < use.itl_slo_s < use.itl_s(prompt.num_sequences) else 0.0
            costs.append(cost if num_new <= use.num_free_blocks else cost + _NO_ROOM_COST)
        return self._draw(candidates, costs, min(costs) + _DECODE_TIE)

    def _draw(self, candidates: list[WorkerRecord], costs: list[float], max_cost: float) -> WorkerRecord:
        """Draws one of the candidates that cost at most max_cost, so that several proxies do not choose the same."""
        tied = [record for record, cost in zip(candidates, costs, strict=True) if cost <= max_cost]
        return tied[0] if len(tied) == 1 else self._rng.choice(tied)

    def _num_new_blocks(self, prompt: PromptShape, num_held: int) -> int:
        """Blocks that a decode worker holding num_held needs for the prompt and each sequence's first token."""
        block_size = self._table.block_size
        num_full = prompt.num_tokens // block_size
        num_own = (prompt.num_tokens + block_size) // block_size - num_full  # not shared by the sequences
        return max(0, num_full - num_held) + prompt.num_sequences * num_own


def _may_take(record: WorkerRecord, prompt: PromptShape) -> bool:
    """Whether neither the worker nor each worker that could decode what it computes is excluded."""
    if record.worker.epoch in prompt.exclude:
        return False
    is_alone = not prompt.needs_decode or record.role == "decode"
    return is_alone or any(epoch not in prompt.exclude for epoch in record.decode_peers)


def _why_none_may_take(prompt: PromptShape) -> str:
    if prompt.numerics:
        return (
            f"no ready worker computes as this answer began (numerics {prompt.numerics}), which --exact requires of "
            "those that continue it"
        )
    return "no prefill worker is ready"


def _without(candidates: list[WorkerRecord], avoid: frozenset[str]) -> list[WorkerRecord]:
    """The candidates whose epoch is not in `avoid`, or all of them when none is left."""
    if not avoid:
        return candidates
    return [record for record in candidates if record.worker.epoch not in avoid] or candidates


@dataclass(frozen=True, slots=True)
class HeldPrefixes:
    """The prefixes of a prompt of num_tokens, by the workers' bits. Workers without any are absent."""

    num_tokens: int
    num_blocks: dict[int, int]
    """Leading full blocks in the KV pool."""
    beyond_pool: dict[int, int]
    """Tokens beyond these, at least the last one, which is computed for its logits."""
    beyond_tiers: dict[int, int]
    """Tokens beyond the blocks in the pool and the tiers together, because a worker loads what its pool lacks."""

    def num_uncached(self, record: WorkerRecord) -> int:
        """Returns the tokens to compute on this worker, plus the tokens to load there times their cost, rounded up."""
        num_computed = self.beyond_tiers.get(record.bit, self.num_tokens)
        num_loaded = self.beyond_pool.get(record.bit, self.num_tokens) - num_computed
        return num_computed + math.ceil(num_loaded * record.use.load_cost) if num_loaded else num_computed

    def fewest_beyond(self) -> int:
        """Returns the fewest tokens that any worker has neither in its pool nor in its tiers."""
        return min(self.beyond_tiers.values(), default=self.num_tokens)


def find_held_prefixes(table: WorkerTable, num_tokens: int, hashes: Sequence[int]) -> HeldPrefixes:
    """hashes: short hashes of the prompt's full blocks, in order; empty for a prompt that must be computed."""
    num_blocks = table.prefixes.depths(hashes)
    beyond_pool = beyond_tiers = _num_beyond(num_tokens, table.block_size, num_blocks)
    if not table.tier_prefixes.is_empty:
        in_all = table.prefixes.depths(hashes, table.tier_prefixes)
        beyond_tiers = _num_beyond(num_tokens, table.block_size, in_all)
    return HeldPrefixes(num_tokens, num_blocks, beyond_pool, beyond_tiers)


def _num_beyond(num_tokens: int, block_size: int, num_blocks: dict[int, int]) -> dict[int, int]:
    most = (num_tokens - 1) // block_size
    return {bit: num_tokens - block_size * min(number, most) for bit, number in num_blocks.items()}
