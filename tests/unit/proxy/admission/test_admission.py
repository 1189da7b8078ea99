"""Limits on waiting requests and on each client's requests in flight; Retry-After estimates when there is room."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from starlette.requests import Request

from tandem.proxy.admission.admission import Admission, ClientLimitExceeded, QueueFull, Ticket
from tandem.proxy.answers.errors import tandem_error_response
from tandem.proxy.proxy_settings import AdmissionSettings
from tandem.runtime.errors import InvalidRequest


def some_request() -> Request:
    return Request({"type": "http", "headers": [], "state": {}})


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_sequences_without_a_first_token_count_as_waiting() -> None:
    admission = Admission(AdmissionSettings(4), Clock())
    first = admission.admit("a", [10, 0, 0])
    with pytest.raises(QueueFull, match="3 requests are waiting"):
        admission.admit("a", [1, 1])
    first.on_first_token(0)
    first.on_first_token(0)
    second = admission.admit("b", [1, 1])
    assert (admission.num_waiting, admission.num_waiting_tokens) == (4, 2)
    with pytest.raises(InvalidRequest, match="asks for 5 sequences"):
        admission.admit("a", [1] * 5)
    first.close()
    first.close()
    second.close()
    assert (admission.num_waiting, admission.num_waiting_tokens) == (0, 0)


def test_waiting_tokens_are_limited_except_for_a_single_prompt() -> None:
    admission = Admission(AdmissionSettings(10, max_waiting_tokens=100), Clock())
    large = admission.admit("a", [500])
    with pytest.raises(QueueFull, match="500 prompt tokens are waiting"):
        admission.admit("a", [1])
    large.on_first_token(0)
    admission.admit("a", [60])
    with pytest.raises(QueueFull):
        admission.admit("a", [60])


def test_sequences_in_flight_per_client_are_limited() -> None:
    admission = Admission(AdmissionSettings(10, max_requests_per_client=2), Clock())
    one = admission.admit("a", [1, 1])
    one.on_first_token(0)
    one.on_first_token(1)
    with pytest.raises(ClientLimitExceeded, match="2 of your sequences") as refused:
        admission.check("a")
    assert tandem_error_response(some_request(), refused.value).status_code == 429
    admission.admit("b", [1])
    one.close()
    admission.admit("a", [1])
    with pytest.raises(InvalidRequest, match="the limit is 2"):
        admission.admit("c", [1] * 3)


def test_sooner_priorities_displace_the_newest_of_the_latest() -> None:
    admission = Admission(AdmissionSettings(4, max_waiting_tokens=100), Clock())
    displaced: list[str] = []

    def admit(name: str, priority: int, *tokens: int) -> Ticket:
        def on_displaced(error: QueueFull) -> None:
            assert error.retry_after_s >= 1
            displaced.append(name)

        return admission.admit("a", tokens, priority, on_displaced)

    first, old, new = admit("first", 5, 10), admit("old", 5, 10), admit("new", 5, 10)
    admit("sooner", 1, 10)
    with pytest.raises(QueueFull, match="4 requests are waiting"):
        admit("as late", 5, 10)
    admission.check("a", priority=4)
    assert displaced == [], "a check displaces nobody"
    first.on_first_token(0)  # it is being answered, so it stays
    admit("soon", 0, 10, 10)
    assert displaced == ["new"]
    new.close()
    admit("large", -1, 75)  # displacing `old` and `sooner` frees enough tokens, so `soon` stays
    assert displaced == ["new", "old", "sooner"]
    with pytest.raises(QueueFull, match="95 prompt tokens"):
        admit("too large", 0, 30)
    for ticket in (first, old):
        ticket.close()
    assert (admission.num_waiting, admission.num_waiting_tokens) == (3, 95)


@pytest.mark.parametrize("others", [[5, 0], [5, 1, 1], [7, 6, 1, 0, -3]])
def test_only_later_priorities_are_displaced_the_latest_first(others: list[int]) -> None:
    admission = Admission(AdmissionSettings(len(others)), Clock())
    displaced: list[int] = []
    for priority in others:
        admission.admit(str(priority), [1], priority, lambda error, priority=priority: displaced.append(priority))
    num_later = sum(priority > 1 for priority in others)
    with pytest.raises(QueueFull):
        admission.admit("b", [1] * (num_later + 1), 1)
    assert not displaced, "what is refused displaces nobody"
    for _ in range(num_later):
        admission.admit("b", [1], 1)
    with pytest.raises(QueueFull):
        admission.admit("b", [1], 1)
    assert displaced == [priority for priority in sorted(others, reverse=True) if priority > 1]


def test_a_full_queue_has_room_for_others_up_to_a_quarter() -> None:
    """One client may have all places until another one comes, which gets those beyond three quarters."""
    admission = Admission(AdmissionSettings(8), Clock())
    displaced: list[tuple[str, QueueFull]] = []

    def admit(client: str, name: str, num_sequences: int = 1, priority: int = 0) -> Ticket:
        return admission.admit(client, [1] * num_sequences, priority, lambda error: displaced.append((name, error)))

    streaming = admit("a", "begun", 2)
    tickets = [admit("a", name, 3 if name == "large" else 1) for name in ("old", "large", "new", "newest")]
    with pytest.raises(QueueFull, match="8 requests are waiting"):
        admission.check("a")
    streaming.on_first_token(0)
    admit("a", "more")
    for client in "bc":
        admission.check(client)
        admit(client, client)
    assert [name for name, _ in displaced] == ["more", "newest"], "the newest first, and none that has begun"
    assert all(tandem_error_response(some_request(), error).status_code == 429 for _, error in displaced)
    for client in "abcd":
        with pytest.raises(QueueFull, match="8 requests are waiting"):
            admit(client, "too many")
    with pytest.raises(QueueFull, match="8 requests are waiting"):
        admit("d", "later than those of the others", priority=1)
    for ticket in (streaming, *tickets):
        ticket.close()
    assert admission._waiting_of == {"b": 1, "c": 1} == admission._waiting_tokens_of


def test_prompt_tokens_of_one_client_leave_a_quarter_to_others() -> None:
    admission = Admission(AdmissionSettings(100, max_waiting_tokens=100), Clock())
    displaced: list[int] = []
    for num_tokens in (40, 25, 20, 10):
        admission.admit("a", [num_tokens], on_displaced=lambda error, size=num_tokens: displaced.append(size))
    admission.admit("b", [15])
    assert displaced == [10]
    with pytest.raises(QueueFull, match="100 prompt tokens"):
        admission.admit("b", [10])  # the rest beyond the share is less than any request of the other client


def test_two_clients_with_few_places_do_not_displace_each_other() -> None:
    for limit in (1, 2, 3):
        admission = Admission(AdmissionSettings(limit), Clock())
        for _ in range(limit):
            admission.admit("a", [1])
        with pytest.raises(QueueFull):
            admission.admit("b", [1])


def test_each_client_gets_its_own_limit_back() -> None:
    """A request that ends gives back each of its sequences, to its own client only."""
    admission = Admission(AdmissionSettings(20, max_requests_per_client=4), Clock())
    for _ in range(3):
        tickets = [admission.admit(client, [1, 1]) for client in ("a", "b", "a", "b")]
        for client in ("a", "b"):
            with pytest.raises(ClientLimitExceeded, match="4 of your sequences"):
                admission.check(client)
        tickets[0].close()
        admission.admit("a", [1, 1]).close()
        with pytest.raises(ClientLimitExceeded):
            admission.admit("b", [1])
        for ticket in tickets:
            ticket.close()
    assert not admission._running and not admission._open


def test_a_request_of_which_one_sequence_streams_is_not_displaced() -> None:
    admission = Admission(AdmissionSettings(3), Clock())
    displaced: list[QueueFull] = []
    admission.admit("a", [1, 1, 1], 5, displaced.append).on_first_token(1)
    admission.admit("b", [1])
    with pytest.raises(QueueFull):
        admission.admit("b", [1])
    assert not displaced


def test_retry_after_of_a_client_limit_is_when_its_oldest_request_should_end() -> None:
    clock = Clock()
    admission = Admission(AdmissionSettings(10, max_requests_per_client=1), clock)
    for _ in range(50):
        ticket = admission.admit("a", [1])
        clock.now += 20
        ticket.close()
    admission.admit("a", [1])
    clock.now += 5
    with pytest.raises(ClientLimitExceeded) as refused:
        admission.check("a")
    assert refused.value.retry_after_s == 15


def test_retry_after_is_the_queue_over_the_recent_speed() -> None:
    clock = Clock()
    admission = Admission(AdmissionSettings(3), clock)
    assert admission.retry_after_s() == 1, "the speed is not known yet"
    for _ in range(5):
        ticket = admission.admit("a", [1000])
        clock.now += 1
        ticket.on_first_token(0)
        ticket.close()
    for _ in range(3):
        admission.admit("a", [3000])
    with pytest.raises(QueueFull) as refused:
        admission.check("a")
    assert refused.value.retry_after_s == 8  # 9000 tokens, 5000 in the last 4 s
    response = tandem_error_response(some_request(), refused.value)
    assert (response.status_code, response.headers["retry-after"]) == (503, "8")
    clock.now += 60
    assert admission.retry_after_s() == 1, "old completions do not count"


class AnyOrder(RuleBasedStateMachine):
    """Random orders of events; the counters always equal the requests present."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.admission = Admission(AdmissionSettings(6, max_waiting_tokens=50, max_requests_per_client=4), self.clock)
        self.open: list[tuple[Ticket, str, dict[int, int], int]] = []

    @rule(
        client=st.sampled_from("ab"),
        tokens=st.lists(st.integers(0, 30), min_size=1, max_size=3),
        priority=st.integers(-1, 1),
    )
    def admit(self, client: str, tokens: list[int], priority: int) -> None:
        waiting = dict(enumerate(tokens))

        def on_displaced(error: QueueFull) -> None:
            assert len(waiting) == len(tokens), "none of its sequences has a token"
            waiting.clear()

        try:
            ticket = self.admission.admit(client, tokens, priority, on_displaced)
        except QueueFull as refused:
            assert 1 <= refused.retry_after_s <= 60
            return
        self.open.append((ticket, client, waiting, len(tokens)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), index=st.integers(0, 2))
    def first_token(self, data: st.DataObject, index: int) -> None:
        ticket, _, waiting, _ = data.draw(st.sampled_from(self.open))
        ticket.on_first_token(index)
        waiting.pop(index, None)
        self.clock.now += 0.5

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.open))
        entry[0].close()
        self.open.remove(entry)

    @invariant()
    def counts(self) -> None:
        waiting = [tokens for _, _, left, _ in self.open for tokens in left.values()]
        assert (self.admission.num_waiting, self.admission.num_waiting_tokens) == (len(waiting), sum(waiting))
        assert len(waiting) <= 6
        for client in "ab":
            running = sum(number for _, whose, _, number in self.open if whose == client)
            assert self.admission._running.get(client, 0) == running <= 4


AnyOrder.TestCase.settings = settings(max_examples=60, deadline=None)
TestAnyOrder = AnyOrder.TestCase
