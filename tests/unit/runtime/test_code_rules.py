"""Rules for product code that ruff cannot express, as they are about methods: who starts tasks and writes files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "decode_worker", "deploy", "engine", "kv_transfer", "media_cache", "prefill_worker", "protocol", "proxy", "runtime",
    "telemetry", "worker",
)  # fmt: skip
STARTS_TASKS = {"create_task", "ensure_future", "TaskGroup", "run_coroutine_threadsafe"}
SHARES_THREADS = {"to_thread", "run_in_executor"}
FORKS = {"fork"}
WRITES_WHOLE = {"write_text", "write_bytes"}
MAY_FORK = {
    "runtime/fork_server.py",
    "runtime/forked_child.py",
    "runtime/forked_process.py",
    "proxy/__main__.py",  # calls `ReaderPool.fork`
}
MAY_START = {"runtime/tasks.py"}
MAY_SHARE = {
    "proxy/server.py",  # when the proxy ends and nothing else runs
    "proxy/reading/media_process.py",  # its own executor
}
MAY_WRITE = {
    "runtime/threads.py",  # /proc
    "deploy/sites/ray_actor.py",  # a memfd
    "deploy/sites/ray_process.py",  # empties a log
    "deploy/processes/log_file.py",  # empties a log
    "deploy/configuration_page.py",  # a page of the documentation
}


def called_names(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and last name of everything that is called or passed on, e.g. `create_task` of `loop.create_task`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, alias.name


def broken(names: set[str], allowed: set[str], packages: tuple[str, ...] = PACKAGES) -> list[str]:
    found = []
    for package in packages:
        for file in (ROOT / package).rglob("*.py"):
            name = str(file.relative_to(ROOT))
            source = file.read_text()
            if name not in allowed and any(each in source for each in names):
                found += [f"{name}:{line} {each}" for line, each in called_names(source) if each in names]
    return found


def test_tasks_are_started_in_one_place() -> None:
    assert not broken(STARTS_TASKS, MAY_START), "use tandem.runtime.tasks, so that the task does not end silently"


def test_processes_are_forked_in_one_place() -> None:
    assert not broken(FORKS, MAY_FORK), "use tandem.runtime.fork_server or forked_child"


def test_files_are_written_whole() -> None:
    assert not broken(WRITES_WHOLE, MAY_WRITE), "use tandem.runtime.whole_file, so that no reader sees a part of a file"


def test_blocking_work_of_a_proxy_has_threads_of_its_kind() -> None:
    found = broken(SHARES_THREADS, MAY_SHARE, ("proxy", "media_cache"))
    assert not found, "use tandem.runtime.threads, so that work which never ends stops no other kind of work"


@pytest.mark.parametrize(
    "source", ["asyncio.create_task(x)", "loop.create_task(x)", "from asyncio import ensure_future"]
)
def test_the_rule_sees(source: str) -> None:
    assert any(name in STARTS_TASKS for _, name in called_names(source))
