"""Two workers with vLLM's engine that ship to each other, and have room for one prompt each."""

from __future__ import annotations

from typing import Any

from tandem.handover.actions import Receive, SendToPeer, SendToProxy, Ship
from tandem.handover.outgoing import YIELD_AFTER_S
from tandem.protocol.messages.dispatch import AttemptPreempted, FirstToken, TokenBatch
from tandem.protocol.messages.transfer import CloseTransfer, FinishTransfer, KVRefused, KVReserved, ReserveKV, ShipKV
from tandem.vllm_worker.scheduler.engine_orders import EngineOrder, VllmAction
from tests.unit.vllm_worker.scheduler.engine_model import BLOCK_SIZE
from tests.unit.vllm_worker.scheduler.pair_model import NUM_BLOCKS, ModelWorker
from tests.unit.vllm_worker.scheduler.prompts import prepare, start

NUM_TOKENS = (NUM_BLOCKS // 2 + 2) * BLOCK_SIZE
MAX_TOKENS = 3


class FullWorkers:
    """The workers, and connections that deliver everything at once. to_proxy: messages by attempt."""

    def __init__(self) -> None:
        self.now = 0.0
        self.workers = {"a": ModelWorker("a"), "b": ModelWorker("b")}
        self.to_proxy: dict[str, list[Any]] = {}

    def dispatch(self, attempt_id: str, source: str) -> None:
        """Sends a prompt to one worker, which ships it to the other one."""
        prompt = start([attempt_id], NUM_TOKENS, f"of {attempt_id}", MAX_TOKENS)
        target = self._other(source)
        self.to_proxy[attempt_id] = []
        self._perform(source, self.workers[source].scheduler.on_start(self.now, prompt, f"{source}-{target}", False))
        self._perform(target, self.workers[target].scheduler.on_prepare(self.now, prepare(prompt)))

    def run(self) -> None:
        """Lets both compute what they can."""
        for _ in range(12):
            for name, worker in self.workers.items():
                self._perform(name, worker.scheduler.on_report(self.now, worker.engine.step()))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for name, worker in self.workers.items():
            self._perform(name, worker.scheduler.on_tick(self.now))

    def tokens(self, attempt_id: str) -> list[int]:
        found = [each.token.token_id for each in self.to_proxy[attempt_id] if isinstance(each, FirstToken)]
        batches = [each for each in self.to_proxy[attempt_id] if isinstance(each, TokenBatch)]
        return found + [token.token.token_id for batch in batches for token in batch.tokens]

    @staticmethod
    def _other(name: str) -> str:
        return "b" if name == "a" else "a"

    def _perform(self, name: str, actions: list[VllmAction]) -> None:
        worker, other = self.workers[name], self._other(name)
        for action in actions:
            match action:
                case SendToProxy():
                    message: Any = action.message
                    tokens = message.tokens if isinstance(message, TokenBatch) else [message]
                    self.to_proxy[tokens[0].attempt_id].append(message)
                case SendToPeer():
                    self._perform(other, self._receive(other, action.message))
                case Ship():
                    ship = ShipKV(action.pair_id, 1, action.transfer_id, action.first_block, len(action.src_block_ids))
                    self._perform(other, self._receive(other, ship))
                    self._perform(name, worker.scheduler.outgoing.on_shipped(action.transfer_id, None))
                case Receive():
                    self._perform(name, worker.scheduler.incoming.on_received(action.transfer_id, None))
                case _:
                    assert isinstance(action, EngineOrder)
                    worker.engine.orders.append(action)

    def _receive(self, name: str, message: Any) -> list[VllmAction]:
        scheduler = self.workers[name].scheduler
        match message:
            case ReserveKV():
                return scheduler.incoming.on_reserve(self.now, message)
            case ShipKV():
                return scheduler.incoming.on_ship(message)
            case FinishTransfer():
                return scheduler.incoming.on_finish_transfer(message)
            case CloseTransfer():
                return scheduler.incoming.on_close_transfer(message.transfer_id)
            case KVReserved():
                return scheduler.outgoing.on_reserved(message)
            case KVRefused():
                return scheduler.outgoing.on_refused(message.transfer_id, message.error)
        raise AssertionError(message)


def test_the_prompt_that_has_waited_yields_its_blocks() -> None:
    pair = FullWorkers()
    pair.dispatch("first", "a")
    pair.run()
    assert len(pair.tokens("first")) == MAX_TOKENS, "one prompt alone fits"
    for attempt_id, source in (("of a", "a"), ("of b", "b")):
        pair.dispatch(attempt_id, source)
    pair.run()
    assert [len(pair.tokens(each)) for each in ("of a", "of b")] == [1, 1], "each waits for the other's blocks"
    pair.tick(YIELD_AFTER_S / 2)
    pair.run()
    assert [len(pair.tokens(each)) for each in ("of a", "of b")] == [1, 1]
    pair.tick(YIELD_AFTER_S / 2)
    pair.run()
    assert isinstance(pair.to_proxy["of a"][-1], AttemptPreempted)
    assert len(pair.tokens("of b")) == MAX_TOKENS
    pair.dispatch("of a again", "a")
    pair.run()
    assert len(pair.tokens("of a again")) == MAX_TOKENS
    for worker in pair.workers.values():
        assert worker.scheduler.is_idle and len(worker.engine.free) == NUM_BLOCKS


def test_a_prompt_keeps_its_blocks_while_nothing_else_needs_them() -> None:
    pair = FullWorkers()
    pair.dispatch("of a", "a")
    pair.workers["b"].engine.free.clear()
    for _ in range(5):
        pair.run()
        pair.tick(YIELD_AFTER_S)
    assert len(pair.tokens("of a")) == 1 and len(pair.to_proxy["of a"]) == 1
