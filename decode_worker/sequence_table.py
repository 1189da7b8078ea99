"""The sequences of the decode role, and their prompts that have not begun, by the ids that messages name. Pure."""

from __future__ import annotations

from tandem.decode_worker.sequence import DecodePrompt, DecodeSequence


class SequenceTable:
    """Sequences from their arrival until they end."""

    def __init__(self) -> None:
        self.by_attempt: dict[tuple[str, str], DecodeSequence] = {}  # by proxy and attempt id
        self.by_transfer: dict[str, DecodePrompt] = {}  # prompts that have not begun

    def holds(self, prompt: DecodePrompt) -> bool:
        """Whether the transfer or an attempt of the prompt is known already."""
        is_known = prompt.request.transfer_id in self.by_transfer
        return is_known or any(sequence.key in self.by_attempt for sequence in prompt.sequences.values())

    def add(self, prompt: DecodePrompt) -> None:
        self.by_attempt.update({sequence.key: sequence for sequence in prompt.sequences.values()})

    def remove(self, sequence: DecodeSequence) -> None:
        """Forgets a sequence, which has ended."""
        sequence.ended = True
        del self.by_attempt[sequence.key], sequence.prompt.sequences[sequence.attempt_id]

    def of_proxy(self, proxy_id: str) -> list[DecodeSequence]:
        return [s for s in self.by_attempt.values() if s.prompt.request.proxy_id == proxy_id]

    def late(self, now: float) -> list[DecodeSequence]:
        """Returns the sequences whose deadline has passed."""
        return [s for s in self.by_attempt.values() if now >= s.prompt.arrived_at + s.prompt.request.deadline_s]

    def waiting_for(self, prefill_epoch: str) -> list[DecodePrompt]:
        """Returns the prompts that wait for the KV of a prefill worker."""
        return [p for p in self.by_transfer.values() if p.prefill_epoch == prefill_epoch]
