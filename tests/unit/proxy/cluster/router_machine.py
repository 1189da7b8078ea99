"""A router over the workers of a test, whose reports and requests are commands of the test."""

from __future__ import annotations

import random
from typing import Any

from tandem.engine.kv_cache.prefix_log import PrefixLog
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    PairChanges,
    PairStatus,
    RegisterWorker,
    Role,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.prefix_hash import BlockHasher, pack_short_hashes, unpack_short_hashes
from tandem.proxy.cluster.router import PromptShape, Router
from tandem.proxy.cluster.worker_table import WorkerTable

BLOCK_SIZE = 4
HASHER = BlockHasher(BLOCK_SIZE, "m")


def worker(worker_id: str) -> WorkerInfo:
    roles: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "worker": "any"}
    role = roles[worker_id.partition("-")[0]]
    return WorkerInfo(worker_id, f"{worker_id}/1", role, f"ipc://{worker_id}", 1)


class RouterMachine:
    """Workers with all pairs ready; each computes 1000 tokens per second and has 100 blocks."""

    def __init__(self, num_prefill: int, num_decode: int, threshold: int = 0, num_any: int = 0) -> None:
        self.table = WorkerTable(2.5, decode_may_prefill=threshold > 0)
        self.prefills = [worker(f"prefill-{i}") for i in range(num_prefill)]
        self.decodes = [worker(f"decode-{i}") for i in range(num_decode)]
        self.elastic = [worker(f"worker-{i}") for i in range(num_any)]
        self.workers = self.prefills + self.decodes + self.elastic
        self.logs = {info.epoch: PrefixLog() for info in self.workers}
        self.tier_logs = {info.epoch: PrefixLog() for info in self.workers}
        for info in self.workers:
            self.join(info)
        for info in self.workers:
            self.report(info)
        self.router = Router(self.table, threshold, 1, random.Random(0))

    def join(self, info: WorkerInfo) -> None:
        self.table.on_register(0, RegisterWorker(PROTOCOL_VERSION, info, 4096, 1000, "m", BLOCK_SIZE))

    def report(
        self, info: WorkerInfo, speed: float = 1000.0, free: int = 100, running: int = 0, **load: object
    ) -> None:
        peers = self.decodes + self.elastic if info.role != "decode" else []
        pairs = [PairStatus(d.worker_id, d.epoch, "ready") for d in peers if d != info]
        reported = WorkerLoad(
            num_decoding=running,
            num_blocks=100,
            num_free_blocks=free,
            prompt_tokens_per_s=speed,
            **load,  # type: ignore[arg-type]
        )
        prefixes, tier_prefixes = self.logs[info.epoch].take(), self.tier_logs[info.epoch].take()
        self.table.on_status(
            0,
            WorkerStatus(
                info.worker_id,
                info.epoch,
                info.role,
                reported,
                PairChanges(0, pairs),
                prefixes,
                tier_prefixes=tier_prefixes,
            ),
        )

    def cache(self, info: WorkerInfo, token_ids: list[int]) -> None:
        """Adds the prompt's blocks to the worker's pool."""
        add_blocks(self.logs[info.epoch], token_ids)
        self.report(info)


def add_blocks(log: PrefixLog, token_ids: list[int]) -> None:
    for block_hash in HASHER.prompt_hashes(pack_token_ids(token_ids)):
        if block_hash not in log.cached:
            log.add(block_hash)


def shape(token_ids: list[int], **fields: object) -> PromptShape:
    hashes = unpack_short_hashes(pack_short_hashes(HASHER.prompt_hashes(pack_token_ids(token_ids))))
    return PromptShape(len(token_ids), hashes=hashes, **fields)  # type: ignore[arg-type]


STEPS: dict[str, Any] = {"fixed_step_s": 0.018, "step_s_per_sequence": 0.002, "itl_slo_s": 0.06}
"""A worker with these takes nine sequences before another one is used, and computes prompts slower beside them."""
