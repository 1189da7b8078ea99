"""Whatever a connector raises or reports stays within its path, and every job and every end is reported once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tandem.kv_transfer.connector import DataNetwork, KVReceiver, KVSender, OnDone, Peer
from tandem.kv_transfer.ranks import contained_path
from tandem.protocol.messages.checks import MAX_ADDRESS_BYTES
from tandem.runtime.errors import KVPathRefused, KVTransferFailed
from tests.support.memory_connector import MemoryConnector
from tests.support.raising_connector import Faults, RaisingConnector, reporting

NETWORK = DataNetwork("127.0.0.1")
BLOCKS = torch.arange(32, dtype=torch.uint8).view(4, 8)
MISTAKE = "connector 'plugin' failed: LookupError: a mistake"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[MemoryConnector], None]:
    def use(connector: MemoryConnector) -> None:
        monkeypatch.setattr(contained_path, "load_connector", lambda name: connector)

    return use


def open_path(results: list[Any]) -> tuple[KVReceiver, KVSender, torch.Tensor]:
    addresses: list[Any] = []
    target = torch.zeros_like(BLOCKS)
    receiver = contained_path.open_receiver("plugin", "path", target, NETWORK, addresses.append)
    [address] = addresses
    sender = contained_path.open_sender("plugin", Peer("path", address), BLOCKS, NETWORK, results.append)
    return receiver, sender, target


def messages(results: list[Any]) -> list[str | None]:
    assert all(each is None or isinstance(each, KVTransferFailed) for each in results)
    return [each.message if each is not None else None for each in results]


def test_a_connector_without_faults_is_used_as_it_is(install: Any) -> None:
    install(RaisingConnector(Faults()))
    results: list[Any] = []
    receiver, sender, target = open_path(results)
    sender.prepare([1])
    sender.send([0, 2], [1, 3], results.append)
    receiver.receive([1, 3], results.append)
    assert results == [None, None, None] and torch.equal(target[[1, 3]], BLOCKS[[0, 2]])
    closed: list[bool] = []
    sender.close(lambda: closed.append(True))
    receiver.close()
    assert closed == [True]


@pytest.mark.parametrize("method", ["open_receiver", "open_sender"])
def test_an_end_that_cannot_be_opened_is_a_refusal(method: str, install: Any) -> None:
    install(RaisingConnector(Faults(method)))
    with pytest.raises(KVPathRefused) as caught:
        open_path([])
    assert caught.value.message == MISTAKE


@pytest.mark.parametrize("error", [KVTransferFailed("no more queue pairs"), KVPathRefused("no peer access")])
def test_a_connectors_own_words_are_kept(error: KVTransferFailed, install: Any) -> None:
    install(RaisingConnector(Faults("open_sender", error=lambda: error)))
    with pytest.raises(KVPathRefused) as caught:
        open_path([])
    assert caught.value.message == error.message


@pytest.mark.parametrize("method", ["send", "receive", "prepare"])
def test_a_call_that_raises_fails_its_job_once(method: str, install: Any) -> None:
    install(RaisingConnector(Faults(method)))
    results: list[Any] = []
    receiver, sender, _ = open_path(results)
    sender.prepare([1])
    if method == "receive":
        receiver.receive([1], results.append)
    else:
        sender.send([0], [1], results.append)
    assert messages(results) == [None, MISTAKE]


@pytest.mark.parametrize("method", ["close_sender", "close_receiver"])
@pytest.mark.parametrize("also", [(), ("send",), ("prepare",)], ids=["after a transfer", "after send", "after prepare"])
@pytest.mark.parametrize("one_sided", [True, False])
def test_an_end_that_cannot_be_closed_counts_as_closed(
    method: str, also: tuple[str, ...], one_sided: bool, install: Any
) -> None:
    """No job is left that could still write."""
    install(RaisingConnector(Faults(method, *also), one_sided=one_sided))
    results: list[Any] = []
    receiver, sender, _ = open_path(results)
    sender.prepare([1])
    sender.send([0], [1], results.append)
    closed: list[bool] = []
    sender.close(lambda: closed.append(True))
    receiver.close()
    assert closed == [True] and (results[1] is None) == (not also)


class LateSender:
    """Reports nothing by itself, and cannot be closed."""

    def __init__(self) -> None:
        self.done: list[OnDone] = []

    def prepare(self, dst_block_ids: Any) -> None: ...

    def send(self, src_block_ids: Any, dst_block_ids: Any, on_done: OnDone) -> None:
        self.done.append(on_done)

    def close(self, on_closed: Callable[[], None]) -> None:
        raise OSError("no answer")


@pytest.mark.parametrize("one_sided", [True, False])
@pytest.mark.parametrize("how", ["never", "fails", "ends"])
def test_only_a_sender_that_may_still_write_does_not_count_as_closed(
    how: str, one_sided: bool, install: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that has failed, or not ended, may have left a write on its way: a wrong "closed" gives its blocks away."""
    late = LateSender()
    connector: Any = RaisingConnector(Faults(), one_sided=one_sided)
    connector.open_sender = lambda peer, blocks, network, on_ready: late
    install(connector)
    results: list[Any] = []
    sender = contained_path.open_sender("plugin", Peer("path", b""), BLOCKS, NETWORK, results.append)
    sender.send([0], [1], results.append)
    if how != "never":
        late.done[0](None if how == "ends" else KVTransferFailed("too slow"))
    closed: list[bool] = []
    sender.close(lambda: closed.append(True))
    is_closed = how == "ends" or not one_sided
    assert closed == [True] * is_closed
    assert ("may still write" in caplog.text) == (not is_closed)


@pytest.mark.parametrize("anything", [RuntimeError("late"), "a word", 3, False], ids=repr)
def test_anything_else_that_is_reported_is_an_error(anything: Any, install: Any) -> None:
    install(reporting(anything))
    results: list[Any] = []
    receiver = contained_path.open_receiver("plugin", "path", BLOCKS, NETWORK, results.append)
    sender = contained_path.open_sender("plugin", Peer("path", b""), BLOCKS, NETWORK, results.append)
    sender.send([0], [1], results.append)
    receiver.receive([1], results.append)
    assert len(results) == 4
    assert all("connector 'plugin' failed: " in str(message) for message in messages(results))


def test_no_address_is_an_error(install: Any) -> None:
    install(reporting(None))
    results: list[Any] = []
    contained_path.open_receiver("plugin", "path", BLOCKS, NETWORK, results.append)
    assert messages(results) == ["connector 'plugin' failed: it reports no address"]


def test_only_the_first_report_counts(install: Any) -> None:
    class Twice(RaisingConnector):
        def open_sender(self, peer: Peer, blocks: torch.Tensor, network: DataNetwork, on_ready: OnDone) -> Any:
            on_ready(None)
            return super().open_sender(peer, blocks, network, on_ready)

    install(Twice(Faults()))
    results: list[Any] = []
    _, sender, _ = open_path(results)
    assert results == [None]
    closed: list[bool] = []
    install(reporting(None))
    sender = contained_path.open_sender("plugin", Peer("path", b""), BLOCKS, NETWORK, results.append)
    sender.close(lambda: closed.append(True))
    assert closed == [True]


def test_a_reason_is_one_short_line(install: Any) -> None:
    install(RaisingConnector(Faults("open_sender", error=lambda: ValueError("x" * 10_000 + "\nmore"))))
    with pytest.raises(KVPathRefused) as caught:
        open_path([])
    assert len(caught.value.message) <= 500 and "\n" not in caught.value.message


@pytest.mark.parametrize("num_bytes", [MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES + 1])
def test_an_address_is_of_limited_size(num_bytes: int, install: Any) -> None:
    """Prefill would refuse a larger one, and nobody would know whose fault it is."""
    install(reporting(bytes(num_bytes)))
    results: list[Any] = []
    contained_path.open_receiver("plugin", "path", BLOCKS, NETWORK, results.append)
    [result] = results
    if num_bytes > MAX_ADDRESS_BYTES:
        assert "reports an address of 65537 bytes, over 65536" in result.message
    else:
        assert result == bytes(num_bytes)
