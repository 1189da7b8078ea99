"""`tandem cache show` and `tandem cache clear`: what is cached in a running cluster, and how to drop it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich.console import Console, Group
from rich.markup import escape

from tandem.deploy.commands.status import plain_table, tier_sizes_gib
from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.deploy.processes.runtime_dir import PROXIES_FILE
from tandem.media_cache.media_client import MediaCacheClient
from tandem.protocol.messages.membership import ClearWorkerCache, WorkerOrdered, WorkerReport
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import ConfigError

CacheKind = Literal["media", "kv"]


async def show_caches(cluster: ClusterClient) -> None:
    """Prints the cached KV blocks of each worker, in its pool and in the tiers below it."""
    Console().print(cache_table((await cluster.status("workers"))[0].workers), soft_wrap=True)


def cache_table(workers: list[WorkerReport]) -> Group:
    """Returns a table with a row for each worker's pool and each of its tiers, and lines with their errors."""
    table = plain_table(["worker", "tier"], ["blocks", "GiB", "limit\nGiB", "stored", "loaded", "skipped", "corrupt"])
    errors = []
    for report in sorted(workers, key=lambda each: each.worker.worker_id):
        name, load = report.worker.worker_id, report.load
        table.add_row(name, "pool", f"{load.num_cached_blocks}/{load.num_blocks}")
        for tier in load.tiers:
            counts = (tier.num_stored, tier.num_loaded, tier.num_skipped, tier.num_corrupt)
            sizes = tier_sizes_gib(tier, report.worker.num_ranks)
            table.add_row(name, tier.name, str(tier.num_blocks), *sizes, *map(str, counts))
            if tier.error:
                errors.append(f"[red]{name} does not use its tier {tier.name} at the moment:[/] {escape(tier.error)}")
    return Group(table, "", _prompt_tokens(workers), *errors)


def _prompt_tokens(workers: list[WorkerReport]) -> str:
    loads = [report.load for report in workers]
    total = sum(load.num_prompt_tokens for load in loads)
    if not total:
        return "no prompt tokens yet"
    cached, loaded = sum(load.num_cached_tokens for load in loads), sum(load.num_loaded_tokens for load in loads)
    return f"{total} prompt tokens: {cached / total:.0%} were cached, {loaded / total:.0%} were loaded from tiers"


async def clear_caches(cluster: ClusterClient, kind: CacheKind | None) -> None:
    """Empties the caches of one kind; None empties both, if the cluster has a media cache that can be emptied.

    Raises ConfigError when no cluster runs, or if a named cache does not exist or cannot be emptied.
    """
    if not cluster.folder.exists():
        raise cluster.not_running()
    if kind == "media" or (kind is None and _media_socket(cluster).exists()):
        await clear_media_cache(cluster)
    if kind != "media":
        await clear_kv_caches(cluster)


async def clear_kv_caches(cluster: ClusterClient) -> None:
    """Tells all workers to drop the prefixes that no request uses, in their pools and in the tiers below.

    Raises ConfigError, after all workers were told, if no proxy passes an order on.
    """
    reports = await cluster.status("workers")
    names = sorted({each.worker.worker_id for report in reports for each in report.workers})
    refused = ""
    for name in names:
        answers = await cluster.ask_proxies(ClearWorkerCache(name), WorkerOrdered)
        if all(answer.error for answer in answers):
            refused = refused or answers[0].error
        else:
            print(f"{name} drops its cached KV blocks", flush=True)
    if refused:
        raise ConfigError(refused)


async def clear_media_cache(cluster: ClusterClient) -> None:
    """Drops all processed images and videos; requests in flight keep the items that they use.

    Raises ConfigError when the cluster has no media cache on this host.
    """
    if (cluster.folder / PROXIES_FILE).exists():
        raise ConfigError("on Ray each proxy has a media cache on its node; `tandem restart` empties them")
    socket = _media_socket(cluster)
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


def _media_socket(cluster: ClusterClient) -> Path:
    return cluster.folder / "media-cache.sock"
