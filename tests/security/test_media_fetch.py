"""A client's URLs neither keep the downloads of others waiting nor lead to a cloud's metadata service."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.proxy.media.fetch import MAX_DOWNLOADS, FetchedMedia, FetchPolicy, MediaFetcher, RefusedURL
from tandem.proxy.media.media_limits import MediaLimits
from tandem.proxy.media.source import InvalidMedia, MediaSource
from tandem.runtime.client_share import CLIENT_SHARE
from tandem.runtime.errors import ClientShareExceeded, Overloaded

MAX_OWN = int(MAX_DOWNLOADS * CLIENT_SHARE)
METADATA = [
    "169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254",
    "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fe80::a9fe:a9fe", "::ffff:168.63.129.16", "64:ff9b::a83f:8110",
    "2002:a83f:8110::1",
]  # fmt: skip


def source(url: str) -> MediaSource:
    return MediaSource(0, "image", url, "messages[0].content[0]")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


class Servers:
    """tarpit: URL of a server that accepts connections and never answers. good: of one that answers with b"ok"."""

    def __init__(self) -> None:
        self.num_stuck = 0
        self.stuck = asyncio.Condition()

    async def on_tarpit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self.stuck:
            self.num_stuck += 1
            self.stuck.notify_all()
        try:
            await reader.read()
        except ConnectionError:
            pass
        finally:
            async with self.stuck:
                self.num_stuck -= 1
                self.stuck.notify_all()
            writer.close()

    async def on_good(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    async def until_stuck(self, number: int) -> None:
        async with self.stuck:
            await self.stuck.wait_for(lambda: self.num_stuck == number)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Servers, str, str]]:
    """Yields the servers and the addresses of the tarpit and of the good one."""
    servers = Servers()
    started = [await asyncio.start_server(on, "127.0.0.1", 0) for on in (servers.on_tarpit, servers.on_good)]
    try:
        tarpit, good = (f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in started)
        yield servers, tarpit, good
        await servers.until_stuck(0)
    finally:
        for server in started:
            server.close()


def fetcher_with(fetch_timeout_s: float, **limits: Any) -> MediaFetcher:
    return MediaFetcher(MediaLimits(allow_private_media=True, fetch_timeout_s=fetch_timeout_s, **limits))


async def fetch(fetcher: MediaFetcher, client: str, url: str) -> bytes:
    with FetchedMedia(fetcher, client) as fetched:
        await fetched.fetch(source(url))
        return fetched.data[0]


def num_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def cancelled(tasks: list[asyncio.Task[bytes]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_tarpits_of_one_client_leave_downloads_to_others(scheme: str) -> None:
    """The deadline is longer than the test's, so another client's download cannot be waiting for a time-out."""

    async def test() -> None:
        fetcher = fetcher_with(600)
        async with serving() as (servers, tarpit, good):
            attack = [
                asyncio.create_task(fetch(fetcher, "attacker", f"{scheme}://{tarpit}/")) for _ in range(3 * MAX_OWN)
            ]
            await servers.until_stuck(MAX_OWN)
            assert await fetch(fetcher, "another", f"http://{good}/") == b"ok"
            await cancelled(attack)
            assert await fetch(fetcher, "attacker", f"http://{good}/") == b"ok", "slots were lost"
        fetcher.close()

    run(test)


def test_a_download_that_never_started_is_the_servers_fault_and_a_slow_one_the_urls() -> None:
    async def test() -> None:
        fetcher = fetcher_with(0.2)
        async with serving() as (_, tarpit, _good):
            attack = [asyncio.create_task(fetch(fetcher, "attacker", f"http://{tarpit}/")) for _ in range(3 * MAX_OWN)]
            errors = await asyncio.gather(*attack, return_exceptions=True)
        refused = [type(error) for error in errors]
        assert set(refused) == {InvalidMedia, ClientShareExceeded}
        assert refused[:MAX_OWN] == [InvalidMedia] * MAX_OWN
        assert any("waited 0.2 s for other downloads of yours" in str(error) for error in errors)
        fetcher.close()

    run(test)


def test_a_cancelled_tls_handshake_leaves_no_connection_open() -> None:
    async def test() -> None:
        fetcher = fetcher_with(0.05)
        async with serving() as (_, tarpit, good):
            await fetch(fetcher, "c", f"http://{good}/")  # opens what stays open
            before = num_open()
            for _ in range(8):
                with pytest.raises(InvalidMedia, match="not downloaded within"):
                    await fetch(fetcher, "c", f"https://{tarpit}/")
        assert num_open() <= before
        fetcher.close()

    run(test)


def test_names_that_do_not_resolve_block_neither_other_lookups_nor_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup cannot be interrupted: its slot stays taken until it ends, and others still have threads."""
    resolve, ended = socket.getaddrinfo, threading.Event()

    def slow(host: str, *others: Any, **options: Any) -> Any:
        if host == "tarpit.example":
            assert ended.wait(60)
            raise socket.gaierror("no such host")
        return resolve(host, *others, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)

    async def test() -> None:
        fetcher = fetcher_with(0.5)
        async with serving() as (_, _tarpit, good):
            attack = [fetch(fetcher, "attacker", "http://tarpit.example/") for _ in range(MAX_OWN)]
            errors = await asyncio.gather(*attack, return_exceptions=True)
            assert {type(error) for error in errors} == {InvalidMedia}
            with pytest.raises(ClientShareExceeded, match=r"waited 0\.5 s"):
                await fetch(fetcher, "attacker", f"http://{good}/")
            assert await fetch(fetcher, "another", f"http://localhost:{good.partition(':')[2]}/") == b"ok"
            ended.set()
            for _ in range(100):  # the slots return with the threads
                try:
                    assert await fetch(fetcher, "attacker", f"http://{good}/") == b"ok"
                    break
                except ClientShareExceeded:
                    continue
            else:
                pytest.fail("slots were lost")
        fetcher.close()

    run(test)


def test_one_client_cannot_hold_all_fetched_bytes() -> None:
    fetcher = fetcher_with(10, max_fetched_bytes=1000)
    fetcher.held.take("attacker", 750)
    with pytest.raises(ClientShareExceeded, match=r"750 bytes .* of your requests"):
        fetcher.held.take("attacker", 1)
    fetcher.held.take("another", 250)
    with pytest.raises(Overloaded) as refused:
        fetcher.held.take("third", 1)
    assert not isinstance(refused.value, ClientShareExceeded), "the client's own requests are not the reason"
    fetcher.held.give_back("attacker", 750)
    fetcher.held.take("third", 1)
    fetcher.close()


@pytest.mark.parametrize("allow_private", [False, True])
@pytest.mark.parametrize("address", METADATA)
def test_metadata_services_are_refused_even_where_private_addresses_are_allowed(
    address: str, allow_private: bool
) -> None:
    with pytest.raises(RefusedURL, match="metadata service"):
        FetchPolicy(MediaLimits(allow_private_media=allow_private)).check_address(address)


def test_a_redirect_to_a_metadata_service_is_refused() -> None:
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 302 Found\r\nlocation: http://168.63.129.16/machine\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def test() -> None:
        server = await asyncio.start_server(redirect, "127.0.0.1", 0)
        fetcher = fetcher_with(10)
        with pytest.raises(InvalidMedia, match=r"168\.63\.129\.16 is link-local or one of a cloud's metadata service"):
            await fetch(fetcher, "c", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
        fetcher.close()
        server.close()

    run(test)


def test_only_the_ports_of_http_and_https_are_fetched_from() -> None:
    policy = FetchPolicy(MediaLimits())
    for url in ("http://a.example/", "https://a.example/", "http://a.example:443/", "https://a.example:80/x?y"):
        policy.check_url(url)
    for port in (0, 22, 6379, 8000, 8080, 11211):
        with pytest.raises(RefusedURL, match=f"port {port}; this server fetches from ports 80 and 443 only"):
            policy.check_url(f"http://a.example:{port}/")
    assert FetchPolicy(MediaLimits(allow_private_media=True)).check_url("http://a.example:9000/").port == 9000


def test_only_hosts_of_allowed_domains_are_fetched_from() -> None:
    policy = FetchPolicy(MediaLimits(allowed_media_domains="cdn.example, *.images.example,bücher.example"))
    for host in ("cdn.example", "CDN.example.", "a.images.example", "a.b.images.example", "xn--bcher-kva.example"):
        policy.check_url(f"https://{host}/a.png")
    for host in ("example", "a.cdn.example", "images.example", "evilimages.example", "cdn.example.evil", "1.1.1.1"):
        with pytest.raises(RefusedURL, match="not one that this server fetches from"):
            policy.check_url(f"https://{host}/a.png")
