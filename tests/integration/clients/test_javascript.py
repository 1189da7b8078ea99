"""The openai and anthropic SDKs for JavaScript against a real cluster."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.support.cluster import MODEL, Cluster
from tests.support.node_clients import node_clients

SCRIPT = Path(__file__).with_name("clients.mjs")


def test_the_sdks_for_javascript() -> None:
    folder = node_clients().parent
    with Cluster("--api-key", "secret", "--dtype", "float32") as cluster:
        command = ["node", str(SCRIPT), cluster.url, "secret", MODEL]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["chat"] == got["chatStream"] == got["message"] == got["messageStream"] != ""
    assert got["models"] == [MODEL] and got["embedding"] > 0 and got["count"] > 0
    assert isinstance(got["call"]["n"], int) and isinstance(got["use"]["n"], int)
    assert got["error"] == [404, "not_found_error"]
