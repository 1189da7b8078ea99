"""Errors of NIXL at any call: each job and the end of the path are reported, and the next path can be opened.

NIXL itself is replaced; paths over it are in `nixl_paths.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from tandem.kv_transfer.connector import Peer
from tandem.kv_transfer.connectors import nixl
from tandem.kv_transfer.connectors.nixl import NixlPool, NixlSender
from tests.support.outcomes import Outcomes

BLOCKS = torch.zeros(4, 64, dtype=torch.uint8)
ADDRESS = msgspec.msgpack.encode(NixlPool(b"metadata", 1 << 20, 4, 64, 0))


class Api:
    """Takes the place of NIXL's agent. raises: calls that fail, with how often they succeed before."""

    def __init__(self) -> None:
        self.raises: dict[str, int] = {}
        self.calls: list[str] = []
        self.states = ["DONE"]

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self.raises:
                self.raises[name] -= 1
                if self.raises[name] < 0:
                    raise RuntimeError(f"NIXL_ERR_BACKEND in {name}")
            if name in ("transfer", "check_xfer_state"):
                return self.states.pop(0) if len(self.states) > 1 else self.states[0]
            return b"peer" if name == "add_remote_agent" else object()

        return call


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    api = Api()
    monkeypatch.setattr(nixl, "new_agent", lambda name: api)
    monkeypatch.setattr(nixl, "_agents", {})
    return api


def open_sender() -> tuple[NixlSender, Outcomes]:
    results = Outcomes()
    return NixlSender(Peer("path", ADDRESS), BLOCKS, results), results


def close(sender: NixlSender) -> None:
    closed = Outcomes()
    sender.close(lambda: closed(None))
    assert closed.next() is None


@pytest.mark.parametrize("num_before", [0, 1], ids=["at the first", "at the second"])
@pytest.mark.parametrize("name", ["release_dlist_handle", "release_xfer_handle", "remove_remote_agent"])
def test_a_path_is_closed_though_nixl_does_not_release_something(
    name: str, num_before: int, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    api.raises[name] = num_before
    sender, results = open_sender()
    assert results.next() is None
    sender.send([0], [1], results)
    assert results.next() is None
    close(sender)
    assert api.calls.count("release_dlist_handle") == 2, "the other one is released, too"
    assert sender._agent is not None and sender._agent._num_paths["peer"] == 0
    assert ("did not release a list of blocks" in caplog.text) == (name == "release_dlist_handle")
    again, results = open_sender()
    assert results.next() is None
    close(again)


@pytest.mark.parametrize(
    ("name", "num_before"),
    [("register_memory", 0), ("add_remote_agent", 0), ("prep_xfer_dlist", 0), ("prep_xfer_dlist", 1)],
)
def test_a_path_that_could_not_be_opened_is_closed(name: str, num_before: int, api: Api) -> None:
    api.raises[name] = num_before
    sender, results = open_sender()
    error = results.next()
    assert error is not None and f"NIXL_ERR_BACKEND in {name}" in error.message
    close(sender)
    assert api.calls.count("release_dlist_handle") == num_before
    api.raises.clear()
    again, results = open_sender()
    assert results.next() is None
    close(again)
    assert again._agent is not None and set(again._agent._num_paths.values()) == {0}


@pytest.mark.parametrize("name", ["make_prepped_xfer", "transfer", "check_xfer_state"])
def test_a_write_that_fails_is_reported_and_the_path_is_closed(name: str, api: Api) -> None:
    api.states, api.raises[name] = ["PROC"], 0
    sender, results = open_sender()
    assert results.next() is None
    sender.send([0], [1], results)
    error = results.next()
    assert error is not None and f"NIXL_ERR_BACKEND in {name}" in error.message
    close(sender)
    assert api.calls.count("release_dlist_handle") == 2


def test_a_path_is_not_closed_before_its_unfinished_write_has_ended(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MESSAGE_TIMEOUT_S", 0.0)
    api.states = ["PROC"]
    sender, results = open_sender()
    assert results.next() is None
    sender.send([0], [1], results)
    error = results.next()
    assert error is not None and "did not take the blocks" in error.message
    closed = Outcomes(0.2)
    sender.close(lambda: closed(None))
    assert "release_dlist_handle" not in api.calls and closed.is_empty
    api.states = ["DONE"]
    assert closed._queue.get(timeout=30) is None
    assert api.calls.count("release_dlist_handle") == 2
