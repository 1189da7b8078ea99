"""Fixtures that start real clusters, and the order and progress of the whole suite."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import random
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tandem.runtime.garbage_collection import freeze_without_collecting
from tests.progress import ProgressPlugin
from tests.selection import group_of, select
from tests.support.cluster import Cluster
from tests.support.noise_model import ensure_noise_model

# Tests run beside each other: more threads of torch would wait for each other. Workers get their own number from the
# launcher.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Modules and collected tests live as long as the session. The collector would scan them while they are made, a third of
# the CPU time of collecting, and again during the tests.
gc.disable()

# Deadlines would measure the machine, not the code.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples each time find nothing new, so they are fewer than the new ones of `make test-properties`.
settings.register_profile("fixed", UNTIMED, derandomize=True, max_examples=60)
# Hypothesis itself sets `derandomize` where the variable CI is set.
settings.register_profile("new", UNTIMED, derandomize=False, print_blob=True)
settings.load_profile("fixed")  # --hypothesis-profile loads another

EXAMPLES = Path(__file__).parents[1] / "examples"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", action="store_true", help="one line with counts and the time left, no dots")


@pytest.hookimpl(trylast=True)  # after the terminal reporter exists
def pytest_configure(config: pytest.Config) -> None:
    if config.option.progress and not hasattr(config, "workerinput"):  # not in the workers of pytest-xdist
        config.pluginmanager.register(ProgressPlugin(config))


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects by the marks that this sets
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    select(items)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs `async def` tests, each on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


def pytest_collection_finish() -> None:
    freeze_without_collecting()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each process takes the next file, or the next simulation."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Makes a test that draws from a library's shared generator see the same numbers in each run."""
    random.seed(0)
    if torch := sys.modules.get("torch"):  # proxies' tests do not import it
        torch.manual_seed(0)


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a program of examples/ in this process, which has imported the clients, and returns what it prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capfd.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out

    return run


@pytest.fixture(scope="session")
def noise_model() -> Path:
    return ensure_noise_model()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The noise model on one prefill and one decode worker. Tests compare its counters before and after."""
    with Cluster() as running:
        yield running


@pytest.fixture(scope="session")
def float32_cluster() -> Iterator[Cluster]:
    """The noise model in float32, with short chunks and small blocks, so that outputs equal those of transformers."""
    with Cluster("--dtype", "float32", "--max-num-batched-tokens", "50", "--block-size", "16") as running:
        yield running
