"""Over tcp only sockets with the cluster's keys can connect."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

import msgspec
import pytest

from tandem.protocol import network
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import FromProxyControl, GetStatus, StatusReport, ToProxyControl
from tandem.protocol.network import Context, NetworkConfig
from tandem.protocol.network_keys import PARTS, Part, load_keys, make_keys
from tandem.protocol.refusals import Refusals
from tandem.protocol.sockets import DealerSocket, RouterSocket, new_context
from tandem.runtime.errors import ConfigError
from tests.support.waiting import until

REPORT = StatusReport("proxy-0", "m", True, 0, [])


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


class Server:
    """A proxy's control socket on tcp, which answers everything with REPORT."""

    def __init__(self, protection: NetworkConfig) -> None:
        self.context = new_context("proxy", protection)
        self.refused: list[str] = []
        self.context.refusals.on_refused = self.refused.append
        codec: Codec[ToProxyControl] = Codec(ToProxyControl)
        self.router = RouterSocket(self.context, "tcp://127.0.0.1:*", codec, self._answer)

    def _answer(self, identity: bytes, _: ToProxyControl) -> None:
        self.router.send(identity, REPORT)

    def close(self) -> None:
        self.router.close()
        self.context.destroy(linger=0)


def dial(
    context: Context, endpoint: str, answers: list[FromProxyControl], peer: Part
) -> DealerSocket[FromProxyControl]:
    dealer = DealerSocket(context, endpoint, Codec(FromProxyControl), answers.append, peer=peer)
    dealer.send(GetStatus())
    return dealer


async def exchange(server: NetworkConfig, part: Part, client: NetworkConfig, peer: Part = "proxy") -> list[str]:
    """Sends one request. Returns the reasons of refusals once it is answered or refused."""
    answering, context = Server(server), new_context(part, client)
    answers: list[FromProxyControl] = []
    dealer = dial(context, answering.router.endpoint, answers, peer)
    try:
        await until(lambda: bool(answers or answering.refused))
        assert bool(answers) != bool(answering.refused)
    finally:
        dealer.close()
        context.destroy(linger=0)
        answering.close()
    return answering.refused


def test_key_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "keys"
    files = make_keys(folder)
    assert {file.name for file in files} == {f"{part}.{kind}" for part in PARTS for kind in ("key", "key_secret")}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    with pytest.raises(ConfigError, match="holds keys already"):
        make_keys(folder)
    (folder / "worker.key_secret").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(folder, "worker")
    (folder / "worker.key_secret").unlink()
    with pytest.raises(ConfigError, match="tandem keys"):
        load_keys(folder, "worker")
    assert load_keys(folder, "proxy").part == "proxy", "a host needs only the secret of its own role"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of root")
def test_a_key_of_root_may_be_readable_by_its_group(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes mounts a Secret for another user in this way."""
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    (keys / "worker.key_secret").chmod(0o440)
    assert load_keys(keys, "worker").part == "worker"
    for mode in (0o460, 0o444):
        (keys / "worker.key_secret").chmod(mode)
        with pytest.raises(ConfigError, match="can be read by others"):
            load_keys(keys, "worker")


@pytest.mark.parametrize("part", ["worker", "operator"])
def test_members_can_connect(keys: Path, part: Part) -> None:
    with_keys = NetworkConfig(str(keys))
    assert asyncio.run(exchange(with_keys, part, with_keys)) == []


@pytest.mark.parametrize("part", ["worker", "operator"])
def test_keys_may_come_from_the_configuration(keys: Path, part: Part) -> None:
    """Ray's actors get their keys in this way. The configuration survives JSON and is valid for one role only."""
    handed = {each: load_keys(keys, each) for each in ("proxy", part)}
    encoded = {each: msgspec.json.encode(NetworkConfig(keys=held)) for each, held in handed.items()}
    server, client = (msgspec.json.decode(encoded[each], type=NetworkConfig) for each in ("proxy", part))
    assert not asyncio.run(exchange(server, part, client))
    assert server.keys is not None and server.keys.secret.decode() not in repr(server)
    with pytest.raises(ConfigError, match=f"are a {part}'s, not a proxy's"):
        new_context("proxy", client)


def test_an_unknown_key_is_refused_and_counted(keys: Path, tmp_path: Path) -> None:
    """The intruder has its own keys and the server's public key."""
    make_keys(tmp_path / "other")
    for part in PARTS:
        if part != "worker":
            (tmp_path / "other" / f"{part}.key").write_bytes((keys / f"{part}.key").read_bytes())
    refusals = asyncio.run(exchange(NetworkConfig(str(keys)), "worker", NetworkConfig(str(tmp_path / "other"))))
    assert "unknown_key" in refusals


def test_roles_may_connect_only_to_listed_roles(keys: Path) -> None:
    """Proxies may not connect to a proxy's control socket."""
    with_keys = NetworkConfig(str(keys))
    assert "unknown_key" in asyncio.run(exchange(with_keys, "proxy", with_keys))


@pytest.mark.parametrize("client", ["plain", "wrong server key"])
def test_peers_without_curve_are_refused_and_counted(keys: Path, client: str) -> None:
    with_keys = NetworkConfig(str(keys))
    asked = asyncio.run(
        exchange(with_keys, "worker", NetworkConfig(insecure=True))
        if client == "plain"
        else exchange(with_keys, "worker", with_keys, peer="worker")
    )
    assert "bad_handshake" in asked


async def test_a_server_without_the_right_key_is_not_trusted(keys: Path, tmp_path: Path) -> None:
    """An impostor at a proxy's address gets no message from the worker."""
    make_keys(tmp_path / "other")
    impostor, context = (
        Server(NetworkConfig(str(tmp_path / "other"))),
        new_context("worker", NetworkConfig(str(keys))),
    )
    answers: list[FromProxyControl] = []
    dealer = dial(context, impostor.router.endpoint, answers, "proxy")
    await until(lambda: bool(impostor.refused))
    assert not answers
    dealer.close()
    context.destroy(linger=0)
    impostor.close()


async def test_plain_tcp_requires_insecure_network(caplog: pytest.LogCaptureFixture) -> None:
    context = new_context("proxy")
    for make in (
        lambda: RouterSocket(context, "tcp://127.0.0.1:*", Codec(ToProxyControl), lambda _, __: None),
        lambda: DealerSocket(context, "tcp://127.0.0.1:1", Codec(FromProxyControl), lambda _: None),
    ):
        with pytest.raises(ConfigError, match=r"tandem keys(.|\n)*--insecure-network"):
            make()
    context.destroy(linger=0)
    with caplog.at_level(logging.WARNING):
        assert (await exchange(NetworkConfig(insecure=True), "worker", NetworkConfig(insecure=True))) == []
    assert "neither encrypted nor authenticated" in caplog.text


async def test_an_invalid_handshake_does_not_stop_the_authenticator(keys: Path) -> None:
    """Members can still connect after an invalid handshake."""
    with_keys = NetworkConfig(str(keys))
    server = Server(with_keys)
    host, port = server.router.endpoint.removeprefix("tcp://").split(":")
    for rubbish in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(9) + b"\x7f\x03", bytes(100), b"\xff" * 64):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(rubbish)
    context = new_context("operator", with_keys)
    answers: list[FromProxyControl] = []
    dealer = dial(context, server.router.endpoint, answers, "proxy")
    await until(lambda: bool(answers))
    dealer.close()
    context.destroy(linger=0)
    server.close()


_CURVE, _NULL = (
    b"\xff" + bytes(8) + b"\x7f\x03\x00" + name.ljust(20, b"\0") + bytes(32) for name in (b"CURVE", b"NULL")
)


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
@pytest.mark.parametrize(
    "says",
    [b"", b"GET / HTTP/1.1\r\n\r\n", _CURVE[:20], _CURVE, _NULL],
    ids=["nothing", "HTTP", "half", "CURVE", "NULL"],
)
async def test_strangers_keep_no_descriptors(
    says: bytes, leaves: bool, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_HANDSHAKE_TIMEOUT_MS", 300)

    def num_descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    server = Server(NetworkConfig(str(keys)))
    host, port = server.router.endpoint.removeprefix("tcp://").split(":")
    before, strangers = num_descriptors(), list[socket.socket]()
    for _ in range(100):
        strangers.append(socket.create_connection((host, int(port))))
        strangers[-1].sendall(says)
        if leaves:
            strangers.pop().close()
    await until(lambda: num_descriptors() <= before + len(strangers), 30)
    for stranger in strangers:
        stranger.close()
    server.close()


class Forgetful:
    """A relay like a firewall: after `forget`, existing connections silently pass nothing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._forgotten: set[int] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.num_connections = 0

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        number = self.num_connections
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._pump(number, source, sink))
            self._pumps.add(pump)

    async def _pump(self, number: int, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                if number not in self._forgotten:
                    sink.write(data)
        except ConnectionError:
            pass
        finally:
            sink.close()

    def forget(self) -> None:
        self._forgotten.update(range(self.num_connections + 1))

    async def close(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


async def test_a_connection_dropped_while_idle_is_reopened(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats detect it, and the next message passes."""
    monkeypatch.setattr(network, "_HEARTBEAT_INTERVAL_MS", 50)
    monkeypatch.setattr(network, "_HEARTBEAT_TIMEOUT_MS", 200)
    protection = NetworkConfig(str(keys))
    server, context = Server(protection), new_context("operator", protection)
    relay = Forgetful(int(server.router.endpoint.rsplit(":", 1)[1]))
    answers: list[FromProxyControl] = []
    dealer = dial(context, f"tcp://127.0.0.1:{await relay.start()}", answers, "proxy")
    await until(lambda: len(answers) == 1)
    relay.forget()
    await until(lambda: relay.num_connections >= 2)
    dealer.send(GetStatus())
    await until(lambda: len(answers) == 2)
    dealer.close()
    context.destroy(linger=0)
    server.close()
    await relay.close()


def test_all_refusals_are_counted_and_few_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    now, refused = [0.0], list[str]()
    refusals = Refusals(refused.append, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            refusals.count("not_a_message", "junk")
            now[0] += 0.015
    assert refused == ["not_a_message"] * 1000
    assert len(caplog.records) == 2
