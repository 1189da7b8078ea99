"""`tandem cache clear`: empties the media cache of a running cluster."""

from __future__ import annotations

from tandem.deploy.commands.cluster_client import ClusterClient
from tandem.deploy.processes.runtime_dir import PROXIES_FILE
from tandem.protocol.media_client import MediaCacheClient
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import ConfigError


async def clear_media_cache(cluster: ClusterClient) -> None:
    """Drops all processed images and videos; requests in flight keep the items that they use.

    Raises ConfigError when no cluster runs or it has no media cache on this host.
    """
    if not cluster.folder.exists():
        raise cluster.not_running()
    if (cluster.folder / PROXIES_FILE).exists():
        raise ConfigError("on Ray each proxy has a media cache on its node; `tandem restart` empties them")
    socket = cluster.folder / "media-cache.sock"
    if not socket.exists():
        raise ConfigError(f"the cluster on port {cluster.port} has no media cache: its model takes no images or videos")
    context = new_context()
    cache = MediaCacheClient(context, f"ipc://{socket}")
    try:
        num_items, num_bytes = await cache.clear()
    finally:
        cache.close()
        context.destroy(linger=0)
    print(f"dropped {num_items} items, {num_bytes / (1 << 20):.1f} MiB")
