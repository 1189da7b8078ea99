"""Fixtures that start real clusters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from bench.noise_model import ensure_noise_model
from tests.support.cluster import Cluster

# How fast a shared machine runs says nothing about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def noise_model() -> Path:
    return ensure_noise_model()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The noise model on one prefill and one decode worker, shared by a module's tests."""
    with Cluster() as running:
        yield running
