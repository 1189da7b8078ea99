"""Which URLs and addresses media may be fetched from. Pure."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from tandem.proxy.media.media_limits import MediaLimits

_PORTS = {"http": 80, "https": 443}
"""Ports that URLs may name, and the default of each scheme."""
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))
_MAX_SHOWN = 100

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
