"""Both roles of a worker over one KV pool: composes their steps and adds up their loads. Pure.

A step holds one token of each running sequence and chunks of prompts. The decode role goes first: its sequences take
the blocks that they need before new prompts do. After a step that did not fit into the device's memory chunks are
smaller for a while (`ChunkLimit`); after one that failed its members run apart (`StepIsolation`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tandem.decode_worker.decode_scheduler import Action, DecodeScheduler
from tandem.decode_worker.sequence import DecodePrompt, DecodeSequence
from tandem.engine.batch import Batch, ItemOutput
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.kv_cache.prefix_tiers import PrefixTiers, TierState
from tandem.engine.steps.step_times import StepTimes
from tandem.handover.incoming import IncomingTransfers
from tandem.handover.outgoing import OutgoingTransfers
from tandem.prefill_worker.prefill_scheduler import PrefillScheduler
from tandem.prefill_worker.prompt import PrefillPrompt
from tandem.protocol.messages.membership import PrefixUpdate


class _Step(NamedTuple):
    """A step. num_decoding: items of sequences, which come first. has_prompts: it computes prompts or encodes media."""

    num_decoding: int
    num_prompt_tokens: int
    has_prompts: bool


class WorkerScheduler:
    """Owns, through the block manager, all blocks of the worker's pool. Events of one role go to that role.

    model_id: part of the prefix cache's hashes. max_num_batched_tokens: prompt tokens per step. max_num_seqs: sequences
    per step, and prompts that compute concurrently. lease_s: see `handover.outgoing.Leases`. itl_slo_s: see
    `engine.steps.step_times`. block_bytes: of all ranks together. tiers: below the pool, fastest first.
    """

    def __init__(
        self,
        blocks: BlockManager,
        model_id: str,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        lease_s: float,
        itl_slo_s: float = 0.0,
        block_bytes: int = 1,
        tiers: Sequence[TierState] = (),
    ) -> None:
        self.blocks = blocks
        self.step_times = StepTimes(itl_slo_s)
        self.tiers = PrefixTiers(blocks, tiers, block_bytes, lambda: self.step_times.prompt_tokens_per_s)
        self.decode = DecodeScheduler(blocks, model_id, max_num_seqs, block_bytes, self.tiers)
        self.prefill = PrefillScheduler(self.decode, max_num_batched_tokens, max_num_seqs, lease_s)
        self._chunks = ChunkLimit(max_num_batched_tokens)
        self._steps: deque[_Step] = deque()  # in flight
        self._isolation = StepIsolation()

    # ---- transfers and load figures (see `presence.WorkerRequests`)

    @property
    def outgoing(self) -> OutgoingTransfers[PrefillPrompt, Action]:
        return self.prefill.transfers

    @property
    def incoming(self) -> IncomingTransfers[DecodePrompt, Action]:
        return self.decode.transfers

    @property
    def num_running(self) -> int:
        return self.prefill.prompts.num_running + self.decode.num_running

    @property
    def num_waiting(self) -> int:
        return self.prefill.prompts.num_waiting + self.decode.num_waiting

    @property
    def is_idle(self) -> bool:
        return self.prefill.prompts.is_idle and self.decode.is_idle

    # ---- prefixes

    def take_prefixes(self) -> tuple[PrefixUpdate | None, PrefixUpdate | None]:
        """Returns what proxies must learn of the pool's prefixes since the last call, and of those in the tiers."""
        return self.blocks.prefix_log.take(), self.tiers.prefix_log.take()

    def restart_prefixes(self) -> None:
        """Publishes all prefixes to the proxies again."""
        self.blocks.prefix_log.restart()
        self.tiers.prefix_log.restart()

    # ---- events that concern both roles

    def on_abort(self, proxy_id: str, attempt_id: str) -> list[Action]:
        return self.prefill.on_abort(proxy_id, attempt_id) + self.decode.on_abort(proxy_id, attempt_id)

    def on_proxy_lost(self, proxy_id: str) -> list[Action]:
        return self.prefill.on_proxy_lost(proxy_id) + self.decode.on_proxy_lost(proxy_id)

    def on_tick(self, now: float) -> list[Action]:
        self.tiers.on_tick(now)
        actions = self.prefill.on_tick(now) + self.decode.on_tick(now)
        return actions + self.prefill.yield_blocks(now) if self.decode.reservations.is_blocked else actions

    # ---- steps

    def schedule(self, now: float) -> tuple[Batch, list[Action]]:
        """Returns the next step's batch, and the actions that follow from it."""
        reserved = self.decode.reserve_waiting()  # the prefill role may have released blocks
        prompts = self.prefill.prompts
        has_members = self.decode.running.sequences or prompts.computing or prompts.waiting
        if not has_members and self._isolation.is_over:  # an idle worker asks ten times a second
            return Batch([]), reserved + self.tiers.take_actions(now)
        batch, actions = self._next_step(now)
        return batch, reserved + actions + self.tiers.take_actions(now)

    def schedule_ahead(self, now: float) -> tuple[Batch, list[Action]]:
        """Returns the batch of the step behind the running one, whose tokens are not known yet. It may be empty.

        It is empty while the running step computes prompts, and if a sequence's next step depends on its token
        (`DecodeSequence.needs_tokens`). Tokens that follow a stop token are dropped when they arrive.
        """
        [running] = self._steps
        if running.has_prompts or not self._isolation.is_over or not self.decode.running.may_schedule_ahead():
            return Batch([]), []
        return self._next_step(now)

    def _next_step(self, now: float) -> tuple[Batch, list[Action]]:
        actions: list[Action] = []
        while True:
            prompts = self.prefill.prompts
            begun: list[Member] = [*self.decode.running.sequences, *prompts.computing.values()]
            only = self._isolation.take(begun, prompts.waiting.values())
            batch, of_step = self._form_step(now, only)
            actions += of_step
            if only is None or batch.items or batch.encodes:
                return batch, actions

    def _form_step(self, now: float, only: list[Member] | None = None) -> tuple[Batch, list[Action]]:
        sequences = None if only is None else {each for each in only if isinstance(each, DecodeSequence)}
        prompts = None if only is None else {each for each in only if isinstance(each, PrefillPrompt)}
        decoding, preempted = self.decode.schedule(now, sequences)
        self._chunks.on_time(now)
        max_tokens = self.step_times.chunk(len(decoding.items), self._chunks.tokens)
        computing, reserving = self.prefill.schedule(now, max_tokens, prompts)
        batch = Batch(decoding.items + computing.items, decoding.block_copies, computing.encodes)
        if batch.items or batch.encodes:
            num_prompt_tokens = sum(len(item.token_ids) for item in computing.items)
            has_prompts = bool(computing.items or computing.encodes)
            self._steps.append(_Step(len(decoding.items), num_prompt_tokens, has_prompts))
        return batch, preempted + reserving

    def on_step(self, now: float, results: list[ItemOutput], step_s: float | None = None) -> list[Action]:
        """results: one for each item of the oldest step in flight. step_s: how long it took, if it was measured."""
        step = self._steps.popleft()
        assert len(results) >= step.num_decoding, "each item of the step has a result"
        if step_s is not None:
            self.step_times.on_step(step.num_decoding, step.num_prompt_tokens, step_s)
        actions = self.decode.on_step(now, results[: step.num_decoding])
        return actions + self.prefill.on_step(now, results[step.num_decoding :]) if step.has_prompts else actions

    def on_out_of_memory(self, error: BaseException) -> list[Action]:
        """Makes the chunks of prompts smaller, see `ChunkLimit`; in a step without prompts, preempts sequences.

        A step with prompts of the smallest size that does not fit either has failed. A step behind it was not run.
        """
        step = self._steps[0]
        num_tokens = step.num_prompt_tokens
        is_smaller = num_tokens > 0 and self._chunks.shrink(num_tokens)
        if not is_smaller and (num_tokens or not step.num_decoding):  # or an image alone
            return self.on_step_failed(error)
        self._steps.popleft()
        preempted = self.decode.on_out_of_memory(preempt=not num_tokens)
        return preempted + self.prefill.on_out_of_memory() + self._take_back()

    def on_step_failed(self, error: BaseException) -> list[Action]:
        """Fails the request of the oldest step in flight, if it was alone in it. Otherwise its members run apart, until
        one fails alone. A step behind it was not run."""
        step = self._steps.popleft()
        sequences = self.decode.running.steps[0].sequences if step.num_decoding else []
        prompts = self.prefill.step_prompts if step.has_prompts else []
        if len(sequences) + len(prompts) > 1:
            running, computing = [s for s in sequences if not s.ended], [p for p in prompts if not p.ended]
            self._isolation.on_failed(running, computing)
            ended = self.decode.on_out_of_memory(preempt=False)
            if step.has_prompts:
                ended += self.prefill.on_out_of_memory()
            return ended + self._take_back()
        actions = self.decode.on_step_failed(error)
        return actions + (self.prefill.on_step_failed(error) if step.has_prompts else []) + self._take_back()

    def _take_back(self) -> list[Action]:
        """Takes back the step that was scheduled ahead."""
        if not self._steps:
            return []
        self._steps.clear()
        ended = self.decode.on_out_of_memory(preempt=False)
        return ended + self.prefill.on_out_of_memory()


MIN_BATCHED_TOKENS = 64
"""Steps are not made smaller than this."""

_MIN_PAUSE_S, _MAX_PAUSE_S = 60.0, 3600.0


class ChunkLimit:
    """How many prompt tokens a step may have on a device that was out of memory.

        as configured -> (a step does not fit) half of that step's -> (a minute without another) twice that, up to the
        first

    What took the memory may be gone after a while: another program on the device, many long sequences, a large image.
    Where it stays, each attempt to grow costs a step, so the pause before the next one is twice as long, up to an hour.

    tokens: the limit.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.tokens = self._configured = max_num_batched_tokens
        self._pause_s = _MIN_PAUSE_S
        self._grows_at: float | None = None  # None where it need not grow, or since the last failure
        self._has_grown = False  # since the last failure

    def shrink(self, num_tokens: int) -> bool:
        """Makes the limit smaller than a step that did not fit. Returns False if it is the smallest one already."""
        if self.tokens <= MIN_BATCHED_TOKENS:
            return False
        self.tokens = max(MIN_BATCHED_TOKENS, min(num_tokens, self.tokens) // 2)
        if self._has_grown:
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        self._grows_at, self._has_grown = None, False
        return True

    def on_time(self, now: float) -> None:
        """Lets the limit grow when steps have fitted for long enough. Call before each step."""
        if self.tokens >= self._configured:
            return
        if self._grows_at is None:
            self._grows_at = now + self._pause_s
        elif now >= self._grows_at:
            self.tokens, self._has_grown = min(2 * self.tokens, self._configured), True
            assert self.tokens > MIN_BATCHED_TOKENS, "a limit grows only after it was made smaller"
            self._grows_at = now + self._pause_s


Member = DecodeSequence | PrefillPrompt


class StepIsolation:
    """Finds the member of a failed step that makes steps fail, so that it fails alone.

        a step fails -> its prompts run apart from its sequences, then each half of the clients, then each half of what
        one client has -> one that fails alone

    A failed step leaves nothing behind: its members compute the same tokens again, so the others lose none. Those that
    are not suspected take every second step: however many members fail, they wait for one failing step at a time.

    Holds the groups that run next, each in a step of its own, before steps hold everything again.
    """

    def __init__(self) -> None:
        self._groups: deque[list[Member]] = deque()
        self._was_group = False  # whether the last step was that of a group

    @property
    def is_over(self) -> bool:
        return not self._groups

    def on_failed(self, sequences: Sequence[DecodeSequence], prompts: Sequence[PrefillPrompt]) -> None:
        """Divides the members of a failed step, which had several: members that have ended meanwhile count, too.

        The parts run behind the groups that wait, so that all clients are apart before those of one are divided.
        """
        members: list[Member] = [*sequences, *prompts]
        clients = sorted({each.client for each in members})
        if sequences and prompts:
            first: set[Member] = set(sequences)
        elif len(clients) > 1:
            of_first = set(clients[: len(clients) // 2])
            first = {each for each in members if each.client in of_first}
        else:
            first = set(members[: (len(members) + 1) // 2])
        for group in ([m for m in members if m in first], [m for m in members if m not in first]):
            if group:
                self._groups.append(group)

    def take(self, begun: Iterable[Member], waiting: Iterable[PrefillPrompt]) -> list[Member] | None:
        """Returns the members of the next step; None if it may hold everything.

        begun: sequences and prompts that have been in a step. waiting: prompts that have not. Every second step has the
        begun ones that are in no group, and new prompts of clients that have nothing in a group.
        """
        if not self._groups:
            self._was_group = False
            return None
        if self._was_group:
            self._was_group = False
            suspects = {each for group in self._groups for each in group}
            clients = {each.client for each in suspects}
            others: list[Member] = [each for each in begun if each not in suspects]
            others += [each for each in waiting if each.client not in clients]
            if others:
                return others
        self._was_group = True
        return self._groups.popleft()
