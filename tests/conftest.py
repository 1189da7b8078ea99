"""Fixtures that start real clusters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.demo_model import ensure_demo_model
from tests.cluster import Cluster


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return ensure_demo_model(lambda text: None)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The demo model on one prefill and one decode worker, shared by a module's tests."""
    with Cluster() as running:
        yield running
