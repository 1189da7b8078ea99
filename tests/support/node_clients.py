"""Finds clients from the npm registry."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def node_clients() -> Path:
    """Returns the folder `node_modules` of NODE_CLIENTS. Skips the test where that is not set."""
    folder = os.environ.get("NODE_CLIENTS")
    if not folder:
        pytest.skip("NODE_CLIENTS is not set: copy tests/integration/clients/package.json to a folder, run npm install")
    return Path(folder) / "node_modules"
