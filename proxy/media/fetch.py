"""Reads the bytes of images and videos: data URLs, files in the allowed folder, and http(s).

To prevent requests to internal addresses, a host name is resolved once, all of its addresses are checked, and the
connection goes to a checked address. Redirects are followed here, each with the same checks.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes, urljoin, urlsplit

import httpcore

from tandem.proxy.media.source import MediaLimits, MediaSource
from tandem.runtime.errors import Overloaded, first_line

_MAX_REDIRECTS = 4
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_CONNECTIONS = 64
_HEADERS = [
    (b"User-Agent", b"tandem"),
    (b"Accept", b"image/*, video/*, */*;q=0.5"),
    (b"Accept-Encoding", b"identity"),
]
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # embeds any IPv4 address (RFC 6052)
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))
_MAX_SHOWN = 100


class _RefusedAddress(Exception):
    """The URL leads to an address that must not be fetched from."""


def check_address(address: str) -> None:
    """Raises _RefusedAddress for an address that is not public, such as loopback, private, link-local or multicast."""
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        ip = embedded or ip
    if not ip.is_global or ip.is_multicast or ip.is_reserved:
        raise _RefusedAddress(f"its address {address} is not a public one")


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects only to public addresses, unless allow_private is set."""

    def __init__(self, allow_private: bool) -> None:
        self._allow_private = allow_private
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await _resolve(host, port)
        if not self._allow_private:
            for address in addresses:
                check_address(address)
        return await self._network.connect_tcp(addresses[0], port, timeout, local_address, socket_options)


async def _resolve(host: str, port: int) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise httpcore.ConnectError(f"the host {host[:_MAX_SHOWN]!r} is not known") from error
    return [str(sockaddr[0]) for _, _, _, _, sockaddr in found]


class MediaFetcher:
    """Downloads from http and https; belongs to one loop. held_bytes: fetched and not released, of all requests."""

    def __init__(self, limits: MediaLimits) -> None:
        self.limits = limits
        self.held_bytes = 0
        self.http = httpcore.AsyncConnectionPool(
            ssl_context=ssl.create_default_context(),
            max_connections=_MAX_CONNECTIONS,
            max_keepalive_connections=0,  # the address is checked for each connection
            network_backend=_CheckedNetwork(limits.allow_private),
        )

    def hold(self, num_bytes: int) -> None:
        """Raises Overloaded if all requests together hold too many bytes."""
        if self.held_bytes + num_bytes > self.limits.max_fetched_bytes:
            raise Overloaded(
                f"{self.held_bytes} bytes of fetched images and video are waiting to be processed; try again later"
            )
        self.held_bytes += num_bytes

    async def close(self) -> None:
        await self.http.aclose()


class FetchedMedia:
    """What one request has fetched. A context manager that releases the bytes' share of `max_fetched_bytes`.

    data: bytes by number of the item.
    """

    def __init__(self, fetcher: MediaFetcher) -> None:
        self._fetcher = fetcher
        self._num_bytes = 0
        self.data: dict[int, bytes] = {}

    def __enter__(self) -> FetchedMedia:
        return self

    def __exit__(self, *_error: object) -> None:
        self._fetcher.held_bytes -= self._num_bytes
        self._num_bytes = 0

    async def fetch(self, source: MediaSource) -> None:
        """Fetches an item from http or https. Raises InvalidMedia, Overloaded."""
        limits = self._fetcher.limits
        try:
            async with asyncio.timeout(limits.fetch_timeout_s):
                self.data[source.number] = await self._fetch(source)
        except (TimeoutError, httpcore.TimeoutException) as error:
            raise source.refused(f"its URL was not downloaded within {limits.fetch_timeout_s:g} s") from error
        except _RefusedAddress as error:
            raise source.refused(f"{error}; this server fetches from public addresses only") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError, OSError, ValueError) as error:
            raise source.refused(f"its URL cannot be fetched: {first_line(error)[:_MAX_SHOWN]}") from error

    async def _fetch(self, source: MediaSource) -> bytes:
        url = source.url
        for _ in range(_MAX_REDIRECTS + 1):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
                raise source.refused("its URL must be http or https, with a host and without a user name")
            async with self._fetcher.http.stream("GET", _ascii(url), headers=_HEADERS) as response:
                if response.status in _REDIRECTS:
                    location = {k.lower(): v for k, v in response.headers}.get(b"location")
                    if location is None:
                        raise source.refused("its URL answers with a redirect without a location")
                    url = urljoin(url, location.decode("latin-1"))
                    continue
                if response.status != 200:
                    raise source.refused(f"its URL answers with status {response.status}")
                return await self._read(source, response)
        raise source.refused(f"its URL redirects more than {_MAX_REDIRECTS} times")

    async def _read(self, source: MediaSource, response: httpcore.Response) -> bytes:
        pieces: list[bytes] = []
        num_bytes = 0
        async for piece in response.aiter_stream():
            num_bytes += len(piece)
            _check_num_bytes(source, num_bytes, self._fetcher.limits)
            self._fetcher.hold(len(piece))
            self._num_bytes += len(piece)
            pieces.append(piece)
        return b"".join(pieces)


def _ascii(url: str) -> str:
    """Returns the URL with an IDNA host, and with characters that a request line cannot contain percent-encoded."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
    netloc = f"[{host}]" if ":" in host else host
    if parts.port is not None:
        netloc += f":{parts.port}"
    query = f"?{quote(parts.query, safe=_PRINTABLE)}" if parts.query else ""
    return f"{parts.scheme}://{netloc}{quote(parts.path or '/', safe=_PRINTABLE)}{query}"


def is_remote(source: MediaSource) -> bool:
    return source.url[:5].lower() in ("http:", "https")


def read_local(source: MediaSource, limits: MediaLimits) -> bytes:
    """Reads a data or file URL. Raises InvalidMedia."""
    scheme = source.url.partition(":")[0].lower()
    if scheme == "data":
        return _decode_data_url(source, limits)
    if scheme == "file":
        return _read_file(source, limits)
    raise source.refused("its URL must begin with data:, http:, https: or file:")


def _decode_data_url(source: MediaSource, limits: MediaLimits) -> bytes:
    head, comma, data = source.url.partition(",")
    if not comma:
        raise source.refused("its data URL has no comma; it must look like data:image/png;base64,AAAA")
    media_type = head[5:].partition(";")[0].lower()
    if media_type and not media_type.startswith(f"{source.kind}/") and media_type != "application/octet-stream":
        raise source.refused(f"its data URL is of type {media_type[:_MAX_SHOWN]}, not {source.kind}")
    is_base64 = head.lower().endswith(";base64")
    _check_num_bytes(source, int(len(data) * (3 / 4 if is_base64 else 1 / 3)) - 3, limits)  # before decoding
    try:
        decoded = base64.b64decode(data, validate=True) if is_base64 else unquote_to_bytes(data)
    except (binascii.Error, ValueError) as error:
        raise source.refused(f"its data URL is not valid base64: {error}") from error
    _check_num_bytes(source, len(decoded), limits)
    return decoded


def _read_file(source: MediaSource, limits: MediaLimits) -> bytes:
    if not limits.allowed_path:
        raise source.refused("this server does not read files; start it with --allowed-media-path")
    parts = urlsplit(source.url)
    if parts.netloc not in ("", "localhost"):
        raise source.refused("its file URL names another host")
    folder = Path(limits.allowed_path).resolve()
    try:
        # Links are resolved before the comparison, so that none leads out of the folder.
        path = Path(os.fsdecode(unquote_to_bytes(parts.path))).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        path = None
    if path is None or not path.is_relative_to(folder):  # the same message, so that clients cannot probe for files
        raise source.refused("its file is not in the folder of --allowed-media-path")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise source.refused("it is not a regular file")
            data = file.read(limits.max_bytes + 1)
    except OSError as error:
        raise source.refused(f"its file cannot be read: {error.strerror}") from error
    _check_num_bytes(source, len(data), limits)
    return data


def _check_num_bytes(source: MediaSource, num_bytes: int, limits: MediaLimits) -> None:
    if num_bytes > limits.max_bytes:
        raise source.refused(f"it has more than {limits.max_bytes} bytes")
