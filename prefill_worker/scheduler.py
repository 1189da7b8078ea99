"""Decides what a worker does in its prefill role. Pure: events and a clock value in, actions out.

A prompt's life:  waiting -> computing -> computed -> shipped

A prompt begins when a step has tokens for it: it shares the blocks that the prefix cache has, allocates the others, and
sends ReserveKV. Finished blocks are shipped as soon as decode has answered, while later chunks still compute (as in
Splitwise and Mooncake). Blocks that decode has cached are not shipped. A prompt that ends early (abort, deadline,
failure) is `ended` at once, but its blocks are released only when no step computes them and no transfer reads them;
then CloseTransfer tells decode that nothing more will be written. Blocks are kept while decode renews their lease
(`prefill_worker.transfer_leases`).

A prompt that is decoded on the same worker is not shipped: its blocks pass to the decode role by id.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.decode_worker.sequence import ComputedPrompt
from tandem.engine.batch import Batch, Encode, ItemOutput
from tandem.engine.block_manager import BlockManager
from tandem.engine.lora.adapter import Adapter
from tandem.engine.sampling.grammar import Grammar
from tandem.engine.tiers.prefix_tiers import PrefixTiers
from tandem.engine.vision.prompt_media import EncodeUnit, PromptMedia
from tandem.prefill_worker.prompt import PrefillPrompt
from tandem.prefill_worker.transfer_leases import Leases
from tandem.protocol.messages.checks import MAX_HELD_SEQUENCES
from tandem.protocol.messages.dispatch import AttemptFailed, AttemptPreempted, StartPrefill
from tandem.protocol.messages.generation import SampledToken
from tandem.protocol.messages.prompt_logprobs import pack_logprobs
from tandem.protocol.messages.transfer import CloseTransfer, FinishTransfer, KVReserved, RenewLeases, ReserveKV
from tandem.protocol.worker_actions import Action, SendToPeer, SendToProxy
from tandem.runtime.errors import (
    DeadlineExceeded,
    ErrorInfo,
    InternalError,
    KVTransferFailed,
    Overloaded,
    TandemError,
    WorkerLost,
)

AGING_S = 2.0
"""Waiting this long outweighs one level of priority, so that no priority starves."""
YIELD_AFTER_S = 1.0
"""How long a computed prompt keeps its blocks for a decode worker that has none, while this worker needs blocks."""


class PrefillScheduler:
    """Owns the prompts that the worker computes.

    model_id: part of the prefix cache's hashes. max_num_batched_tokens: prompt tokens per step. max_num_seqs: prompts
    that compute concurrently. lease_s: see `prefill_worker.transfer_leases`. decode, tiers: of the same worker, over
    the same blocks.
    """

    def __init__(
        self,
        blocks: BlockManager,
        model_id: str,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        lease_s: float,
        decode: DecodeScheduler,
        tiers: PrefixTiers,
    ) -> None:
        self.blocks = blocks
        self._decode = decode
        self._tiers = tiers
        self._model_id = model_id
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._leases = Leases(lease_s)
        self._waiting: dict[int, PrefillPrompt] = {}  # by number, in order of arrival
        self._computing: dict[int, PrefillPrompt] = {}
        self._by_request: dict[tuple[str, str], PrefillPrompt] = {}
        self._by_transfer: dict[str, PrefillPrompt] = {}
        self._step: list[tuple[PrefillPrompt, int]] = []
        self._encoding: list[PrefillPrompt] = []  # prompts whose media the step encodes
        self._num_arrived = 0
        self.num_finished = self.num_shipped = 0
        self.num_expired_leases = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    # ---- load figures

    @property
    def num_running(self) -> int:
        return len(self._by_transfer) - len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._by_transfer

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def waiting_tokens(self) -> list[tuple[int, int]]:
        """Returns the prompt tokens still to be computed, as (priority, tokens)."""
        tokens: Counter[int] = Counter()
        for prompt in (*self._waiting.values(), *self._computing.values()):
            tokens[prompt.request.priority] += prompt.num_remaining_tokens
        return sorted(tokens.items())

    # ---- events

    def on_start(
        self,
        now: float,
        request: StartPrefill,
        pair_id: str | None,
        grammar: Grammar | None = None,
        media: PromptMedia | None = None,
        adapter: Adapter | None = None,
        *,
        decodes_here: bool = False,
    ) -> list[Action]:
        """Queues a prompt, or refuses it. Takes over `media` and releases them at the prompt's end.

        pair_id: through which it is shipped; None if it is not.
        """
        prompt = PrefillPrompt.of(request, pair_id, decodes_here, self._num_arrived, now, grammar, media, adapter)
        keys = [(request.proxy_id, attempt_id) for attempt_id in request.attempt_ids]
        if (error := self._why_refused(prompt, keys)) is not None:
            if media is not None:
                media.release()
            return _failures(prompt, error)
        self._num_arrived += 1
        self._by_request.update(dict.fromkeys(keys, prompt))
        self._by_transfer[request.transfer_id] = prompt
        self._waiting[prompt.number] = prompt
        return []

    def _why_refused(self, prompt: PrefillPrompt, keys: list[tuple[str, str]]) -> TandemError | None:
        transfer_id = prompt.request.transfer_id
        if transfer_id in self._by_transfer or any(key in self._by_request for key in keys):
            return InternalError(f"transfer {transfer_id} exists already")
        if len(self._by_request) >= MAX_HELD_SEQUENCES:
            return Overloaded("this worker has too many prompts")
        needed = self.blocks.num_blocks_for(prompt.num_prompt_tokens)
        if needed > self.blocks.num_blocks:
            return InternalError(f"the prompt needs {needed} KV blocks, this worker has {self.blocks.num_blocks}")
        return self._decode.why_refused(prompt.request) if prompt.decodes_here else None

    def on_abort(self, proxy_id: str, attempt_id: str) -> list[Action]:
        prompt = self._by_request.pop((proxy_id, attempt_id), None)
        if prompt is None:
            return []
        prompt.open_ids.discard(attempt_id)
        return [] if prompt.open_ids else self._end(prompt)

    def on_proxy_lost(self, proxy_id: str) -> list[Action]:
        lost = [prompt for prompt in self._by_transfer.values() if prompt.request.proxy_id == proxy_id]
        return [action for prompt in lost for action in self._end(prompt)]

    def on_reserved(self, message: KVReserved) -> list[Action]:
        prompt = self._by_transfer.get(message.transfer_id)
        if prompt is None or not prompt.reserve_sent or prompt.dst_block_ids is not None:
            return []
        num_cached, num_blocks = message.num_cached_blocks, len(prompt.block_table)
        if num_cached > num_blocks or len(message.block_ids) != num_blocks - num_cached:
            error = f"decode reserved {num_cached} + {len(message.block_ids)} blocks for a prompt of {num_blocks}"
            return self._end(prompt, KVTransferFailed(error))
        prompt.dst_block_ids = message.block_ids
        prompt.num_decode_cached_blocks = prompt.num_shipped_blocks = message.num_cached_blocks
        return self._ship(prompt) + self._settle(prompt)

    def on_refused(self, transfer_id: str, error: ErrorInfo) -> list[Action]:
        prompt = self._by_transfer.get(transfer_id)
        return self._end(prompt, error.to_error()) if prompt is not None else []

    def on_renewed(self, now: float, message: RenewLeases) -> None:
        self._leases.renew(now, message.pair_id, message.transfer_ids)

    def on_shipped(self, transfer_id: str, error: TandemError | None) -> list[Action]:
        """Handles the end of a `Ship` action. On success the shell has announced it."""
        prompt = self._by_transfer[transfer_id]
        prompt.num_ships_in_flight -= 1
        if error is not None and not prompt.ended:
            return self._end(prompt, error)
        return self._settle(prompt)

    def on_pair_lost(self, pair_id: str, reason: str) -> list[Action]:
        lost = [prompt for prompt in self._by_transfer.values() if prompt.pair_id == pair_id]
        return [a for prompt in lost for a in self._end(prompt, WorkerLost(f"the decode worker was lost: {reason}"))]

    def on_tick(self, now: float) -> list[Action]:
        late = [p for p in self._by_transfer.values() if not (p.ended or p.finish_sent) and now >= p.deadline]
        error = DeadlineExceeded("the request's deadline passed before its first token was decoded")
        actions = [action for prompt in late for action in self._end(prompt, error)]
        for transfer_id in self._leases.expired(now):
            self.num_expired_leases += 1
            unclaimed = KVTransferFailed(
                f"the decode worker has not renewed its lease on the KV blocks for {self._leases.term_s:g} s"
            )
            actions += self._end(self._by_transfer[transfer_id], unclaimed)
        return actions

    def yield_blocks(self, now: float) -> list[Action]:
        """Gives up the newest prompt that has waited too long for the blocks of its decode worker.

        Called while sequences of this worker wait for blocks. Two workers that ship to each other would otherwise wait
        for each other when both are full. The proxy dispatches the prompt again; what was computed stays cached.
        """
        waiting = [p for p in self._by_transfer.values() if p.is_computed and p.dst_block_ids is None and not p.ended]
        late = [p for p in waiting if now - p.computed_at >= YIELD_AFTER_S]
        if not late:
            return []
        prompt = max(late, key=lambda p: p.number)
        preempted = [
            SendToProxy(prompt.request.proxy_id, AttemptPreempted(attempt_id)) for attempt_id in sorted(prompt.open_ids)
        ]
        return [*preempted, *self._end(prompt)]

    # ---- steps

    def schedule(self, now: float, max_tokens: int | None = None) -> tuple[Batch, list[Action]]:
        """Returns the next step's chunks, and the reservations sent with first chunks.

        max_tokens: limit on the chunks' tokens if it is less than max_num_batched_tokens.

        The prompt that is first by priority and age gets half of the step's tokens. The rest goes by priority, then to
        the prompts with the fewest tokens left. So short prompts pass long ones, but cannot starve them. Encoding one
        placeholder of an image counts as one token. An image above the budget is encoded in a step that it begins.
        """
        assert not self._step and not self._encoding, "one step at a time"
        broken = [p for p in self._waiting.values() if p.media is not None and p.media.error is not None]
        actions = [action for p in broken for action in self._end_for_its_media(p)]
        candidates = self._candidates()
        if not candidates:
            return Batch([]), actions
        budget = max_tokens = min(max_tokens or self._max_num_batched_tokens, self._max_num_batched_tokens)
        first = min(candidates, key=lambda p: (p.arrived_at + AGING_S * p.request.priority, p.number))
        shares: dict[int, int] = {}
        units: dict[int, list[EncodeUnit]] = defaultdict(list)
        may_begin = True
        turns = [(first, budget - budget // 2)]
        by_turn = sorted(candidates, key=lambda p: (p.request.priority, p.num_remaining_tokens, p.number))
        turns += [(p, budget) for p in by_turn]
        for prompt, limit in turns:
            if budget <= 0:
                break
            if not prompt.has_begun:
                if not may_begin or len(self._computing) == self._max_num_seqs:
                    continue
                if not self._begin(now, prompt, actions):
                    # No other prompt allocates blocks before the first one, unless that one waits for a tier.
                    may_begin = prompt is not first or self._tiers.is_waiting(prompt.request.transfer_id)
                    continue
            number, planned = prompt.number, shares.get(prompt.number, 0)
            may_exceed = budget == max_tokens  # the step is still empty
            share, new_units, cost = prompt.next_work(planned, min(budget, limit), units[number], may_exceed)
            shares[number] = planned + share
            units[number] += new_units
            budget -= share + cost
        self._step = [(self._computing[number], share) for number, share in sorted(shares.items()) if share]
        self._encoding = [self._computing[number] for number in sorted(units) if units[number]]
        for prompt in (*(prompt for prompt, _ in self._step), *self._encoding):
            prompt.in_step = True
        encodes = [Encode(p.media, unit) for p in self._encoding if p.media is not None for unit in units[p.number]]
        return Batch([prompt.next_item(num) for prompt, num in self._step], encodes=encodes), actions

    def _candidates(self) -> list[PrefillPrompt]:
        """Returns the prompts that may compute now.

        No prompt begins for a decode worker that is full, i.e. that has not answered a computed prompt: its KV could
        not leave.
        """
        full = {p.pair_id for p in self._by_transfer.values() if p.is_computed and p.dst_block_ids is None} - {None}
        may_begin = (p for p in self._waiting.values() if p.pair_id not in full and p.may_compute)
        return [*self._computing.values(), *(p for p in may_begin if not self._tiers.is_waiting(p.request.transfer_id))]

    def _begin(self, now: float, prompt: PrefillPrompt, actions: list[Action]) -> bool:
        """Gives a waiting prompt its blocks, cached ones first. Returns False if it must wait: for blocks, for the
        decode role, or for a tier that has more of its prefix."""
        if self._decode.is_blocked:
            return False
        if prompt.decodes_here:
            num_promised = sum(len(other.open_ids) for other in self._computing.values() if other.decodes_here)
            if not self._decode.has_room(num_promised + len(prompt.open_ids)):
                return False
        hashes = prompt.hashes or prompt.hash_blocks(self.blocks.block_size, self._model_id)
        # The last token is always computed, as its result is needed.
        num_usable = (prompt.num_prompt_tokens - 1) // self.blocks.block_size
        cached = self.blocks.match(hashes[:num_usable]) if prompt.may_use_cache else []
        num_new = self.blocks.num_blocks_for(prompt.num_prompt_tokens) - len(cached)
        if num_new + self._decode.num_growing > self.blocks.num_free_without(cached):
            return False
        if prompt.may_use_cache and self._tiers.must_wait(now, prompt.request.transfer_id, hashes[:num_usable]):
            return False
        self._tiers.forget(prompt.request.transfer_id)
        self.blocks.share(cached)
        prompt.block_table = cached + self.blocks.allocate(num_new)
        prompt.num_published_blocks = len(cached)
        prompt.num_cached_tokens = prompt.num_computed_tokens = len(cached) * self.blocks.block_size
        self.num_prompt_tokens += prompt.num_prompt_tokens
        self.num_cached_tokens += prompt.num_cached_tokens
        prompt.started_at = now
        del self._waiting[prompt.number]
        self._computing[prompt.number] = prompt
        if prompt.pair_id is not None:
            prompt.reserve_sent = True
            self._leases.begin(now, prompt.pair_id, prompt.request.transfer_id)
            reserve = ReserveKV(
                prompt.pair_id, prompt.request.transfer_id, prompt.num_prompt_tokens, prompt.request.adapter_digest
            )
            actions.append(SendToPeer(prompt.pair_id, reserve))
        return True

    def on_step(self, now: float, results: list[ItemOutput]) -> list[Action]:
        actions: list[Action] = []
        step, encoding = self._end_step()
        for (prompt, num_tokens), output in zip(step, results, strict=True):
            if output.error is None:
                prompt.num_computed_tokens += num_tokens
            if prompt.is_computed or prompt.ended:
                self._computing.pop(prompt.number, None)
            if prompt.ended:
                actions += self._settle(prompt)
                continue
            if output.error is not None:
                actions += self._end(prompt, output.error.to_error())
                continue
            self._publish(prompt)
            if prompt.media is not None:
                prompt.media.forget_before(prompt.num_computed_tokens)
            prompt.prompt_logprobs += pack_logprobs(output.prompt_logprobs)
            if output.pooled is not None:
                prompt.add_pooled(output.pooled)
            if prompt.is_computed:
                prompt.computed_at = now
                actions += self._on_first_tokens(now, prompt, output.tokens)
            if not prompt.ended:
                actions += self._ship(prompt) + self._settle(prompt)
        for prompt in encoding:
            actions += self._end_for_its_media(prompt)
        return actions

    def on_out_of_memory(self, max_num_batched_tokens: int) -> list[Action]:
        """Ends a step that did not fit into the device's memory: its prompts compute the same chunks again, in steps of
        at most this many tokens."""
        step, encoding = self._end_step()
        self._max_num_batched_tokens = max_num_batched_tokens
        actions: list[Action] = []
        for prompt in {id(prompt): prompt for prompt in (*(prompt for prompt, _ in step), *encoding)}.values():
            if prompt.ended:
                self._computing.pop(prompt.number, None)
                actions += self._settle(prompt)
        return actions

    def on_step_failed(self, error: BaseException) -> list[Action]:
        step, encoding = self._end_step()
        failure = InternalError(f"the model failed on this prompt: {error}")
        ended = [action for prompt, _ in step for action in self._end(prompt, failure)]
        return ended + [action for prompt in encoding for action in self._end(prompt, failure)]

    def _end_step(self) -> tuple[list[tuple[PrefillPrompt, int]], list[PrefillPrompt]]:
        step, self._step = self._step, []
        encoding, self._encoding = self._encoding, []
        for prompt in (*(prompt for prompt, _ in step), *encoding):
            prompt.in_step = False
        return step, encoding

    def _publish(self, prompt: PrefillPrompt) -> None:
        """Puts computed full blocks into the prefix cache."""
        num_full = prompt.num_computed_tokens // self.blocks.block_size
        for i in range(prompt.num_published_blocks, num_full):
            self.blocks.publish(prompt.block_table[i], prompt.hashes[i])
        prompt.num_published_blocks = num_full

    def _on_first_tokens(self, now: float, prompt: PrefillPrompt, tokens: list[SampledToken]) -> list[Action]:
        proxy_id = prompt.request.proxy_id
        actions: list[Action] = []
        is_pooled = prompt.request.pooling is not None
        for message in prompt.embedding(now) if is_pooled else prompt.first_tokens(now, tokens):
            actions.append(SendToProxy(proxy_id, message))
            if message.finish_reason is not None:
                self.num_finished += 1
                prompt.open_ids.remove(message.attempt_id)
                del self._by_request[proxy_id, message.attempt_id]
        if prompt.open_ids and prompt.decodes_here:
            actions += self._decode_here(prompt)
        return actions if prompt.open_ids else actions + self._end(prompt)

    def _decode_here(self, prompt: PrefillPrompt) -> list[Action]:
        """Passes the prompt's open sequences and its blocks to the decode role."""
        assert prompt.first_token_ids is not None
        computed = ComputedPrompt(
            prompt.request,
            prompt.open_ids,
            prompt.arrived_at,
            prompt.hashes,
            prompt.block_table,
            prompt.first_token_ids,
            prompt.position_offset,
            prompt.grammar,
            prompt.adapter,
        )
        for attempt_id in prompt.open_ids:
            del self._by_request[prompt.request.proxy_id, attempt_id]
        prompt.open_ids, prompt.block_table = set(), []
        return self._decode.begin_computed(computed)

    # ---- shipping and release

    def _ship(self, prompt: PrefillPrompt) -> list[Action]:
        """Ships blocks that are complete and not shipped yet. The last shipment ends the transfer."""
        if prompt.dst_block_ids is None or prompt.ended or prompt.pair_id is None:
            return []
        ship = prompt.next_ship(self.blocks.block_size)
        actions: list[Action] = [ship] if ship is not None else []
        if prompt.is_computed and not prompt.finish_sent:
            assert prompt.first_token_ids is not None
            prompt.finish_sent = True
            finish = FinishTransfer(
                prompt.request.transfer_id, prompt.num_prompt_tokens, prompt.first_token_ids, prompt.position_offset
            )
            actions.append(SendToPeer(prompt.pair_id, finish))
        return actions

    def _end_for_its_media(self, prompt: PrefillPrompt) -> list[Action]:
        """Settles a prompt that has ended, and ends one whose media have an error."""
        if prompt.ended:
            self._computing.pop(prompt.number, None)
            return self._settle(prompt)
        error = prompt.media.error if prompt.media is not None else None
        return self._end(prompt, error.to_error()) if error is not None else []

    def _end(self, prompt: PrefillPrompt, error: TandemError | None = None) -> list[Action]:
        """Ends the prompt at once and reports `error`, if any, to the proxy. Its blocks follow in `_settle`."""
        failures = _failures(prompt, error) if error is not None and not prompt.ended else []
        prompt.ended = True
        self._leases.end(prompt.request.transfer_id)
        self._tiers.forget(prompt.request.transfer_id)
        self._waiting.pop(prompt.number, None)
        if not prompt.in_step:
            self._computing.pop(prompt.number, None)
        return failures + self._settle(prompt)

    def _settle(self, prompt: PrefillPrompt) -> list[Action]:
        """Releases the prompt's blocks and media and forgets it, unless a step or a transfer still uses them."""
        all_shipped = prompt.finish_sent and prompt.num_shipped_blocks == len(prompt.block_table)
        if prompt.in_step or prompt.num_ships_in_flight or not (prompt.ended or all_shipped):
            return []
        if self._by_transfer.get(prompt.request.transfer_id) is not prompt:
            return []  # settled before
        for attempt_id in prompt.open_ids:
            self._by_request.pop((prompt.request.proxy_id, attempt_id), None)
        del self._by_transfer[prompt.request.transfer_id]
        self._leases.end(prompt.request.transfer_id)
        if prompt.media is not None:
            prompt.media.release()
        self.blocks.release(prompt.block_table)
        prompt.block_table = []
        if not prompt.ended:
            prompt.ended = True
            self.num_finished += len(prompt.open_ids)
            self.num_shipped += len(prompt.open_ids)
            return []
        if prompt.reserve_sent and prompt.pair_id is not None:
            return [SendToPeer(prompt.pair_id, CloseTransfer(prompt.request.transfer_id))]
        return []


def _failures(prompt: PrefillPrompt, error: TandemError) -> list[Action]:
    info = ErrorInfo.of(error)
    return [
        SendToProxy(prompt.request.proxy_id, AttemptFailed(attempt_id, info))
        for attempt_id in prompt.request.attempt_ids
        if attempt_id in prompt.open_ids
    ]
