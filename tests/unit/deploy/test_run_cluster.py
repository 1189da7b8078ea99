"""What the start of a cluster warns of, without a cluster."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.cluster_config import ClusterConfig
from tandem.deploy.launch import run_cluster

WARNING = "--insecure-network: anybody who can reach"


class Stub:
    """Takes the place of the site and of the launcher, which ends at once."""

    on_gpus = False

    def __init__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def stop(self) -> None:
        pass

    async def run(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("fields", "is_warned"),
    [
        ({}, False),
        ({"cluster_host": "127.0.0.1", "insecure_network": True}, True),
        ({"cluster_host": "127.0.0.1", "network_keys": "keys", "insecure_network": True}, False),
        ({"cluster_host": "127.0.0.1", "network_keys": "keys"}, False),
        ({"insecure_network": True}, False),
        ({"join": "tcp://127.0.0.1:1", "cluster_host": "127.0.0.1", "insecure_network": True}, True),
    ],
)
def test_a_network_without_keys_is_warned_of_where_other_hosts_reach_the_cluster(
    fields: dict[str, Any],
    is_warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stubs = {
        "LocalSite": Stub,
        "Launcher": Stub,
        "create_runtime_dir": lambda place: tmp_path,
        "remove_runtime_dir": lambda *_, **__: None,
        "user_folders": lambda *_: nullcontext(tmp_path),
        "_check_port": lambda *_: None,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(run_cluster, name, stub)
    run = run_cluster.run_cluster(ClusterConfig(**fields), lambda *_: None, lambda *_: None, stops_on_signals=False)
    with caplog.at_level(logging.WARNING):
        asyncio.run(run)
    assert (WARNING in caplog.text) is is_warned
