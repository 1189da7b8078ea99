"""Reads the bytes of images and videos from files in the allowed folder and from http(s).

To prevent requests to internal addresses, a host name is resolved once, all of its addresses are checked, and the
connection goes to a checked address. Redirects are followed here, each with the same checks.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes, urljoin, urlsplit

import httpcore

from tandem.proxy.admission.budgets import ClientBudget
from tandem.proxy.admission.fair_slots import FairSlots
from tandem.proxy.media.media_limits import MediaLimits
from tandem.proxy.media.source import MediaSource, check_num_bytes
from tandem.runtime.client_share import CLIENT_SHARE
from tandem.runtime.errors import ClientShareExceeded, Overloaded, client_reason
from tandem.runtime.files.regular_file import read_regular
from tandem.runtime.threads import post

_PORTS = {"http": 80, "https": 443}
"""Ports that URLs may name, and the default of each scheme."""
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))

_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # embeds any IPv4 address (RFC 6052)
_SITE_LOCAL = ipaddress.ip_network("fec0::/10")  # deprecated (RFC 3879); Python calls it global
_METADATA = [
    ipaddress.ip_network(network)
    for network in (
        "169.254.0.0/16",  # link-local: AWS, Azure, GCP, OpenStack, Tencent and others
        "fe80::/10",
        "168.63.129.16/32",  # Azure's WireServer, a public address
        "192.0.0.192/32",  # Oracle
        "100.100.100.200/32",  # Alibaba
        "fd00:ec2::/32",  # AWS
        "fd20:ce::254/128",  # GCP
        "fd00:c1::/32",  # Oracle
        "fd00:42::42/128",  # Scaleway
    )
]
"""Addresses at which clouds give credentials to their machines. Nothing is fetched from them."""

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class RefusedURL(Exception):
    """The URL must not be fetched. The message says why."""


class FetchURL(NamedTuple):
    """A URL that may be fetched. host: as DNS has it. target: of the request line, in printable ASCII."""

    scheme: str
    host: str
    port: int
    target: str


class FetchPolicy:
    """Applies `MediaLimits.allow_private_media` and `allowed_media_domains`."""

    def __init__(self, limits: MediaLimits) -> None:
        self._allow_private = limits.allow_private_media
        self._domains = [_ascii_host(domain) for domain in limits.domains]

    def check_url(self, url: str) -> FetchURL:
        """Raises RefusedURL, or ValueError for an invalid host or port."""
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None:
            raise RefusedURL("its URL must be http or https, with a host and without a user name")
        port = _PORTS[parts.scheme] if parts.port is None else parts.port
        if port not in _PORTS.values() and not (self._allow_private and port):
            raise RefusedURL(f"its URL names port {port}; this server fetches from ports 80 and 443 only")
        host = _ascii_host(parts.hostname)
        if self._domains and not any(_matches(host, domain) for domain in self._domains):
            raise RefusedURL(f"its host {host[:_MAX_SHOWN]!r} is not one that this server fetches from")
        query = f"?{quote(parts.query, safe=_PRINTABLE)}" if parts.query else ""
        return FetchURL(parts.scheme, host, port, quote(parts.path or "/", safe=_PRINTABLE) + query)

    def check_address(self, address: str) -> None:
        """Raises RefusedURL for a cloud's metadata service and, unless private ones are allowed, for an address that is
        not public, such as loopback, private or multicast."""
        for ip in _meanings(address):
            if any(ip in network for network in _METADATA):
                raise RefusedURL(f"its address {address} is link-local or one of a cloud's metadata service")
            if not self._allow_private and (not ip.is_global or ip.is_multicast or ip.is_reserved or ip in _SITE_LOCAL):
                raise RefusedURL(
                    f"its address {address} is not a public one; this server fetches from public addresses only"
                )


def _ascii_host(host: str) -> str:
    """Returns the host as DNS and HTTP have it: lower case, IDNA, without a dot at the end. Raises ValueError."""
    host = host.lower().rstrip(".")
    return host if host.isascii() else host.encode("idna").decode()


def _matches(host: str, domain: str) -> bool:
    return host == domain or (domain.startswith("*.") and host.endswith(domain[1:]))


def _meanings(address: str) -> list[IPAddress]:
    """Returns the address, or the IPv4 addresses that an IPv6 address leads to."""
    ip: IPAddress = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return [ip]
    if ip in _NAT64:
        return [ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)]
    embedded = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
    return [found for found in embedded if found is not None] or [ip]


_MAX_REDIRECTS = 4
_REDIRECTS = (301, 302, 303, 307, 308)
MAX_DOWNLOADS = 64
"""Downloads at the same time. Each needs a thread while its host name is looked up."""
_HEADERS = [
    (b"User-Agent", b"tandem"),
    (b"Accept", b"image/*, video/*, */*;q=0.5"),
    (b"Accept-Encoding", b"identity"),
]
_MAX_SHOWN = 100


class _CheckedAddress(httpcore.AsyncNetworkBackend):
    """Connects to one address, whatever the host of the URL. A context manager that closes the connections."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._network = httpcore.AnyIOBackend()
        self._streams: list[httpcore.AsyncNetworkStream] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        stream = await self._network.connect_tcp(self._address, port, timeout, local_address, socket_options)
        self._streams.append(stream)
        return stream

    async def __aenter__(self) -> _CheckedAddress:
        return self

    async def __aexit__(self, *_error: object) -> None:
        for stream in self._streams:  # httpcore leaves one open that is cancelled during the TLS handshake
            await stream.aclose()


class FetchedBytes(ClientBudget):
    """Bytes of images and videos that were fetched and are not released. max_bytes: of all clients together."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self.max_client_bytes = int(max_bytes * CLIENT_SHARE)

    def check(self, client: str, number: int) -> None:
        """Raises ClientShareExceeded or Overloaded."""
        if (num_own := self._by_client[client]) + number > self.max_client_bytes:
            raise ClientShareExceeded(
                f"{num_own} bytes of fetched images and video of your requests are waiting to be processed; the limit "
                f"is {self.max_client_bytes} for each client. Send fewer such requests at once, and try again later."
            )
        if self.num_held + number > self._max_bytes:
            raise Overloaded(
                f"{self.num_held} bytes of fetched images and video are waiting to be processed; try again later"
            )


class MediaFetcher:
    """Downloads from http and https; belongs to one loop. One client may hold at most CLIENT_SHARE of the downloads."""

    def __init__(self, limits: MediaLimits) -> None:
        self.limits = limits
        self.policy = FetchPolicy(limits)
        self.downloads = FairSlots(MAX_DOWNLOADS, int(MAX_DOWNLOADS * CLIENT_SHARE))
        self.held = FetchedBytes(limits.max_fetched_bytes)
        # Not the loop's own threads: those are few, and a lookup cannot be interrupted.
        self._lookups = ThreadPoolExecutor(MAX_DOWNLOADS, "dns")
        self.ssl_context = ssl.create_default_context()

    def look_up(self, host: str, port: int) -> Future[Any]:
        """Starts to resolve a host name on a thread."""
        return self._lookups.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)

    def close(self) -> None:
        self._lookups.shutdown(wait=False, cancel_futures=True)


class FetchedMedia:
    """The media that one request has fetched. A context manager that releases the bytes' share of `max_fetched_bytes`.

    data: bytes by number of the item.
    """

    def __init__(self, fetcher: MediaFetcher, client: str) -> None:
        self._fetcher = fetcher
        self._client = client
        self._num_bytes = 0
        self.data: dict[int, bytes] = {}

    def __enter__(self) -> FetchedMedia:
        return self

    def __exit__(self, *_error: object) -> None:
        self._fetcher.held.give_back(self._client, self._num_bytes)
        self._num_bytes = 0

    async def fetch(self, source: MediaSource) -> None:
        """Fetches an item from http or https. Raises InvalidMedia, ClientShareExceeded, Overloaded."""
        limits, downloads = self._fetcher.limits, self._fetcher.downloads
        waits_for_own = downloads.has_share(self._client)
        try:
            async with asyncio.timeout(limits.fetch_timeout_s):
                await downloads.acquire(self._client)
        except TimeoutError as error:
            waited = f"{source.kind} {source.number} ({source.param}) waited {limits.fetch_timeout_s:g} s for other "
            if waits_for_own:
                raise ClientShareExceeded(
                    f"{waited}downloads of yours to end; send fewer at once, and try again later"
                ) from error
            raise Overloaded(f"{waited}downloads to end; try again later") from error
        lookups: list[Future[Any]] = []
        try:
            async with asyncio.timeout(limits.fetch_timeout_s):
                self.data[source.number] = await self._fetch(source, lookups)
        except (TimeoutError, httpcore.TimeoutException) as error:
            raise source.refused(f"its URL was not downloaded within {limits.fetch_timeout_s:g} s") from error
        except RefusedURL as error:
            raise source.refused(str(error)) from error
        except (httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError, OSError, ValueError) as error:
            raise source.refused(f"its URL cannot be fetched: {client_reason(error)[:_MAX_SHOWN]}") from error
        finally:
            self._release_download(lookups)

    def _release_download(self, lookups: list[Future[Any]]) -> None:
        """Releases the slot, but not before the thread of the last lookup is free again."""
        release = partial(self._fetcher.downloads.release, self._client)
        if not lookups or lookups[-1].done():
            release()
            return
        loop = asyncio.get_running_loop()
        lookups[-1].add_done_callback(lambda lookup: post(loop, release))

    async def _fetch(self, source: MediaSource, lookups: list[Future[Any]]) -> bytes:
        """lookups: all lookups of host names are appended."""
        fetcher, url = self._fetcher, source.url
        for _ in range(_MAX_REDIRECTS + 1):
            checked = fetcher.policy.check_url(url)
            address = await self._resolve(checked, lookups)
            request = httpcore.URL(scheme=checked.scheme, host=checked.host, port=checked.port, target=checked.target)
            async with (
                _CheckedAddress(address) as network,
                httpcore.AsyncHTTPConnection(
                    request.origin, self._fetcher.ssl_context, network_backend=network
                ) as http,
                http.stream("GET", request, headers=_HEADERS) as response,
            ):
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

    async def _resolve(self, url: FetchURL, lookups: list[Future[Any]]) -> str:
        """Returns an address of the URL's host. All of its addresses are checked. Raises RefusedURL, ConnectError."""
        lookup = self._fetcher.look_up(url.host, url.port)
        lookups.append(lookup)
        try:
            found = await asyncio.wrap_future(lookup)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"the host {url.host[:_MAX_SHOWN]!r} is not known") from error
        addresses = [str(sockaddr[0]) for _, _, _, _, sockaddr in found]
        for address in addresses:
            self._fetcher.policy.check_address(address)
        return addresses[0]

    async def _read(self, source: MediaSource, response: httpcore.Response) -> bytes:
        pieces: list[bytes] = []
        num_bytes = 0
        async for piece in response.aiter_stream():
            num_bytes += len(piece)
            check_num_bytes(source, num_bytes, self._fetcher.limits)
            if self._num_bytes + len(piece) > self._fetcher.held.max_client_bytes:
                raise source.refused(
                    f"with others of the request it has more than {self._fetcher.held.max_client_bytes} bytes, which "
                    "is what one client may have fetched at the same time; send smaller or fewer ones"
                )
            self._fetcher.held.take(self._client, len(piece))
            self._num_bytes += len(piece)
            pieces.append(piece)
        return b"".join(pieces)


def is_remote(source: MediaSource) -> bool:
    return source.url[:5].lower() in ("http:", "https")


def read_file(source: MediaSource, limits: MediaLimits) -> bytes:
    """Reads a file URL. Raises InvalidMedia."""
    if source.url.partition(":")[0].lower() != "file":
        raise source.refused("its URL must begin with data:, http:, https: or file:")
    if not limits.allowed_media_path:
        raise source.refused("this server does not read files; start it with --allowed-media-path")
    parts = urlsplit(source.url)
    if parts.netloc not in ("", "localhost"):
        raise source.refused("its file URL names another host")
    folder = Path(limits.allowed_media_path).resolve()
    try:
        # Links are resolved before the comparison, so that none leads out of the folder.
        path = Path(os.fsdecode(unquote_to_bytes(parts.path))).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        path = None
    if path is None or not path.is_relative_to(folder):  # the same message, so that clients cannot probe for files
        raise source.refused("its file is not in the folder of --allowed-media-path")
    try:
        return read_regular(path, limits.max_bytes, follow_links=False)
    except OSError as error:
        raise source.refused(f"its file cannot be read: {error.strerror}") from error
