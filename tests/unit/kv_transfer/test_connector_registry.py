"""Connectors of other packages are found by their entry points."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest
import torch

from tandem.deploy.cluster_config import load_config
from tandem.handover.incoming_pairs import IncomingPairTable
from tandem.handover.kv_traffic import IncomingPairs
from tandem.kv_transfer.connector import DataNetwork, Peer
from tandem.kv_transfer.handshake import agree, offered_connectors
from tandem.kv_transfer.ranks.fan_out import WorkerPools
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.kv_transfer.registry import load_connector
from tandem.protocol.messages.membership import PROTOCOL_VERSION
from tandem.protocol.messages.transfer import ClosePair, KVLayout, OpenPair
from tandem.runtime.errors import ConfigError, KVLayoutMismatch
from tandem.runtime.processes.lifetime import watch_exit
from tests.support.memory_connector import MemoryReceiver, MemorySender
from tests.support.named_connectors import named
from tests.support.outcomes import Addresses, Outcomes

Install = Callable[[str], None]

EXAMPLE = Path(__file__).parents[3] / "examples/kv_connector/tandem_folder_connector.py"
MEMORY = """
    from tests.support.memory_connector import MemoryConnector
    network = MemoryConnector()
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package on the path whose entry points `memory` and `gloo` lead into a module with the given source."""

    def write(source: str) -> None:
        (tmp_path / "other_connectors.py").write_text(textwrap.dedent(source))
        metadata = tmp_path / "other_connectors-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-connectors\nVersion: 1.0\n")
        points = "memory = other_connectors:network\ngloo = other_connectors:network\n"
        (metadata / "entry_points.txt").write_text(f"[tandem.kv_connectors]\n{points}")
        monkeypatch.syspath_prepend(tmp_path)

    yield write
    load_connector.cache_clear()
    sys.modules.pop("other_connectors", None)


def test_an_installed_connector_is_found_by_name(install: Install) -> None:
    with pytest.raises(ConfigError, match=r"unknown connector 'memory'; known are auto, ipc, nixl, tcp, gloo, nccl$"):
        offered_connectors("memory", "cpu")
    install(MEMORY)
    assert [*offered_connectors("memory", "cpu")] == ["memory"]
    assert [*offered_connectors("auto", "cpu")] == ["ipc", "tcp", "gloo"], "plugins are used only by name"
    with pytest.raises(ConfigError, match=r"'pigeon'; known are auto, ipc, nixl, tcp, gloo, nccl, memory$"):
        offered_connectors("pigeon", "cpu")
    assert load_config(None, {"kv_connector": "memory"}).kv_connector == "memory"


def test_an_installed_connector_moves_blocks(install: Install) -> None:
    install(MEMORY)
    source, target = torch.arange(32, dtype=torch.uint8).view(4, 8), torch.zeros(4, 8, dtype=torch.uint8)
    outcomes: list[object] = []
    memory = load_connector("memory")
    receiver = memory.open_receiver("pair", target, DataNetwork("127.0.0.1"), outcomes.append)
    assert outcomes == [b"path pair"]
    sender = memory.open_sender(Peer("pair", b"path pair"), source, DataNetwork("127.0.0.1"), outcomes.append)
    assert isinstance(receiver, MemoryReceiver) and isinstance(sender, MemorySender)
    sender.send([1, 2], [3, 0], outcomes.append)
    assert outcomes[1:] == [None, None]
    assert torch.equal(target[[3, 0]], source[[1, 2]])


def test_the_examples_connector_moves_blocks_and_closes(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    monkeypatch.setenv("TANDEM_KV_FOLDER", str(folder))
    install(EXAMPLE.read_text() + "network = connector\n")
    source, target = torch.arange(64, dtype=torch.uint8).view(8, 8), torch.zeros(8, 8, dtype=torch.uint8)
    addresses, done, closed = Addresses[bytes](), Outcomes(), Outcomes()
    example = load_connector("memory")
    receiver = example.open_receiver("a/../pair", target, DataNetwork("127.0.0.1"), addresses)
    sender = example.open_sender(Peer("a/../pair", addresses.get()), source, DataNetwork("127.0.0.1"), done)
    assert done.next() is None
    for src, dst in (([1, 2, 5], [3, 0, 7]), ([4], [4])):
        receiver.receive(dst, done)
        sender.send(src, dst, done)
        assert done.next() is None and done.next() is None
        assert torch.equal(target[dst], source[src])
    assert not list(folder.iterdir())
    receiver.receive([1], done)
    receiver.close()
    error = done.next()
    assert error is not None
    sender.close(lambda: closed(None))
    closed.next()


def test_the_handshake_respects_a_connectors_reach(install: Install) -> None:
    install(MEMORY)
    layout = KVLayout("model", "bfloat16", 2, 2, 16, 16)
    offer = OpenPair(PROTOCOL_VERSION, "prefill-0", "epoch", [1], "d", "pair", layout, "here", "cpu", ["memory"])
    assert agree(offer, layout, "here", "cpu", named("memory")) == "memory"
    with pytest.raises(KVLayoutMismatch, match="different hosts"):
        agree(offer, layout, "there", "cpu", named("memory"))


BROKEN_PROPERTY = """
    from tests.support.memory_connector import MemoryConnector

    class Network(MemoryConnector):
        @property
        def devices(self):
            raise OSError("no driver")

    network = Network()
"""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_module", "'memory' of other-connectors cannot be loaded: No module named 'no_such_module'"),
        ("network = 3", "'memory' of other-connectors has no devices"),
        (BROKEN_PROPERTY, "'memory' of other-connectors cannot be loaded: no driver"),
    ],
)
def test_a_broken_connector_is_named_in_the_error(install: Install, source: str, words: str) -> None:
    install(source)
    with pytest.raises(ConfigError, match=words):
        offered_connectors("memory", "cpu")
    assert [*offered_connectors("gloo", "cpu")] == ["gloo"], "built-in names cannot be replaced"


FAILING = """
    from tests.support.memory_connector import MemoryConnector
    from tandem.runtime.errors import KVTransferFailed

    class Network(MemoryConnector):
        opened = []

        def open_receiver(self, path_id, blocks, network, on_address):
            if self.opened:
                raise KVTransferFailed("no more queue pairs")
            self.opened.append(super().open_receiver(path_id, blocks, network, on_address))
            return self.opened[0]

    network = Network()
"""


def test_a_path_that_cannot_be_opened_closes_the_pair(install: Install) -> None:
    """A prefill worker has two ranks: the first rank's path is closed again, and the pair is dropped."""
    install(FAILING)
    layout = KVLayout("model", "bfloat16", 2, 2, 16, 16)
    blocks = torch.zeros(4, 512, dtype=torch.uint8)
    sent: list[object] = []
    lost: list[tuple[str, str, bool]] = []

    async def run() -> IncomingPairs:
        table = IncomingPairTable(layout, "here", "cpu", named("memory"), False)
        pairs = IncomingPairs(
            "d",
            table,
            MagicMock(
                pools=WorkerPools(layout, [RankPool(0, layout, blocks, DataNetwork("127.0.0.1"))]),
                watch_exit=watch_exit,
            ),
            lambda pair_id, message: sent.append(message),
            lambda *loss: lost.append(loss),
            lambda epoch: None,
        )
        theirs = msgspec.structs.replace(layout, tensor_parallel_size=2, num_kv_heads=1)
        offer = OpenPair(PROTOCOL_VERSION, "prefill-0", "e", [1, 2], "d", "pair", theirs, "here", "cpu", ["memory"])
        pairs.on_open(offer)
        assert not table.is_open("pair")
        pairs.close()
        return pairs

    asyncio.run(run())
    assert sent == [ClosePair("pair", "no more queue pairs")]
    assert lost == [("pair", "no more queue pairs", True)]
    [receiver] = load_connector("memory").opened  # type: ignore[attr-defined]
    assert receiver.closed
