"""The `tcp` connector: blocks travel over a socket, with TLS if the cluster has keys. Both sides have CPU pools.

The decode end listens on a free port, which is its address, until the peer has connected
(`kv_transfer.connectors.accept_peer`). Each transfer has a header, so that the ends notice when they disagree.

A path has one connection, on one thread. Python reads one TLS record of 16 KiB per call, so several threads of a
process would spend on the GIL what they gain from more cores (figures: docs/adr/0029-tcp-connector.md).

The sender does not use `sendfile`: the kernel would read the pages after the call returned, when the blocks may already
belong to another request.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch

from tandem.kv_transfer.connector import DataNetwork, OnAddress, OnDone, Peer
from tandem.kv_transfer.connectors.accept_peer import accept_peer
from tandem.kv_transfer.connectors.addresses import CONNECT_TIMEOUT_S, SocketAddress, read_address
from tandem.kv_transfer.connectors.block_messages import BlockMessages, Message
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.protocol.sockets import listen_on_free_port
from tandem.runtime.errors import KVTransferFailed, first_line

PROGRESS_TIMEOUT_S = 5.0
"""Longest time without progress in a transfer; then the peer counts as dead."""
_PIECE_BYTES = 1 << 20
"""Bytes that one call sends at most."""
_PATH_ID_BYTES = struct.Struct("!H")
_ACCEPTED = b"\1"
_HEADER = struct.Struct("!QQI")  # number of the transfer, bytes of a block, blocks


class _Link:
    """One connected socket. `stop` may be called on any thread, and ends a blocked call at once."""

    def __init__(self, connected: socket.socket) -> None:
        """Takes over the socket. Raises OSError."""
        self._socket = connected
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * PROGRESS_TIMEOUT_S))
            connected.settimeout(PROGRESS_TIMEOUT_S)
        except OSError:
            connected.close()
            raise

    def handshake(self) -> None:
        """Performs the TLS handshake of the end that connects, if it has TLS. Raises OSError."""
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.do_handshake()

    def send(self, data: memoryview | bytes) -> None:
        """Sends all bytes, in pieces, because the deadline holds for each call."""
        for begin in range(0, len(data), _PIECE_BYTES):
            self._socket.sendall(data[begin : begin + _PIECE_BYTES])

    def receive(self, into: memoryview) -> None:
        """Fills `into`. Raises KVTransferFailed if the peer closes the connection."""
        while into:
            num_bytes = self._socket.recv_into(into)
            if not num_bytes:
                raise KVTransferFailed("the peer closed the connection")
            into = into[num_bytes:]

    def read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self.receive(memoryview(data))
        return bytes(data)

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # after `shutdown` of its own, an SSLSocket would read without decrypting
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class _TcpEnd:
    """Common to both ends: the connection and its thread."""

    def __init__(self, name: str, blocks: torch.Tensor, network: DataNetwork) -> None:
        self._messages = BlockMessages("tcp", blocks)  # uint8 [num_blocks, ...]: whole blocks, or some heads of each
        self._block_bytes = blocks[0].numel()
        self._network = network
        self._num_transfers = 0
        self._lock = threading.Lock()  # of the next two
        self._link: _Link | None = None  # to the peer
        self._is_closed = False
        self._thread = JobThread(name)

    def _connect(self) -> None:
        self._messages.prepare()
        try:
            self._open_connection()
        except ssl.SSLError as error:
            raise KVTransferFailed(f"the peer has other network keys: {first_line(error)}") from error

    def _open_connection(self) -> None:
        raise NotImplementedError

    def _keep(self, link: _Link) -> _Link:
        """Registers the connection, which `close` stops and closes."""
        with self._lock:
            self._link = link
            if self._is_closed:
                raise KVTransferFailed("the pair was closed")
        return link

    def _submit(self, move: Callable[[_Link, int, list[int]], None], block_ids: Sequence[int], on_done: OnDone) -> None:
        """move(link, number of the transfer, blocks): called on the thread, unless connecting failed."""
        self._thread.submit(partial(self._move, move, self._num_transfers, list(block_ids)), on_done)
        self._num_transfers += 1

    def _move(self, move: Callable[[_Link, int, list[int]], None], transfer: int, block_ids: list[int]) -> None:
        assert self._link is not None  # a thread whose first job failed runs no other
        move(self._link, transfer, block_ids)

    def close(self, on_closed: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            self._is_closed = True
            if self._link is not None:
                self._link.stop()

        self._thread.close(on_closed, self._release)

    def _release(self) -> None:
        if self._link is not None:
            self._link.close()


class TcpSender(_TcpEnd):
    """The prefill end, which connects."""

    def __init__(self, peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> None:
        super().__init__(f"ship-{peer.path_id}", blocks, network)
        self._peer = peer
        self._thread.submit(self._connect, on_ready)

    def _open_connection(self) -> None:
        address = read_address(self._peer.address, SocketAddress)
        connected = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S)
        if self._network.tls is not None:
            connected = self._network.tls.client.wrap_socket(connected, do_handshake_on_connect=False)
        link = self._keep(_Link(connected))
        link.handshake()
        link.send(_greeting(self._peer.path_id))
        if link.read(1) != _ACCEPTED:
            raise KVTransferFailed("the peer did not accept the connection")

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        """Does nothing: the receiver writes."""

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        self._submit(self._send, src_block_ids, on_done)

    def _send(self, link: _Link, transfer: int, block_ids: list[int]) -> None:
        link.send(_HEADER.pack(transfer, self._block_bytes, len(block_ids)))
        for message in self._messages.of(block_ids):
            self._messages.gather(message)
            link.send(_bytes_of(message))


class TcpReceiver(_TcpEnd):
    """The decode end, which listens. It alone writes to its pool, so nothing is written once it is closed."""

    def __init__(self, path_id: str, blocks: torch.Tensor, network: DataNetwork, on_address: OnAddress) -> None:
        """Raises KVTransferFailed if it cannot listen."""
        try:
            fd, port = listen_on_free_port(network.host)
        except OSError as error:
            raise KVTransferFailed(f"cannot listen on {network.host}: {error}") from error
        self._listener = socket.socket(fileno=fd)
        self._greeting = _greeting(path_id)
        super().__init__(f"take-{path_id}", blocks, network)
        self._thread.submit(self._connect, lambda error: None)
        on_address(msgspec.msgpack.encode(SocketAddress(network.host, port)))

    def _open_connection(self) -> None:
        context = self._network.tls.server if self._network.tls is not None else None
        with self._listener as listener:
            link = self._keep(_Link(accept_peer(listener, self._greeting, context, CONNECT_TIMEOUT_S)))
        link.send(_ACCEPTED)

    def close(self, on_closed: Callable[[], None] = lambda: None) -> None:
        with contextlib.suppress(OSError):  # closed, once the peer has connected
            self._listener.shutdown(socket.SHUT_RDWR)
        super().close(on_closed)

    def _release(self) -> None:
        self._listener.close()
        super()._release()

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        self._submit(self._receive, block_ids, on_done)

    def _receive(self, link: _Link, transfer: int, block_ids: list[int]) -> None:
        header, expected = _HEADER.unpack(link.read(_HEADER.size)), (transfer, self._block_bytes, len(block_ids))
        if header != expected:
            raise KVTransferFailed(
                f"the peer sends (transfer, bytes of a block, blocks) {header} instead of {expected}"
            )
        for message in self._messages.of(block_ids):
            link.receive(_bytes_of(message))
            self._messages.scatter(message)


def _greeting(path_id: str) -> bytes:
    encoded = path_id.encode()
    return _PATH_ID_BYTES.pack(len(encoded)) + encoded


def _bytes_of(message: Message) -> memoryview:
    data: memoryview = message.data.view(-1).numpy().data
    return data


class TcpConnector:
    """Implements `kv_transfer.connector.KVConnector` for CPU pools on any hosts."""

    devices = ("cpu",)
    crosses_hosts = True
    encrypts = True
    one_sided = False

    open_sender = TcpSender
    open_receiver = TcpReceiver


connector = TcpConnector()
