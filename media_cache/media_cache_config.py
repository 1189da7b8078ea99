"""Configuration of the media cache process."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.protocol.network import NetworkConfig


class MediaCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON file that `python -m tandem.media_cache FILE` reads.

    endpoint: ZeroMQ address for clients on this host, bound here. capacity_bytes: shared memory for all items.
    tcp_endpoint: address where prefill workers of other hosts read items; "" if there are none. Its port may be 0: the
    bound endpoint is then written to tcp_endpoint_file. network: protection of the tcp endpoint, with the proxy's keys.
    """

    endpoint: str
    capacity_bytes: Annotated[int, Meta(ge=1)]
    tcp_endpoint: str = ""
    network: NetworkConfig = NetworkConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    tcp_endpoint_file: str = ""
