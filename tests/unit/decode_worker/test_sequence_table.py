"""Sequences of the decode role are found by all that messages name."""

from __future__ import annotations

from tandem.decode_worker.sequence import DecodePrompt, SequenceTable
from tandem.protocol.messages.dispatch import PrepareDecode
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions


def prompt(transfer_id: str, proxy_id: str = "p", arrived_at: float = 0.0, deadline_s: float = 9.0) -> DecodePrompt:
    request = PrepareDecode(
        proxy_id, [f"{transfer_id}0", f"{transfer_id}1"], transfer_id, pack_token_ids([1, 2]), SamplingParams(), [5, 6],
        StopConditions(3), deadline_s, prefill_worker_id="prefill-0", prefill_epoch="x",
    )  # fmt: skip
    return DecodePrompt.of(request, 0, arrived_at, 8, "m")


def table_of(*prompts: DecodePrompt) -> SequenceTable:
    table = SequenceTable()
    for each in prompts:
        table.add(each)
    return table


def test_a_proxy_s_sequences_are_its_own() -> None:
    table = table_of(prompt("a", "proxy-1"), prompt("b", "proxy-0"), prompt("c", "proxy-1"), prompt("d", "proxy-2"))
    assert [each.attempt_id for each in table.of_proxy("proxy-1")] == ["a0", "a1", "c0", "c1"]
    assert [each.sampling.seed for each in table.of_proxy("proxy-0")] == [5, 6]
    assert not table.of_proxy("proxy")


def test_a_sequence_is_late_from_its_own_deadline_on() -> None:
    table = table_of(prompt("a", arrived_at=10.0, deadline_s=5.0), prompt("b", arrived_at=2.0, deadline_s=20.0))
    late = {now: {each.attempt_id for each in table.late(now)} for now in (14.9, 15.0, 21.9, 22.0)}
    assert late == {14.9: set(), 15.0: {"a0", "a1"}, 21.9: {"a0", "a1"}, 22.0: {"a0", "a1", "b0", "b1"}}


def test_an_attempt_that_is_known_is_held() -> None:
    table = table_of(prompt("a"))
    same_attempts = prompt("a", "p")
    assert table.holds(same_attempts) and not table.holds(prompt("a", "another proxy"))
    for sequence in list(table.by_attempt.values()):
        table.remove(sequence)
        assert sequence.ended and sequence.attempt_id not in sequence.prompt.sequences
    assert not table.holds(same_attempts)
