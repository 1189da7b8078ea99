"""The KV of vLLM's ranks moves to the same ranks of another worker, in the worker's process or behind channels."""

from __future__ import annotations

import os
import pickle
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.kv_transfer.connector import DataNetwork, KVReceiver
from tandem.protocol.messages.transfer import KVLayout
from tandem.protocol.network_keys import NetworkKeys, load_keys, make_keys
from tandem.runtime.errors import KVTransferFailed
from tandem.vllm_worker.extensions import kv_ranks
from tandem.vllm_worker.extensions.kv_memory import Immovable, block_rows, mapped_allocation
from tandem.vllm_worker.extensions.kv_ranks import KVRank, RankFacts, RankKV, open_ranks
from tests.support.outcomes import Addresses, Outcomes

NUM_LAYERS, NUM_BLOCKS, BLOCK_VALUES = 3, 12, 40
LAYER_BLOCK_BYTES = BLOCK_VALUES * 2
BLOCK_BYTES = NUM_LAYERS * LAYER_BLOCK_BYTES


def cache_config(is_by_layer: bool, **changes: Any) -> Any:
    """Returns what vLLM's `KVCacheConfig` says of three layers in one group, with other values for its one tensor."""
    layer_stride = LAYER_BLOCK_BYTES * (NUM_BLOCKS if is_by_layer else 1)
    block_stride = LAYER_BLOCK_BYTES if is_by_layer else BLOCK_BYTES
    place = {
        "size": NUM_BLOCKS * BLOCK_BYTES, "layers": ["0", "1", "2"], "layer_stride": layer_stride,
        "block_stride": block_stride, "offset": 0, "host_resident": False,
    }  # fmt: skip
    group = SimpleNamespace(layer_names=["0", "1", "2"], kv_cache_spec=SimpleNamespace(block_size=16))
    tensor = SimpleNamespace(**place | changes)
    return SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_tensors=[tensor], transfer_groups=[group])


class Rank(KVRank):
    """A rank whose caches vLLM has not made. is_by_layer: layers are apart, else a block's layers are side by side."""

    model_config = SimpleNamespace(dtype=torch.bfloat16)

    def __init__(self, rank: int, is_by_layer: bool) -> None:
        self.rank, self.config = rank, cache_config(is_by_layer)
        with mapped_allocation():
            pool = torch.zeros(NUM_BLOCKS * BLOCK_BYTES).random_(-128, 127).view(torch.bfloat16)
        shape = (NUM_LAYERS, NUM_BLOCKS) if is_by_layer else (NUM_BLOCKS, NUM_LAYERS)
        layers = pool.view(*shape, BLOCK_VALUES)
        self.caches = {str(i): each for i, each in enumerate(layers if is_by_layer else layers.transpose(0, 1))}

    def _kv_cache(self) -> Any:
        return self.config, self.caches

    def rows(self) -> torch.Tensor:
        return block_rows(self.config, self.caches)

    def bytes_of(self, block_ids: list[int]) -> torch.Tensor:
        return self.rows()[block_ids]


class Worker:
    """Ranks of this process, as `collective_rpc` reaches them: with several, arguments and answers are pickled."""

    def __init__(self, size: int, is_by_layer: bool = False, keys: NetworkKeys | None = None) -> None:
        self.ranks = [Rank(rank, is_by_layer) for rank in range(size)]
        self.size = size
        self.kv: RankKV = open_ranks(self._ask, self._layout, "127.0.0.1", keys)
        self.pools = self.kv.pools

    def _ask(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        assert timeout
        if self.size == 1:
            return [getattr(self.ranks[0], method)(*args)]
        return [
            pickle.loads(pickle.dumps(getattr(rank, method)(*pickle.loads(pickle.dumps(args))))) for rank in self.ranks
        ]

    def _layout(self, facts: RankFacts) -> KVLayout:
        return KVLayout("model", facts.dtype, facts.num_regions, 1, 8, 16, self.size)

    def listen(self, connector: str, num_senders: int) -> tuple[KVReceiver, list[list[bytes]]]:
        addresses = Addresses[list[list[bytes]]]()
        return self.pools.open_receiver(connector, "pair", num_senders, addresses), addresses.get()

    def checksums(self, block_ids: list[int]) -> list[int]:
        answers: queue.Queue[Any] = queue.Queue()
        self.pools.checksums(block_ids, answers.put)
        found: list[int] = answers.get(timeout=30)
        return found


@pytest.fixture(autouse=True)
def no_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """These ranks end with this process."""
    monkeypatch.setattr(kv_ranks, "die_with_parent", lambda number: None)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> NetworkKeys:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(folder)
    return load_keys(folder, "worker")


@pytest.mark.parametrize("is_by_layer", [False, True])
@pytest.mark.parametrize("connector", ["ipc", "tcp"])
@pytest.mark.parametrize("size", [1, 2])
def test_blocks_of_all_ranks_arrive(connector: str, size: int, is_by_layer: bool, keys: NetworkKeys) -> None:
    prefill, decode = (Worker(size, is_by_layer, keys) for _ in range(2))
    assert prefill.kv.block_bytes == size * BLOCK_BYTES
    assert prefill.kv.pids == [os.getpid()] * size
    before = [rank.bytes_of(list(range(NUM_BLOCKS))) for rank in decode.ranks]
    src, dst = [7, 1, 2], [4, 9, 10]
    ready, sent, received = Outcomes(), Outcomes(), Outcomes()
    receiver, addresses = decode.listen(connector, size)
    assert [len(each) for each in addresses] == [1] * size
    sender = prefill.pools.open_sender(connector, "pair", addresses, ready)
    ready.check_next()
    receiver.receive(dst, received)
    sender.send(src, dst, sent)
    sent.check_next()
    received.check_next()
    others = [block for block in range(NUM_BLOCKS) if block not in dst]
    for ours, theirs, old in zip(prefill.ranks, decode.ranks, before, strict=True):
        assert torch.equal(ours.bytes_of(src), theirs.bytes_of(dst))
        assert torch.equal(old[others], theirs.bytes_of(others))
    assert prefill.checksums(src) == decode.checksums(dst)
    closed = Outcomes()
    sender.close(lambda: closed(None))
    receiver.close()
    closed.check_next()


def test_checksums_see_a_part_on_the_wrong_rank() -> None:
    worker = Worker(2)
    one, other = (rank.bytes_of([3]) for rank in worker.ranks)
    [right] = worker.checksums([3])
    worker.ranks[0].rows()[[3]], worker.ranks[1].rows()[[3]] = other, one
    [swapped] = worker.checksums([3])
    worker.ranks[0].rows()[[3]] = one
    worker.ranks[1].rows()[[3]] = one
    [equal] = worker.checksums([3])
    assert len({right, swapped, equal, 0}) == 4


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_workers_of_other_sizes_are_refused(sizes: tuple[int, int]) -> None:
    prefill, decode = (Worker(size) for size in sizes)
    answers: queue.Queue[Any] = queue.Queue()
    try:
        decode.pools.open_receiver("ipc", "pair", sizes[0], answers.put)
        error = answers.get(timeout=30)
    except KVTransferFailed as raised:
        error = raised
    assert str(error) == f"the peer has {sizes[0]} ranks, not {sizes[1]}"
    _, addresses = decode.listen("ipc", sizes[1])
    try:
        prefill.pools.open_sender("ipc", "pair", addresses, answers.put)
        error = answers.get(timeout=30)
    except KVTransferFailed as raised:
        error = raised
    assert str(error) == f"the peer has no path for each of {sizes[0]} ranks"


def test_a_block_has_its_bytes_of_every_layer() -> None:
    for is_by_layer in (False, True):
        rank = Rank(0, is_by_layer)
        layers = [rank.caches[str(each)] for each in range(NUM_LAYERS)]
        for block in range(NUM_BLOCKS):
            wanted = torch.cat([layer[block] for layer in layers]).view(torch.uint8)
            assert torch.equal(rank.rows()[block].flatten(), wanted)


def test_what_lies_otherwise_does_not_move() -> None:
    """Blocks of unequal sizes have no common row, and those of a pool that does not hold them would be another's."""
    caches = Rank(0, True).caches
    config = cache_config(True)
    config.kv_cache_tensors.append(SimpleNamespace(**vars(config.kv_cache_tensors[0]) | {"block_stride": 40}))
    with pytest.raises(Immovable, match=r"blocks of unequal sizes \(40, 80 bytes\)"):
        block_rows(config, caches)
    with pytest.raises(Immovable, match="layers do not lie at equal distances"):
        block_rows(cache_config(True, layer_stride=LAYER_BLOCK_BYTES * NUM_BLOCKS + 8), caches)
    with pytest.raises(Immovable, match="several allocations"):
        block_rows(cache_config(True), caches | {"2": caches["2"].clone()})
    with pytest.raises(Immovable, match="several allocations"):
        block_rows(cache_config(True, size=NUM_BLOCKS * BLOCK_BYTES * 2), caches)


def test_a_cache_that_does_not_move_is_said_to_be_so() -> None:
    rank = Rank(0, True)
    rank.config = cache_config(True, layer_stride=8)
    facts = rank.kv_facts()
    assert facts.immovable == "layers do not lie at equal distances"
    layout = KVLayout("model", "bfloat16", 1, 1, 8, 16, immovable=facts.immovable)
    assert not rank.kv_pool(layout, DataNetwork("127.0.0.1")).blocks.numel()


def test_shared_memory_of_a_killed_rank_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names as vLLM's CPU communicator gives them (`CpuCommunicator`); `test_ranks.py` has the real ones."""
    names = [f"vllm_dist_{tmp_path.name}-tp:0-[0-1]-cpushm_0", f"vllm_dist_{tmp_path.name}x-tp:0-[0-1]-cpushm_0"]
    files = [Path("/dev/shm") / name for name in names]
    for file in files:
        file.touch()
    try:
        monkeypatch.setenv("VLLM_DIST_IDENT", f"vllm_dist_{tmp_path.name}")
        Worker(2)
        assert [file.exists() for file in files] == [False, True], "only those of the own group"
    finally:
        files[1].unlink()
