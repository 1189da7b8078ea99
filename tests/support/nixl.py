"""Finds NIXL for the tests that need it."""

from __future__ import annotations

import os

import pytest

OVER_TCP = {"UCX_TLS": "tcp"}
"""Makes UCX move data as between hosts without RDMA, where both processes take part. On one host it would copy it."""


def nixl_environment() -> dict[str, str]:
    """Returns variables with which a process finds NIXL. Skips the test where NIXL is not there.

    It lies in a folder of its own, because its presence changes what `auto` offers.
    """
    folder = os.environ.get("NIXL_FOLDER")
    if not folder:
        pytest.skip("NIXL_FOLDER names no folder with NIXL (pip install --target FOLDER nixl)")
    return {"PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), folder])}
