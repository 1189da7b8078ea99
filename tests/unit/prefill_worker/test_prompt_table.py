"""Prompts of the prefill role are found by all that messages name, and counted by state."""

from __future__ import annotations

from tandem.handover.outgoing import OutgoingTransfer
from tandem.prefill_worker.prompt import PrefillPrompt, PromptTable
from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions


def prompt(
    number: int,
    transfer_id: str,
    proxy_id: str = "p",
    pair_id: str | None = "pair",
    num_tokens: int = 4,
    priority: int = 0,
    arrived_at: float = 0.0,
) -> PrefillPrompt:
    request = StartPrefill(
        proxy_id, [f"{transfer_id}0", f"{transfer_id}1"], transfer_id, pack_token_ids([1] * num_tokens),
        SamplingParams(), [5, 6], StopConditions(3), 9.0, decode_worker_id="w", decode_epoch="e", priority=priority,
    )  # fmt: skip
    return PrefillPrompt.of(request, pair_id, False, number, arrived_at)


def table_of(*prompts: PrefillPrompt) -> PromptTable:
    table = PromptTable()
    for each in prompts:
        table.add(each)
    return table


def names(prompts: list[PrefillPrompt]) -> list[str]:
    return [each.request.transfer_id for each in prompts]


def test_prompts_are_found_by_proxy() -> None:
    table = table_of(prompt(0, "a", "p1"), prompt(1, "b", "p2"), prompt(2, "c", "p1"), prompt(3, "d", "p3"))
    assert names(table.of_proxy("p1")) == ["a", "c"] and not table.of_proxy("p")


def test_a_prompt_runs_from_its_first_step_until_it_is_forgotten() -> None:
    table = table_of(prompt(0, "a"), prompt(1, "b"), prompt(2, "c"))
    first, second, _ = table.by_transfer.values()
    assert (table.num_waiting, table.num_running, table.is_idle) == (3, 0, False)
    table.begin(first)
    table.begin(second)
    assert (table.num_waiting, table.num_running) == (1, 2)
    del table.computing[0]  # computed, and shipped now
    assert (table.num_waiting, table.num_running) == (1, 2)
    table.forget(first)
    assert (table.num_waiting, table.num_running) == (1, 1)
    for each in list(table.by_transfer.values()):
        table.waiting.pop(each.number, None)
        table.forget(each)
    assert table.is_idle and not table.by_attempt


def test_tokens_still_to_compute_are_counted_by_priority() -> None:
    table = table_of(
        prompt(0, "a", num_tokens=5), prompt(1, "b", num_tokens=7, priority=2), prompt(2, "c", num_tokens=11)
    )
    assert table.waiting_tokens() == [(0, 16), (2, 7)]
    begun = table.by_transfer["c"]
    table.begin(begun)
    begun.num_computed_tokens = 8
    assert table.waiting_tokens() == [(0, 8), (2, 7)]


def test_a_transfer_or_an_attempt_that_is_known_is_held() -> None:
    table = table_of(prompt(0, "a"))
    again = prompt(1, "a").request
    assert table.holds(again) and not table.holds(prompt(1, "b").request)
    [known] = table.by_transfer.values()
    assert table.end_attempt("another proxy", "a0") is None
    assert table.end_attempt("p", "a0") is known and known.open_ids == {"a1"}
    assert table.end_attempt("p", "a0") is None
    table.by_transfer.clear()
    assert table.holds(again), "its second attempt is open"
    assert table.end_attempt("p", "a1") is known
    assert not table.holds(again)


def test_a_prompt_is_late_unless_it_has_ended_or_needs_nothing_more() -> None:
    table = table_of(*(prompt(number, name, arrived_at=number) for number, name in enumerate("abcd")))
    table.by_transfer["b"].ended = True
    finished = table.by_transfer["c"]
    finished.transfer = OutgoingTransfer(finished.request, "pair", finished, [], finish_sent=True)
    assert names(table.late(8.9)) == [] and names(table.late(9.0)) == ["a"] and names(table.late(12.0)) == ["a", "d"]
