"""Data from sockets is never unpickled: no module names a function that could do it. (Ruff's S rules help.)"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.product import name_of, python_files

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {
    "send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized",  # pyzmq
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",  # torch.distributed
    "send_object_list", "recv_object_list", "read_pickle",
}  # fmt: skip
CONNECTION_CALLS = {"send", "recv"}
"""Methods of a multiprocessing.Connection that pickle; send_bytes and recv_bytes do not."""
OWN_CONNECTIONS = {"simulator/network.py"}
"""Files whose connections are `simulator.network.Connection`, which joins two sockets of one process."""


def findings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                yield module
            case ast.Call(func=ast.Attribute(attr=name)) if name in CALLS:
                yield name
            case ast.Call(func=ast.Attribute(attr=name, value=ast.Attribute(attr=of) | ast.Name(id=of))) if (
                name in CONNECTION_CALLS and of.lower().endswith("connection")
            ):
                yield f"{of}.{name}"
            case ast.Call(func=ast.Attribute(attr="load", value=ast.Name(id="torch")), keywords=keywords) if not any(
                keyword.arg == "weights_only" and getattr(keyword.value, "value", None) is True for keyword in keywords
            ):
                yield "torch.load without weights_only"


@pytest.mark.parametrize("file", python_files(), ids=name_of)
def test_no_module_unpickles(file: Path) -> None:
    found = list(findings(file.read_text()))
    if name_of(file) in OWN_CONNECTIONS:
        found = [each for each in found if not each.endswith("connection.send")]
    assert found == []


def test_the_search_finds_unpickling() -> None:
    source = """
import pickle
from cloudpickle import loads
socket.recv_pyobj()
self._connection.recv()
torch.load("x")
torch.load("x", weights_only=True)
self._connection.recv_bytes()
"""
    assert len(list(findings(source))) == 5
