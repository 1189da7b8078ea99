"""KV transfer between workers of several ranks: head routes, and complete blocks over real transports."""

from __future__ import annotations

import os
import queue
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.deploy.processes.process_configs import num_sharing_ranks
from tandem.kv_transfer.connector import DataNetwork, when_all
from tandem.kv_transfer.ranks.head_slices import head_routes
from tandem.kv_transfer.ranks.orders import Order, PoolReady, PrepareBlocks
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.kv_transfer.ranks.remote_rank import RemoteRank
from tandem.kv_transfer.ranks.transfer_server import TransferServer
from tandem.kv_transfer.ranks.worker_pools import WorkerPools
from tandem.protocol.codec import Codec
from tandem.protocol.messages.transfer import ConnectorParams, KVLayout
from tandem.protocol.rank_channel import RankChannel, open_channel
from tandem.runtime.errors import InternalError, KVPathRefused, KVTransferFailed
from tests.support.outcomes import Outcomes

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

    def heads(self) -> torch.Tensor:
        """All ranks' heads side by side: [num_blocks, 2 * num_layers, NUM_KV_HEADS, HEAD_BYTES]."""
        return torch.cat([b.view(NUM_BLOCKS, 2 * NUM_LAYERS, -1, HEAD_BYTES) for b in self.blocks], 2)


@contextmanager
def worker_of(size: int) -> Iterator[Worker]:
    layout = KVLayout("model", "bfloat16", NUM_LAYERS, NUM_KV_HEADS // size, 8, 4, size)
    num_bytes = NUM_BLOCKS * 2 * NUM_LAYERS * (NUM_KV_HEADS // size) * HEAD_BYTES
    fds, blocks, params, ends, follower_ends = [], [], [], [], []
    for rank in range(size):
        fds.append(os.memfd_create(f"test-pool-{rank}"))
        os.ftruncate(fds[-1], num_bytes)
        path = f"/proc/{os.getpid()}/fd/{fds[-1]}"
        mapped = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        mapped.random_(0, 256)
        blocks.append(mapped.view(NUM_BLOCKS, -1))
        params.append(ConnectorParams(os.getpid(), fds[-1], num_bytes, NUM_BLOCKS))
    for rank in range(1, size):
        end, follower_end = open_channel()
        ends.append(end)
        follower_ends.append(follower_end)
        TransferServer(follower_end, RankPool(rank, layout, blocks[rank], NETWORK), params[rank]).start()
    pools = WorkerPools(RankPool(0, layout, blocks[0], NETWORK), params[0], ends)
    pools.wait_until_ready()
    assert pools.params == params
    yield Worker(pools, blocks, follower_ends)
    for fd in fds:
        os.close(fd)


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
        receiver, peers = decode.pools.open_receiver(connector, "pair", sizes[0], ready)
        sender = prefill.pools.open_sender(connector, "pair", peers, ready)
        assert ready.next() is None and ready.next() is None
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


def test_a_dead_rank_fails_its_jobs() -> None:
    with worker_of(2) as prefill, worker_of(2) as decode:
        ready, sent = Outcomes(), Outcomes()
        sender = prefill.pools.open_sender("ipc", "pair", decode.pools.params, ready)
        assert ready.next() is None
        with socket.socket(fileno=os.dup(prefill.follower_ends[0].fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # this is how the death of its process appears here
        sender.send([1], [1], sent)
        error = sent.next()
        assert error is not None and "rank" in error.message
        sender.send([1], [1], sent)
        assert sent.next() is not None


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
        prefill.pools.open_sender("ipc", "pair-0", decode.pools.params, ready)
        error = ready.next()
        assert error is not None and "can't start new thread" in error.message
        prefill.pools.open_sender("ipc", "pair-1", decode.pools.params, ready)
        assert ready.next() is None


def test_a_frozen_follower_does_not_count_as_closed() -> None:
    """It may still write what it was told to before. Its silence is no proof."""
    end, follower_end = open_channel()
    with socket.socket(fileno=os.dup(end.fileno())) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 50_000))
    RankChannel(follower_end, Codec(Order)).send(PoolReady(ConnectorParams()))
    rank = RemoteRank(end)
    rank.wait_until_ready(30)
    ready, sent, closed = Outcomes(), Outcomes(), Outcomes()
    sender = rank.open_sender("ipc", "pair", [], ready)
    for _ in range(20):
        sender.send(list(range(30_000)), list(range(30_000)), sent)
    sender.close(lambda: closed(None))
    rank.order(lambda job_id: PrepareBlocks(job_id, "pair", [1]), ready)
    error = ready.next()
    assert error is not None and "takes no orders" in error.message
    assert closed.is_empty
    follower_end.close()


def test_a_rank_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.kv_transfer.ranks.worker_pools.READY_TIMEOUT_S", 0.01)
    layout = KVLayout("model", "bfloat16", NUM_LAYERS, 3, 8, 4, 2)
    ours, theirs = open_channel()
    pools = WorkerPools(RankPool(0, layout, torch.zeros(1, 1), NETWORK), ConnectorParams(), [ours])
    with pytest.raises(InternalError, match="did not come up"):
        pools.wait_until_ready()
    theirs.close()
    with pytest.raises(InternalError, match="did not come up"):
        pools.wait_until_ready()


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
        prefill.pools.open_sender("ipc", "pair", decode.pools.params, ready)
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
    rank.order(lambda job_id: PrepareBlocks(job_id, "pair", [1]), outcomes)
    rank.order(lambda job_id: PrepareBlocks(job_id, "pair", [2]), outcomes)
    assert sent.wait(30) and outcomes.is_empty
    released.set()
    for each in (end, follower_end):
        each.close()
