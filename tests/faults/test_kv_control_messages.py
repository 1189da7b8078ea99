"""A decode worker tolerates duplicate and reordered control messages, sent by a prefill worker that the test plays."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tandem.deploy.processes.runtime_dir import runtime_dir
from tandem.engine.loading.model_loader import load_model
from tandem.kv_transfer.connectors.mapped_memory import map_peer_pool
from tandem.protocol.codec import Codec
from tandem.protocol.messages.dispatch import AbortAttempt, DecodeReserved, PrepareDecode, TokenBatch, ToProxy
from tandem.protocol.messages.generation import SamplingParams, StopConditions
from tandem.protocol.messages.membership import PROTOCOL_VERSION
from tandem.protocol.messages.token_ids import pack_token_ids
from tandem.protocol.messages.transfer import (
    ClosePair,
    CloseTransfer,
    FinishTransfer,
    KVLayout,
    KVReserved,
    OpenPair,
    PairAccepted,
    RenewLeases,
    ReserveKV,
    ShipKV,
    ToPrefillPeer,
)
from tandem.protocol.sockets import DealerSocket, new_context
from tandem.runtime.host import host_id
from tandem.worker.config import WorkerConfig
from tests.faults.test_kv_pairs import ask
from tests.support.cluster import Cluster

PROXY, PAIR = "fake-proxy", "fake-pair"
NUM_PROMPT_TOKENS = 100  # two blocks
NUM_TOKENS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("--threads-per-worker", "1", "--kv-cache-gib", "0.05", "--kv-connector", "ipc") as running:
        yield running


class FakePeers:
    """Sockets of a prefill worker and a proxy, connected to the decode worker at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        self._context = new_context()
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()
        self.prefill: DealerSocket[ToPrefillPeer] = DealerSocket(
            self._context, endpoint, Codec(ToPrefillPeer), self._arrived.put_nowait, PAIR.encode()
        )
        self.proxy: DealerSocket[ToProxy] = DealerSocket(
            self._context, endpoint, Codec(ToProxy), self._arrived.put_nowait, f"{PROXY}:0".encode()
        )

    async def next(self) -> Any:
        """The next message other than a lease renewal, which may come at any time."""
        while isinstance(message := await asyncio.wait_for(self._arrived.get(), 20), RenewLeases):
            pass
        return message

    async def both(self) -> dict[type, Any]:
        """Two messages from two connections, in any order, by type."""
        return {type(message): message for message in (await self.next(), await self.next())}

    def prepare(self, name: str, prefill_epoch: str) -> None:
        tokens = pack_token_ids([4 + i + len(name) for i in range(NUM_PROMPT_TOKENS)])
        stop = StopConditions(NUM_TOKENS, frozenset())
        self.proxy.send(
            PrepareDecode(
                PROXY, [f"r-{name}"], name, tokens, SamplingParams(), [1], stop, 60.0,
                prefill_worker_id="prefill-0", prefill_epoch=prefill_epoch,
                cache_salt=name,
            )
        )  # fmt: skip

    def close(self) -> None:
        self.prefill.close()
        self.proxy.close()
        self._context.term()


async def play(endpoint: str, layout: KVLayout, epoch: str) -> None:
    peers = FakePeers(endpoint)
    prefill = peers.prefill
    open_pair = OpenPair(PROTOCOL_VERSION, "prefill-0", epoch, [os.getpid()], PAIR, layout, host_id(), "cpu", ["ipc"])
    for _ in range(2):
        prefill.send(open_pair)
    accepted = await peers.next()
    assert isinstance(accepted, PairAccepted)  # a second PairAccepted would be read instead of the reservation below

    # Every message twice: the duplicate has no effect.
    peers.prepare("twice", epoch)
    for _ in range(2):
        prefill.send(ReserveKV(PAIR, "twice", NUM_PROMPT_TOKENS))
    answers = await peers.both()
    assert answers.keys() == {KVReserved, DecodeReserved}
    block_ids = answers[KVReserved].block_ids
    assert len(block_ids) == 2
    map_peer_pool(accepted.params[0])[block_ids] = 0
    for _ in range(2):
        prefill.send(ShipKV(PAIR, 0, "twice", 0, 2))
    for _ in range(2):
        prefill.send(FinishTransfer("twice", NUM_PROMPT_TOKENS, [5]))
    reasons: list[str | None] = []
    while len(reasons) < NUM_TOKENS - 1:  # the first came from prefill
        message = await peers.next()
        assert isinstance(message, TokenBatch)
        reasons += [token.finish_reason for token in message.tokens]
    assert reasons == [None, None, "length"]
    for _ in range(2):
        prefill.send(CloseTransfer("twice"))  # long over

    # A reservation that comes after its own end is refused, so no blocks are reserved for it.
    prefill.send(CloseTransfer("late"))
    prefill.send(ReserveKV(PAIR, "late", NUM_PROMPT_TOKENS))
    refused = await peers.next()
    assert refused.transfer_id == "late" and refused.error.code == "request_aborted"

    # Blocks 1 before blocks 0: one message is missing, and the pair fails.
    peers.prepare("gap", epoch)
    prefill.send(ReserveKV(PAIR, "gap", NUM_PROMPT_TOKENS))
    assert (await peers.both()).keys() == {KVReserved, DecodeReserved}
    prefill.send(ShipKV(PAIR, 2, "gap", 1, 1))
    closed = None
    while not isinstance(closed, ClosePair):
        closed = await peers.next()  # the request and the transfer fail with it
    assert "message 1 about shipped blocks was lost" in closed.reason
    peers.proxy.send(AbortAttempt(PROXY, "r-gap"))
    prefill.send(ClosePair(PAIR, "as you say"))  # our word that we write no more: only now are the blocks free again
    prefill.send(ClosePair(PAIR, "as you say"))
    prefill.send(open_pair)  # late or doubled: a pair's id is used once, so it has no answer
    prefill.send(ReserveKV(PAIR, "after", NUM_PROMPT_TOKENS))
    answer = None
    while getattr(answer, "transfer_id", None) != "after":
        answer = await peers.next()
        assert not isinstance(answer, PairAccepted)
    assert "the pair is closed" in answer.error.message
    peers.close()


def test_duplicate_and_reordered_messages_are_harmless(cluster: Cluster) -> None:
    decode, prefill = cluster.worker("decode-0").worker, cluster.worker("prefill-0").worker
    config = msgspec.json.decode((runtime_dir(cluster.port) / "decode-0.json").read_bytes(), type=WorkerConfig)
    answers = ask(cluster, 4, 300)
    asyncio.run(play(decode.endpoint, load_model(config.engine).layout, prefill.epoch))
    assert [answer.result(120) for answer in answers] == [200] * 4, "the other pair never notices"
    cluster.wait_for(cluster.all_blocks_free, 20)
    assert [answer.result(120) for answer in ask(cluster, 4, 300)] == [200] * 4
    (pair,) = cluster.worker("prefill-0").pairs
    assert pair.state == "ready" and cluster.worker("decode-0").worker.epoch == decode.epoch
    assert "Traceback" not in cluster.logs()
