"""Protection of a process's sockets: the ZeroMQ context with the keys, and the check of connecting peers.

`ipc` sockets lie in a folder that only their user can enter. Over tcp both sides authenticate with CURVE keys and all
traffic is encrypted; a key that is not on the list is refused and counted. Plain tcp needs an explicit option.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.auth.asyncio

from tandem.protocol.network_keys import NetworkKeys, Part, load_keys
from tandem.protocol.refusals import Refusals
from tandem.runtime.errors import ConfigError

log = logging.getLogger(__name__)

_HEARTBEAT_INTERVAL_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 4_000
"""A silent tcp connection is closed after this time and opened again. Hosts that are cut off close nothing, and TCP
alone would retry at growing intervals."""
_CONNECT_TIMEOUT_MS = 2_000
_HANDSHAKE_TIMEOUT_MS = 5_000
"""A connection without a complete handshake is closed after this time."""


class NetworkConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tcp endpoints are protected."""

    keys_folder: str = ""
    """Folder that `tandem keys` has made; empty for no keys."""
    insecure: bool = False
    """Whether tcp without keys is allowed."""
    keys: NetworkKeys | None = None
    """Keys of a process that gets its configuration in memory, in place of the folder. Must not be written to disk."""

    def keys_of(self, part: Part) -> NetworkKeys | None:
        """Returns the keys of this process, if it has any. Raises ConfigError if they cannot be read or are another
        part's."""
        keys = self.keys
        if keys is None and self.keys_folder:
            keys = load_keys(Path(self.keys_folder), part)
        if keys is not None and keys.part != part:
            raise ConfigError(f"the keys that this process was given are a {keys.part}'s, not a {part}'s")
        return keys


class Context(zmq.Context[Any]):
    """One per process, created on its sockets' loop by `protocol.sockets.new_context`."""

    keys: NetworkKeys | None
    insecure: bool
    refusals: Refusals
    _gate: _Gate | None
    _warned: bool

    def protect(self, part: Part, config: NetworkConfig) -> None:
        """Loads the keys of this process. Raises ConfigError for keys that cannot be read or are another part's."""
        self.keys = config.keys_of(part)
        self.insecure = config.insecure
        self.refusals = Refusals()
        self._gate = None
        self._warned = False

    def secure_bind(self, socket: zmq.Socket[Any], endpoint: str) -> None:
        """Sets options before binding. Raises ConfigError for tcp without keys, unless insecure."""
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_TIMEOUT_MS)
        keys = self._keys_for(socket, endpoint)
        if keys is None:
            return
        if self._gate is None:  # before binding: without it ZeroMQ accepts every key
            self._gate = _Gate(self, keys)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public[keys.part])
        socket.setsockopt(zmq.ZAP_DOMAIN, keys.part.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_connect(self, socket: zmq.Socket[Any], endpoint: str, peer: Part) -> None:
        """Sets options before connecting. Raises ConfigError for tcp without keys, unless insecure."""
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
                f"{endpoint} is not protected: create keys with `tandem keys FOLDER` and pass --network-keys FOLDER to "
                "all commands of the cluster, or pass --insecure-network if nobody else can reach this network"
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
    """Decides for each new connection whether its key may connect (ZAP, rfc.zeromq.org/spec/27).

    Runs on the loop rather than on a thread: connections are rare, and a stalled process could not serve them anyway.
    """

    def __init__(self, context: Context, keys: NetworkKeys) -> None:
        super().__init__(context, log=logging.getLogger("zmq.auth"))
        self._refusals = context.refusals
        self._callers = keys.callers
        self.configure_curve_callback(keys.part, credentials_provider=self)
        self.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """key: in Z85. Public keys need no comparison in constant time."""
        if key in self._callers:
            return True
        self._refusals.count("unknown_key", f"a peer with public key {key.decode()} may not connect to a {domain}")
        return False
