"""Which connectors there are: those of this package, and those that other packages bring.

Another package brings one by an entry point of the group `tandem.kv_connectors`; its name is what `--kv-connector`
takes, and it points to a module or an object that is a `kv_transfer.connector.KVConnector`:

    [project.entry-points."tandem.kv_connectors"]
    rdma = "my_package.rdma_connector"

It must be installed for every worker. `auto` never chooses it. The built-in ones are found in the same way. No torch
here, for the command line reads this file.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from tandem.runtime.errors import ConfigError

if TYPE_CHECKING:
    from tandem.kv_transfer.connector import KVConnector

GROUP = "tandem.kv_connectors"
AUTO = "auto"
BUILT_IN = {
    "ipc": EntryPoint("ipc", "tandem.kv_transfer.connectors.ipc:connector", GROUP),
    "gloo": EntryPoint("gloo", "tandem.kv_transfer.connectors.process_group:gloo", GROUP),
    "nccl": EntryPoint("nccl", "tandem.kv_transfer.connectors.process_group:nccl", GROUP),
}
"""By preference; `auto` offers those that the device allows."""
_PARTS = (
    "devices", "crosses_hosts", "crosses_devices", "one_sided", "meets_in_store", "open_sender", "open_receiver",
)  # fmt: skip


def known_connectors() -> list[str]:
    """All names that a configuration may give."""
    return [AUTO, *BUILT_IN, *_entry_points()]


def check_name(name: str) -> None:
    """Raises ConfigError for a name that nobody has given a connector."""
    if name != AUTO and name not in BUILT_IN and name not in _entry_points():
        raise ConfigError(f"unknown connector {name!r}; known are {', '.join(known_connectors())}")


@functools.cache
def load_connector(name: str) -> KVConnector:
    """One connector, not `auto`. Raises ConfigError when there is none or it cannot be loaded."""
    check_name(name)
    entry_point = BUILT_IN[name] if name in BUILT_IN else _entry_points()[name]
    package = entry_point.dist.name if entry_point.dist is not None else entry_point.value
    try:
        connector: KVConnector = entry_point.load()
    except Exception as error:  # whatever another package does when it is imported
        raise ConfigError(f"connector {name!r} of {package} cannot be loaded: {error}") from error
    missing = [part for part in _PARTS if not hasattr(connector, part)]
    if missing:
        raise ConfigError(f"connector {name!r} of {package} has no {missing[0]}; see kv_transfer.connector.KVConnector")
    return connector


def _entry_points() -> dict[str, EntryPoint]:
    """Other packages', by name. Our own names cannot be taken over."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    return {name: point for name, point in sorted(found.items()) if name != AUTO and name not in BUILT_IN}
