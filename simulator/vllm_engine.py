"""vLLM's engine core in simulated time, with its contract about blocks and about the names of requests.

A request that receives gets its blocks when it is scheduled and keeps them, also after an abort, until it is named as
received. One that ships keeps them after its end until it is named as sent. One that runs out of blocks is preempted
inside a step: it loses them and computes its tokens again. A step that fails ends the engine: it carries out no order
any more. `simulator.engine` computes, so every block is checked when it is read, and a token depends on all that it
should.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from tandem.engine.batch import Batch, BatchItem, ItemOutput, Sample
from tandem.engine.engine import StepTiming
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.kv_cache.prefix_log import PrefixLog
from tandem.engine.lora.adapter import Adapter
from tandem.engine.sampling.grammar import GrammarState
from tandem.handover.outgoing import NO_BLOCK
from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.packed import BYTES_PER_TOKEN, pack_logprobs
from tandem.protocol.messages.sampling import FinishReason, SampledToken, TokenLogprobs
from tandem.protocol.prefix_hash import client_of
from tandem.simulator.attachments import SimulatedAdapters, SimulatedGrammars
from tandem.simulator.engine import Pool, SimulatedEngine
from tandem.vllm_worker.scheduler.engine_orders import (
    AddRequest,
    AllocatedBlocks,
    ComputedBlocks,
    EngineFigures,
    EngineOutput,
    StepReport,
)
from tandem.vllm_worker.vllm_worker import OnFailed

Status = Literal["waiting", "receiving", "received", "running", "ended"]
"""A request that has ended is still known while its blocks are kept."""


@dataclass(eq=False)
class VllmRequest:
    """One request of the engine. hashes: of the full blocks of its message's prompt."""

    order: AddRequest
    number: int
    hashes: list[bytes]
    token_ids: list[int]
    """Prompt and output."""
    grammar: GrammarState | None = None
    adapter: Adapter | None = None
    status: Status = "waiting"
    block_table: list[int] = field(default_factory=list)
    window_table: list[int] = field(default_factory=list)
    """Blocks of the layers with a window, if the model has such; NO_BLOCK for those that have left it."""
    num_cached: int | None = None
    """Tokens that the prefix cache had when it was scheduled first."""
    num_computed: int = 0
    """Tokens whose KV is in its blocks."""
    num_reported: int = 0
    """Complete blocks that a report has named."""
    ships: bool = False
    keeps_blocks: bool = False
    """Whether a path may still read its blocks after its end."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_prompt_logprobs: int | None = None
    first_token_due: bool = True
    waits_for_kv: bool = False

    @property
    def engine_id(self) -> str:
        return self.order.engine_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt without those that were generated before."""
        return len(self.order.message.token_ids) // BYTES_PER_TOKEN - self.order.message.num_generated

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def turn(self) -> tuple[int, int]:
        return self.order.message.priority, self.number

    @property
    def is_ready(self) -> bool:
        """Whether its grammar is compiled and its adapter loaded."""
        return all(each is None or each.is_ready for each in (self.grammar, self.adapter))

    @property
    def sample(self) -> Sample:
        message = self.order.message
        params = msgspec.structs.replace(message.sampling, seed=message.seeds[self.order.number])
        output = self.token_ids[self.num_prompt_tokens :]
        return Sample(
            params,
            self.token_ids[: self.num_prompt_tokens] if params.has_penalties else (),
            output if params.needs_history else (),
            message.stop.banned(len(output)) if message.stop.min_tokens else (),
            self.grammar,
        )


@dataclass(frozen=True)
class SimulatedWindow:
    """Layers that attend to the last tokens only: a second group, whose blocks hold what those of full attention hold.

    reach: how many tokens, with the next one. pools: of all heads. on_corrupt: called with what is wrong, and a block.
    """

    reach: int
    pools: list[Pool]
    on_corrupt: Callable[[str, int], None]

    def first_block(self, num_computed: int) -> int:
        """Returns the number of the first block that a later token needs."""
        return max(0, num_computed - self.reach + 1) // self.pools[0].block_size

    def write(self, request: VllmRequest, start: int, end: int) -> None:
        """Gives the window the tokens from `start` to `end`, which full attention has."""
        for position in range(start, end):
            block, slot = divmod(position, self.pools[0].block_size)
            for pool in self.pools:
                pool.blocks[request.window_table[block]][slot] = pool.blocks[request.block_table[block]][slot]

    def check(self, request: VllmRequest) -> None:
        """Compares what the next token needs with what full attention has."""
        size = self.pools[0].block_size
        for number in range(self.first_block(request.num_computed), -(-request.num_computed // size)):
            block, num_slots = request.window_table[number], min(size, request.num_computed - number * size)
            for pool in self.pools:
                full = pool.blocks[request.block_table[number]][:num_slots]
                if block == NO_BLOCK or pool.blocks[block][:num_slots] != full:
                    self.on_corrupt(f"block {block} of a window in {request.window_table}", block)


class SimulatedVllm:
    """Implements `vllm_worker.vllm_worker.EngineHandle`. Orders are carried out between steps, in order.

    config: limits of a step. compute: runs steps. post: called with each report. on_failed: called with the error of a
    step and the requests in it. on_cached: called with an attempt and how many tokens of its prompt were cached when it
    began. window: of some layers, whose blocks are not cached, so that no prefix is.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        compute: SimulatedEngine,
        post: Callable[[StepReport], None],
        on_failed: OnFailed,
        grammars: SimulatedGrammars,
        adapters: SimulatedAdapters,
        on_cached: Callable[[str, int], object],
        window: SimulatedWindow | None = None,
    ) -> None:
        self.blocks = blocks
        self._window = window
        self.requests: dict[str, VllmRequest] = {}
        self._compute = compute
        self._post, self._on_failed = post, on_failed
        self._has_failed = False
        self._grammars, self._adapters = grammars, adapters
        self._config = config
        self._on_cached = on_cached
        self._orders: deque[Callable[[], None]] = deque()
        self._numbers = itertools.count()
        self._step: list[tuple[VllmRequest, int]] | None = None
        """Requests of the running step and how many tokens they compute; None if none runs."""
        self._refused: list[EngineOutput] = []
        self._begun: list[str] = []
        self._allocated: list[AllocatedBlocks] = []
        self._lost: list[str] = []
        self._num_preempted = 0
        self._lost_blocks = False  # a request was preempted in the last step
        self._prefixes = blocks.prefix_log = RecordedPrefixes()

    # ---- orders

    def add(self, order: AddRequest, hashes: list[bytes]) -> None:
        self._order(lambda: self._add(order, hashes))

    def abort(self, engine_ids: list[str]) -> None:
        self._order(lambda: self._abort(engine_ids))

    def on_received(self, engine_id: str, first_token_id: int) -> None:
        self._order(lambda: self._receive(engine_id, first_token_id))

    def end_receiving(self, engine_id: str) -> None:
        self._order(lambda: self._end_receiving(engine_id))

    def end_shipping(self, engine_id: str) -> None:
        self._order(lambda: self._end_shipping(engine_id))

    def clear_cache(self) -> None:
        self._order(self.blocks.drop_cached)

    def check(self, now: float) -> str:
        return ""

    def stop(self, timeout_s: float) -> None:
        self._compute.stop(timeout_s)

    def wake(self) -> None:
        """A grammar or an adapter is ready."""
        self._order(lambda: None)

    def _order(self, carry_out: Callable[[], None]) -> None:
        if self._has_failed:  # nothing is waiting for orders in vLLM's thread any more
            return
        self._orders.append(carry_out)
        if self._step is None:
            self._begin_step()

    def _add(self, order: AddRequest, hashes: list[bytes]) -> None:
        assert order.engine_id not in self.requests, "a request is added once"
        message, sampling = order.message, order.message.sampling
        client = client_of(message.cache_salt)
        grammar = self._grammars.get(sampling.grammar, client, sampling.is_grammar_optional)
        state = None
        if grammar is not None:
            state = grammar.new_state(
                message.stop.stop_token_ids, sampling.thinking, sampling.is_grammar_optional, client
            )
        adapter = self._adapters.get(message.adapter)
        request = VllmRequest(order, next(self._numbers), hashes, list(order.token_ids), state, adapter)
        request.ships = request.keeps_blocks = order.ships
        request.waits_for_kv = order.receives
        if isinstance(message, StartPrefill) and not order.number and not order.num_generated:
            request.num_prompt_logprobs = message.num_prompt_logprobs
        self.requests[order.engine_id] = request

    def _abort(self, engine_ids: list[str]) -> None:
        for engine_id in engine_ids:
            if (request := self.requests.get(engine_id)) is not None:
                self._end(request)

    def _receive(self, engine_id: str, first_token_id: int) -> None:
        request = self.requests.get(engine_id)
        if request is None:
            return
        assert request.status == "receiving", "vLLM ends the process"
        request.status, request.waits_for_kv = "received", False
        request.num_computed = len(request.token_ids)
        request.token_ids.append(first_token_id)
        self._publish(request)

    def _end_receiving(self, engine_id: str) -> None:
        request = self.requests.get(engine_id)
        if request is not None:
            assert request.status == "ended", "it would begin with KV that is not there"
            self._free(request)

    def _end_shipping(self, engine_id: str) -> None:
        request = self.requests.get(engine_id)
        if request is None:
            return
        assert request.order.ships
        request.ships = request.keeps_blocks = False
        if request.status == "ended":
            self._free(request)

    def _end(self, request: VllmRequest) -> None:
        if request.status == "ended":
            return
        is_kept = request.status == "receiving" or (request.keeps_blocks and request.block_table)
        request.status = "ended"
        if not is_kept:
            self._free(request)

    def _free(self, request: VllmRequest) -> None:
        del self.requests[request.engine_id]
        self._release(request)

    def _release(self, request: VllmRequest) -> None:
        self.blocks.release(request.block_table + [each for each in request.window_table if each != NO_BLOCK])
        request.block_table, request.window_table = [], []

    def _publish(self, request: VllmRequest) -> None:
        num_full = min(request.num_computed // self.blocks.block_size, len(request.hashes))
        for block_id, block_hash in zip(request.block_table[:num_full], request.hashes, strict=False):
            self.blocks.publish(block_id, block_hash)

    # ---- steps

    def _begin_step(self) -> None:
        while self._orders:
            self._orders.popleft()()
        self._step = self._schedule()
        if not self._step and self._lost_blocks:
            self._step = self._schedule()  # the blocks that were taken are free now
        if self._window is not None:
            for request, _ in self._step:
                self._window.check(request)
        items = [self._item(request, num_tokens) for request, num_tokens in self._step]
        if items:
            self._compute.submit(Batch(items), self._on_step)
            return
        self._step = None
        self._post(self._report([], 0.0, 0, 0))

    def _schedule(self) -> list[tuple[VllmRequest, int]]:
        """Running requests go first, then waiting ones by priority and age, while there are blocks.

        None begins in a step that has taken blocks from another one.
        """
        step: list[tuple[VllmRequest, int]] = []
        budget, num_preempted = self._config.max_num_batched_tokens, self._num_preempted
        for request in sorted(self._of("running"), key=lambda each: each.turn):
            if request.status != "running" or not budget:
                continue  # preempted by one before it
            num_tokens = min(budget, len(request.token_ids) - request.num_computed)
            while not self._grow(request, num_tokens) and self._preempt_last(request):
                pass
            if request.status == "running" and self._grow(request, num_tokens):
                step.append((request, num_tokens))
                budget -= num_tokens
        self._lost_blocks = num_preempted != self._num_preempted
        waiting = [each for each in self.requests.values() if each.status in ("waiting", "received") and each.is_ready]
        # Those that hold blocks go first: behind one that finds none they could never give theirs back.
        for request in (
            sorted(waiting, key=lambda each: (not each.block_table, each.turn)) if not self._lost_blocks else ()
        ):
            if request.waits_for_kv:
                if not self._allocate(request):
                    break
                continue
            if not budget or len(self._of("running")) >= self._config.max_num_seqs:
                break
            if request.adapter is not None and request.adapter.error is not None:
                self._refused.append(EngineOutput(request.engine_id, [], None, request.adapter.error.to_error()))
                self._end(request)
                continue
            if not request.block_table:
                self._share_cached(request)
            num_tokens = min(budget, len(request.token_ids) - request.num_computed)
            if not self._grow(request, num_tokens):
                if request.status == "waiting":
                    self._release(request)
                    request.num_computed = 0
                break
            request.status = "running"
            self._begun.append(request.engine_id)
            step.append((request, num_tokens))
            budget -= num_tokens
        return [(request, num_tokens) for request, num_tokens in step if request.status == "running"]

    def _of(self, status: Status) -> list[VllmRequest]:
        return [each for each in self.requests.values() if each.status == status]

    def _share_cached(self, request: VllmRequest) -> None:
        """The last token is always computed. Prompts with log-probabilities compute all of them."""
        num_usable = (len(request.token_ids) - 1) // self.blocks.block_size
        cached = self._match(request.hashes[:num_usable]) if request.num_prompt_logprobs is None else []
        self.blocks.share(cached)
        request.block_table = list(cached)
        request.num_computed = len(cached) * self.blocks.block_size
        if request.num_cached is None:  # after a preemption it finds its own blocks
            request.num_cached = request.num_computed
            self._on_cached(request.order.message.attempt_ids[request.order.number], request.num_computed)

    def _allocate(self, request: VllmRequest) -> bool:
        """Allocates blocks for a prompt whose KV comes from another worker, if there are enough."""
        num_usable = len(request.token_ids) // self.blocks.block_size
        cached = self._match(request.hashes[:num_usable])
        num_blocks = self.blocks.num_blocks_for(len(request.token_ids))
        num_new = num_blocks - len(cached)
        first = self._window.first_block(len(request.token_ids)) if self._window is not None else num_blocks
        num_of_window, num_groups = num_blocks - first, 1 if self._window is None else 2
        num_left = num_groups * len(self._of("running"))  # for the next block of each
        if num_new + num_of_window + num_left > self.blocks.num_free_without(cached):
            return False
        self.blocks.share(cached)
        new = self.blocks.allocate(num_new)
        request.status, request.block_table = "receiving", [*cached, *new]
        groups = [(len(cached), new)]
        if self._window is not None:
            of_window = self.blocks.allocate(num_of_window)
            request.window_table = [NO_BLOCK] * first + of_window
            groups.append((first, of_window))
        num_cached_tokens = len(cached) * self.blocks.block_size
        self._allocated.append(AllocatedBlocks(request.engine_id, num_cached_tokens, groups))
        return True

    def _match(self, hashes: list[bytes]) -> list[int]:
        return self.blocks.match(hashes) if self._window is None else []

    def _grow(self, request: VllmRequest, num_tokens: int) -> bool:
        num_blocks = self.blocks.num_blocks_for(request.num_computed + num_tokens)
        num_needed = max(0, num_blocks - len(request.block_table))
        num_of_window = 0
        if self._window is not None:
            self._leave_window(request, self._window.first_block(request.num_computed))
            num_of_window = max(0, num_blocks - len(request.window_table))
        if num_needed + num_of_window > 0:
            if not self.blocks.can_allocate(num_needed + num_of_window):
                return False
            new = self.blocks.allocate(num_needed + num_of_window)
            request.block_table = request.block_table + new[:num_needed]
            request.window_table = request.window_table + new[num_needed:]
        return True

    def _leave_window(self, request: VllmRequest, first: int) -> None:
        """Gives back the blocks before the first one that is needed."""
        gone = [each for each in request.window_table[:first] if each != NO_BLOCK]
        if gone:
            self.blocks.release(gone)
            request.window_table = [NO_BLOCK] * first + request.window_table[first:]

    def _preempt_last(self, request: VllmRequest) -> bool:
        """Takes the blocks of the running request whose turn is last. Returns False if that is this one."""
        last = max(self._of("running"), key=lambda each: each.turn)
        self._num_preempted += 1
        last.status, last.num_computed, last.num_reported = "waiting", 0, 0
        last.prompt_logprobs = []  # they are computed again
        self._release(last)
        if last.ships:
            self._lost.append(last.engine_id)
            last.ships = last.keeps_blocks = False  # nothing of it is reported from now on
        return last is not request

    def _item(self, request: VllmRequest, num_tokens: int) -> BatchItem:
        start = request.num_computed
        end = start + num_tokens
        wants = request.num_prompt_logprobs if request.first_token_due else None
        return BatchItem(
            request.token_ids[start:end],
            start,
            request.block_table,
            [request.sample] if end == len(request.token_ids) else (),
            num_prompt_logprobs=wants,
            target_token_ids=() if wants is None else request.token_ids[start + 1 : end + 1],
            adapter=request.adapter,
        )

    def _on_step(self, results: list[ItemOutput] | None, error: BaseException | None, timing: StepTiming) -> None:
        assert self._step is not None
        step, outputs = self._step, list[EngineOutput]()
        if error is not None:
            self._has_failed = True
            self._on_failed(error, [request.engine_id for request, _ in step])
            return
        assert results is not None
        num_prompt_tokens = sum(num for request, num in step if num > 1 or request.first_token_due)
        num_decoding = sum(num == 1 and not request.first_token_due for request, num in step)
        for (request, num_tokens), result in zip(step, results, strict=True):
            if result.error is not None:
                outputs.append(EngineOutput(request.engine_id, [], None, result.error.to_error()))
                self._end(request)
                continue
            request.num_computed += num_tokens
            if self._window is not None:
                self._window.write(request, request.num_computed - num_tokens, request.num_computed)
            self._publish(request)
            request.prompt_logprobs += result.prompt_logprobs
            for token in result.tokens:
                request.token_ids.append(token.token_id)
                message = request.order.message
                reason = message.stop.check(token.token_id, request.num_generated)
                if reason is None and request.num_generated >= request.order.max_tokens:
                    reason = "length"
                outputs.append(self._output(request, token, reason))
        computed = self._computed()
        for output in outputs:
            if output.finish_reason is not None and (ended := self.requests.get(output.engine_id)) is not None:
                self._end(ended)
        self._step = None
        self._post(self._report(outputs, timing.step_s, num_decoding, num_prompt_tokens, computed))
        self._begin_step()

    def _output(self, request: VllmRequest, token: SampledToken, reason: FinishReason | None) -> EngineOutput:
        is_first, request.first_token_due = request.first_token_due, False
        logprobs = None
        if is_first and request.num_prompt_logprobs is not None:
            logprobs = pack_logprobs(request.prompt_logprobs)
            request.prompt_logprobs = []
        num_cached = (request.num_cached or 0) if is_first else 0
        return EngineOutput(request.engine_id, [token], reason, None, num_cached, logprobs)

    def _computed(self) -> list[ComputedBlocks]:
        """Returns the complete blocks of requests that ship: of their prompts and what was generated before."""
        found = []
        for request in self.requests.values():
            num_given = len(request.order.token_ids)
            num_tokens = min(request.num_computed, num_given)
            is_whole = num_tokens == num_given
            num_blocks = self.blocks.num_blocks_for(num_tokens) if is_whole else num_tokens // self.blocks.block_size
            if request.ships and request.status == "running" and num_blocks > request.num_reported:
                request.num_reported = num_blocks
                tables = [request.block_table] + ([request.window_table] if self._window is not None else [])
                found.append(ComputedBlocks(request.engine_id, [table[:num_blocks] for table in tables]))
        return found

    def _report(
        self,
        outputs: list[EngineOutput],
        step_s: float,
        num_decoding: int,
        num_prompt_tokens: int,
        computed: list[ComputedBlocks] | None = None,
    ) -> StepReport:
        begun, self._begun = self._begun, []
        allocated, self._allocated = self._allocated, []
        refused, self._refused = self._refused, []
        lost, self._lost = self._lost, []
        added, evicted = self._prefixes.take_changes()
        num_waiting = len(self.requests) - len(self._of("running"))
        figures = EngineFigures(
            len(self._of("running")), num_waiting, self.blocks.num_blocks, self.blocks.num_free,
            self.blocks.num_cached, self._num_preempted,
        )  # fmt: skip
        return StepReport(
            begun, allocated, computed or [], refused + outputs, lost, figures, step_s, None, num_decoding,
            num_prompt_tokens, 0, added, evicted,
        )  # fmt: skip


class RecordedPrefixes(PrefixLog):
    """Also keeps what the cache has gained and lost since the last report."""

    def __init__(self) -> None:
        super().__init__()
        self._added: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    def add(self, block_hash: bytes) -> None:
        super().add(block_hash)
        if block_hash in self._evicted:
            del self._evicted[block_hash]
        else:
            self._added[block_hash] = None

    def evict(self, block_hash: bytes) -> None:
        super().evict(block_hash)
        if block_hash in self._added:
            del self._added[block_hash]
        else:
            self._evicted[block_hash] = None

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        added, evicted = list(self._added), list(self._evicted)
        self._added.clear()
        self._evicted.clear()
        return added, evicted
