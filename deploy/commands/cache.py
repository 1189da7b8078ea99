"""`tandem cache clear`: empties the media cache of a running cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tandem.deploy.commands.cluster_client import no_cluster
from tandem.deploy.processes.runtime_dir import PROXIES_FILE, runtime_dir
from tandem.protocol.media_client import MediaCacheClient
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import ConfigError


def clear_media_cache(port: int, say: Callable[[str], None]) -> None:
    """Drop all processed images and videos; requests in flight keep the items that they use.

    Raises ConfigError when no cluster runs on `port` or it has no media cache on this host.
    """
    folder = runtime_dir(port)
    if not folder.exists():
        raise no_cluster(port)
    if (folder / PROXIES_FILE).exists():
        raise ConfigError("on Ray each proxy has a media cache on its node; `tandem restart` empties them")
    socket = folder / "media-cache.sock"
    if not socket.exists():
        raise ConfigError(f"the cluster on port {port} has no media cache: its model takes no images or videos")
    num_items, num_bytes = asyncio.run(_clear(f"ipc://{socket}"))
    say(f"dropped {num_items} items, {num_bytes / (1 << 20):.1f} MiB")


async def _clear(endpoint: str) -> tuple[int, int]:
    """Returns the number of items dropped and the bytes that they had."""
    context = new_context()
    cache = MediaCacheClient(context, endpoint)
    try:
        return await cache.clear()
    finally:
        cache.close()
        context.destroy(linger=0)
