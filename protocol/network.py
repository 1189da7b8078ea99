"""How a process's sockets are protected: the ZeroMQ context with the keys, and who is let in.

`ipc` sockets lie in a folder that only their user can enter. Over tcp both sides prove with CURVE keys who they are,
and everything is encrypted; a key that is not on the list is refused and counted. Plain tcp takes an explicit word.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.auth.asyncio

from tandem.protocol.network_keys import HandedKeys, NetworkKeys, Part, load_keys
from tandem.protocol.refusals import Refusals
from tandem.runtime.errors import ConfigError

log = logging.getLogger(__name__)

_HEARTBEAT_INTERVAL_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 4_000
"""Over tcp: a host that is gone or cut off says no goodbye. A connection that is closed for silence is made anew when
there is a way; left alone, TCP would wait longer and longer between its tries. ZeroMQ's own thread answers them."""
_CONNECT_TIMEOUT_MS = 2_000
_HANDSHAKE_TIMEOUT_MS = 5_000
"""A connection that has not said who it is by then is closed."""


class NetworkConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tcp endpoints are protected. keys_folder: see `tandem keys`. insecure: without keys, tcp is not refused.

    keys: in place of the folder, for a process that is handed its configuration in memory.
    """

    keys_folder: str = ""
    insecure: bool = False
    keys: HandedKeys | None = None


class Context(zmq.Context[Any]):
    """One per process; made on the loop that its sockets live on, by `protocol.sockets.new_context`."""

    keys: NetworkKeys | None
    insecure: bool
    refusals: Refusals
    _gate: _Gate | None
    _warned: bool

    def protect(self, part: Part, config: NetworkConfig) -> None:
        """Raises ConfigError for keys that cannot be read."""
        if config.keys is not None:
            self.keys = config.keys.keys(part)
        else:
            self.keys = load_keys(Path(config.keys_folder), part) if config.keys_folder else None
        self.insecure = config.insecure
        self.refusals = Refusals()
        self._gate = None
        self._warned = False

    def secure_bind(self, socket: zmq.Socket[Any], endpoint: str) -> None:
        """Before binding. Raises ConfigError for plain tcp that nobody has asked for."""
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_TIMEOUT_MS)
        keys = self._keys_for(socket, endpoint)
        if keys is None:
            return
        if self._gate is None:  # before the bind: without it ZeroMQ would let in every key
            self._gate = _Gate(self, keys)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public[keys.part])
        socket.setsockopt(zmq.ZAP_DOMAIN, keys.part.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_connect(self, socket: zmq.Socket[Any], endpoint: str, peer: Part) -> None:
        """Before connecting. Raises ConfigError for plain tcp that nobody has asked for."""
        keys = self._keys_for(socket, endpoint)
        if keys is None:
            return
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public[peer])
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public[keys.part])

    def _keys_for(self, socket: zmq.Socket[Any], endpoint: str) -> NetworkKeys | None:
        if not endpoint.startswith("tcp://"):
            return None
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_TIMEOUT_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        if self.keys is None and not self.insecure:
            raise ConfigError(
                f"{endpoint} is not protected: make keys with `tandem keys FOLDER` and give --network-keys FOLDER to "
                "every part of the cluster, or say --insecure-network where nobody else can reach this network"
            )
        if self.keys is None and not self._warned:
            self._warned = True
            log.warning(
                "--insecure-network: %s is neither encrypted nor authenticated; who reaches it controls the cluster",
                endpoint,
            )
        return self.keys

    def term(self) -> None:
        self._close_gate()
        super().term()

    def destroy(self, linger: int | None = None) -> None:
        self._close_gate()
        super().destroy(linger)

    def _close_gate(self) -> None:
        gate: _Gate | None = self.__dict__.get("_gate")
        if gate is not None:
            self._gate = None
            gate.stop()


class _Gate(zmq.auth.asyncio.AsyncioAuthenticator):
    """Answers ZeroMQ's question, once for each connection, whether a key may come in (ZAP, rfc.zeromq.org/spec/27).

    On the loop and not on a thread of its own: connections are rare, those that are open do not pass by here, and a
    process whose loop stands still could not serve a new one anyway.
    """

    def __init__(self, context: Context, keys: NetworkKeys) -> None:
        super().__init__(context, log=logging.getLogger("zmq.auth"))
        self._refusals = context.refusals
        self._callers = keys.callers
        self.configure_curve_callback(keys.part, credentials_provider=self)
        self.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """key: in Z85. Keys are public, so comparing them in constant time would hide nothing."""
        if key in self._callers:
            return True
        self._refusals.count("unknown_key", f"a peer with public key {key.decode()} may not connect to a {domain}")
        return False
