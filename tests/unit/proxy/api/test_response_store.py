"""Stored responses: chains, clients, and room for new ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tandem.proxy.answers.errors import status_of
from tandem.proxy.api.responses_api import response_store
from tandem.proxy.api.responses_api.response_store import (
    ItemLookup,
    PreviousResponseNotFound,
    ResponseNotFound,
    ResponseStore,
    StoredResponse,
)
from tandem.proxy.api.responses_api.responses_request import InputItem, stored_input
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.files import client_files
from tandem.runtime.files.client_files import FileLimits


def stored(question: str, answer: str, previous: str = "") -> StoredResponse:
    output = {"output": [{"type": "message", "id": "m", "role": "assistant", "content": answer}]}
    given = stored_input([InputItem("message", "user", question)])
    return StoredResponse(json.dumps(output).encode(), given, previous)


def test_a_chain_of_responses_is_a_conversation(tmp_path: Path) -> None:
    store, other = ResponseStore(tmp_path), ResponseStore(tmp_path)
    assert store.save("", "1", stored("a", "b")) and other.save("", "2", stored("c", "d", previous="1"))
    assert [item.content for item in store.history("", "2")] == ["a", "b", "c", "d"]
    store.delete("", "1")
    with pytest.raises(PreviousResponseNotFound) as lost:
        other.history("", "2")
    assert (status_of(lost.value), lost.value.param) == (400, "previous_response_id")


def test_a_response_that_comes_before_itself_is_refused(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path)  # clients may choose ids, and so give the id of an earlier response to a later one
    store.save("", "1", stored("a", "b", previous="2"))
    store.save("", "2", stored("c", "d", previous="1"))
    with pytest.raises(InvalidRequest, match="before itself"):
        store.history("", "2")


def test_responses_of_others_are_not_found(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path)
    store.save("alice", "1", stored("a", "b"))
    for call in (store.load, store.delete):
        with pytest.raises(ResponseNotFound) as unknown:
            call("bob", "1")
        assert status_of(unknown.value) == 404
    with pytest.raises(PreviousResponseNotFound):
        store.history("bob", "1")
    for name in ("../alice/1", "/etc/passwd", "a\0b", "x" * 5000):
        with pytest.raises(ResponseNotFound):
            store.load("alice", name)
    assert store.load("alice", "1")
    [folder] = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0


def test_old_large_and_many_responses_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_files, "CHECK_INTERVAL_S", 0)
    monkeypatch.setattr(response_store, "MAX_RESPONSES", 3)
    store = ResponseStore(tmp_path)
    for number in range(5):
        store.save("", str(number), stored("a", "b"))
        os.utime(store._file("", str(number)), (number + 1e9 * 2, number + 1e9 * 2))
    assert [n for n in range(5) if store._file("", str(n)).exists()] == [2, 3, 4]
    store._files.limits = FileLimits(1200, 3, response_store.MAX_AGE_S)
    store.save("", "5", stored("a", "b" * 300))
    assert store.load("", "5") and not store._file("", "2").exists()
    os.utime(store._file("", "5"), (1, 1))
    with pytest.raises(ResponseNotFound):
        store.load("", "5")
    monkeypatch.setattr(response_store, "MAX_RESPONSE_BYTES", 100)
    assert not store.save("", "6", stored("a", "b" * 100))
    monkeypatch.setattr(response_store, "MAX_HISTORY_BYTES", 10)
    with pytest.raises(InvalidRequest, match="begin a new chain"):
        store.history("", "4")


def test_one_client_leaves_half_of_the_room_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_files, "CHECK_INTERVAL_S", 0)
    monkeypatch.setattr(response_store, "MAX_RESPONSES", 8)
    store = ResponseStore(tmp_path)
    store.save("bob", "0", stored("a", "b"))
    os.utime(store._file("bob", "0"), (2e9, 2e9))
    for number in range(20):
        store.save("alice", str(number), stored("a", "b"))
        os.utime(store._file("alice", str(number)), (2e9 + number, 2e9 + number))
    assert store.load("bob", "0")
    assert len(list(store._file("alice", "0").parent.iterdir())) <= 5  # the last one came after the check


def test_room_is_made_after_much_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_BYTES", 10_000)
    monkeypatch.setattr(client_files, "CHECK_BYTES", 2_000)
    store = ResponseStore(tmp_path)
    for number in range(100):
        store.save("", str(number), stored("a", "b" * 800))
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.json")) <= 13_000


def test_the_answers_that_references_name_are_limited_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(tmp_path)
    for number in range(3):
        output = [{"type": "message", "id": f"msg_0_{number}", "content": "a" * 500, "role": "assistant"}]
        answer = json.dumps({"output": output}).encode()
        store.save("", f"resp_{number}", StoredResponse(answer, stored_input([])))
    monkeypatch.setattr(response_store, "MAX_HISTORY_BYTES", 1500)
    lookup = ItemLookup(store, "")
    assert lookup.find("msg_0_0") and lookup.find("msg_0_1") and lookup.find("msg_0_0")
    with pytest.raises(InvalidRequest, match="send the items themselves"):
        lookup.find("msg_0_2")
