"""Which requests that browsers send for web pages are served. Pure.

A page of any site can make its reader's browser send requests to a server that only the reader can reach, such as one
on loopback. API keys prevent that, because a page does not have them. Without keys two things do:

- A browser says which page a request is for (`Origin`, `Sec-Fetch-Site`). Requests that compute or change something are
  refused for pages of other sites, unless the operator allows them.
- A page can give its own host name the address of this server (DNS rebinding), and is then of the same site. Where a
  server listens on loopback, requests to names that somebody can register on the internet are refused.

Other programs than browsers send neither header, and are not concerned.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping

from tandem.runtime.errors import ConfigError, InvalidRequest

ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,*?#]+")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_PRIVATE_ZONES = (".localhost", ".local", ".internal", ".home.arpa")
"""Names in them cannot be registered on the internet, nor can names without a dot."""
_MAX_SHOWN = 200
"""Characters of a header that an error message repeats."""


class OriginNotAllowed(InvalidRequest):
    """A browser sends the request for a page that may not use this server."""

    code = "origin_not_allowed"


def parse_origins(given: Iterable[str]) -> list[str]:
    """Returns the origins in these lists, which are separated by commas. Raises ConfigError."""
    origins = [origin.strip().lower() for each in given for origin in each.split(",") if origin.strip()]
    for origin in origins:
        if origin not in (ANY_ORIGIN, "null") and _ORIGIN.fullmatch(origin) is None:
            raise ConfigError(
                f"cors_origin: {origin!r} is not an origin; write it as https://HOST[:PORT], or * for all"
            )
    return origins


class BrowserRules:
    """The rules of one address. origins: whose pages may use it. host: the address that it listens on."""

    def __init__(self, origins: Iterable[str], host: str) -> None:
        self._origins = frozenset(origins)
        self._names = {host.lower(), socket.gethostname().lower()}
        self._names |= {_name_of(origin.partition("://")[2]) for origin in self._origins}
        self._checks_names = is_loopback(host)

    def check(self, method: str, headers: Mapping[str, str]) -> None:
        """headers: by name in lower case. Raises OriginNotAllowed."""
        if ANY_ORIGIN in self._origins:
            return
        host = headers.get("host", "").lower()
        if self._checks_names and not self._is_own(_name_of(host)):
            name = host[:_MAX_SHOWN]
            raise OriginNotAllowed(
                f"This server does not answer to the name {name!r}: it has no API keys and listens on loopback. "
                f"Use localhost, or start it with --api-key, or with --cors-origin https://{name}."
            )
        origin = headers.get("origin", "").lower()
        if method in _SAFE_METHODS or not origin or origin in self._origins:
            return
        site = headers.get("sec-fetch-site")
        if site in ("same-origin", "none") if site is not None else origin.partition("://")[2] == host:
            return
        raise OriginNotAllowed(
            f"Pages of {origin[:_MAX_SHOWN]!r} are not allowed to use this server; its operator can allow them with "
            "--cors-origin."
        )

    def _is_own(self, name: str) -> bool:
        if "." not in name.rstrip(".") or name in self._names or name.endswith(_PRIVATE_ZONES):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _name_of(authority: str) -> str:
    """Returns the host without its port and brackets."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Returns whether only this host can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
