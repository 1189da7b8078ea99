"""The address of a Mooncake store, as the command line takes it."""

from __future__ import annotations

import re

from tandem.runtime.errors import ConfigError

_URL = re.compile(r"mooncake://(?P<host>[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})/?")


def parse_store_url(url: str) -> str:
    """Returns HOST:PORT of a store's master, from mooncake://HOST:PORT. Raises ConfigError."""
    found = _URL.fullmatch(url)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ConfigError(
            f"kv_store: {url!r} is not mooncake://HOST:PORT, the address of a Mooncake master (a name or an IPv4 "
            "address), such as mooncake://10.0.0.1:50051"
        )
    return f"{found['host']}:{found['port']}"
