"""From a URL to bytes: data URLs, files in the allowed folder, and the web, on which a client must not send us astray.

A host name is resolved once, all of its addresses are checked, and the connection goes to one that was checked: a name
that answers differently the second time gains nothing. Redirects are followed by hand, each like the first URL.
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
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

import httpcore

from tandem.proxy.media.source import InvalidMedia, MediaLimits, MediaSource
from tandem.runtime.errors import Overloaded

_MAX_REDIRECTS = 4
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_CONNECTIONS = 64
_HEADERS = {"User-Agent": "tandem", "Accept": "image/*, video/*, */*;q=0.5", "Accept-Encoding": "identity"}
_SHARED = ipaddress.ip_network("64:ff9b::/96")  # leads to any IPv4 address (RFC 6052)
_MAX_SHOWN = 100


class _RefusedAddress(Exception):
    """Says which, and why."""


def check_address(address: str) -> None:
    """Raises _RefusedAddress for one that is not public: loopback, private, link-local, multicast and the like."""
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address.partition("%")[0])
    inner: ipaddress.IPv4Address | None = None
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _SHARED:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    for each in (ip, inner):
        is_mapping = each is ip and inner is not None
        if each is not None and not is_mapping and (not each.is_global or each.is_multicast or each.is_reserved):
            raise _RefusedAddress(f"its address {address} is not a public one")


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to addresses that have been checked. allow_private: checks none."""

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
        addresses = await self._resolve(host, port)
        if not self._allow_private:
            for address in addresses:
                check_address(address)
        return await self._network.connect_tcp(addresses[0], port, timeout, local_address, socket_options)

    async def _resolve(self, host: str, port: int) -> list[str]:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"the host {host[:_MAX_SHOWN]!r} is not known") from error
        return [str(sockaddr[0]) for _, _, _, _, sockaddr in found]

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise _RefusedAddress("it leads to a local socket")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Fetched:
    """What one request has fetched, by the number of the item; its bytes count until it is closed."""

    def __init__(self, fetcher: MediaFetcher) -> None:
        self._fetcher = fetcher
        self._num_bytes = 0
        self.data: dict[int, bytes] = {}

    def count(self, num_bytes: int) -> None:
        """Raises Overloaded when all requests together have too many."""
        fetcher = self._fetcher
        if fetcher.held_bytes + num_bytes > fetcher.limits.max_fetched_bytes:
            raise Overloaded(f"{fetcher.held_bytes} bytes that were fetched wait to be processed; try again later")
        self._num_bytes += num_bytes
        fetcher.held_bytes += num_bytes

    def close(self) -> None:
        self._fetcher.held_bytes -= self._num_bytes
        self._num_bytes = 0


class MediaFetcher:
    """Belongs to the loop that it is used on. held_bytes: of all that is open."""

    def __init__(self, limits: MediaLimits) -> None:
        self.limits = limits
        self.held_bytes = 0
        self._http = httpcore.AsyncConnectionPool(
            ssl_context=ssl.create_default_context(),
            max_connections=_MAX_CONNECTIONS,
            max_keepalive_connections=0,  # every connection is checked
            network_backend=_CheckedNetwork(limits.allow_private),
        )

    async def fetch(self, source: MediaSource, into: Fetched) -> None:
        """From http or https. Raises InvalidMedia, and Overloaded when too much is held already."""
        limits = self.limits
        try:
            async with asyncio.timeout(limits.fetch_timeout_s):
                into.data[source.number] = await self._fetch(source, into)
        except (InvalidMedia, Overloaded):
            raise
        except (TimeoutError, httpcore.TimeoutException):
            raise source.refused(f"its URL gave no whole answer within {limits.fetch_timeout_s:g} s") from None
        except _RefusedAddress as error:
            raise source.refused(f"{error}; this server fetches from public ones alone") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError, OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:_MAX_SHOWN] or type(error).__name__
            raise source.refused(f"its URL cannot be fetched: {reason}") from error

    async def _fetch(self, source: MediaSource, into: Fetched) -> bytes:
        url = source.url
        for _ in range(_MAX_REDIRECTS + 1):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
                raise source.refused("its URL leads to something else than http or https with a host")
            headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            async with self._http.stream("GET", _ascii(url), headers=headers) as response:
                if response.status in _REDIRECTS:
                    location = {k.lower(): v for k, v in response.headers}.get(b"location")
                    if location is None:
                        raise source.refused("its URL redirects to nowhere")
                    url = urljoin(url, location.decode("latin-1"))
                    continue
                if response.status != 200:
                    raise source.refused(f"its URL answers with status {response.status}")
                return await self._read(source, response, into)
        raise source.refused(f"its URL redirects more than {_MAX_REDIRECTS} times")

    async def _read(self, source: MediaSource, response: httpcore.Response, into: Fetched) -> bytes:
        most = self.limits.max_bytes
        pieces: list[bytes] = []
        num_bytes = 0
        async for piece in response.aiter_stream():
            num_bytes += len(piece)
            if num_bytes > most:
                raise source.refused(f"it has more than {most} bytes")
            into.count(len(piece))
            pieces.append(piece)
        return b"".join(pieces)

    async def close(self) -> None:
        await self._http.aclose()


def _ascii(url: str) -> str:
    """The host as it stands in certificates, and in the rest no character that a request line cannot hold."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    host = parts.hostname.encode("idna").decode() if not parts.hostname.isascii() else parts.hostname
    netloc = f"[{host}]" if ":" in host else host
    if parts.port is not None:
        netloc += f":{parts.port}"
    quoted = "".join(c if "!" <= c <= "~" else "".join(f"%{b:02X}" for b in c.encode()) for c in parts.path or "/")
    query = "".join(c if "!" <= c <= "~" else "".join(f"%{b:02X}" for b in c.encode()) for c in parts.query)
    return f"{parts.scheme}://{netloc}{quoted}" + (f"?{query}" if query else "")


def is_remote(source: MediaSource) -> bool:
    return source.url[:5].lower() in ("http:", "https")


def read_local(source: MediaSource, limits: MediaLimits) -> bytes:
    """Of a data or file URL. Raises InvalidMedia."""
    scheme = source.url.partition(":")[0].lower()
    if scheme == "data":
        return _decode_data_url(source, limits)
    if scheme == "file":
        return _read_file(source, limits)
    raise source.refused("its URL must begin with data:, http:, https: or file:")


def _decode_data_url(source: MediaSource, limits: MediaLimits) -> bytes:
    head, comma, data = source.url.partition(",")
    if not comma:
        raise source.refused("its data URL has no comma; it looks like data:image/png;base64,AAAA")
    media_type = head[5:].partition(";")[0].lower()
    if media_type and not media_type.startswith(f"{source.kind}/") and media_type != "application/octet-stream":
        raise source.refused(f"its data URL is of type {media_type[:_MAX_SHOWN]}, not {source.kind}")
    is_base64 = head.lower().endswith(";base64")
    if len(data) * (3 / 4 if is_base64 else 1 / 3) > limits.max_bytes + 3:
        raise source.refused(f"it has more than {limits.max_bytes} bytes")
    try:
        found = base64.b64decode(data, validate=True) if is_base64 else unquote_to_bytes(data)
    except (binascii.Error, ValueError) as error:
        raise source.refused(f"its data URL is not valid base64: {error}") from None
    if len(found) > limits.max_bytes:
        raise source.refused(f"it has more than {limits.max_bytes} bytes")
    return found


def _read_file(source: MediaSource, limits: MediaLimits) -> bytes:
    if not limits.allowed_path:
        raise source.refused("this server reads no local files; have it started with --allowed-media-path")
    parts = urlsplit(source.url)
    if parts.netloc not in ("", "localhost"):
        raise source.refused("its file URL names another host")
    folder = Path(limits.allowed_path).resolve()
    try:
        # Links are followed before the comparison, so that none leads out.
        path = Path(os.fsdecode(unquote_to_bytes(parts.path))).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        path = None
    if path is None or not path.is_relative_to(folder):  # which it is, is not for the client to know
        raise source.refused("its file is not in the folder that this server may read")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise source.refused("it is not a regular file")
            data = file.read(limits.max_bytes + 1)
    except OSError as error:
        raise source.refused(f"its file cannot be read: {error.strerror}") from None
    if len(data) > limits.max_bytes:
        raise source.refused(f"it has more than {limits.max_bytes} bytes")
    return data
