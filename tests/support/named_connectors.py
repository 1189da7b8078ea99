"""Connectors by name, as a worker offers them."""

from __future__ import annotations

from tandem.kv_transfer.connector import KVConnector
from tandem.kv_transfer.registry import load_connector


def named(*names: str) -> dict[str, KVConnector]:
    return {name: load_connector(name) for name in names}
