"""A vLLM worker that computes prompts and decodes them itself."""

from __future__ import annotations

import pytest

from tandem.protocol.messages.dispatch import FirstToken
from tandem.runtime.errors import DeadlineExceeded
from tandem.vllm_worker.scheduler.engine_orders import AbortRequests
from tests.unit.vllm_worker.scheduler.one_worker import (
    failures,
    new_tokens,
    orders,
    output,
    report,
    scheduler,
    to_proxy,
)
from tests.unit.vllm_worker.scheduler.prompts import start


def test_a_sequence_from_its_prompt_to_its_end() -> None:
    worker = scheduler()
    [order] = orders(worker.on_start(1.0, start(["a"], max_tokens=3), None, True))
    assert (order.token_ids, order.max_tokens, order.ships, order.receives) == (list(range(10)), 3, False, False)
    assert worker.waiting_tokens() == [(0, 10)] and worker.num_decoding == 0 and worker.num_waiting == 1
    worker.on_report(2.0, report(begun=[order.engine_id], num_running=1, step_s=0.5))
    [first] = to_proxy(worker.on_report(3.0, report(output(order.engine_id, 7), num_running=1)))
    assert (first.attempt_id, first.token.token_id, first.finish_reason) == ("a", 7, None)
    assert (first.queue_s, first.prefill_s) == (0.5, 1.5)
    assert worker.waiting_tokens() == [] and worker.num_decoding == 1 and worker.num_waiting == 0
    [batch] = to_proxy(worker.on_report(4.0, report(output(order.engine_id, 8), step_s=0.25)))
    assert [each.decode_wait_s for each in batch.began] == [0.75]
    [batch] = to_proxy(worker.on_report(5.0, report(output(order.engine_id, 9, reason="length"))))
    assert batch.tokens[0].finish_reason == "length" and not batch.began
    assert worker.is_idle and worker.num_finished == 1


def test_one_token_only_if_no_worker_decodes() -> None:
    worker = scheduler()
    [order] = orders(worker.on_start(0.0, start(["a"], max_tokens=1), None, False))
    assert order.max_tokens == 1
    [first] = to_proxy(worker.on_report(1.0, report(output(order.engine_id, 7, reason="length"))))
    assert first.finish_reason == "length" and worker.is_idle


def test_a_first_token_that_stops() -> None:
    worker = scheduler()
    [order] = orders(worker.on_start(0.0, start(["a"], stop_token_ids=frozenset({7})), None, True))
    [first] = to_proxy(worker.on_report(1.0, report(output(order.engine_id, 7, reason="stop"))))
    assert first.finish_reason == "stop" and worker.is_idle


def test_the_engine_ends_a_sequence_by_itself() -> None:
    worker = scheduler()
    [order] = orders(worker.on_start(0.0, start(["a"], max_tokens=50), None, True))
    worker.on_report(1.0, report(output(order.engine_id, 7)))
    assert new_tokens(worker.on_report(2.0, report(output(order.engine_id, 8, reason="length")))) == [
        ("a", 8, "length")
    ]
    assert worker.is_idle


def test_several_tokens_of_one_step() -> None:
    worker = scheduler()
    [order] = orders(worker.on_start(0.0, start(["a"], max_tokens=50), None, True))
    actions = worker.on_report(1.0, report(output(order.engine_id, 7, 8, 9, reason="stop")))
    first = to_proxy(actions)[0]
    assert isinstance(first, FirstToken), "the first token is sent first"
    assert first.finish_reason is None
    assert new_tokens(actions) == [("a", 8, None), ("a", 9, "stop")]


def test_a_sequence_goes_on_after_tokens_of_another_worker() -> None:
    worker = scheduler()
    [order] = orders(worker.on_start(0.0, start(["a"], max_tokens=5, num_generated=3), None, True))
    assert (order.num_generated, order.max_tokens, len(order.token_ids)) == (3, 5, 10)
    [first] = to_proxy(worker.on_report(1.0, report(output(order.engine_id, 7))))
    assert first.finish_reason is None
    assert new_tokens(worker.on_report(2.0, report(output(order.engine_id, 8)))) == [("a", 8, "length")]


def test_sequences_of_a_prompt_end_alone() -> None:
    worker = scheduler()
    a, b, c = orders(worker.on_start(0.0, start(["a", "b", "c"]), None, True))
    assert [each.number for each in (a, b, c)] == [0, 1, 2]
    assert worker.on_abort("proxy", "a") == [AbortRequests([a.engine_id])]
    assert worker.waiting_tokens() == [(0, 10)], "the prompt still waits for the others"
    actions = worker.on_report(1.0, report(output(b.engine_id, 7), output(c.engine_id, error="it broke")))
    assert failures(actions) == {"c": "it broke"}
    assert worker.on_report(2.0, report(output(a.engine_id, 9))) == [], "it was aborted"
    assert worker.on_proxy_lost("another") == []
    assert worker.on_proxy_lost("proxy") == [AbortRequests([b.engine_id])]
    assert worker.is_idle


def test_the_deadline_passes() -> None:
    worker = scheduler()
    [order] = orders(worker.on_start(5.0, start(["a"], deadline_s=2.0), None, True))
    assert worker.on_tick(6.9) == []
    failed, abort = worker.on_tick(7.0)
    [message] = to_proxy([failed])
    assert isinstance(message.error.to_error(), DeadlineExceeded)
    assert abort == AbortRequests([order.engine_id]) and worker.is_idle


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = scheduler()
    assert not failures(worker.on_start(0.0, start(["a"], 399), None, True))
    assert "an attempt exists" in failures(worker.on_start(0.0, start(["a"]), None, True))["a"]
    assert "needs 101 KV blocks" in failures(worker.on_start(0.0, start(["b"], 400), None, True))["b"]
    monkeypatch.setattr("tandem.vllm_worker.scheduler.vllm_scheduler.MAX_HELD_SEQUENCES", 1)
    assert "too many sequences" in failures(worker.on_start(0.0, start(["c"]), None, True))["c"]


def test_waiting_tokens_by_priority() -> None:
    worker = scheduler()
    worker.on_start(0.0, start(["a", "b"], 6, priority=1), None, True)
    worker.on_start(0.0, start(["c"], 5), None, True)
    worker.on_start(0.0, start(["d"], 3), None, True)
    assert worker.waiting_tokens() == [(0, 8), (1, 6)]


def test_prefixes_of_the_cache_are_told_once() -> None:
    worker = scheduler()
    worker.on_report(0.0, report(added=[b"x", b"y", b"x"], evicted=[b"z"]))
    worker.on_report(0.0, report(evicted=[b"y"]))
    assert worker.prefixes.cached == {b"x"}


def test_sequences_of_a_prompt_share_its_numbers() -> None:
    """128 sequences of 300,000 tokens had 128 copies of them."""
    first, *others = orders(scheduler().on_start(0.0, start(["a", "b", "c"], 350), None, True))
    assert all(one is other for each in others for one, other in zip(first.token_ids, each.token_ids, strict=True))
    assert all(first.token_ids is not each.token_ids for each in others)


def test_gaps_between_steps_are_reported_where_there_were_any() -> None:
    worker = scheduler()
    worker.on_report(1.0, report(step_s=0.5))
    assert worker.step_times.gap_s == 0.0
    worker.on_report(2.0, report(step_s=0.5, gap_s=0.25))
    assert worker.step_times.gap_s == 0.25
