"""KV transfer between workers of several ranks: head routes, and complete blocks over real transports."""

from __future__ import annotations

import os
import queue
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.deploy.processes.process_configs import num_sharing_ranks
from tandem.kv_transfer.connector import DataNetwork, KVReceiver, gather, when_all
from tandem.kv_transfer.ranks.fan_out import WorkerPools
from tandem.kv_transfer.ranks.head_slices import head_routes
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.kv_transfer.ranks.remote_rank import Order, PoolReady, RemoteRank, TransferServer
from tandem.kv_transfer.ranks.worker_tiers import WorkerTiers
from tandem.kv_transfer.tiers.tier import TierAnswer, TiersConfig
from tandem.protocol.codec import Codec
from tandem.protocol.messages.transfer import KVLayout
from tandem.protocol.network_keys import NetworkKeys, load_keys, make_keys
from tandem.protocol.rank_channel import RankChannel, open_channel
from tandem.protocol.tls_identity import tls_contexts
from tandem.runtime.errors import InternalError, KVPathRefused, KVTransferFailed
from tests.support.outcomes import Addresses, Outcomes
from tests.support.waiting import wait_until

NUM_BLOCKS, NUM_LAYERS, NUM_KV_HEADS, HEAD_BYTES = 24, 3, 6, 64
HOST = "127.0.0.1"
NETWORK = DataNetwork(HOST)


@given(st.data())
def test_every_head_is_routed_exactly_once(data: st.DataObject) -> None:
    num_kv_heads = data.draw(st.integers(1, 48))
    sizes = st.sampled_from([n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0])
    src_size, dst_size = data.draw(sizes), data.draw(sizes)
    moved = []
    for route in head_routes(num_kv_heads, src_size, dst_size):
        src_first = route.src_rank * num_kv_heads // src_size
        dst_first = route.dst_rank * num_kv_heads // dst_size
        src = range(src_first + route.src.start, src_first + route.src.stop)
        assert list(src) == list(range(dst_first + route.dst.start, dst_first + route.dst.stop))
        assert 0 <= route.src.start < route.src.stop <= route.src.num_kv_heads == num_kv_heads // src_size
        assert 0 <= route.dst.start < route.dst.stop <= route.dst.num_kv_heads == num_kv_heads // dst_size
        moved += src
    assert sorted(moved) == list(range(num_kv_heads))


def test_equal_numbers_of_ranks_move_whole_blocks() -> None:
    routes = head_routes(8, 4, 4)
    assert [(r.src_rank, r.dst_rank) for r in routes] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert all((r.src.start, r.src.stop, r.src.num_kv_heads) == (0, 2, 2) and r.src == r.dst for r in routes)


@dataclass
class Worker:
    """Ranks of one worker in this process: rank 0 as its worker holds it, the others behind real channels."""

    pools: WorkerPools
    blocks: list[torch.Tensor]  # by rank: uint8 [num_blocks, block_bytes]
    follower_ends: list[Connection]
    followers: list[RemoteRank]

    def heads(self) -> torch.Tensor:
        """All ranks' heads side by side: [num_blocks, 2 * num_layers, NUM_KV_HEADS, HEAD_BYTES]."""
        return torch.cat([b.view(NUM_BLOCKS, 2 * NUM_LAYERS, -1, HEAD_BYTES) for b in self.blocks], 2)


@contextmanager
def worker_of(size: int, keys: NetworkKeys | None = None, tiers: TiersConfig | None = None) -> Iterator[Worker]:
    layout = KVLayout("model", "bfloat16", NUM_LAYERS, NUM_KV_HEADS // size, 8, 4, size)
    num_bytes = NUM_BLOCKS * 2 * NUM_LAYERS * (NUM_KV_HEADS // size) * HEAD_BYTES
    fds, blocks, ends, follower_ends = [], [], [], []
    for rank in range(size):
        fds.append(os.memfd_create(f"test-pool-{rank}"))
        os.ftruncate(fds[-1], num_bytes)
        path = f"/proc/{os.getpid()}/fd/{fds[-1]}"
        mapped = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        mapped.random_(0, 256)
        blocks.append(mapped.view(NUM_BLOCKS, -1))
    for rank in range(1, size):
        end, follower_end = open_channel()
        ends.append(end)
        follower_ends.append(follower_end)
        TransferServer(follower_end, RankPool(rank, layout, blocks[rank], NETWORK)).start()
    network = NETWORK if keys is None else DataNetwork(HOST, tls_contexts(keys))
    followers = [RemoteRank(end) for end in ends]
    for follower in followers:
        follower.wait_until_ready(keys)
    own = RankPool(0, layout, blocks[0], network)
    tiers = tiers or TiersConfig()
    own_tiers = WorkerTiers.of(own.tiers(tiers), followers, tiers)
    yield Worker(WorkerPools(layout, [own, *followers], own_tiers), blocks, follower_ends, followers)
    for fd in fds:
        os.close(fd)


def listen(worker: Worker, connector: str, pair_id: str, num_senders: int) -> tuple[KVReceiver, list[list[bytes]]]:
    """Opens the receiver. Returns it with the addresses for its senders."""
    addresses = Addresses[list[list[bytes]]]()
    receiver = worker.pools.open_receiver(connector, pair_id, num_senders, addresses)
    return receiver, addresses.get()


def checksums_of(worker: Worker, block_ids: list[int]) -> list[int]:
    answers: queue.Queue[list[int] | KVTransferFailed] = queue.Queue()
    worker.pools.checksums(block_ids, answers.put)
    answer = answers.get(timeout=30)
    assert isinstance(answer, list) and len(answer) == len(block_ids)
    return answer


def test_a_failed_checksum_fails_only_its_call() -> None:
    with worker_of(2) as worker:
        answers: queue.Queue[list[int] | KVTransferFailed] = queue.Queue()
        worker.pools.checksums([NUM_BLOCKS], answers.put)
        assert isinstance(answers.get(timeout=30), KVTransferFailed)
        assert checksums_of(worker, [NUM_BLOCKS - 1])


@pytest.mark.parametrize(
    "sizes", [(2, 2), (1, 2), (2, 1), (2, 3), (6, 3)], ids=lambda sizes: f"{sizes[0]}-to-{sizes[1]}"
)
@pytest.mark.parametrize("connector", ["ipc", "tcp", "gloo"])
def test_blocks_of_all_ranks_arrive(connector: str, sizes: tuple[int, int]) -> None:
    with ExitStack() as stack:
        prefill, decode = (stack.enter_context(worker_of(size)) for size in sizes)
        ready = Outcomes()
        receiver, peers = listen(decode, connector, "pair", sizes[0])
        sender = prefill.pools.open_sender(connector, "pair", peers, ready)
        assert ready.next() is None
        rng = random.Random(0)
        sent, received = Outcomes(), Outcomes()
        expected = decode.heads()
        for _ in range(6):
            count = rng.randint(1, 9)
            start = rng.randrange(NUM_BLOCKS - count)
            src = rng.sample(range(NUM_BLOCKS), count) if rng.random() < 0.5 else list(range(start, start + count))
            dst = rng.sample(range(NUM_BLOCKS), count) if rng.random() < 0.5 else list(range(start, start + count))
            expected[dst] = prefill.heads()[src]
            if connector != "ipc":
                receiver.receive(dst, received)
                sender.send(src, dst, sent)
            else:
                sender.send(src, dst, sent)
                assert sent.next() is None
                receiver.receive(dst, received)
            assert received.next() is None
            assert connector == "ipc" or sent.next() is None
            assert torch.equal(decode.heads(), expected)
            assert checksums_of(prefill, src) == checksums_of(decode, dst)
        closed = Outcomes()
        sender.close(lambda: closed(None))
        closed.next()
        receiver.close()
        sender.send([0], [0], sent)
        error = sent.next()
        assert error is not None and "closed" in error.message


def test_followers_use_the_cluster_keys(tmp_path: Path) -> None:
    make_keys(tmp_path)
    keys = load_keys(tmp_path, "worker")
    with worker_of(2, keys) as prefill, worker_of(2, keys) as decode:
        ready, moved = Outcomes(), Outcomes()
        receiver, addresses = listen(decode, "tcp", "pair", 2)
        stranger = RankPool(1, prefill.pools.layout, prefill.blocks[1], NETWORK)
        refused = stranger.open_sender("tcp", "pair", addresses, ready)
        assert ready.next() is not None
        refused.close(lambda: None)
        sender = prefill.pools.open_sender("tcp", "pair", addresses, ready)
        assert ready.next() is None
        receiver.receive([5], moved)
        sender.send([3], [5], moved)
        assert moved.next() is None and moved.next() is None
        assert torch.equal(decode.heads()[5], prefill.heads()[3])
        sender.close(lambda: None)
        receiver.close()


def test_tiers_keep_the_heads_of_all_ranks(tmp_path: Path) -> None:
    tiers = TiersConfig(kv_disk_dir=str(tmp_path), kv_disk_gib=0.01)
    answers: queue.Queue[TierAnswer] = queue.Queue()
    with worker_of(2, tiers=tiers) as worker:
        before = worker.heads()[[3, 4]]
        worker.pools.tiers.store("disk", [3, 4], [b"a" * 16, b"b" * 16], answers.put)
        stored = answers.get(timeout=30)
        assert stored.num_blocks == 2 and stored.error is None
        for blocks in worker.blocks:
            blocks[[3, 4]] = 0
        worker.pools.tiers.load("disk", [3, 4, 5], [b"a" * 16, b"b" * 16, b"c" * 16], answers.put)
        loaded = answers.get(timeout=30)
        assert loaded.num_blocks == 2 and loaded.error is None and torch.equal(worker.heads()[[3, 4]], before)
        for order in (worker.pools.tiers.refresh, worker.pools.tiers.clear):
            order("disk", answers.put)
            assert answers.get(timeout=30).error is None
        worker.pools.tiers.load("disk", [3], [b"a" * 16], answers.put)
        assert answers.get(timeout=30).num_blocks == 0
        worker.pools.tiers.close()


def test_a_dead_rank_fails_its_jobs() -> None:
    with worker_of(2) as prefill, worker_of(2) as decode:
        ready, sent = Outcomes(), Outcomes()
        sender = prefill.pools.open_sender("ipc", "pair", listen(decode, "ipc", "pair", 2)[1], ready)
        assert ready.next() is None
        with socket.socket(fileno=os.dup(prefill.follower_ends[0].fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # this is how the death of its process appears here
        sender.send([1], [1], sent)
        error = sent.next()
        assert error is not None and "rank" in error.message
        sender.send([1], [1], sent)
        assert sent.next() is not None


@pytest.mark.parametrize(
    "forge",
    [
        lambda addresses: [],
        lambda addresses: [*addresses, [], []],
        lambda addresses: [[], []],
        lambda addresses: [addresses[0], []],
        lambda addresses: [addresses[0], [*addresses[1], b"forged"]],
        lambda addresses: [addresses[0], [b"forged"]],
        lambda addresses: [*reversed(addresses)],
    ],
    ids=["none", "of too many ranks", "empty", "one missing", "one too many", "forged", "in the wrong order"],
)
def test_addresses_that_do_not_belong_to_the_ranks_fail_the_pair(forge: Any) -> None:
    with worker_of(2) as prefill, worker_of(2) as decode:
        receiver, addresses = listen(decode, "tcp", "pair", 2)
        ready = Outcomes()
        try:
            sender = prefill.pools.open_sender("tcp", "pair", forge(addresses), ready)
        except KVTransferFailed as error:
            assert "rank" in error.message
        else:
            assert ready.next() is not None
            sender.close(lambda: None)
        receiver.close()


def test_an_order_that_fails_unexpectedly_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    opens = RankPool.open_sender
    failures = [RuntimeError("can't start new thread")]

    def open_sender(self: RankPool, *args: Any) -> Any:
        if self.rank == 1 and failures:
            raise failures.pop()
        return opens(self, *args)

    monkeypatch.setattr(RankPool, "open_sender", open_sender)
    with worker_of(2) as prefill, worker_of(2) as decode:
        ready = Outcomes()
        prefill.pools.open_sender("ipc", "pair-0", listen(decode, "ipc", "pair-0", 2)[1], ready)
        error = ready.next()
        assert error is not None and "can't start new thread" in error.message
        prefill.pools.open_sender("ipc", "pair-1", listen(decode, "ipc", "pair-1", 2)[1], ready)
        assert ready.next() is None


def test_a_frozen_follower_does_not_count_as_closed() -> None:
    """It may still write what it was told to before. Its silence is no proof."""
    end, follower_end = open_channel()
    with socket.socket(fileno=os.dup(end.fileno())) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 50_000))
    RankChannel(follower_end, Codec(Order)).send(PoolReady())
    rank = RemoteRank(end)
    rank.wait_until_ready()
    ready, sent, closed = Outcomes(), Outcomes(), Outcomes()
    sender = rank.open_sender("ipc", "pair", [], ready)
    for _ in range(20):
        sender.send(list(range(30_000)), list(range(30_000)), sent)
    sender.close(lambda: closed(None))
    rank.order("prepare", "pair", [1], on_done=ready)
    error = ready.next()
    assert error is not None and "takes no orders" in error.message
    assert closed.is_empty
    follower_end.close()


def test_a_rank_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.kv_transfer.ranks.remote_rank.READY_TIMEOUT_S", 0.01)
    ours, theirs = open_channel()
    rank = RemoteRank(ours)
    with pytest.raises(InternalError, match="did not come up"):
        rank.wait_until_ready()
    theirs.close()
    with pytest.raises(InternalError, match="did not come up"):
        rank.wait_until_ready()


def test_a_refusal_at_any_rank_is_a_refusal_of_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of one rank may not reach its peer, so the pair must use another connector."""
    opens = RankPool.open_sender

    def open_sender(self: RankPool, connector: str, pair_id: str, peers: Any, on_ready: Any) -> Any:
        if self.rank == 0:
            return opens(self, connector, pair_id, peers, on_ready)
        on_ready(KVPathRefused("cannot map the peer's KV pool"))
        return opens(self, connector, pair_id, peers, lambda error: None)

    monkeypatch.setattr(RankPool, "open_sender", open_sender)
    with worker_of(2) as prefill, worker_of(2) as decode:
        ready = Outcomes()
        prefill.pools.open_sender("ipc", "pair", listen(decode, "ipc", "pair", 2)[1], ready)
        error = ready.next()
        assert isinstance(error, KVPathRefused) and error.message == "cannot map the peer's KV pool"


@pytest.mark.parametrize("refused_last", [False, True])
def test_a_refusal_is_reported_before_other_errors(refused_last: bool) -> None:
    outcomes = Outcomes()
    done = when_all(2, outcomes)
    errors = [KVPathRefused("refused"), KVTransferFailed("no answer")]
    for error in reversed(errors) if refused_last else errors:
        done(error)
    assert outcomes.next() is errors[0]


@given(st.data())
def test_the_memory_plan_counts_all_paths_of_a_rank(data: st.DataObject) -> None:
    num_heads = data.draw(st.integers(1, 32))
    sizes = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    own, other = data.draw(st.sampled_from(sizes)), data.draw(st.sampled_from(sizes))
    for routes, rank_of in (
        (head_routes(num_heads, own, other), lambda route: route.src_rank),
        (head_routes(num_heads, other, own), lambda route: route.dst_rank),
    ):
        assert max(Counter(map(rank_of, routes)).values()) <= num_sharing_ranks(own, other)


@given(st.permutations(range(5)), st.none() | st.integers(0, 4))
def test_results_are_gathered_in_the_order_of_the_jobs(order: list[int], failing: int | None) -> None:
    gathered: list[object] = []
    on_all: Callable[[list[str] | KVTransferFailed], None] = gathered.append
    callbacks = gather(5, on_all)
    for job in order[:-1]:
        callbacks[job](KVTransferFailed("no") if job == failing else str(job))
    assert not gathered
    callbacks[order[-1]](KVTransferFailed("no") if order[-1] == failing else str(order[-1]))
    [result] = gathered
    assert isinstance(result, KVTransferFailed) if failing is not None else result == list("01234")


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_the_last_rank_reports_for_all(failures: list[bool]) -> None:
    outcomes = Outcomes()
    done = when_all(len(failures), outcomes)
    errors = [KVTransferFailed(str(i)) if failed else None for i, failed in enumerate(failures)]
    threads = [threading.Thread(target=done, args=(error,)) for error in errors]
    for thread in threads[:-1]:
        thread.start()
    for thread in threads[:-1]:
        thread.join()
    assert outcomes.is_empty
    threads[-1].start()
    threads[-1].join()
    error = outcomes.next()
    assert (error is not None) == any(failures) and outcomes.is_empty


def test_orders_do_not_wait_for_a_frozen_follower() -> None:
    """A full channel blocks a sender for seconds."""
    end, follower_end = open_channel()
    sent, released = threading.Event(), threading.Event()

    def send(message: object) -> None:
        sent.set()
        assert released.wait(30), "the caller waits for the channel"

    rank = RemoteRank(end)
    rank._channel.send = send  # type: ignore[method-assign]
    outcomes = Outcomes()
    for block_id in (1, 2):
        rank.order("prepare", "pair", [block_id], on_done=outcomes)
    assert sent.wait(30) and outcomes.is_empty
    released.set()
    for each in (end, follower_end):
        each.close()


def test_an_order_that_cannot_be_sent_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.protocol.codec.MAX_MESSAGE_BYTES", 1000)
    with worker_of(2) as worker:
        outcomes, checksums = Outcomes(), queue.Queue[list[int] | KVTransferFailed]()
        worker.followers[0].order("prepare", "pair", list(range(1000)), on_done=outcomes)
        error = outcomes.next()
        assert error is not None and "cannot be sent" in error.message
        worker.pools.checksums([0] * 150, checksums.put)  # the order is small, the result is not
        assert isinstance(checksums.get(timeout=30), KVTransferFailed)
        assert checksums_of(worker, [1])


def test_an_answer_that_cannot_be_handled_keeps_no_other_from_being_read(caplog: pytest.LogCaptureFixture) -> None:
    def mistake(result: object) -> None:
        raise RuntimeError("Event loop is closed")

    with worker_of(2) as worker:
        worker.followers[0].order("prepare", "pair", [1], on_done=mistake)
        assert checksums_of(worker, [1])
    assert "could not be handled" in caplog.text


@pytest.mark.parametrize("side", ["rank 0", "follower"])
def test_what_is_not_a_message_ends_the_channel(side: str, caplog: pytest.LogCaptureFixture) -> None:
    end, follower_end = open_channel()
    layout = KVLayout("model", "bfloat16", NUM_LAYERS, 3, 8, 4, 2)
    TransferServer(follower_end, RankPool(1, layout, torch.zeros(1, 1), NETWORK)).start()
    rank = RemoteRank(end)
    rank.wait_until_ready()
    sender: Any = end if side == "rank 0" else follower_end
    sender.send_bytes(b"nonsense")
    outcomes = Outcomes()
    wait_until(lambda: "cannot be understood" in caplog.text)
    rank.order("prepare", "pair", [1], on_done=outcomes)
    error = outcomes.next()
    assert error is not None and "rank" in error.message
