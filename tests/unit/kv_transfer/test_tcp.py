"""The `tcp` connector over real sockets, with and without TLS: any blocks, strangers, other keys, dead peers."""

from __future__ import annotations

import queue
import socket
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kv_transfer.connector import DataNetwork, Peer
from tandem.kv_transfer.connectors import tcp
from tandem.kv_transfer.connectors.addresses import SocketAddress
from tandem.kv_transfer.connectors.tcp import TcpReceiver, TcpSender
from tandem.protocol.network_keys import load_keys, make_keys
from tandem.protocol.tls_identity import tls_contexts
from tandem.runtime.errors import KVTransferFailed

HOST = "127.0.0.1"
CLEAR = DataNetwork(HOST)


class Results:
    """Collects `on_done` calls from other threads."""

    def __init__(self) -> None:
        self._queue: queue.Queue[KVTransferFailed | None] = queue.Queue()

    def __call__(self, error: KVTransferFailed | None) -> None:
        self._queue.put(error)

    def next(self, timeout_s: float = 30.0) -> KVTransferFailed | None:
        return self._queue.get(timeout=timeout_s)


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> DataNetwork:
    return network_with_keys(tmp_path_factory.mktemp("keys"))


def network_with_keys(folder: Path) -> DataNetwork:
    make_keys(folder)
    return DataNetwork(HOST, tls_contexts(load_keys(folder, "worker")))


def listen(destination: torch.Tensor, network: DataNetwork) -> tuple[TcpReceiver, bytes]:
    addresses: list[bytes | KVTransferFailed] = []
    receiver = TcpReceiver("pair/0-0", destination, network, addresses.append)
    [address] = addresses
    assert isinstance(address, bytes), address
    return receiver, address


class BothEnds:
    """Both ends of a path in this process."""

    def __init__(
        self, source: torch.Tensor, destination: torch.Tensor, ours: DataNetwork = CLEAR, theirs: DataNetwork = CLEAR
    ) -> None:
        self.ready = Results()
        self.receiver, address = listen(destination, theirs)
        self.sender = TcpSender(Peer("pair/0-0", address), source, ours, self.ready)

    def connected(self) -> BothEnds:
        assert self.ready.next() is None
        return self

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        done = Results()
        self.receiver.receive(dst, done)
        self.sender.send(src, dst, done)
        assert done.next() is None and done.next() is None

    def close(self) -> None:
        closed = Results()
        self.sender.close(lambda: closed(None))
        self.receiver.close(lambda: closed(None))
        closed.next(), closed.next()


@pytest.fixture(scope="module", params=["clear", "encrypted"])
def network(request: pytest.FixtureRequest, encrypted: DataNetwork) -> DataNetwork:
    return CLEAR if request.param == "clear" else encrypted


@pytest.fixture(scope="module")
def large(network: DataNetwork) -> Iterator[tuple[BothEnds, torch.Tensor, torch.Tensor]]:
    """Blocks of 300 KiB, so that a chunk has three."""
    source = torch.randint(0, 256, (24, 300 << 10), dtype=torch.uint8)
    destination = torch.zeros_like(source)
    path = BothEnds(source, destination, network, network).connected()
    yield path, source, destination
    path.close()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_blocks_arrive_where_they_should(
    large: tuple[BothEnds, torch.Tensor, torch.Tensor], data: st.DataObject
) -> None:
    path, source, destination = large
    blocks = st.lists(st.integers(0, 23), min_size=1, max_size=24, unique=True)
    src = data.draw(blocks.map(sorted) | blocks)
    dst = data.draw(st.permutations(range(24)) | st.just(list(range(24))))[: len(src)]
    destination.zero_()
    path.move(src, dst)
    expected = torch.zeros_like(destination)
    expected[dst] = source[src]
    assert torch.equal(destination, expected)


def test_some_heads_of_blocks_travel(network: DataNetwork) -> None:
    source = torch.randint(0, 256, (8, 4, 6, 64), dtype=torch.uint8)
    destination = torch.zeros(10, 4, 4, 64, dtype=torch.uint8)
    path = BothEnds(source[:, :, 2:4], destination[:, :, 1:3], network, network).connected()
    path.move([1, 2, 7], [9, 0, 4])
    assert torch.equal(destination[[9, 0, 4], :, 1:3], source[[1, 2, 7], :, 2:4])
    assert not destination[:, :, 0].any() and not destination[:, :, 3].any() and not destination[5].any()
    path.close()


def test_the_network_carries_no_plain_text_with_keys(encrypted: DataNetwork) -> None:
    source = torch.zeros(1, 4096, dtype=torch.uint8)
    path = BothEnds(source, torch.zeros_like(source), encrypted, encrypted).connected()
    for end in (path.sender, path.receiver):
        for link in end._links:
            secure = link._socket
            assert isinstance(secure, ssl.SSLSocket) and secure.version() == "TLSv1.3"
            assert secure.getpeercert(binary_form=True) is not None, "both ends prove who they are"
    path.close()


def test_ends_that_derive_their_certificates_apart_trust_each_other(tmp_path: Path) -> None:
    make_keys(tmp_path)
    ours, theirs = (DataNetwork(HOST, tls_contexts(load_keys(tmp_path, "worker"))) for _ in range(2))
    source = torch.randint(0, 256, (1, 64), dtype=torch.uint8)
    destination = torch.zeros_like(source)
    path = BothEnds(source, destination, ours, theirs).connected()
    path.move([0], [0])
    assert torch.equal(destination, source)
    path.close()


@pytest.mark.parametrize("case", ["other keys", "no keys at the sender", "no keys at the receiver"])
def test_peers_without_the_same_keys_are_refused(
    case: str, encrypted: DataNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "CONNECT_TIMEOUT_S", 3.0)
    ours = {"other keys": network_with_keys(tmp_path / "k"), "no keys at the sender": CLEAR}.get(case, encrypted)
    theirs = CLEAR if case == "no keys at the receiver" else encrypted
    blocks = torch.zeros(2, 64, dtype=torch.uint8)
    path = BothEnds(blocks, blocks.clone(), ours, theirs)
    received = Results()
    path.receiver.receive([0], received)
    assert path.ready.next() is not None and received.next() is not None
    path.close()


def test_strangers_do_not_disturb(network: DataNetwork) -> None:
    """Connections that say nothing, nonsense or another path's id are dropped, and the peer still connects."""
    source = torch.randint(0, 256, (2, 64), dtype=torch.uint8)
    ready = Results()
    destination = torch.zeros_like(source)
    receiver, address = listen(destination, network)
    port = msgspec.msgpack.decode(address, type=SocketAddress).port
    strangers = [socket.create_connection((HOST, port)) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    strangers[1].close()
    sender = TcpSender(Peer("pair/0-0", address), source, network, ready)
    assert ready.next() is None
    done = Results()
    receiver.receive([1], done)
    sender.send([0], [1], done)
    assert done.next() is None and done.next() is None
    assert torch.equal(destination[1], source[0])
    sender.close(lambda: None)
    receiver.close()
    for stranger in strangers:
        stranger.close()


def test_ends_that_disagree_notice(network: DataNetwork) -> None:
    blocks = torch.zeros(4, 64, dtype=torch.uint8)
    path = BothEnds(blocks, blocks.clone(), network, network).connected()
    sent, received = Results(), Results()
    path.receiver.receive([0, 1], received)
    path.sender.send([0], [0], sent)
    error = received.next()
    assert error is not None and "instead of" in error.message
    path.close()


def test_close_ends_blocked_ends_at_once(network: DataNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that nothing is sent to, and a sender that nobody reads from, wait much longer by themselves."""
    monkeypatch.setattr(tcp, "PROGRESS_TIMEOUT_S", 60.0)
    source = torch.zeros(64, 1 << 20, dtype=torch.uint8)
    waiting = BothEnds(source, source.clone(), network, network).connected()
    received = Results()
    waiting.receiver.receive([0], received)
    waiting.close()
    assert received.next(10.0) is not None
    stuck = BothEnds(source, source.clone(), network, network).connected()
    sent = Results()
    stuck.sender.send(range(64), range(64), sent)
    stuck.close()
    assert sent.next(10.0) is not None
    stuck.sender.send([0], [0], sent)
    error = sent.next()
    assert error is not None and "closed" in error.message


def test_a_frozen_peer_fails_the_transfer_within_its_deadline(
    network: DataNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "PROGRESS_TIMEOUT_S", 0.5)
    source = torch.zeros(64, 1 << 20, dtype=torch.uint8)
    path = BothEnds(source, source.clone(), network, network).connected()
    done = Results()
    path.sender.send(range(64), range(64), done)
    assert done.next() is not None
    path.close()


def test_closing_before_anything_is_connected(network: DataNetwork) -> None:
    closed = Results()
    receiver, address = listen(torch.zeros(2, 64, dtype=torch.uint8), network)
    receiver.close(lambda: closed(None))
    assert closed.next(5.0) is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, msgspec.msgpack.decode(address, type=SocketAddress).port))
