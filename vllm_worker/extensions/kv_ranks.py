"""The KV of vLLM's ranks: in the worker's process if there is one rank, else in a process for each.

A worker asks its ranks by vLLM's `collective_rpc`, which calls a method of `KVRank` in each of them. Ranks in processes
of their own then serve their transfers on a channel, as followers of Tandem's own engine do
(`kv_transfer.ranks.remote_rank`).
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from xxhash import xxh3_64_intdigest

from tandem.engine.numerics import machine_numerics
from tandem.kv_transfer.checksums import OnChecksums
from tandem.kv_transfer.connector import DataNetwork, KVReceiver, KVSender, OnDone, Peer
from tandem.kv_transfer.ranks import contained_path
from tandem.kv_transfer.ranks.fan_out import OnAddresses, WorkerPools
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.kv_transfer.ranks.remote_rank import READY_TIMEOUT_S, RemoteRank, TransferServer
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.messages.transfer import KVLayout
from tandem.protocol.network_keys import NetworkKeys
from tandem.protocol.rank_channel import accept, connect, listen
from tandem.protocol.tls_identity import tls_contexts
from tandem.runtime.errors import KVPathRefused, KVTransferFailed
from tandem.runtime.processes.lifetime import die_with_parent
from tandem.vllm_worker.extensions.kv_memory import Immovable, block_rows, described_groups

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

NUMERIC_VARIABLES = ("VLLM_BATCH_INVARIANT", "VLLM_USE_DEEP_GEMM")
"""Environment variables by which vLLM chooses other kernels."""


class RankFacts(NamedTuple):
    """What one rank says of its KV."""

    pid: int
    dtype: str
    """As torch names it."""
    groups: str
    """Its groups of layers (`kv_memory.described_groups`)."""
    num_regions: int
    block_bytes: int
    machine: Numerics = Numerics()
    """What its machine and libraries decide of its arithmetic."""
    immovable: str = ""
    """See `KVLayout`."""


class RankKV(NamedTuple):
    """The KV of all ranks of a worker."""

    pids: list[int]
    block_bytes: int
    """Size of one block, summed over all ranks."""
    pools: WorkerPools


class AskRanks(Protocol):
    """Calls a method of `KVRank` in all ranks, and returns their answers in order."""

    def __call__(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]: ...


@dataclass(frozen=True)
class VllmRankPool(RankPool):
    """The pool of one rank. blocks: rows of bytes, as `kv_memory.block_rows` returns them.

    Both workers of a pair have equally many ranks (`vllm_host.kv_layout`), and rank i sends whole blocks to rank i.
    """

    def open_sender(self, connector: str, pair_id: str, addresses: list[list[bytes]], on_ready: OnDone) -> KVSender:
        if [len(each) for each in addresses] != [1] * self.layout.tensor_parallel_size:
            raise KVPathRefused(f"the peer has no path for each of {self.layout.tensor_parallel_size} ranks")
        num_regions, region_block_bytes = self.blocks.shape[1:]

        def view(pool: torch.Tensor) -> torch.Tensor:
            return pool.view(num_regions, -1, region_block_bytes).transpose(0, 1)

        peer = Peer(self._path_id(pair_id), addresses[self.rank][0], view)
        return contained_path.open_sender(connector, peer, self.blocks, self.network, on_ready)

    def open_receiver(self, connector: str, pair_id: str, num_senders: int, on_addresses: OnAddresses) -> KVReceiver:
        if num_senders != self.layout.tensor_parallel_size:
            raise KVPathRefused(f"the peer has {num_senders} ranks, not {self.layout.tensor_parallel_size}")

        def on_address(address: bytes | KVTransferFailed) -> None:
            on_addresses(address if isinstance(address, KVTransferFailed) else [address])

        path_id = self._path_id(pair_id)
        return contained_path.open_receiver(connector, path_id, self.blocks, self.network, on_address)

    def checksums(self, block_ids: Sequence[int], on_checksums: OnChecksums) -> None:
        """Hashes this rank's part of each block, with the rank as seed: ranks that share a head have equal parts."""
        rows, ids = self.blocks, list(block_ids)
        self.checksum_thread.submit(
            lambda: [xxh3_64_intdigest(rows[each].contiguous().cpu().numpy().data, self.rank) for each in ids],
            on_checksums,
        )

    def _path_id(self, pair_id: str) -> str:
        return f"{pair_id}/{self.rank}"


class KVRank:
    """Mixed into vLLM's worker class, of which every rank has an object."""

    rank: int
    model_config: Any

    def kv_facts(self) -> RankFacts:
        config, kv_caches = self._kv_cache()
        first = next(iter(kv_caches.values()))
        view = first[0] if isinstance(first, list) else first
        machine = machine_numerics(view.device, self.model_config.dtype, NUMERIC_VARIABLES)
        dtype, groups = str(view.dtype).removeprefix("torch."), described_groups(config)
        try:
            rows = block_rows(config, kv_caches)
        except Immovable as error:
            block_bytes = config.kv_cache_tensors[0].size // config.num_blocks
            return RankFacts(os.getpid(), dtype, groups, 1, block_bytes, machine, str(error))
        return RankFacts(os.getpid(), dtype, groups, rows.shape[1], rows[0].numel(), machine)

    def kv_pool(self, layout: KVLayout, network: DataNetwork) -> VllmRankPool:
        """Returns the pool, without blocks if they cannot move: then no pair is opened."""
        rows = torch.empty(0, 1, 1, dtype=torch.uint8) if layout.immovable else block_rows(*self._kv_cache())
        return VllmRankPool(self.rank, layout, rows, network)

    def serve_kv_pool(self, layout: KVLayout, host: str, worker_pid: int) -> bytes:
        """Serves the transfers of a rank that has a process of its own. Returns the address for its channel.

        host: own address for data. worker_pid: process of the worker, which alone is let in.
        """
        _unname_shared_memory()
        # The end of the worker ends a rank also if it is stopped, or spins in a collective operation without its peer.
        die_with_parent(signal.SIGKILL)
        signal.set_wakeup_fd(-1)  # a forked rank has the worker's: its loop would take the rank's signals for its own
        listener, pool = listen(), self.kv_pool(layout, DataNetwork(host))
        threading.Thread(target=_serve, args=(listener, worker_pid, pool), name="transfers", daemon=True).start()
        address: bytes = listener.getsockname()
        return address

    def _kv_cache(self) -> tuple[KVCacheConfig, Mapping[str, torch.Tensor | list[torch.Tensor]]]:
        """Returns how vLLM has laid out its cache, and the views of its layers."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        return connector.kv_cache_config, connector.kv_caches


def _unname_shared_memory() -> None:
    """Removes the names of the memory that ranks share for collective operations on CPUs: vLLM leaves them behind.

    All ranks have mapped the memory when they answer calls.
    """
    if name := os.environ.get("VLLM_DIST_IDENT"):
        for file in Path("/dev/shm").glob(f"{name}-*-cpushm_*"):  # noqa: S108
            file.unlink(missing_ok=True)  # all ranks do this at once


def _serve(listener: socket.socket, worker_pid: int, pool: VllmRankPool) -> None:
    TransferServer(accept(listener, worker_pid), pool).start()


def open_ranks(
    ask: AskRanks, make_layout: Callable[[RankFacts], KVLayout], host: str, keys: NetworkKeys | None
) -> RankKV:
    """Opens the pools of all ranks. Blocks until they are there. Raises InternalError on time-out.

    make_layout: called with the facts of a rank. host: own address for data.
    """
    facts: list[RankFacts] = ask("kv_facts", READY_TIMEOUT_S)
    layout = make_layout(facts[0])
    ranks: Sequence[RankPool | RemoteRank]
    if len(facts) == 1:
        network = DataNetwork(host, tls_contexts(keys) if keys is not None else None)
        ranks = ask("kv_pool", READY_TIMEOUT_S, (layout, network))
    else:
        addresses = ask("serve_kv_pool", READY_TIMEOUT_S, (layout, host, os.getpid()))
        found = zip(addresses, facts, strict=True)
        ranks = remote = [RemoteRank(connect(address, each.pid)) for address, each in found]
        for rank in remote:
            rank.wait_until_ready(keys)
    return RankKV([each.pid for each in facts], sum(each.block_bytes for each in facts), WorkerPools(layout, ranks))
