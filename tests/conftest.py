"""Fixtures that start real clusters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from deploy.demo_model import ensure_demo_model
from tests.cluster import Cluster

# How fast a shared machine runs says nothing about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return ensure_demo_model(lambda text: None)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The demo model on one prefill and one decode worker, shared by a module's tests."""
    with Cluster() as running:
        yield running
