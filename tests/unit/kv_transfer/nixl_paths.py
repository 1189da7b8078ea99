"""Paths of the `nixl` connector in one process, over UCX. Run by test_nixl.py, where NIXL is on the path."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kv_transfer.connector import DataNetwork, KVReceiver, KVSender, Peer, PeerView
from tandem.kv_transfer.connectors import nixl
from tandem.kv_transfer.handshake import offered_connectors
from tandem.kv_transfer.ranks.head_slices import head_routes
from tandem.kv_transfer.registry import load_connector
from tandem.protocol.messages.checks import MAX_ADDRESS_BYTES
from tandem.runtime.errors import KVTransferFailed

HOST = "127.0.0.1"
NUM_BLOCKS, BLOCK_BYTES = 24, 12 * 1024
NUM_LAYERS, NUM_HEADS = 3, 4
Result = KVTransferFailed | None


class OpenedPath:
    """Both ends of a path. view: the part of the peer's pool that `source` goes to."""

    def __init__(self, source: torch.Tensor, destination: torch.Tensor, view: PeerView = lambda pool: pool) -> None:
        self.results: queue.Queue[Result] = queue.Queue()
        addresses: queue.Queue[bytes | KVTransferFailed] = queue.Queue()
        made_by, network = load_connector("nixl"), DataNetwork(HOST)
        self.receiver: KVReceiver = made_by.open_receiver("path", destination, network, addresses.put)
        address = addresses.get(timeout=30)
        assert isinstance(address, bytes), address
        assert 0 < len(address) < MAX_ADDRESS_BYTES / 4
        self.sender: KVSender = made_by.open_sender(Peer("path", address, view), source, network, self.results.put)
        self.error = self.results.get(timeout=30)

    def move(self, src: Sequence[int], dst: Sequence[int]) -> Result:
        self.sender.send(src, dst, self.results.put)
        return self.results.get(timeout=30)

    def close(self) -> None:
        closed: queue.Queue[None] = queue.Queue()
        self.sender.close(lambda: closed.put(None))
        closed.get(timeout=30)
        self.receiver.close()


def new_pools() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randint(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
    return source, torch.zeros_like(source)


@pytest.fixture(scope="module")
def path() -> OpenedPath:
    """The pools are kept for the agents' sake."""
    return OpenedPath(*POOLS)


POOLS = new_pools()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_blocks_arrive_where_they_should(path: OpenedPath, data: st.DataObject) -> None:
    source, destination = POOLS
    count = data.draw(st.integers(1, NUM_BLOCKS))
    src, dst = (data.draw(st.permutations(range(NUM_BLOCKS)))[:count] for _ in range(2))
    destination.zero_()
    assert path.error is None and path.move(src, dst) is None
    expected = torch.zeros_like(destination)
    expected[dst] = source[src]
    assert torch.equal(destination, expected)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 4), (4, 2)], ids=str)
def test_heads_go_from_every_rank_to_every_rank(sizes: tuple[int, int]) -> None:
    sources, destinations = (
        [torch.randint(0, 256, (NUM_BLOCKS, BLOCK_BYTES // size), dtype=torch.uint8) for _ in range(size)]
        for size in sizes
    )
    before = [each.clone() for each in destinations]
    src, dst = [1, 5, 6, 7], [3, 0, 23, 11]
    for route in head_routes(NUM_HEADS, *sizes):
        opened = OpenedPath(
            route.src.of(sources[route.src_rank], NUM_LAYERS),
            route.dst.of(destinations[route.dst_rank], NUM_LAYERS),
            lambda pool, route=route: route.dst.of(pool, NUM_LAYERS),
        )
        assert opened.error is None and opened.move(src, dst) is None
        opened.close()

    def heads(pools: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([pool.view(NUM_BLOCKS, 2 * NUM_LAYERS, NUM_HEADS // len(pools), -1) for pool in pools], 2)

    expected = heads(before)
    expected[dst] = heads(sources)[src]
    assert torch.equal(heads(destinations), expected)


def test_long_transfers_are_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MESSAGE_BYTES", 3 * BLOCK_BYTES)
    source, destination = new_pools()
    opened = OpenedPath(source, destination)
    assert opened.move(range(NUM_BLOCKS), range(NUM_BLOCKS)) is None and torch.equal(destination, source)
    opened.close()


def test_a_closed_path_refuses_and_others_of_the_agent_go_on() -> None:
    source, destination = new_pools()
    first, second = OpenedPath(source, destination), OpenedPath(source, destination)
    first.close()
    error = first.move([0], [0])
    assert error is not None and "closed" in error.message
    assert second.move([2], [1]) is None and torch.equal(destination[1], source[2])
    second.close()


def num_sockets() -> int:
    return sum(
        str(file.readlink()).startswith("socket:") for file in Path("/proc/self/fd").iterdir() if file.is_symlink()
    )


def test_paths_that_are_opened_again_share_their_connection() -> None:
    source, destination = new_pools()
    counts = []
    for _ in range(4):
        opened = OpenedPath(source, destination)
        assert opened.move([3], [5]) is None
        opened.close()
        counts.append(num_sockets())
    assert counts[-1] <= counts[0]


def test_threads_of_idle_agents_sleep(path: OpenedPath) -> None:
    """A thread that polls without pause is only ever interrupted, however little time a busy machine gives it."""
    before = thread_activity()
    time.sleep(1)
    used = {
        name: (ticks - before[name][0], sleeps - before[name][1]) for name, (ticks, sleeps) in thread_activity().items()
    }
    assert path.error is None and len(used) > 1
    assert not {name: each for name, each in used.items() if each[0] > 2 and each[1] < 10}


def thread_activity() -> dict[str, tuple[int, int]]:
    """Returns for each thread of this process its CPU time in ticks, and how often it went to sleep."""
    activity = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        activity[task.name] = int(fields[11]) + int(fields[12]), int(status["voluntary_ctxt_switches"])
    return activity


def test_pools_of_other_sizes_are_refused() -> None:
    source, _ = new_pools()
    opened = OpenedPath(source, torch.zeros(4, 64, dtype=torch.uint8))
    assert opened.error is not None and "do not fit" in opened.error.message
    opened.close()


def test_auto_offers_nixl_unless_keys_demand_encryption() -> None:
    assert [*offered_connectors("auto", "cpu")] == ["ipc", "nixl", "tcp", "gloo"]
    assert [*offered_connectors("auto", "cpu", has_keys=True)] == ["ipc", "tcp"]
    assert [*offered_connectors("auto", "cuda", has_keys=True)] == ["ipc", "nixl", "nccl"]
