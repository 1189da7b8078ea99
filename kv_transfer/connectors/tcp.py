"""The `tcp` connector: blocks travel over plain sockets, with TLS if the cluster has keys. Both sides have CPU pools.

A path has several connections, so that several cores encrypt. The decode end listens on a free port, which it puts into
the store, and closes the listener when all connections are there. Both ends divide a transfer in the same way; each
connection's part has a header, so that the ends notice when they disagree.

The sender does not use `sendfile`: the kernel would read the pages after the call returned, when the blocks may already
belong to another request.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from tandem.kv_transfer.connector import DataNetwork, KVReceiver, KVSender, OnDone, OpenStore, Peer, when_all
from tandem.kv_transfer.connectors.block_runs import is_run
from tandem.kv_transfer.connectors.job_thread import JobThread
from tandem.kv_transfer.connectors.process_group import connect_store
from tandem.kv_transfer.connectors.staging import copy_blocks
from tandem.protocol.sockets import listen_on_free_port
from tandem.runtime.errors import KVTransferFailed, first_line

CONNECT_TIMEOUT_S = 20.0
PROGRESS_TIMEOUT_S = 5.0
"""Longest time without progress in a transfer; then the peer counts as dead."""
_GREETING_TIMEOUT_S = 2.0
"""Deadline of a new connection's TLS handshake and greeting: a stranger delays the others by no more."""
NUM_CONNECTIONS = 4
_MIN_PART_BYTES = 1 << 20
"""A connection is used only for at least this much of a transfer."""
_CHUNK_BYTES = 1 << 20
"""Blocks that are not adjacent in the pool are gathered into a buffer of about this size."""
_PORT_KEY = "port"
_GREETING = struct.Struct("!HH")  # bytes of the path id, number of the connection; the path id follows
_ACCEPTED = b"\1"
_HEADER = struct.Struct("!QQI")  # of a part: number of the transfer, bytes of a block, blocks
_SHORTEST_SLICE_S = 0.001


def divided(block_ids: Sequence[int], block_bytes: int) -> list[list[int]]:
    """Returns the blocks of each connection that is used, at least one. Both ends divide alike."""
    num_parts = max(1, min(NUM_CONNECTIONS, len(block_ids), len(block_ids) * block_bytes // _MIN_PART_BYTES))
    bounds = [len(block_ids) * part // num_parts for part in range(num_parts + 1)]
    return [list(block_ids[begin:end]) for begin, end in itertools.pairwise(bounds)]


class _Link:
    """One connected socket. `stop` may be called on any thread, and ends a blocked call at once."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext | None, is_server: bool) -> None:
        """Performs the TLS handshake, if there is a context. Takes over `plain`. Raises OSError."""
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * PROGRESS_TIMEOUT_S))
        plain.settimeout(_GREETING_TIMEOUT_S)
        self._duplicate = plain.dup()  # an SSLSocket that is shut down would read on without decrypting
        try:
            self._socket = plain if context is None else context.wrap_socket(plain, server_side=is_server)
        except Exception:
            plain.close()
            self._duplicate.close()
            raise

    def greeted(self) -> None:
        """Replaces the deadline of greetings by that of transfers."""
        self._socket.settimeout(PROGRESS_TIMEOUT_S)

    def send(self, data: memoryview | bytes) -> None:
        """Sends all bytes, in pieces, because the deadline holds for each call."""
        for begin in range(0, len(data), _CHUNK_BYTES):
            self._socket.sendall(data[begin : begin + _CHUNK_BYTES])

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
        with contextlib.suppress(OSError):
            self._duplicate.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        self._duplicate.close()


class _TcpEnd:
    """Common to both ends: the connections, a thread for each, and the division of transfers into parts.

    Connecting runs on the first thread. Jobs wait for it.
    """

    def __init__(self, name: str, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> None:
        self._blocks = blocks  # uint8 [num_blocks, ...]: whole blocks, or some heads of each
        self._bytes = blocks.view(-1).numpy().data if blocks.is_contiguous() else None
        self._block_bytes = blocks[0].numel()
        self._network = network
        self._num_transfers = 0
        self._lock = threading.Lock()  # of the next three
        self._links: list[_Link] = []
        self._listener: socket.socket | None = None
        self._is_closed = False
        self._connected: Future[list[_Link]] = Future()  # in order of their numbers
        self._threads = [JobThread(f"{name}.{number}") for number in range(NUM_CONNECTIONS)]
        self._threads[0].submit(self._connect, on_ready)

    def _connect(self) -> None:
        try:
            self._connected.set_result(self._open_connections(time.monotonic() + CONNECT_TIMEOUT_S))
        except ssl.SSLError as error:
            failure = KVTransferFailed(f"the peer has other network keys: {first_line(error)}")
            self._connected.set_exception(failure)
            raise failure from error
        except Exception as error:
            self._connected.set_exception(error)
            raise

    def _open_connections(self, deadline: float) -> list[_Link]:
        raise NotImplementedError

    def _keep(self, link: _Link) -> _Link:
        """Registers a connection to be stopped by `close`."""
        with self._lock:
            self._links.append(link)
            if self._is_closed:
                raise KVTransferFailed("the pair was closed")
        return link

    def _submit(self, block_ids: Sequence[int], move: Callable[[_Link, int, list[int]], None], on_done: OnDone) -> None:
        """move(link, number of the transfer, blocks): called on the connection's thread."""
        parts = divided(block_ids, self._block_bytes)
        done = when_all(len(parts), on_done)
        for number, part in enumerate(parts):
            self._threads[number].submit(partial(self._move, number, move, self._num_transfers, part), done)
        self._num_transfers += 1

    def _move(self, number: int, move: Callable[[_Link, int, list[int]], None], transfer: int, part: list[int]) -> None:
        move(self._connected.result(CONNECT_TIMEOUT_S)[number], transfer, part)

    def _chunks(self, block_ids: list[int]) -> Iterator[tuple[list[int], memoryview, torch.Tensor | None]]:
        """Yields (block ids, their bytes, None), or a buffer for them instead: its bytes, and its blocks."""
        num_blocks = max(1, _CHUNK_BYTES // self._block_bytes)
        buffer: torch.Tensor | None = None
        for first in range(0, len(block_ids), num_blocks):
            chunk = block_ids[first : first + num_blocks]
            if self._bytes is not None and is_run(chunk):
                begin = chunk[0] * self._block_bytes
                yield chunk, self._bytes[begin : begin + len(chunk) * self._block_bytes], None
                continue
            if buffer is None:
                buffer = self._blocks.new_empty((min(num_blocks, len(block_ids)), *self._blocks.shape[1:]))
            used = buffer[: len(chunk)]
            yield chunk, used.view(-1).numpy().data, used

    def close(self, on_closed: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            self._is_closed = True
            links, listener = list(self._links), self._listener
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        for link in links:
            link.stop()

        def end(_: KVTransferFailed | None) -> None:
            for link in self._links:
                link.close()
            on_closed()

        ended = when_all(len(self._threads), end)
        for thread in self._threads:
            thread.close(partial(ended, None))


class TcpSender(_TcpEnd):
    """The prefill end, which connects."""

    def __init__(self, peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> None:
        self._peer = peer
        super().__init__(f"ship-{peer.path_id}", blocks, network, on_ready)

    def _open_connections(self, deadline: float) -> list[_Link]:
        path_id, params = self._peer.path_id.encode(), self._peer.params
        address = params.store_host, int(connect_store(self._peer.path_id, params).get(_PORT_KEY))
        context = self._network.tls.client if self._network.tls is not None else None
        links = []
        for number in range(NUM_CONNECTIONS):
            plain = socket.create_connection(address, _time_left(deadline))
            link = self._keep(_Link(plain, context, is_server=False))
            link.send(_GREETING.pack(len(path_id), number) + path_id)
            links.append(link)
        for link in links:
            link.greeted()  # the peer accepts one after the other
            if link.read(1) != _ACCEPTED:
                raise KVTransferFailed("the peer did not accept the connection")
        return links

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        """Does nothing: the receiver writes."""

    def send(self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int], on_done: OnDone) -> None:
        self._submit(src_block_ids, self._send, on_done)

    def _send(self, link: _Link, transfer: int, block_ids: list[int]) -> None:
        link.send(_HEADER.pack(transfer, self._block_bytes, len(block_ids)))
        for chunk, data, buffer in self._chunks(block_ids):
            if buffer is not None:
                copy_blocks(self._blocks, chunk, buffer, range(len(chunk)))
            link.send(data)


class TcpReceiver(_TcpEnd):
    """The decode end, which listens. It alone writes to its pool, so nothing is written once it is closed."""

    def __init__(
        self, path_id: str, open_store: OpenStore, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone
    ) -> None:
        self._path_id = path_id.encode()
        self._open_store = open_store
        super().__init__(f"take-{path_id}", blocks, network, on_ready)

    def _open_connections(self, deadline: float) -> list[_Link]:
        store = self._open_store()
        fd, port = listen_on_free_port(self._network.host)
        with socket.socket(fileno=fd) as listener:
            with self._lock:
                self._listener = listener
                if self._is_closed:
                    raise KVTransferFailed("the pair was closed")
            store.set(_PORT_KEY, str(port))
            try:
                return self._accept_all(listener, deadline)
            finally:
                with self._lock:
                    self._listener = None

    def _accept_all(self, listener: socket.socket, deadline: float) -> list[_Link]:
        """Accepts the peer's connections. Others, such as a stranger's, are closed."""
        found: dict[int, _Link] = {}
        refused = "nothing connected"
        while len(found) < NUM_CONNECTIONS:
            listener.settimeout(_time_left(deadline))
            try:
                plain, _ = listener.accept()
            except TimeoutError:
                raise KVTransferFailed(f"the peer did not connect in {CONNECT_TIMEOUT_S:g} s: {refused}") from None
            try:
                link = self._greet(plain)
                number = self._number_of(link)
            except (OSError, KVTransferFailed) as error:
                refused = first_line(error)
                continue
            if number in found or not 0 <= number < NUM_CONNECTIONS:
                refused = f"a second connection of number {number}"
                link.stop()
                continue
            found[number] = link
        for link in found.values():
            link.send(_ACCEPTED)
            link.greeted()
        return [found[number] for number in range(NUM_CONNECTIONS)]

    def _greet(self, plain: socket.socket) -> _Link:
        context = self._network.tls.server if self._network.tls is not None else None
        return self._keep(_Link(plain, context, is_server=True))

    def _number_of(self, link: _Link) -> int:
        """Reads the greeting. Raises KVTransferFailed if it is another path's."""
        length, number = _GREETING.unpack(link.read(_GREETING.size))
        if length != len(self._path_id) or link.read(length) != self._path_id:
            link.stop()
            raise KVTransferFailed("a connection was not of this path")
        return int(number)

    def receive(self, block_ids: Sequence[int], on_done: OnDone) -> None:
        self._submit(block_ids, self._receive, on_done)

    def _receive(self, link: _Link, transfer: int, block_ids: list[int]) -> None:
        header, expected = _HEADER.unpack(link.read(_HEADER.size)), (transfer, self._block_bytes, len(block_ids))
        if header != expected:
            raise KVTransferFailed(
                f"the peer sends (transfer, bytes of a block, blocks) {header} instead of {expected}"
            )
        for chunk, data, buffer in self._chunks(block_ids):
            link.receive(data)
            if buffer is not None:
                copy_blocks(buffer, range(len(chunk)), self._blocks, chunk)


def _time_left(deadline: float) -> float:
    return max(_SHORTEST_SLICE_S, deadline - time.monotonic())


class TcpConnector:
    """Implements `kv_transfer.connector.KVConnector` for CPU pools on any hosts."""

    devices = ("cpu",)
    crosses_hosts = True
    encrypts = True
    one_sided = False
    meets_in_store = True

    def open_sender(self, peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> KVSender:
        return TcpSender(peer, blocks, network, on_ready)

    def open_receiver(
        self, path_id: str, open_store: OpenStore, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone
    ) -> KVReceiver:
        return TcpReceiver(path_id, open_store, blocks, network, on_ready)


connector = TcpConnector()
