"""Prometheus service discovery (`http_sd_configs`): the proxies' shared port and each worker's own endpoint. Pure.

Proxies that share a port render each other's metrics, so they are one target.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tandem.protocol.messages.membership import WorkerInfo
from tandem.proxy.proxy_config import ProxyConfig

_EVERY_ADDRESS = ("0.0.0.0", "::", "")


class TargetGroup(msgspec.Struct, frozen=True):
    """Labels with two leading underscores configure the scrape; the others are added to every series."""

    targets: list[str]
    labels: dict[str, str]


def scrape_targets(config: ProxyConfig, asked_host: str, workers: Iterable[WorkerInfo]) -> list[TargetGroup]:
    """asked_host: the request's Host header (host:port), used where the proxy is bound to every address.

    workers: with their current roles, so that the label `role` follows a change of role.
    """
    http = config.http
    host, port = (http.admin_host, http.admin_port) if http.admin_port else (http.host, http.port)
    own = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if host in _EVERY_ADDRESS and asked_host:
        own = asked_host
    scheme = {"__scheme__": "https"} if http.ssl_certfile and not http.admin_port else {}
    groups = [TargetGroup([own], {"role": "proxy", **scheme})]
    for worker in sorted(workers, key=lambda worker: (worker.role, worker.worker_id)):
        if worker.metrics_address:
            groups.append(TargetGroup([worker.metrics_address], {"role": worker.role, "worker": worker.worker_id}))
    return groups
