"""Finds connectors by name: the built-in ones and those of other packages.

Another package adds one with an entry point of the group `tandem.kv_connectors`. The entry point's name is the value
for `--kv-connector`; it refers to a module or object that implements `kv_transfer.connector.KVConnector`:

    [project.entry-points."tandem.kv_connectors"]
    rdma = "my_package.rdma_connector"

The package must be installed for every worker. `auto` never selects it. This module does not import torch, because the
command line imports it.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from tandem.runtime.errors import ConfigError, first_line

if TYPE_CHECKING:
    from tandem.kv_transfer.connector import KVConnector

GROUP = "tandem.kv_connectors"
AUTO = "auto"
BUILT_IN = {
    "ipc": EntryPoint("ipc", "tandem.kv_transfer.connectors.ipc:connector", GROUP),
    "nixl": EntryPoint("nixl", "tandem.kv_transfer.connectors.nixl:connector", GROUP),
    "tcp": EntryPoint("tcp", "tandem.kv_transfer.connectors.tcp:connector", GROUP),
    "gloo": EntryPoint("gloo", "tandem.kv_transfer.connectors.process_group:gloo", GROUP),
    "nccl": EntryPoint("nccl", "tandem.kv_transfer.connectors.process_group:nccl", GROUP),
}
"""In order of preference; `auto` offers those that support the device. `nixl` supports none if it is not installed."""
_MEMBERS = (
    "devices", "crosses_hosts", "encrypts", "one_sided", "open_sender", "open_receiver",
)  # fmt: skip


def known_connectors() -> list[str]:
    """All valid values of `--kv-connector`."""
    return [AUTO, *BUILT_IN, *_entry_points()]


def check_name(name: str) -> None:
    """Raises ConfigError for an unknown connector."""
    if name != AUTO and name not in BUILT_IN and name not in _entry_points():
        raise ConfigError(f"unknown connector {name!r}; known are {', '.join(known_connectors())}")


@functools.cache
def load_connector(name: str) -> KVConnector:
    """Loads a connector by name (not `auto`). Raises ConfigError if it is unknown or cannot be loaded."""
    check_name(name)
    entry_point = BUILT_IN[name] if name in BUILT_IN else _entry_points()[name]
    package = entry_point.dist.name if entry_point.dist is not None else entry_point.value
    try:
        connector: KVConnector = entry_point.load()
        missing = [member for member in _MEMBERS if not hasattr(connector, member)]
    except Exception as error:  # importing another package, or asking its properties, may raise anything
        raise ConfigError(f"connector {name!r} of {package} cannot be loaded: {first_line(error)}") from error
    if missing:
        raise ConfigError(f"connector {name!r} of {package} has no {missing[0]}; see kv_transfer.connector.KVConnector")
    return connector


def _entry_points() -> dict[str, EntryPoint]:
    """Entry points of other packages, by name. They cannot replace built-in connectors."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    return {name: point for name, point in sorted(found.items()) if name != AUTO and name not in BUILT_IN}
