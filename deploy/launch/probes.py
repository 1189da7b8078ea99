"""Signs of life that the launcher waits for beside the proxies' reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from tandem.deploy.launch.hang_detector import INTERVAL_S
from tandem.media_cache.media_client import MediaCacheClient
from tandem.protocol.messaging import Network
from tandem.runtime.errors import TandemError

log = logging.getLogger(__name__)


async def all_accept(hosts: Iterable[str], port: int) -> bool:
    """Returns whether the port of every host accepts a connection."""
    for host in hosts:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 1.0)
        except (OSError, TimeoutError):
            return False
        writer.close()
    return True


async def ask_media_cache(network: Network, endpoint: str, on_answer: Callable[[float], None]) -> None:
    """Asks the media cache again and again, until cancelled. on_answer: called with the time of each
    answer."""
    cache = MediaCacheClient(network, endpoint)
    try:
        while True:
            try:
                await cache.status()
                on_answer(asyncio.get_running_loop().time())
            except TandemError as error:
                log.warning("%s", error)
            await asyncio.sleep(INTERVAL_S)
    finally:
        cache.close()
