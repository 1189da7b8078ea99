"""Which tests `make test` runs, and in which order.

Unit, simulation and security tests all run. Of the tests that start clusters, those named in REPRESENTATIVE run; all
others are marked `extended` and run with `make test-extended`. A single test or parameter of a named module, or a
security test that starts a cluster, is left out by `pytest.mark.extended`.

Tests marked `alone` bound how long a client waits beside an attack, or have processes that spin and make others wait.
They are extended tests, and `make test-alone` runs them with no other test beside.

Property tests have the same examples each time, so that a result depends on the code alone; `make test-properties` runs
them with new random ones.

Modules in EXHAUSTIVE, and tests marked so, run with `make test-exhaustive` only: many more random schedules, the same
faults over further connectors and layouts, larger clusters. `make test-all` runs everything.
"""

from __future__ import annotations

import pytest

STAGES = ("unit", "simulation", "faults", "integration", "security")
"""In the order in which they run. The last one has small modules, so that all processes end at about the same time."""
LONG = ("security/test_largest_values.py",)
"""Modules that begin the last stage for the same reason."""
FORKING = (
    "unit/deploy/test_runtime_dir.py",
    "unit/proxy/api/test_limited_checks.py",
    "unit/proxy/reading/test_reader_pool.py",
    "unit/runtime/processes/test_fork_server.py",
    "security/test_calls_without_workers.py",
)
"""Modules that run before all others: they fork the tests' process, in which later tests leave threads. What such a
thread holds at that moment stays locked in the child."""
RAY = "test_ray"
"""Begins the names of modules that start a Ray cluster, of which this machine runs one at a time."""
CLUSTER_STAGES = ("integration", "faults")
"""Stages whose tests start clusters."""

REPRESENTATIVE = (
    "integration/test_cli.py",
    "integration/test_media_serving.py",
    "integration/test_openai_surface.py",
    "integration/test_parity.py",
    "integration/test_sampling.py",
    "integration/test_serving.py",
)
"""Modules below tests/."""
FLOAT32 = ("integration/test_parity.py", "integration/test_sampling.py")
"""Those of REPRESENTATIVE that use the cluster in float32, which they share when one process runs them."""

EXHAUSTIVE = (
    "integration/clients/test_load_generators.py",
    "integration/test_overlap.py",
    "integration/test_ray_vllm.py",
    "integration/test_scale.py",
    "faults/test_device_errors.py",
    "faults/test_gpu_check.py",
    "faults/test_killed_rank.py",
)


def stage_of(node_id: str) -> str:
    folders = node_id.split("/")
    return folders[1] if len(folders) > 2 and folders[1] in STAGES else STAGES[0]


def is_representative(node_id: str) -> bool:
    return _module_of(node_id) in REPRESENTATIVE


def is_exhaustive(node_id: str) -> bool:
    return _module_of(node_id) in EXHAUSTIVE


def _module_of(node_id: str) -> str:
    return node_id.removeprefix("tests/").partition("::")[0]


def tries_examples(item: pytest.Item) -> bool:
    """Returns whether hypothesis chooses the test's examples; a test that calls a state machine is marked so."""
    by_decorator = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return by_decorator or item.get_closest_marker("hypothesis") is not None


def select(items: list[pytest.Item]) -> None:
    """Marks property, extended and exhaustive tests and sorts all by stage. Else the order stays pytest's, but for
    FORKING and LONG."""
    for item in items:
        if tries_examples(item):
            item.add_marker("properties")
        if is_exhaustive(item.nodeid):
            item.add_marker("exhaustive")
        if item.get_closest_marker("exhaustive") is not None:
            item.add_marker("extended")
        if stage_of(item.nodeid) in CLUSTER_STAGES and not is_representative(item.nodeid):
            item.add_marker("extended")

    def order(item: pytest.Item) -> tuple[bool, int, bool]:
        module = _module_of(item.nodeid)
        return module not in FORKING, STAGES.index(stage_of(item.nodeid)), module not in LONG

    items.sort(key=order)


def group_of(node_id: str) -> str:
    """Tests of one group run in one process, one after the other: a file, a simulation, FLOAT32, or all with Ray."""
    if stage_of(node_id) == "simulation":
        return node_id
    module = node_id.partition("::")[0]
    if _module_of(node_id) in FLOAT32:
        return FLOAT32[0]
    return RAY if module.rpartition("/")[2].startswith(RAY) else module
