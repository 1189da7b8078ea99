"""The running sequences, and the composition of steps. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tandem.decode_worker.sequence import DecodePrompt, DecodeSequence
from tandem.engine.batch import Batch
from tandem.engine.kv_cache.block_manager import BlockManager


@dataclass(frozen=True)
class DecodeStep:
    """A step in flight. sequences: in the order of the batch."""

    sequences: list[DecodeSequence]
    copies: list[tuple[DecodeSequence, int]] = field(default_factory=list)
    """Sequences for which the step copies a block, and that block, which is held until the step ends."""


class RunningBatch:
    """Forms steps of one token for each running sequence. max_num_seqs: sequences per step.

    A second step may be formed while the first runs (`may_schedule_ahead`). Its items have no tokens yet.
    """

    def __init__(self, blocks: BlockManager, max_num_seqs: int) -> None:
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self.sequences: list[DecodeSequence] = []
        self._joined: list[DecodeSequence] = []  # since the last `on_clock`
        self.steps: deque[DecodeStep] = deque()  # in flight

    def __len__(self) -> int:
        return len(self.sequences)

    # ---- joining and leaving

    def begin(
        self,
        prompt: DecodePrompt,
        first_tokens: Mapping[str, int],
        prompt_blocks: list[int],
        spare: list[int],
        num_own: int,
        position_offset: int,
    ) -> bool:
        """Starts the prompt's sequences. They share its full blocks, and each gets blocks of its own after these.

        first_tokens: token ids by attempt_id. spare: blocks of their own, as far as they have been reserved; steps
        allocate the others. num_own: blocks of its own that a sequence begins with. Returns whether blocks were freed.
        """
        blocks = self._blocks
        full = prompt_blocks[: len(prompt.hashes)]
        for block_id, block_hash in zip(full, prompt.hashes, strict=True):
            blocks.publish(block_id, block_hash)
        partial = prompt_blocks[len(full) :]  # at most one; the first sequence takes it, the others copy it
        for number, sequence in enumerate(prompt.sequences.values()):
            num_spare = num_own if number else num_own - len(partial)
            own, spare = spare[:num_spare], spare[num_spare:]
            blocks.share(full)
            if not number:
                own = partial + own
            elif partial:
                blocks.share(partial)
                sequence.copy_from = partial[0]
            assert not sequence.ended and not sequence.block_table, "a sequence begins once"
            sequence.begin(full + own, first_tokens[sequence.attempt_id], blocks.block_size, position_offset)
            self.sequences.append(sequence)
            self._joined.append(sequence)
        blocks.release(full)  # the transfer's own hold
        has_sequences = bool(prompt.sequences)
        blocks.release(spare if has_sequences else spare + partial)
        return bool(spare) or not has_sequences

    def leave(self, sequence: DecodeSequence) -> bool:
        """Removes a sequence. Returns False if a step still uses its blocks: `release` must follow `end_step` then."""
        self.sequences = [s for s in self.sequences if s is not sequence]
        return self.release(sequence)

    def release(self, sequence: DecodeSequence) -> bool:
        """Releases the blocks of a sequence that has left. Returns False if a step still uses them."""
        assert sequence.ended, "its next step would write into blocks of others"
        if sequence.num_steps:  # a step in flight writes into its blocks, also after its request has ended
            return False
        if sequence.copy_from is not None:
            self._blocks.release([sequence.copy_from])
        self._blocks.release(sequence.block_table)
        sequence.block_table = []
        return True

    def on_clock(self, now: float) -> None:
        for sequence in self._joined:
            sequence.joined_at = now
        self._joined.clear()

    # ---- steps

    def may_schedule_ahead(self) -> bool:
        """Whether the next step can be formed while the last one runs: without its tokens, and without preemption."""
        if len(self.steps) != 1 or len(self.sequences) > self._max_num_seqs:
            return False
        if any(sequence.needs_tokens for sequence in self.steps[0].sequences):
            return False
        return self._blocks.can_allocate(sum(map(self._must_grow, self.sequences)))

    def schedule(
        self, now: float, only: Collection[DecodeSequence] | None = None
    ) -> tuple[Batch, list[DecodeSequence]]:
        """Returns the next step's batch and the sequences that were preempted for it. only: those that may step.

        The oldest sequences take their blocks first. If there are none left, the newest sequence is preempted. A
        sequence that runs alone and finds no block, because transfers hold them, skips the step.
        """
        self.on_clock(now)
        preempted: list[DecodeSequence] = []
        step = DecodeStep([])
        may_run = self.sequences if only is None else [each for each in self.sequences if each in only]
        for sequence in sorted(may_run[: self._max_num_seqs], key=lambda s: s.age):
            may_step = not sequence.ended and sequence.may_step and sequence.has_more_steps
            if may_step and self._grow(sequence, preempted):
                step.sequences.append(sequence)
        sample_of = {id(s): number for number, s in enumerate(self.steps[-1].sequences)} if self.steps else {}
        items, copies = [], []
        for sequence in step.sequences:
            if sequence.stepped_at is None:
                sequence.stepped_at = now
            if sequence.copy_from is not None:
                copies.append((sequence.copy_from, sequence.block_table[len(sequence.prompt.hashes)]))
                step.copies.append((sequence, sequence.copy_from))
                sequence.copy_from = None
            items.append(sequence.next_item(sample_of.get(id(sequence))))
            sequence.num_steps += 1
        assert len(items) <= self._max_num_seqs and len(self.steps) < 2, "one step runs, and one waits for it"
        if items:
            self.steps.append(step)
        return Batch(items, copies), preempted

    def _must_grow(self, sequence: DecodeSequence) -> bool:
        return sequence.num_tokens_to_store > len(sequence.block_table) * self._blocks.block_size

    def _grow(self, sequence: DecodeSequence, preempted: list[DecodeSequence]) -> bool:
        """Returns whether the sequence has, or gets, a block for its newest token."""
        if not self._must_grow(sequence):
            return True
        while not self._blocks.can_allocate(1):
            newest = max(self.sequences, key=lambda s: s.age)
            if newest is sequence and len(self.sequences) == 1:
                return False
            newest.ended = True
            self.leave(newest)
            preempted.append(newest)
            if newest is sequence:
                return False
        sequence.block_table = [*sequence.block_table, *self._blocks.allocate(1)]  # a step in flight has the old list
        return True

    def end_step(self, has_run: bool = True) -> list[DecodeSequence]:
        """Ends the oldest step and returns its sequences, in the order of the batch; none if no step is in flight.

        has_run: False for a step that has failed or was not run. Its copies may be missing, so the next step of each
        sequence makes them again.
        """
        if not self.steps:
            return []
        step = self.steps.popleft()
        for sequence in step.sequences:
            sequence.num_steps -= 1
            assert 0 <= sequence.num_steps <= len(self.steps), "it takes part in a step once"
            sequence.is_void = sequence.num_void_steps > 0
            sequence.num_void_steps -= sequence.is_void
        if has_run:
            self._blocks.release([block_id for _, block_id in step.copies])
        else:
            for sequence, block_id in step.copies:
                sequence.copy_from = block_id
        return step.sequences

    def rotate(self, step: list[DecodeSequence]) -> None:
        """Puts the sequences of this step behind the others, if more run than one step takes."""
        if len(self.sequences) > self._max_num_seqs:
            stepped = set(map(id, step))
            self.sequences.sort(key=lambda sequence: id(sequence) in stepped)
