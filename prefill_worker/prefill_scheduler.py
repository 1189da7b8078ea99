"""Decides what a worker does in its prefill role. Pure: events and a clock value in, actions out.

A prompt's life:  waiting -> computing -> computed -> shipped

A prompt begins when a step has tokens for it: it shares the blocks that the prefix cache has, allocates the others, and
is announced to decode. Complete blocks are shipped while later chunks still compute (`handover.outgoing`). A prompt
that ends early (abort, deadline, failure) is `ended` at once, but its blocks are released only when no step computes
them and no transfer reads them.

A prompt that is decoded on the same worker is not shipped: its blocks pass to the decode role by id.
"""

from __future__ import annotations

from collections.abc import Collection

from tandem.decode_worker.decode_scheduler import Action, DecodeScheduler
from tandem.engine.batch import Batch, ItemOutput
from tandem.engine.lora.adapter import Adapter
from tandem.engine.sampling.grammar import Grammar
from tandem.engine.vision.prompt_media import PromptMedia
from tandem.handover.actions import SendToProxy
from tandem.handover.outgoing import OutgoingTransfer, OutgoingTransfers
from tandem.prefill_worker.prompt import PrefillPrompt, PromptTable
from tandem.prefill_worker.step import PrefillStep, plan_step
from tandem.protocol.messages.checks import MAX_HELD_SEQUENCES
from tandem.protocol.messages.dispatch import AttemptFailed, AttemptPreempted, StartPrefill
from tandem.protocol.messages.packed import pack_logprobs
from tandem.protocol.messages.sampling import SampledToken
from tandem.runtime.errors import (
    DeadlineExceeded,
    ErrorInfo,
    InternalError,
    Overloaded,
    TandemError,
)


class PrefillScheduler:
    """Owns the prompts that the worker computes.

    decode: the other role of the worker, whose blocks and tiers this one shares. max_num_batched_tokens: prompt tokens
    per step. max_num_seqs: prompts that compute concurrently. lease_s: see `handover.outgoing.Leases`.
    """

    def __init__(self, decode: DecodeScheduler, max_num_batched_tokens: int, max_num_seqs: int, lease_s: float) -> None:
        self.blocks = decode.blocks
        self._decode = decode
        self._tiers = decode.tiers
        self._model_id = decode.model_id
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self.transfers: OutgoingTransfers[PrefillPrompt, Action] = OutgoingTransfers(lease_s, self)
        self.prompts = PromptTable()
        self._step = PrefillStep()  # in flight, if it has prompts
        self._num_arrived = 0
        self.num_finished = self.num_shipped = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

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
        if (error := self._why_refused(prompt)) is not None:
            if media is not None:
                media.release()
            return _failures(prompt, error)
        self._num_arrived += 1
        self.prompts.add(prompt)
        if pair_id is not None:
            num_blocks = self.blocks.num_blocks_for(prompt.num_prompt_tokens)
            prompt.transfer = self.transfers.add(request, pair_id, prompt, [num_blocks])
        return []

    def _why_refused(self, prompt: PrefillPrompt) -> TandemError | None:
        if self.prompts.holds(prompt.request):
            return InternalError(f"transfer {prompt.request.transfer_id} exists already")
        if len(self.prompts.by_attempt) >= MAX_HELD_SEQUENCES:
            return Overloaded("this worker has too many prompts")
        needed = self.blocks.num_blocks_for(prompt.num_prompt_tokens)
        if needed > self.blocks.num_blocks:
            return InternalError(f"the prompt needs {needed} KV blocks, this worker has {self.blocks.num_blocks}")
        return self._decode.why_refused(prompt.request) if prompt.decodes_here else None

    def on_abort(self, proxy_id: str, attempt_id: str) -> list[Action]:
        prompt = self.prompts.end_attempt(proxy_id, attempt_id)
        if prompt is None:
            return []
        if not prompt.open_ids:
            return self._end(prompt)
        return self.transfers.on_attempt_ended(prompt.transfer, attempt_id) if prompt.transfer is not None else []

    def on_proxy_lost(self, proxy_id: str) -> list[Action]:
        return [action for prompt in self.prompts.of_proxy(proxy_id) for action in self._end(prompt)]

    def on_tick(self, now: float) -> list[Action]:
        error = DeadlineExceeded("the request's deadline passed before its first token was decoded")
        late = [action for prompt in self.prompts.late(now) for action in self._end(prompt, error)]
        return late + self.transfers.on_tick(now)

    def yield_blocks(self, now: float) -> list[Action]:
        """Gives up the newest prompt that has waited too long for the blocks of its decode worker.

        Called while sequences of this worker wait for blocks, see `OutgoingTransfers.unanswered`.
        """
        transfer = self.transfers.unanswered(now)
        if transfer is None:
            return []
        prompt = transfer.prompt
        preempted = [
            SendToProxy(prompt.request.proxy_id, AttemptPreempted(attempt_id)) for attempt_id in sorted(prompt.open_ids)
        ]
        return [*preempted, *self._end(prompt)]

    # ---- steps

    @property
    def step_prompts(self) -> list[PrefillPrompt]:
        """The prompts of the step in flight."""
        return list({prompt.number: prompt for prompt in self._step.prompts}.values())

    def schedule(
        self, now: float, max_tokens: int | None = None, only: Collection[PrefillPrompt] | None = None
    ) -> tuple[Batch, list[Action]]:
        """Returns the next step's chunks, and the reservations sent with first chunks.

        max_tokens: limit on the chunks' tokens if it is less than max_num_batched_tokens. only: prompts that may
        compute.
        """
        assert not self._step.prompts, "one step at a time"
        waiting = self.prompts.waiting.values()
        broken = [p for p in waiting if p.media is not None and p.media.error is not None]
        actions = [action for p in broken for action in self._end_for_its_media(p)]
        may_begin = True

        def begin(prompt: PrefillPrompt, is_first: bool) -> bool:
            nonlocal may_begin
            if not may_begin or len(self.prompts.computing) == self._max_num_seqs:
                return False
            if self._begin(now, prompt, actions):
                return True
            # No other prompt allocates blocks before the first one, unless that one waits for a tier.
            may_begin = not is_first or self._tiers.is_waiting(prompt.request.transfer_id)
            return False

        budget = min(max_tokens or self._max_num_batched_tokens, self._max_num_batched_tokens)
        candidates = self._candidates()
        self._step = plan_step([each for each in candidates if only is None or each in only], budget, begin)
        for prompt in self._step.prompts:
            prompt.in_step = True
        return self._step.batch(), actions

    def _candidates(self) -> list[PrefillPrompt]:
        """Returns the prompts that may compute now.

        No prompt begins for a decode worker that is full, i.e. that has not answered a computed prompt: its KV could
        not leave.
        """
        if not self.prompts.waiting:  # in most steps of a decode worker
            return list(self.prompts.computing.values())
        full = self.transfers.full_pairs()
        may_begin = (p for p in self.prompts.waiting.values() if p.pair_id not in full and p.may_compute)
        return [
            *self.prompts.computing.values(),
            *(p for p in may_begin if not self._tiers.is_waiting(p.request.transfer_id)),
        ]

    def _begin(self, now: float, prompt: PrefillPrompt, actions: list[Action]) -> bool:
        """Gives a waiting prompt its blocks, cached ones first. Returns False if it must wait: for blocks, for the
        decode role, or for a tier that has more of its prefix."""
        if self._decode.reservations.is_blocked:
            return False
        if prompt.decodes_here:
            num_promised = sum(len(other.open_ids) for other in self.prompts.computing.values() if other.decodes_here)
            if not self._decode.reservations.has_room(num_promised + len(prompt.open_ids)):
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
        assert len(prompt.block_table) == self.blocks.num_blocks_for(prompt.num_prompt_tokens)
        assert prompt.num_computed_tokens < prompt.num_prompt_tokens, "a step computes the last token"
        prompt.started_at = now
        self.prompts.begin(prompt)
        if prompt.transfer is not None:
            actions += self.transfers.on_begun(now, prompt.transfer)
            actions += self.transfers.on_computed(now, prompt.transfer, [cached])
        return True

    def on_step(self, now: float, results: list[ItemOutput]) -> list[Action]:
        actions: list[Action] = []
        step = self._end_step()
        for (prompt, num_tokens), output in zip(step.chunks, results, strict=True):
            if output.error is None:
                # Without a first token, the last one of the prompt is computed again.
                prompt.num_computed_tokens += num_tokens - output.is_late
                assert prompt.num_computed_tokens <= prompt.num_prompt_tokens, "chunks end with the prompt"
            if prompt.ended:
                actions += self._leave_step(prompt)
                continue
            if prompt.is_computed:
                del self.prompts.computing[prompt.number]
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
            if prompt.transfer is not None and not prompt.ended:
                complete = prompt.complete_blocks(self.blocks.block_size)
                actions += self.transfers.on_computed(now, prompt.transfer, [complete], prompt.position_offset)
        for prompt in step.encoding:
            actions += self._leave_step(prompt) if prompt.ended else self._end_for_its_media(prompt)
        return actions

    def on_out_of_memory(self) -> list[Action]:
        """Ends a step that did not fit into the device's memory, has failed, or was not run: its prompts compute the
        same tokens again."""
        return [action for prompt in self._end_step().prompts if prompt.ended for action in self._leave_step(prompt)]

    def on_step_failed(self, error: BaseException) -> list[Action]:
        failure = InternalError(f"the model failed on this prompt: {error}")
        actions: list[Action] = []
        for prompt in self._end_step().prompts:
            # One that was aborted meanwhile must leave, too: it would fail in each step from now on.
            actions += self._leave_step(prompt) if prompt.ended else self._end(prompt, failure)
        return actions

    def _end_step(self) -> PrefillStep:
        step, self._step = self._step, PrefillStep()
        for prompt in step.prompts:
            prompt.in_step = False
        return step

    def _publish(self, prompt: PrefillPrompt) -> None:
        """Puts computed full blocks into the prefix cache."""
        num_full = prompt.num_computed_tokens // self.blocks.block_size
        assert prompt.num_published_blocks <= num_full <= len(prompt.block_table), "published blocks stay computed"
        for i in range(prompt.num_published_blocks, num_full):
            self.blocks.publish(prompt.block_table[i], prompt.hashes[i])
        prompt.num_published_blocks = num_full

    def _on_first_tokens(self, now: float, prompt: PrefillPrompt, tokens: list[SampledToken]) -> list[Action]:
        proxy_id = prompt.request.proxy_id
        actions: list[Action] = []
        is_pooled = prompt.request.pooling is not None
        messages = prompt.embedding(now) if is_pooled else prompt.first_tokens(now, tokens)
        for message in messages:
            actions.append(SendToProxy(proxy_id, message))
            if message.finish_reason is not None:
                self.num_finished += 1
                self.prompts.end_attempt(proxy_id, message.attempt_id)
        if not prompt.open_ids:
            return actions + self._end(prompt)
        for message in messages if prompt.transfer is not None else ():
            goes_on = message.finish_reason is None
            assert prompt.transfer is not None
            actions += self.transfers.on_first_token(
                prompt.transfer, message.attempt_id, message.token.token_id, goes_on
            )
        return actions + self._decode_here(prompt) if prompt.decodes_here else actions

    def _decode_here(self, prompt: PrefillPrompt) -> list[Action]:
        """Passes the prompt's open sequences and its blocks to the decode role."""
        assert prompt.is_computed and prompt.transfer is None, "its blocks leave by one way only"
        computed = prompt.computed()
        for attempt_id in prompt.open_ids:
            del self.prompts.by_attempt[prompt.request.proxy_id, attempt_id]
        prompt.open_ids, prompt.block_table = set(), []
        return self._decode.begin_computed(computed) + self._end(prompt)

    # ---- holder of blocks for `transfers` (see `SendingHolder`)

    def stop(self, transfer: OutgoingTransfer[PrefillPrompt], error: TandemError | None) -> list[Action]:
        return self._end(transfer.prompt, error)

    def release_sent(self, transfer: OutgoingTransfer[PrefillPrompt]) -> list[Action]:
        prompt = transfer.prompt
        assert prompt.transfer is transfer and not transfer.num_ships_in_flight, "a shipment reads the blocks"
        prompt.transfer = None
        if transfer.ended:
            return self._settle(prompt)
        self.num_finished += len(prompt.open_ids)
        self.num_shipped += len(prompt.open_ids)
        return self._end(prompt)

    # ---- ends

    def _end_for_its_media(self, prompt: PrefillPrompt) -> list[Action]:
        """Ends a prompt whose media have an error."""
        error = prompt.media.error if prompt.media is not None else None
        return self._end(prompt, error.to_error()) if error is not None else []

    def _end(self, prompt: PrefillPrompt, error: TandemError | None = None) -> list[Action]:
        """Ends the prompt at once and reports `error`, if any, to the proxy. Its blocks follow in `_settle`."""
        if prompt.ended:
            return []
        failures = _failures(prompt, error) if error is not None else []
        prompt.ended = True
        self._tiers.forget(prompt.request.transfer_id)
        self.prompts.waiting.pop(prompt.number, None)
        if not prompt.in_step:
            self.prompts.computing.pop(prompt.number, None)
        ended = self.transfers.end(prompt.transfer) if prompt.transfer is not None else []
        return failures + ended + self._settle(prompt)

    def _leave_step(self, prompt: PrefillPrompt) -> list[Action]:
        """Takes leave of a prompt that has ended in a step, which is over now."""
        assert prompt.ended and not prompt.in_step
        self.prompts.computing.pop(prompt.number, None)  # a prompt whose media were encoded may be in a step twice
        return self._settle(prompt)

    def _settle(self, prompt: PrefillPrompt) -> list[Action]:
        """Releases the blocks and media of a prompt once it has ended and neither a step nor a transfer uses them."""
        if not prompt.ended or prompt.in_step or prompt.transfer is not None:
            return []
        if self.prompts.by_transfer.get(prompt.request.transfer_id) is not prompt:
            return []  # settled before
        # Blocks are released here only: whatever ends a prompt during a step, the step still writes into them.
        assert prompt.number not in self.prompts.waiting and prompt.number not in self.prompts.computing
        self.prompts.forget(prompt)
        if prompt.media is not None:
            prompt.media.release()
        self.blocks.release(prompt.block_table)
        prompt.block_table = []
        return []


def _failures(prompt: PrefillPrompt, error: TandemError) -> list[Action]:
    info = ErrorInfo.of(error)
    return [
        SendToProxy(prompt.request.proxy_id, AttemptFailed(attempt_id, info))
        for attempt_id in prompt.request.attempt_ids
        if attempt_id in prompt.open_ids
    ]
