"""The `nixl` connector, in a process of its own that finds NIXL: the other tests check what happens without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.kv_transfer.handshake import offered_connectors
from tandem.runtime.errors import ConfigError
from tests.support.nixl import nixl_environment


@pytest.mark.extended
@pytest.mark.timeout(270)
@pytest.mark.parametrize(("module", "env"), [("nixl_paths", {}), ("nixl_frozen_peer", {"UCX_TLS": "tcp"})])
def test_in_a_process_with_nixl(module: str, env: dict[str, str]) -> None:
    """Over shared memory, which UCX chooses on one host, a frozen peer takes everything."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, str(Path(__file__).with_name(f"{module}.py"))],
        env={**os.environ, **nixl_environment(), **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0 and "passed" in run.stdout, run.stdout[-5000:] + run.stderr[-2000:]


def test_without_nixl_the_connector_says_so() -> None:
    assert "nixl" not in offered_connectors("auto", "cpu")
    missing = re.escape(f"'nixl' is not installed for {sys.executable}; install it there: pip install nixl")
    with pytest.raises(ConfigError, match=missing):
        offered_connectors("nixl", "cpu")
