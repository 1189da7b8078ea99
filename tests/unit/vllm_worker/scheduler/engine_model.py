"""A model of vLLM's engine core that keeps the contract of its scheduler about blocks and the names of requests.

A request that receives gets its blocks at once and keeps them, also after an abort, until it is named as received. One
that ships keeps them after its end until it is named as sent. A name that the engine does not know ends the process.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tandem.protocol.messages.sampling import FinishReason, SampledToken
from tandem.runtime.errors import InvalidRequest
from tandem.vllm_worker.scheduler.engine_orders import (
    AbortRequests,
    AddRequest,
    AllocatedBlocks,
    ComputedBlocks,
    EndReceiving,
    EndShipping,
    EngineFigures,
    EngineOrder,
    EngineOutput,
    KVArrived,
    StepReport,
)

BLOCK_SIZE = 4
_CHUNK_BLOCKS = 2


def nth_token(number: int, index: int) -> int:
    """Returns the token that sequence `number` of every prompt generates after `index` tokens."""
    return 1000 * (number + 1) + index


@dataclass(eq=False)
class ModelRequest:
    order: AddRequest
    status: str = "waiting"
    """waiting, receiving, received, running, or ended (and still known, because its blocks are kept)."""
    num_cached: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_generated: int = 0
    num_computed: int = 0
    num_reported: int = 0
    ships: bool = False
    kv_is_here: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.order.token_ids)

    @property
    def num_prompt_blocks(self) -> int:
        return -(-self.num_tokens // BLOCK_SIZE)


class EngineModel:
    """Carries out orders between steps, as `vllm_worker.engine.vllm_engine` does."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = deque(range(num_blocks))
        self.owners: dict[int, str] = {}
        self.requests: dict[str, ModelRequest] = {}
        self.orders: deque[EngineOrder] = deque()
        self.num_cached = 0
        """Prompt blocks that the cache has for the next request that receives."""
        self._named: list[str] = []
        self._preempted: set[str] = set()
        """Requests that the next step takes the blocks from."""
        self._errors: list[EngineOutput] = []
        self.added: set[str] = set()
        self._shipping_ended: set[str] = set()

    def step(self) -> StepReport:
        while self.orders:
            self._carry_out(self.orders.popleft())
        lost = [each for each in sorted(self._preempted) if self._take_from(each)]
        self._preempted.clear()
        begun, allocated = self._schedule()
        outputs, computed = self._compute()
        for engine_id in self._named:
            assert engine_id in self.requests, "vLLM ends the process"
            request = self.requests[engine_id]
            if request.status == "receiving":
                request.status, request.kv_is_here = "received", True
            else:
                assert request.status == "ended", "vLLM ends the process"
                self._free(engine_id)
        self._named.clear()
        errors, self._errors = self._errors, []
        num_running = sum(each.status == "running" for each in self.requests.values())
        figures = EngineFigures(num_running, 0, self.num_blocks, len(self.free))
        return StepReport(begun, allocated, computed, errors + outputs, lost, figures)

    def fail(self, engine_id: str) -> None:
        """Ends a request with an error, e.g. because its grammar is wrong."""
        self._end(engine_id)
        self._errors.append(EngineOutput(engine_id, [], None, InvalidRequest("a wrong grammar")))

    def preempt(self, engine_id: str) -> None:
        """The next step takes the request's blocks, after it has carried out its orders."""
        self._preempted.add(engine_id)

    def _take_from(self, engine_id: str) -> bool:
        """Returns whether the request had blocks that were still to be shipped."""
        request = self.requests.get(engine_id)
        if request is None or request.status != "running":
            return False
        self._take_blocks(request)
        request.status, request.num_computed, request.num_reported = "waiting", 0, 0
        had_shipped, request.ships = request.ships, False  # from now on nothing of it is reported
        return had_shipped

    # ---- orders

    def _carry_out(self, order: EngineOrder) -> None:
        match order:
            case AddRequest():
                assert order.engine_id not in self.added, "a request is added once"
                self.added.add(order.engine_id)
                self.requests[order.engine_id] = ModelRequest(
                    order, num_generated=order.num_generated, ships=order.ships
                )
            case AbortRequests(engine_ids):
                for engine_id in engine_ids:
                    assert engine_id in self.added, "only known requests are aborted"
                    if engine_id in self.requests and self.requests[engine_id].status != "ended":
                        self._end(engine_id)
            case KVArrived(engine_id, token_id):
                if (request := self.requests.get(engine_id)) is None:
                    return
                if request.status == "receiving":
                    request.num_generated += 1
                    request.order.token_ids.append(token_id)
                self._name(engine_id)
            case EndReceiving(engine_id):
                if engine_id in self.requests:
                    assert self.requests[engine_id].status == "ended", "it would begin with KV that is not there"
                    self._name(engine_id)
            case EndShipping(engine_id):
                assert engine_id in self.added
                if (request := self.requests.get(engine_id)) is not None:
                    assert request.order.ships
                    request.ships = False
                    if request.status == "ended":
                        self._name(engine_id)
                    else:
                        self._shipping_ended.add(engine_id)

    def _name(self, engine_id: str) -> None:
        assert engine_id not in self._named, "a request is named once"
        self._named.append(engine_id)

    # ---- a step

    def _schedule(self) -> tuple[list[str], list[AllocatedBlocks]]:
        begun, allocated = [], []
        for engine_id, request in self.requests.items():
            order = request.order
            if request.status == "received":
                request.status, request.num_computed = "running", request.num_tokens
            if request.status != "waiting":
                continue
            waits = order.receives and not request.kv_is_here
            num_cached = min(self.num_cached, (request.num_tokens - 1) // BLOCK_SIZE) if waits else 0
            num_tokens = request.num_tokens + order.max_tokens - order.num_generated
            num_needed = -(-num_tokens // BLOCK_SIZE) - num_cached
            if num_needed > len(self.free):
                break
            request.num_cached = num_cached
            request.block_ids = [self.free.popleft() for _ in range(num_needed)]
            self.owners.update(dict.fromkeys(request.block_ids, engine_id))
            if waits:
                request.status = "receiving"
                own = request.block_ids[: request.num_prompt_blocks - num_cached]
                allocated.append(AllocatedBlocks(engine_id, list(range(-num_cached, 0)), own))
            else:
                request.status = "running"
                begun.append(engine_id)
        return begun, allocated

    def _compute(self) -> tuple[list[EngineOutput], list[ComputedBlocks]]:
        outputs, computed = [], []
        for engine_id, request in list(self.requests.items()):
            if request.status != "running":
                continue
            order = request.order
            request.num_computed = min(request.num_tokens, request.num_computed + _CHUNK_BLOCKS * BLOCK_SIZE)
            is_whole = request.num_computed == request.num_tokens
            num_blocks = request.num_prompt_blocks if is_whole else request.num_computed // BLOCK_SIZE
            if request.ships and num_blocks > request.num_reported:
                request.num_reported = num_blocks
                computed.append(ComputedBlocks(engine_id, request.block_ids[:num_blocks]))
            if not is_whole:
                continue
            token_id = nth_token(order.number, request.num_generated)
            request.num_generated += 1
            reason: FinishReason | None = "length" if request.num_generated >= order.max_tokens else None
            if token_id in order.message.stop.stop_token_ids:
                reason = "stop"
            outputs.append(EngineOutput(engine_id, [SampledToken(token_id)], reason))
            if reason is not None:
                self._end(engine_id)
        return outputs, computed

    def _end(self, engine_id: str) -> None:
        request = self.requests[engine_id]
        is_kept = request.status == "receiving" or (request.order.ships and engine_id not in self._shipping_ended)
        request.status = "ended"
        if not is_kept:
            self._free(engine_id)

    def _free(self, engine_id: str) -> None:
        self._take_blocks(self.requests.pop(engine_id))

    def _take_blocks(self, request: ModelRequest) -> None:
        for block_id in request.block_ids:
            del self.owners[block_id]
        self.free.extend(request.block_ids)
        request.block_ids = []
