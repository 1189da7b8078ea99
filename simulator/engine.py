"""The engine in simulated time. It reads what its tokens depend on from KV blocks and from what the step says.

So a block that was lost, mixed up or overwritten shows, and so does a step with a wrong seed, history or adapter
(`simulator.sampling`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.batch import Batch, BatchItem, ItemOutput, Sample
from tandem.engine.engine import OnDone, StepTiming
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.sampling.grammar import GrammarState, MaskRequest
from tandem.protocol.messages.sampling import SampledToken, TokenLogprobs
from tandem.runtime.errors import ErrorInfo, TandemError
from tandem.simulator.sampling import VOCAB_SIZE, History, after, logprobs_of, needs_history, sampled, start_state
from tandem.simulator.scenario import ClusterShape, SimulatedStepTimes
from tandem.simulator.timeline import ProcessLoop


class NotedBlocks(BlockManager):
    """Notes which blocks of a worker begin and end to be held. The engine and the paths note who writes them.

    pools: of the worker's heads. on_corrupt: called with what is wrong with a block in the prefix cache, and its id.
    has_evicted: whether a cached block was ever given to another sequence. num_running: returns how many sequences run.
    on_greedy: called when a new prompt gets blocks that these will need next.
    """

    def __init__(
        self,
        name: str,
        shape: ClusterShape,
        note: Callable[..., None],
        pools: Sequence[Pool],
        on_corrupt: Callable[[str, int], None],
        num_running: Callable[[], int],
        on_greedy: Callable[[str], None],
    ) -> None:
        super().__init__(shape.num_blocks, shape.block_size)
        self._name, self._note = name, note
        self._pools, self._on_corrupt = pools, on_corrupt
        self._num_running, self._on_greedy = num_running, on_greedy
        self._is_for_new = False  # whether the next blocks are for a new prompt, which is asked for first
        self._has_tiers = bool(shape.tiers)  # for which blocks are taken later
        self.has_evicted = False

    def num_free_without(self, block_ids: Iterable[int]) -> int:
        self._is_for_new = True
        return super().num_free_without(block_ids)

    def can_allocate(self, num_blocks: int) -> bool:
        self._is_for_new = False
        return super().can_allocate(num_blocks)

    def allocate(self, num_blocks: int) -> list[int]:
        is_for_new = self._is_for_new and not self._has_tiers
        block_ids = super().allocate(num_blocks)
        if is_for_new and self.num_free < self._num_running():
            self._on_greedy(f"{self._name}: {self.num_free} blocks are left for {self._num_running()} sequences")
        self._note("%s: blocks %s are allocated", self._name, tuple(block_ids))
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        super().share(self._noted("shared", block_ids))

    def release(self, block_ids: Sequence[int]) -> None:
        super().release(self._noted("released", block_ids))

    def quarantine(self, block_ids: Iterable[int]) -> None:
        super().quarantine(self._noted("in quarantine", block_ids))

    def end_quarantine(self, block_ids: Iterable[int]) -> None:
        super().end_quarantine(self._noted("in quarantine no more", block_ids))

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Checks that the tokens of the block follow one another, else a later prompt may read a damaged block."""
        super().publish(block_id, block_hash)
        for pool in self._pools:
            slots = pool.blocks[block_id]
            if None in slots or any(one[1] != two[0] for one, two in itertools.pairwise(slots) if one and two):
                self._on_corrupt(f"block {block_id} is left to the prefix cache", block_id)
                return

    def is_held(self, block_id: int) -> bool:
        return block_id in self._num_holders

    def _evict(self) -> int:
        self.has_evicted = True
        return super()._evict()

    def _noted(self, what: str, block_ids: Iterable[int]) -> tuple[int, ...]:
        noted = tuple(block_ids)
        if noted:
            self._note("%s: blocks %s are %s", self._name, noted, what)
        return noted


class StepFailed(Exception):
    """A step of a simulated engine fails. Tandem's engine then fails the requests in it, and vLLM's ends."""


@dataclass
class Pool:
    """KV blocks. A slot holds the states before and after its token, or None."""

    num_blocks: int
    block_size: int
    on_write: Callable[[int], None] = lambda block_id: None
    """Called with each block that another process writes."""
    is_held: Callable[[int], bool] = lambda block_id: True
    """Whether a block belongs to a request, so that a step may write it."""
    head: int = 0
    """Number of the head whose keys and values it holds."""
    blocks: list[list[tuple[int, int] | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = [[None] * self.block_size for _ in range(self.num_blocks)]


class SimulatedEngine:
    """Implements `engine.engine.Engine`. on_corrupt: called with what is wrong in a sequence, and its block.

    pools: of the ranks, which hold the same, because a slot stands for the heads of its rank. why_failed: returns an
    error if the oldest step fails. It has then done nothing, not even its copies. on_step: called with each step that
    has ended, before its results are told.
    """

    def __init__(
        self,
        loop: ProcessLoop,
        pools: list[Pool],
        times: SimulatedStepTimes,
        overlaps: bool,
        on_corrupt: Callable[[str, int], None],
        note: Callable[..., None],
        why_failed: Callable[[], BaseException | None] = lambda: None,
        on_step: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        self.overlaps = overlaps
        self._why_failed = why_failed
        self._on_step = on_step
        self._loop = loop
        self._pools = pools
        self.times = times
        self._on_corrupt = on_corrupt
        self._note = note
        self._steps: deque[tuple[Batch | None, OnDone]] = deque()
        self._is_running = self._has_ended = False
        self._samples: list[tuple[int, bool]] = []  # of the step before: tokens, and whether they have an error
        self._histories: list[list[History | ErrorInfo]] = []  # of the samples of the running step, by item
        self.is_stopped = False

    def submit(self, batch: Batch | None, on_done: OnDone) -> None:
        self._steps.append((batch, on_done))
        assert len(self._steps) <= 1 + self.overlaps, "too many steps at once"
        if self._has_ended:
            self._post()
        elif not self._is_running:
            self._begin()

    def _begin(self) -> None:
        batch = self._steps[0][0]
        assert batch is not None
        self._is_running = True
        self._histories = [[self._history(item, sample) for sample in item.samples] for item in batch.items]
        step_s = self.times.of(batch) * self._loop.slowness
        self._loop.call_later(self.times.gap_s + step_s, self._end, step_s)

    def _end(self, step_s: float) -> None:
        self._is_running, self._has_ended, self._step_s = False, True, step_s
        if not self.overlaps or len(self._steps) > 1:
            self._post()

    def _post(self) -> None:
        """Computes the step that has ended, and begins the one behind it."""
        self._has_ended = False
        if self.is_stopped:
            return
        batch, on_done = self._steps.popleft()
        assert batch is not None
        self._on_step(batch)
        timing = StepTiming(self._step_s, 0.0)
        if (error := self._why_failed()) is not None:
            self._steps.clear()  # the one behind it is not run
            self._loop.call_soon(on_done, None, error, timing)
            return
        for pool in self._pools:
            for source, destination in batch.block_copies:
                pool.blocks[destination] = list(pool.blocks[source])
        outputs = [self._run(item, histories) for item, histories in zip(batch.items, self._histories, strict=True)]
        self._samples = [(token.token_id, output.error is not None) for output in outputs for token in output.tokens]
        if self._steps and self._steps[0][0] is None:
            self._steps.popleft()
        if self._steps:
            self._begin()
        self._loop.call_soon(on_done, outputs, None, timing)

    def _history(self, item: BatchItem, sample: Sample) -> History | ErrorInfo:
        """Returns what a sample depends on besides the KV, or why it fails. Called when the step before has ended."""
        output, grammar = list(sample.output_token_ids), sample.grammar
        if item.follows is not None and needs_history(sample.params):
            token_id, has_failed = self._samples[item.follows]
            output.append(token_id)
            grammar = None if has_failed else grammar
        mask = self._mask(grammar, output, sample) if grammar is not None and not grammar.has_failed else b""
        if isinstance(mask, ErrorInfo):
            return mask
        return History(sample.prompt_token_ids, output, sample.banned_token_ids, mask)

    def _mask(self, state: GrammarState, output: list[int], sample: Sample) -> bytes | ErrorInfo:
        try:
            process = state.grammar.process()
            process.send([MaskRequest(state, output, sample.banned_token_ids)], [], 1.0, 1.0)
        except TandemError as error:
            return ErrorInfo.of(error)
        mask = process.receive(1.0)
        assert mask is not None
        if mask.error is not None and state.is_optional:
            state.give_up(mask.error.message)
            return b""
        return mask.error or mask.bits

    def _run(self, item: BatchItem, histories: list[History | ErrorInfo]) -> ItemOutput:
        if item.adapter is not None and item.adapter.error is not None:
            return ItemOutput([], error=item.adapter.error)
        state, token_ids, size = self._read(item), self._tokens_of(item), self._pools[0].block_size
        written = item.block_table[item.start // size : -(-(item.start + len(token_ids)) // size)]
        self._note("%s: a step writes blocks %s", self._loop.name, tuple(written))
        for block in written:
            if not self._pools[0].is_held(block):
                self._on_corrupt(f"a step writes block {block}, which is free", block)
        targets, prompt_logprobs = iter(item.target_token_ids), list[TokenLogprobs]()
        blocks_of = [pool.blocks for pool in self._pools]
        for position, token_id in enumerate(token_ids, item.start):
            following = after(state, token_id)
            block, slot = divmod(position, size)
            number, states = item.block_table[block], (state, following)
            for blocks in blocks_of:
                blocks[number][slot] = states
            state = following
            if item.num_prompt_logprobs is not None and (target := next(targets, None)) is not None:
                prompt_logprobs.append(logprobs_of(state, target, item.num_prompt_logprobs))
        position = item.start + len(token_ids)
        tokens = [
            SampledToken(0) if isinstance(history, ErrorInfo) else sampled(state, position, sample.params, history)
            for sample, history in zip(item.samples, histories, strict=True)
        ]
        error = next((each for each in histories if isinstance(each, ErrorInfo)), None)
        return ItemOutput(tokens, prompt_logprobs, error)

    def _tokens_of(self, item: BatchItem) -> Sequence[int]:
        return item.token_ids if item.follows is None else [self._samples[item.follows][0]]

    def _read(self, item: BatchItem) -> int:
        """Returns the state behind the item's context, as all of its blocks have it."""
        digest: Any = item.adapter.weights if item.adapter is not None else ""
        state, first, *others = start_state(digest), *self._pools
        for start in range(0, item.start, first.block_size):
            block = item.block_table[start // first.block_size]
            num_slots = min(first.block_size, item.start - start)
            kept = first.blocks[block][:num_slots]
            if others and any(pool.blocks[block][:num_slots] != kept for pool in others):
                return self._corrupt(item, block)
            for slot in kept:
                if slot is None or slot[0] != state:
                    return self._corrupt(item, block)
                state = slot[1]
        return state

    def _corrupt(self, item: BatchItem, block: int) -> int:
        self._on_corrupt(f"block {block} of {item.start} tokens in {list(item.block_table)}", block)
        return 0

    def check(self, now: float) -> None:
        pass

    def stop(self, timeout_s: float) -> None:
        self.is_stopped = True


class TimedEngine(SimulatedEngine):
    """Keeps no KV: a token follows from the one before it and its position. Only the time of a step counts."""

    def _run(self, item: BatchItem, histories: list[History | ErrorInfo]) -> ItemOutput:
        token_ids = self._tokens_of(item)
        token_id = next_timed_token(item.start + len(token_ids), token_ids[-1])
        return ItemOutput([SampledToken(token_id) for _ in item.samples])


def next_timed_token(position: int, last_token_id: int) -> int:
    """Returns the token at a position, behind this one."""
    return 1 + (after(position, last_token_id) >> 20) % (VOCAB_SIZE - 1)
