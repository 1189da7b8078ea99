"""Configuration of the media cache process."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.protocol.network import NetworkConfig
from tandem.runtime.logs import LogSettings


class MediaCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON file that `python -m tandem.media_cache FILE` reads."""

    endpoint: str
    """ZeroMQ address that is bound for clients on this host."""
    capacity_bytes: Annotated[int, Meta(ge=1)]
    """Shared memory for all items."""
    tcp_endpoint: str = ""
    """Address where prefill workers of other hosts read items; empty if there are none. Its port may be 0."""
    network: NetworkConfig = NetworkConfig()
    """Protection of the tcp endpoint, with the proxy's keys."""
    logs: LogSettings = LogSettings()
    tcp_endpoint_file: str = ""
    """File to which the bound tcp endpoint is written; empty for none."""
