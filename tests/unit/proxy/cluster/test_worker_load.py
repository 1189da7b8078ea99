"""What this proxy expects of one worker: times, costs and free blocks, from its last report and what was sent since."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.messages.membership import WorkerLoad
from tandem.proxy.cluster.worker_record import PromptQueue, TypicalSpeed, WorkerUse


def use_of(**load: Any) -> WorkerUse:
    use = WorkerUse(TypicalSpeed(5000.0))
    use.on_report(WorkerLoad(**{"prompt_tokens_per_s": 1000.0, "num_blocks": 100, "num_free_blocks": 50, **load}))
    return use


STEPS: dict[str, Any] = {"fixed_step_s": 0.01, "step_s_per_sequence": 0.001, "itl_slo_s": 0.04}


@pytest.mark.parametrize(
    ("load", "ttft_s"),
    [
        ({}, 0.5),
        (STEPS, 0.5),  # no sequence runs
        ({**STEPS, "num_decoding": 6}, 0.5 / 0.6),  # steps of 16 ms leave 24 of 40 ms
        ({**STEPS, "num_decoding": 10}, 1.0),
        ({**STEPS, "num_decoding": 500}, 1.0),  # half of its speed at least
        ({"num_decoding": 6}, 0.5),  # without an SLO chunks are not made smaller
    ],
)
def test_prompts_are_slower_beside_sequences(load: dict[str, Any], ttft_s: float) -> None:
    use = use_of(waiting_tokens=[(0, 400)], **load)
    assert use.ttft_s(0, 100) == pytest.approx(ttft_s)
    assert use.ttft_s(-1, 100) == pytest.approx(ttft_s / 5), "what is later is not ahead"


def test_steps_grow_with_each_sequence() -> None:
    use = use_of(num_decoding=3, **STEPS)
    assert [use.itl_s(more) for more in (0, 1, 5)] == pytest.approx([0.013, 0.014, 0.018])
    use.add(2, 0, num_proxies=3)
    assert use.itl_s(0) == pytest.approx(0.019), "the other proxies are assumed to send as much"
    assert use_of(num_decoding=3).itl_s(4) == 0


def test_some_sequences_leave_room_for_prompts() -> None:
    assert use_of(**STEPS).num_comfortable == pytest.approx((0.6 * 0.04 - 0.01) / 0.001)
    assert use_of(**{**STEPS, "itl_slo_s": 0.01}).num_comfortable == 0
    assert use_of().num_comfortable == 0


def test_a_full_pool_costs_as_much_as_sixteen_sequences() -> None:
    empty, full = use_of(num_free_blocks=100), use_of(num_free_blocks=0)
    assert full.decode_cost(0) - empty.decode_cost(0) == pytest.approx(16)
    assert use_of(num_decoding=16, num_free_blocks=100).decode_cost(0) == pytest.approx(full.decode_cost(0))
    assert empty.decode_cost(25) - empty.decode_cost(0) == pytest.approx(4)


def test_loading_costs_what_it_takes_but_never_more_than_computing() -> None:
    assert use_of().load_cost == 0.25, "before the first load"
    assert use_of(loaded_tokens_per_s=8000.0).load_cost == pytest.approx(0.125)
    assert use_of(loaded_tokens_per_s=10.0).load_cost == 1


def test_a_worker_that_has_measured_nothing_is_as_fast_as_the_last_one_that_has() -> None:
    typical = TypicalSpeed(5000.0)
    new, other = WorkerUse(typical), WorkerUse(typical)
    assert new.ttft_s(0, 100) == pytest.approx(0.02)
    other.on_report(WorkerLoad(prompt_tokens_per_s=100.0))
    assert new.ttft_s(0, 100) == pytest.approx(1.0)


def test_a_new_worker_has_no_load() -> None:
    use = WorkerUse(TypicalSpeed(1000.0))
    assert use.is_idle
    assert (use.num_sequences, use.num_free_blocks, use.prompt_share, use.load_cost) == (0, 0, 0.0, 0.25)
    assert (use.itl_s(0), use.num_comfortable) == (0, 0)


def test_sequences_that_no_report_has_yet_count() -> None:
    use = use_of(num_decoding=2)
    use.add(3, 0, num_proxies=1)
    assert use.num_sequences == 5
    use.on_report(WorkerLoad(num_decoding=1))
    assert use.num_sequences == 3, "this proxy's own"
    use.on_report(WorkerLoad(num_decoding=7))
    assert use.num_sequences == 7


def test_the_share_of_reports_with_prompts_is_an_average_of_seconds() -> None:
    use = use_of()
    shares = []
    for _ in range(20):
        use.on_report(WorkerLoad(waiting_tokens=[(0, 5)]))
        shares.append(use.prompt_share)
    assert shares == pytest.approx([1 - 0.95**number for number in range(1, 21)])
    for _ in range(20):
        use.on_report(WorkerLoad())
    assert use.prompt_share == pytest.approx(shares[-1] * 0.95**20)


@given(st.lists(st.tuples(st.sampled_from(["add", "promise ends", "sequence ends", "report"]), st.integers(0, 9))))
def test_promised_blocks_are_not_free_until_they_are_reserved(events: list[tuple[str, int]]) -> None:
    use, num_reported = use_of(num_free_blocks=50), 50
    promises: list[int] = []
    num_own = 0
    for event, number in events:
        if event == "add":
            use.add(1, number, num_proxies=1)
            promises.append(number)
            num_own += 1
        elif event == "promise ends" and promises:
            use.end_promise(promises.pop())
        elif event == "sequence ends" and num_own:
            use.end_sequence()
            num_own -= 1
        elif event == "report":
            num_reported = 10 * number
            use.on_report(WorkerLoad(num_free_blocks=num_reported, num_decoding=number))
        assert use.num_free_blocks == num_reported - sum(promises)
        assert use.num_sequences >= num_own
    assert use.is_idle == (not num_own and not sum(promises))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "report"]), st.integers(-2, 2), st.integers(1, 50), st.integers(1, 3)
        ),
        max_size=30,
    )
)
def test_what_is_ahead_is_what_both_have_sent_at_this_priority_or_sooner(
    events: list[tuple[str, int, int, int]],
) -> None:
    queue, own = PromptQueue(), list[tuple[int, int]]()
    others: dict[int, int] = {}
    for event, priority, num_tokens, num_proxies in events:
        if event == "add":
            queue.add(priority, num_tokens, num_proxies)
            own.append((priority, num_tokens))
            others[priority] = others.get(priority, 0) + num_tokens * (num_proxies - 1)
        elif event == "remove" and own:
            queue.remove(*own.pop())
        elif event == "report":
            there = sum(number for level, number in own if level == priority)
            queue.on_report([(priority, there + num_tokens)] if num_tokens % 2 else [(priority, there // 2)])
            others = {priority: num_tokens} if num_tokens % 2 else {}
        for level in range(-3, 4):
            expected = sum(number for each, number in [*own, *others.items()] if each <= level)
            assert queue.ahead_of(level) == expected
        assert queue.total == queue.ahead_of(9) and queue.is_empty == (not own)
