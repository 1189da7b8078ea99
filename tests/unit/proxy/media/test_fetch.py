"""Fetching media: refused addresses, redirects, and limits of size and time. No model, no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import httpcore
import msgspec
import pytest

from tandem.proxy.media import fetch as media_fetch
from tandem.proxy.media.fetch import FetchedMedia, FetchPolicy, FetchURL, MediaFetcher, RefusedURL
from tandem.proxy.media.media_limits import MediaLimits
from tandem.proxy.media.source import InvalidMedia, MediaSource
from tandem.runtime.errors import Overloaded

LIMITS = MediaLimits(max_bytes=1000, fetch_timeout_s=20, allow_private_media=True)
Reply = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


def source(url: str) -> MediaSource:
    return MediaSource(3, "image", url, "messages[0].content[1]")


def answer(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def fetch(
    reply: Reply, path: str = "/a.png", limits: MediaLimits = LIMITS, host: str = "127.0.0.1", port: int = 0
) -> bytes:
    """Fetches from a server on this loop. reply: gets the path and writes the answer. port: 0 for the server's."""

    async def run() -> bytes:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                await reply(head.split()[1].decode(), writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass  # the client has closed the connection
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        fetcher = MediaFetcher(limits)
        try:
            item = source(f"http://{host}:{port or server.sockets[0].getsockname()[1]}{path}")
            with FetchedMedia(fetcher, "client") as fetched:
                await fetched.fetch(item)
                return fetched.data[item.number]
        finally:
            assert fetcher.held.num_held == 0
            fetcher.close()
            server.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


def replying(data: bytes) -> Reply:
    async def reply(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return reply


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "224.0.0.1", "255.255.255.255", "240.0.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1",
        "ff02::1", "fec0::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    with pytest.raises(RefusedURL, match=r"not a public one|link-local"):
        FetchPolicy(MediaLimits()).check_address(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_are_accepted(address: str) -> None:
    FetchPolicy(MediaLimits()).check_address(address)


def test_downloaded_bytes_are_unchanged() -> None:
    seen: list[str] = []

    async def reply(path: str, writer: asyncio.StreamWriter) -> None:
        seen.append(path)
        writer.write(answer("200 OK", b"picture"))

    assert fetch(reply, "/ä b.png?c=ü d") == b"picture"
    assert seen == ["/%C3%A4%20b.png?c=%C3%BC%20d"]


def test_what_exceeds_a_clients_share_by_itself_is_refused_for_good() -> None:
    limits = msgspec.structs.replace(LIMITS, max_fetched_bytes=1000)
    assert fetch(replying(answer("200 OK", bytes(750))), limits=limits) == bytes(750)
    with pytest.raises(InvalidMedia, match="more than 750 bytes, which is what one client may have fetched"):
        fetch(replying(answer("200 OK", bytes(751))), limits=limits)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1"])
def test_loopback_is_refused_in_every_notation(host: str) -> None:
    with pytest.raises(InvalidMedia, match=r"image 3 \(messages\[0\].content\[1\]\)") as refused:
        fetch(replying(answer("200 OK", b"secret")), host=host, port=80, limits=MediaLimits(fetch_timeout_s=20))
    assert "not a public one" in str(refused.value) or "is not known" in str(refused.value)


class OwnServer(FetchPolicy):
    """Treats 127.0.0.1, the test's own server, like a public address, with any port."""

    def check_url(self, url: str) -> FetchURL:
        return (FetchPolicy(LIMITS) if "//127.0.0.1:" in url else super()).check_url(url)

    def check_address(self, address: str) -> None:
        if address != "127.0.0.1":
            super().check_address(address)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("http://127.0.0.2/secret", "is not a public one"),
        ("http://10.0.0.1/", "is not a public one"),
        ("//169.254.169.254/meta", "a cloud's metadata service"),
        ("http://8.8.8.8:22/", "ports 80 and 443 only"),
        ("file:///etc/passwd", "must be http or https"),
        ("gopher://x/", "must be http or https"),
        ("http://user@127.0.0.1/", "must be http or https"),
    ],
)
def test_each_redirect_is_checked_like_the_first_url(target: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_fetch, "FetchPolicy", OwnServer)
    with pytest.raises(InvalidMedia, match=reason):
        fetch(replying(answer("302 Found", b"", f"location: {target}")), limits=MediaLimits(fetch_timeout_s=20))


def test_a_name_is_resolved_once_and_its_checked_address_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second resolution would give another address."""
    answers = ["8.8.8.8", "127.0.0.1"]
    connected: list[str] = []

    def look_up(self: MediaFetcher, host: str, port: int) -> Future[Any]:
        found: Future[Any] = Future()
        found.set_result([(0, 0, 0, "", (answers.pop(0), port))])
        return found

    async def connect(self: object, host: str, *others: object) -> None:
        connected.append(host)
        raise OSError("not in a test")

    monkeypatch.setattr(MediaFetcher, "look_up", look_up)
    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
    with pytest.raises(InvalidMedia, match="cannot be fetched"):
        fetch(replying(b""), host="rebind.example", port=80, limits=MediaLimits(fetch_timeout_s=20))
    assert connected == ["8.8.8.8"] and len(answers) == 1


def test_redirects_are_followed_up_to_a_limit() -> None:
    async def reply(path: str, writer: asyncio.StreamWriter) -> None:
        number = int(path[1:])
        writer.write(answer("307 Next", b"", f"location: /{number - 1}") if number else answer("200 OK", b"there"))

    assert fetch(reply, "/4") == b"there"
    with pytest.raises(InvalidMedia, match="more than 4 times"):
        fetch(reply, "/5")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (answer("404 Not Found"), "answers with status 404"),
        (answer("200 OK", bytes(1001)), "more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"200\r\n" + bytes(512) + b"\r\n" * 1, "cannot be"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf", "cannot be fetched"),
        (b"nonsense\r\n\r\n", "cannot be fetched"),
        (answer("302 Found"), "redirect without a location"),
    ],
)
def test_invalid_downloads_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidMedia, match=reason):
        fetch(replying(data))


def test_a_download_has_a_timeout() -> None:
    async def reply(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
        await asyncio.Event().wait()

    with pytest.raises(InvalidMedia, match=r"not downloaded within 0\.2 s"):
        fetch(reply, limits=msgspec.structs.replace(LIMITS, fetch_timeout_s=0.2))


def test_the_total_of_fetched_bytes_is_limited() -> None:
    fetcher = MediaFetcher(msgspec.structs.replace(LIMITS, max_fetched_bytes=800))
    fetcher.held.take("a", 600)
    with pytest.raises(Overloaded, match="800 bytes of fetched images and video are waiting to be processed"):
        [fetcher.held.take(client, 200) for client in "bc"]
    fetcher.close()
