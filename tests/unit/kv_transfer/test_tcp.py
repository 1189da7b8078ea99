"""The `tcp` connector over real sockets, with and without TLS: any blocks, strangers, other keys, dead peers."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kv_transfer.connector import DataNetwork, Peer
from tandem.kv_transfer.connectors import accept_peer, tcp
from tandem.kv_transfer.connectors.addresses import SocketAddress
from tandem.kv_transfer.connectors.tcp import TcpReceiver, TcpSender
from tandem.protocol.network_keys import load_keys, make_keys
from tandem.protocol.tls_identity import tls_contexts
from tandem.runtime.errors import KVTransferFailed
from tests.support.waiting import wait_until

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
        close(self.sender, self.receiver)


def close(*ends: TcpSender | TcpReceiver) -> None:
    """Closes ends, and waits until their descriptors are closed, too."""
    closed = Results()
    for end in ends:
        end.close(lambda: closed(None))
    for _ in ends:
        closed.next()


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
        assert end._link is not None
        secure = end._link._socket
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
    monkeypatch.setattr(tcp, "CONNECT_TIMEOUT_S", 1.0)
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
    close(sender, receiver)
    for stranger in strangers:
        stranger.close()


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


NUM_STRANGERS = 100
CONNECT: dict[str, Callable[[tuple[str, int], ssl.SSLContext], socket.socket]] = {
    "nothing": lambda address, tls: socket.create_connection(address),
    "garbage": lambda address, tls: sending(address, b"GET / HTTP/1.1\r\n\r\n"),
    "a part of a greeting": lambda address, tls: sending(address, b"\0\x08pair"),
    "a part of a handshake": lambda address, tls: sending(address, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    "another path": lambda address, tls: sending(address, b"\0\x08pair/9-9"),
    "another key": lambda address, tls: with_tls(address, tls),
}
"""Opens a stranger's connection."""


def sending(address: tuple[str, int], data: bytes) -> socket.socket:
    stranger = socket.create_connection(address)
    stranger.sendall(data)
    return stranger


def with_tls(address: tuple[str, int], context: ssl.SSLContext) -> socket.socket:
    """Performs a whole handshake, if the other end speaks TLS."""
    plain = socket.create_connection(address)
    plain.settimeout(0.1)
    secure = context.wrap_socket(plain, do_handshake_on_connect=False)
    with contextlib.suppress(OSError):
        secure.do_handshake()
    return secure


@pytest.fixture(scope="module")
def strange_tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """Proves another cluster's key, and believes anyone."""
    network = network_with_keys(tmp_path_factory.mktemp("strange"))
    assert network.tls is not None
    network.tls.client.verify_mode = ssl.CERT_NONE
    return network.tls.client


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
@pytest.mark.parametrize("says", CONNECT)
def test_strangers_cost_few_descriptors_and_no_time(
    says: str, leaves: bool, network: DataNetwork, strange_tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept_peer, "GREETING_TIMEOUT_S", 600.0)  # they are closed before
    source = torch.randint(0, 256, (2, 64), dtype=torch.uint8)
    destination = torch.zeros_like(source)
    before = num_descriptors()
    receiver, address = listen(destination, network)
    port = msgspec.msgpack.decode(address, type=SocketAddress).port
    strangers: list[socket.socket] = []
    for _ in range(NUM_STRANGERS):
        strangers.append(CONNECT[says]((HOST, port), strange_tls))
        if leaves:
            strangers.pop().close()
    limit = before + len(strangers) + 1 + accept_peer.MAX_GREETINGS
    wait_until(lambda: num_descriptors() <= limit, 10)
    if leaves:
        wait_until(lambda: num_descriptors() <= before + 1, 10)
    ready, done = Results(), Results()
    sender = TcpSender(Peer("pair/0-0", address), source, network, ready)
    assert ready.next() is None
    wait_until(lambda: num_descriptors() == before + len(strangers) + 2, 10)
    receiver.receive([1], done)
    sender.send([0], [1], done)
    assert done.next() is None and done.next() is None and torch.equal(destination[1], source[0])
    for stranger in strangers:
        stranger.close()
    close(sender, receiver)
    assert num_descriptors() == before


def test_a_connection_that_says_too_little_is_closed(network: DataNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_peer, "GREETING_TIMEOUT_S", 0.1)
    receiver, address = listen(torch.zeros(2, 64, dtype=torch.uint8), network)
    port = msgspec.msgpack.decode(address, type=SocketAddress).port
    with socket.create_connection((HOST, port)) as stranger:
        stranger.settimeout(10)
        assert stranger.recv(1) == b""
    close(receiver)


def test_a_peer_that_does_not_come_is_an_error_that_names_the_last_stranger(
    network: DataNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "CONNECT_TIMEOUT_S", 0.5)
    before = num_descriptors()
    receiver, address = listen(torch.zeros(2, 64, dtype=torch.uint8), network)
    port = msgspec.msgpack.decode(address, type=SocketAddress).port
    with socket.create_connection((HOST, port)) as silent, sending((HOST, port), b"nonsense"):
        received = Results()
        receiver.receive([0], received)
        error = received.next()
        assert error is not None and "did not connect in 0.5 s" in error.message
        assert "nothing connected" not in error.message
        silent.settimeout(10)
        assert silent.recv(1) == b"", "it is closed with the wait"
    assert num_descriptors() == before, "also before the pair is closed"
    close(receiver)


def test_a_greeting_in_pieces_is_read(network: DataNetwork) -> None:
    receiver, address = listen(torch.zeros(2, 64, dtype=torch.uint8), network)
    port = msgspec.msgpack.decode(address, type=SocketAddress).port
    with socket.create_connection((HOST, port)) as plain:
        peer = plain if network.tls is None else network.tls.client.wrap_socket(plain)
        for byte in b"\0\x08pair/0-0":
            peer.sendall(bytes([byte]))
        assert peer.recv(1) == b"\1"
        peer.close()
    close(receiver)


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
