"""Configurations from settings by their names alone, as flags and the keys of a file have them."""

from __future__ import annotations

from typing import Any

from tandem.deploy.cluster_config import ClusterConfig
from tandem.proxy.proxy_config import ProxyConfig
from tandem.runtime.settings import with_values


def cluster_config(**settings: Any) -> ClusterConfig:
    return with_values(ClusterConfig(), settings)


def proxy_config(**settings: Any) -> ProxyConfig:
    return with_values(ProxyConfig("proxy-0", "", "m", "m"), settings)
