"""The running sequences, and the composition of steps. Pure."""

from __future__ import annotations

from tandem.decode_worker.sequence import DecodeSequence
from tandem.engine.batch import Batch
from tandem.engine.block_manager import BlockManager


class RunningBatch:
    """Forms steps of one token for each running sequence. max_num_seqs: sequences per step."""

    def __init__(self, blocks: BlockManager, max_num_seqs: int) -> None:
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self.sequences: list[DecodeSequence] = []
        self._joined: list[DecodeSequence] = []  # since the last `on_clock`
        self.step: list[DecodeSequence] = []
        self._copied_from: list[int] = []  # held until the step ends

    def __len__(self) -> int:
        return len(self.sequences)

    # ---- who runs

    def join(self, sequence: DecodeSequence) -> None:
        self.sequences.append(sequence)
        self._joined.append(sequence)

    def leave(self, sequence: DecodeSequence) -> bool:
        """Removes a sequence. Returns False if a step still uses its blocks: `release` must follow `end_step` then."""
        self.sequences = [s for s in self.sequences if s is not sequence]
        if not sequence.in_step:
            self.release(sequence)
        return not sequence.in_step

    def release(self, sequence: DecodeSequence) -> None:
        """Releases the sequence's blocks."""
        if sequence.copy_from is not None:
            self._blocks.release([sequence.copy_from])
        self._blocks.release(sequence.block_table)
        sequence.block_table = []

    def on_clock(self, now: float) -> None:
        for sequence in self._joined:
            sequence.joined_at = now
        self._joined.clear()

    # ---- steps

    def schedule(self, now: float) -> tuple[Batch, list[DecodeSequence]]:
        """Returns the next step's batch and the sequences that were preempted for it.

        The oldest sequences take their blocks first. If there are none left, the newest sequence is preempted. A
        sequence that runs alone and finds no block, because transfers hold them, skips the step.
        """
        assert not self.step, "one step at a time"
        self.on_clock(now)
        preempted: list[DecodeSequence] = []
        for sequence in sorted(self.sequences[: self._max_num_seqs], key=lambda s: s.age):
            if not sequence.ended and sequence.may_step and self._grow(sequence, preempted):
                self.step.append(sequence)
        copies = []
        for sequence in self.step:
            sequence.in_step = True
            if sequence.stepped_at is None:
                sequence.stepped_at = now
            if sequence.copy_from is not None:
                copies.append((sequence.copy_from, sequence.block_table[len(sequence.prompt.hashes)]))
                self._copied_from.append(sequence.copy_from)
                sequence.copy_from = None
        return Batch([sequence.next_item() for sequence in self.step], copies), preempted

    def _grow(self, sequence: DecodeSequence, preempted: list[DecodeSequence]) -> bool:
        """Returns whether the sequence has, or gets, a block for its newest token."""
        if sequence.num_tokens <= len(sequence.block_table) * self._blocks.block_size:
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
        sequence.block_table += self._blocks.allocate(1)
        return True

    @property
    def has_copied(self) -> bool:
        """Whether the step copies blocks."""
        return bool(self._copied_from)

    def end_step(self) -> list[DecodeSequence]:
        """Ends the step and returns its sequences, in the order of the batch."""
        step, self.step = self.step, []
        for sequence in step:
            sequence.in_step = False
        self._blocks.release(self._copied_from)
        self._copied_from = []
        return step

    def rotate(self, step: list[DecodeSequence]) -> None:
        """Puts the sequences of this step behind the others, if more run than one step takes."""
        if len(self.sequences) > self._max_num_seqs:
            stepped = set(map(id, step))
            self.sequences.sort(key=lambda sequence: id(sequence) in stepped)
