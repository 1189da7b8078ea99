"""What vLLM's scheduler and model runner ask of Tandem about KV that comes from other workers, or goes to them.

vLLM finds the class by its name in `KVTransferConfig`, and makes an object of it for the scheduler, and one for the
model runner of each rank. They only record: data moves on other threads, between steps
(`vllm_worker.engine.vllm_engine`). What the scheduler's object is told goes with the next step to all ranks, whose
objects report it to vLLM's scheduler.

A request whose KV comes from another worker has `RECEIVES` in its `kv_transfer_params`. The scheduler allocates its
blocks, which is the reservation, and lets it wait until `finished_receiving` names it. A request that is aborted
meanwhile keeps its blocks until then, because a peer may still write to them. Likewise a request with `SHIPS` keeps its
blocks after its end until `finished_sending` names it.

Blocks come in groups of layers (`KVCacheConfig.kv_cache_groups`), each with a table of its own for each request. All
groups take their blocks from one pool. Of a table's blocks some may not be there: those outside of a window, and all
but the last one of layers that keep a state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs

from tandem.handover.outgoing import NO_BLOCK
from tandem.vllm_worker.extensions.kv_memory import mapped_allocation, written_blocks
from tandem.vllm_worker.scheduler.engine_orders import AllocatedBlocks

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

RECEIVES, SHIPS = "tandem_receives", "tandem_ships"


@dataclass
class EndedTransfers(KVConnectorMetadata):
    """Requests whose blocks nothing writes any more, and those whose blocks nothing reads any more."""

    received: set[str]
    sent: set[str]


class TandemConnector(KVConnectorBase_V1, SupportsHMA):
    """Call the methods that are not vLLM's between steps, on the engine's thread.

    block_sizes: tokens of a block in each group that moves.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.kv_cache_config = kv_cache_config
        self.block_sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.transfer_groups]
        # The scheduler's object:
        self.begun: list[str] = []
        """Requests that were scheduled, but not to receive."""
        self.allocated: list[AllocatedBlocks] = []
        self.last_step: SchedulerOutput | None = None
        self.running_steps: deque[SchedulerOutput] = deque(maxlen=vllm_config.max_concurrent_batches)
        self._receiving: set[str] = set()  # have their blocks
        self._shipping: set[str] = set()  # must keep their blocks at their end
        self._kept: set[str] = set()  # have ended and keep their blocks
        self.finished_receiving: set[str] = set()
        self.finished_sending: set[str] = set()
        # The model runner's object:
        self.kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]] = {}

    # ---- the scheduler's object

    def on_new_request(self, request: Request) -> None:
        if request.kv_transfer_params and SHIPS in request.kv_transfer_params:
            self._shipping.add(request.request_id)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        waits = bool(request.kv_transfer_params) and RECEIVES in request.kv_transfer_params
        if not waits or request.request_id in self._receiving:  # after a preemption all is computed here
            return 0, False
        return request.num_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._receiving.add(request.request_id)
            num_tokens, num_cached = request.num_tokens, request.num_tokens - num_external_tokens
            tables = zip(self.block_tables(blocks), self.block_sizes, strict=True)
            groups = [written_blocks(table, size, num_cached, num_tokens) for table, size in tables]
            self.allocated.append(AllocatedBlocks(request.request_id, num_cached, groups))
        else:
            self.begun.append(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self.last_step = scheduler_output
        self.running_steps.append(scheduler_output)
        ended = EndedTransfers(self.finished_receiving, self.finished_sending)
        self.finished_receiving, self.finished_sending = set(), set()
        return ended

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        engine_id = request.request_id
        self._receiving.discard(engine_id)
        if engine_id not in self._shipping:
            return False, None
        self._kept.add(engine_id)
        return True, None

    def end_shipping(self, engine_id: str) -> None:
        """Lets vLLM have the blocks of a request when it ends, or now if it has ended."""
        self._shipping.discard(engine_id)
        if engine_id in self._kept:
            self._kept.discard(engine_id)
            self.finished_sending.add(engine_id)

    def prefix_group(self) -> tuple[int, int]:
        """Returns (number, tokens of a block) of the group whose cached blocks stand for a prefix: that of full
        attention, if there is one."""
        groups = self.kv_cache_config.kv_cache_groups
        is_full = [isinstance(next(iter(iter_layer_specs(group.kv_cache_spec))), FullAttentionSpec) for group in groups]
        number = is_full.index(True) if True in is_full else 0
        return number, groups[number].kv_cache_spec.block_size

    def block_tables(self, blocks: KVCacheBlocks) -> list[list[int]]:
        """Returns the blocks of a request in each group that moves. NO_BLOCK stands for those that are not there."""
        groups = [blocks.blocks[number] for number in self.kv_cache_config.transfer_group_ids]
        return [[NO_BLOCK if block.is_null else block.block_id for block in group] for group in groups]

    # ---- the model runner's object

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return mapped_allocation() if self._vllm_config.device_config.device_type == "cpu" else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.kv_caches = kv_caches

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        ended = self._get_connector_metadata()
        assert isinstance(ended, EndedTransfers)
        return ended.sent, ended.received

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
