"""The fake connector follows the rules of the real ones and injects exactly the configured faults."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from tandem.kv_transfer.connector import Peer
from tandem.protocol.messages.transfer import ConnectorParams
from tandem.runtime.errors import KVTransferFailed
from tests.support.fake_connector import TIMEOUT_S, FakeNetwork, FakeReceiver, FakeSender, Faults

NUM_BLOCKS = 12


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Pair:
    """Two pools, a path between them, and the outcome of each job by name."""

    def __init__(self, one_sided: bool, faults: Faults | None = None, seed: int = 0) -> None:
        self.clock = Clock()
        self.network = FakeNetwork(self.clock, seed, one_sided, faults)
        self.source = torch.randint(0, 256, (NUM_BLOCKS, 8), dtype=torch.uint8, generator=torch.manual_seed(seed))
        self.target = torch.zeros_like(self.source)
        self.outcomes: list[tuple[str, KVTransferFailed | None]] = []
        self.receiver: FakeReceiver = self.network.open_receiver(
            "path", HashStore, self.target, "", lambda error: self.outcomes.append(("receiver ready", error))
        )
        self.sender: FakeSender = self.network.open_sender(
            Peer("path", ConnectorParams()),
            self.source,
            "",
            lambda error: self.outcomes.append(("sender ready", error)),
        )
        self.network.run_due()
        assert self.outcomes == [("receiver ready", None), ("sender ready", None)]
        self.outcomes.clear()

    def send(self, name: str, src: list[int], dst: list[int]) -> None:
        self.sender.send(src, dst, lambda error: self.outcomes.append((f"send {name}", error)))

    def receive(self, name: str, dst: list[int]) -> None:
        self.receiver.receive(dst, lambda error: self.outcomes.append((f"receive {name}", error)))

    def advance(self, seconds: float) -> None:
        self.clock.now += seconds
        self.network.run_due()

    def to_rest(self) -> None:
        while (due := self.network.next_due()) is not None:
            self.clock.now = max(self.clock.now, due)
            self.network.run_due()

    def failed(self) -> list[str]:
        return [name for name, error in self.outcomes if error is not None]


@pytest.mark.parametrize("one_sided", [True, False])
def test_blocks_arrive_delayed_and_in_order(one_sided: bool) -> None:
    pair = Pair(one_sided, Faults(delay_s=1.0))
    pair.send("a", [0, 1, 2], [5, 4, 9])
    pair.receive("a", [5, 4, 9])
    pair.network.run_due()
    assert not torch.equal(pair.target[9], pair.source[2])
    pair.to_rest()
    assert 0 < pair.clock.now <= 3.0
    assert torch.equal(pair.target[[5, 4, 9]], pair.source[:3])
    assert sorted(pair.outcomes) == [("receive a", None), ("send a", None)]


def test_blocks_in_flight_are_written_after_the_pair_is_closed() -> None:
    pair = Pair(one_sided=True, faults=Faults(delay_s=1.0))
    pair.send("begun", [0, 1], [0, 1])
    pair.send("waiting", [2], [2])
    pair.advance(0.0)
    pair.network.freeze("path")
    closed: list[float] = []
    pair.sender.close(lambda: closed.append(pair.clock.now))
    pair.advance(100.0)
    assert not pair.target.any() and not pair.outcomes and not closed
    pair.network.thaw("path")
    pair.to_rest()
    assert torch.equal(pair.target[:2], pair.source[:2]) and not pair.target[2].any()
    assert [name for name, _ in pair.outcomes] == ["send begun", "send waiting"] and pair.failed() == ["send waiting"]
    assert len(closed) == 1


def test_a_failed_receiver_is_not_written_to() -> None:
    pair = Pair(one_sided=False, faults=Faults(delay_s=1.0))
    pair.send("a", [0, 1, 2], [0, 1, 2])
    pair.receive("a", [0, 1, 2])
    pair.advance(0.0)
    pair.network.freeze("path")
    pair.advance(TIMEOUT_S)
    assert pair.failed() == ["receive a"]
    before = pair.target.clone()
    pair.network.thaw("path")
    pair.to_rest()
    assert torch.equal(pair.target, before)
    assert pair.failed() == ["receive a", "send a"]


def test_one_sided_senders_write_to_a_frozen_receiver() -> None:
    pair = Pair(one_sided=True, faults=Faults(delay_s=1.0))
    pair.network.freeze("path", "receiver")
    pair.send("a", [0, 1], [0, 1])
    pair.receive("a", [0, 1])
    pair.to_rest()
    assert torch.equal(pair.target[:2], pair.source[:2]) and pair.outcomes == [("send a", None)]
    pair.network.thaw("path", "receiver")
    pair.to_rest()
    assert sorted(pair.outcomes) == [("receive a", None), ("send a", None)]


def test_a_frozen_two_sided_receiver_fails_the_path_and_receives_nothing() -> None:
    pair = Pair(one_sided=False, faults=Faults(delay_s=1.0))
    pair.send("a", [0, 1, 2], [0, 1, 2])
    pair.receive("a", [0, 1, 2])
    pair.advance(0.0)
    pair.network.freeze("path", "receiver")
    pair.advance(TIMEOUT_S)
    assert pair.failed() == ["send a"]
    before = pair.target.clone()
    pair.network.thaw("path", "receiver")
    pair.to_rest()
    assert pair.failed() == ["send a", "receive a"] and torch.equal(pair.target, before)


def test_sends_without_a_receiver_time_out() -> None:
    pair = Pair(one_sided=False)
    pair.send("a", [0], [0])
    pair.send("b", [0], [0])
    pair.advance(TIMEOUT_S - 0.1)
    assert not pair.outcomes
    pair.advance(0.1)
    assert pair.failed() == ["send a", "send b"] and not pair.target.any()


def test_waiting_for_a_slow_transfer_is_no_time_out() -> None:
    pair = Pair(one_sided=False, faults=Faults(delay_s=4.0))
    for name in "abc":
        pair.send(name, [0, 1], [0, 1])
        pair.receive(name, [0, 1])
    pair.to_rest()
    assert pair.clock.now > TIMEOUT_S and not pair.failed() and len(pair.outcomes) == 6


@pytest.mark.parametrize("one_sided", [True, False])
def test_faults_occur_at_the_configured_rate(one_sided: bool) -> None:
    num_lost = num_corrupted = 0
    for seed in range(300):
        pair = Pair(one_sided, Faults(loss=0.3, corruption=0.2), seed)
        pair.send("a", [0, 1, 2, 3], [0, 1, 2, 3])
        pair.receive("a", [0, 1, 2, 3])
        pair.to_rest()
        assert bool(pair.network.num_lost_transfers) == ("send a" in pair.failed())
        if not pair.failed():
            differing = sum(not torch.equal(a, b) for a, b in zip(pair.source[:4], pair.target[:4], strict=True))
            assert differing == pair.network.num_corrupted_blocks
            num_corrupted += differing
        num_lost += pair.network.num_lost_transfers
    assert 60 < num_lost < 120 and 100 < num_corrupted < 230


ACTS = st.sampled_from(
    [
        "send", "receive", "advance", "freeze", "thaw", "freeze receiver", "thaw receiver", "close sender",
        "close receiver",
    ]
)  # fmt: skip


def run(acts: list[str], one_sided: bool, seed: int) -> Pair:
    pair, rng = Pair(one_sided, Faults(delay_s=2.0, loss=0.1, corruption=0.1), seed), random.Random(seed)
    num_closed = 0

    def closed() -> None:
        nonlocal num_closed
        num_closed += 1
        assert not pair.sender.jobs

    for index, act in enumerate(acts):
        ids = rng.sample(range(NUM_BLOCKS), rng.randint(1, 4))
        if act == "send":
            pair.send(str(index), ids, ids[::-1])
            if not one_sided:
                pair.receive(str(index), ids[::-1])
        elif act == "receive" and one_sided:
            pair.receive(str(index), ids)
        elif act == "advance":
            pair.advance(rng.uniform(0.0, 3.0))
        elif act.startswith("freeze"):
            pair.network.freeze("path", "receiver" if act.endswith("receiver") else "sender")
        elif act.startswith("thaw"):
            pair.network.thaw("path", "receiver" if act.endswith("receiver") else "sender")
        elif act == "close sender":
            pair.sender.close(closed)
        elif act == "close receiver":
            pair.receiver.close()
    pair.network.thaw("path", "sender")
    pair.network.thaw("path", "receiver")
    pair.to_rest()
    assert num_closed == ("close sender" in acts)
    return pair


@settings(max_examples=200, deadline=None)
@given(st.lists(ACTS, max_size=30), st.booleans(), st.integers(0, 1000))
def test_every_job_ends_once_and_runs_are_reproducible(acts: list[str], one_sided: bool, seed: int) -> None:
    pair = run(acts, one_sided, seed)
    ended = Counter(name for name, _ in pair.outcomes)
    sends = [f"send {i}" for i, act in enumerate(acts) if act == "send"]
    takes = [f"receive {i}" for i, act in enumerate(acts) if act == ("receive" if one_sided else "send")]
    assert ended == Counter(sends + takes)
    again = run(acts, one_sided, seed)
    assert [(name, str(error)) for name, error in again.outcomes] == [(n, str(e)) for n, e in pair.outcomes]
    assert torch.equal(again.target, pair.target) and again.clock.now == pair.clock.now
