"""A prefill and a decode worker in one process: real schedulers and real models, messages delivered immediately."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from tandem.decode_worker.decode_scheduler import Action, DecodeScheduler
from tandem.engine.batch import Batch
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.engine.vision.prompt_media import EmbeddingCache
from tandem.handover.actions import Receive, SendToPeer, SendToProxy, Ship
from tandem.protocol.messages.dispatch import (
    AttemptFailed,
    AttemptPreempted,
    FirstToken,
    PrepareDecode,
    StartPrefill,
    TokenBatch,
)
from tandem.protocol.messages.media import MediaItem
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.protocol.messages.transfer import CloseTransfer, FinishTransfer, KVRefused, KVReserved, ReserveKV, ShipKV
from tandem.worker.media_intake import MediaIntake
from tandem.worker.worker_scheduler import WorkerScheduler
from tests.support.vision_models import Generated

BLOCK_SIZE = 8
MODEL_ID = "model"
GREEDY = SamplingParams(temperature=0.0, logprobs=0)


class VisionPair:
    """num_decode_blocks: few blocks cause preemptions. batches: the batches that prefill ran."""

    def __init__(self, folder: Path, max_num_batched_tokens: int = 48, num_decode_blocks: int = 400) -> None:
        config = EngineConfig(
            str(folder),
            dtype="float32",
            device="cpu",
            block_size=BLOCK_SIZE,
            kv_cache_bytes=1 << 24,
            max_model_len=2048,
        )
        prefill, decode = load_model(config), load_model(config)
        self.pools = KVPool(prefill, config), KVPool(decode, config)
        self.runners = ModelRunner(prefill, self.pools[0]), ModelRunner(decode, self.pools[1])
        self.cache = EmbeddingCache(1 << 20)
        self.intake = MediaIntake(prefill.vision, self.cache, max_num_batched_tokens // 2, None, lambda: None)
        blocks = BlockManager(self.pools[0].num_blocks, BLOCK_SIZE)
        self.prefill = WorkerScheduler(blocks, MODEL_ID, max_num_batched_tokens, 64, 10.0).prefill
        self.decode = DecodeScheduler(BlockManager(num_decode_blocks, BLOCK_SIZE), MODEL_ID, 64)
        self.batches: list[Batch] = []
        self.tokens: dict[int, list[SampledToken]] = {}
        self.num_cached_tokens: dict[int, int] = {}
        self.failures: dict[int, str] = {}
        self.num_preempted = 0
        self._prompts: dict[int, tuple[list[int], tuple[MediaItem, ...], int]] = {}
        self._numbers = itertools.count()
        self._attempts = itertools.count()
        self._by_request: dict[str, int] = {}
        self._now = 0.0

    def close(self) -> None:
        for pool in self.pools:
            pool.close()

    def start(self, token_ids: list[int], items: Sequence[MediaItem], num_new: int) -> int:
        number = next(self._numbers)
        self.tokens[number] = []
        self._prompts[number] = token_ids, tuple(items), num_new
        self._dispatch(number)
        return number

    def _dispatch(self, number: int) -> None:
        """Dispatches a prompt with the tokens generated so far, as the proxy does."""
        token_ids, items, num_new = self._prompts[number]
        generated = [token.token_id for token in self.tokens[number]]
        transfer_id = f"t{next(self._attempts)}"
        self._by_request[transfer_id] = number
        stop = StopConditions(max_tokens=num_new)
        packed = pack_token_ids(token_ids + generated)
        start = StartPrefill(
            "proxy", [transfer_id], transfer_id, packed, GREEDY, [0], stop, 1e9,
            decode_worker_id="decode", decode_epoch="epoch",
            num_generated=len(generated), media=items,
        )  # fmt: skip
        prepare = PrepareDecode(
            "proxy", [transfer_id], transfer_id, packed, GREEDY, [0], stop, 1e9,
            prefill_worker_id="prefill", prefill_epoch="epoch",
            num_generated=len(generated), media=items,
        )  # fmt: skip
        media = self.intake.open(start)
        self._on_decode(self.decode.on_prepare(self._now, prepare))
        self._on_prefill(self.prefill.on_start(self._now, start, "pair", None, media))

    def run(self) -> None:
        """Runs until nothing is left to do."""
        for _ in range(2000):
            self._now += 0.001
            batch, actions = self.prefill.schedule(self._now)
            self._on_prefill(actions)
            if batch.items or batch.encodes:
                self.batches.append(batch)
                self._on_prefill(self.prefill.on_step(self._now, self.runners[0].run(batch)))
                self.intake.share_encoded()
            steps, decode_actions = self.decode.schedule(self._now)
            self._on_decode(decode_actions)
            if steps.items:
                self._on_decode(self.decode.on_step(self._now, self.runners[1].run(steps)))
            if not (batch.items or batch.encodes or steps.items or actions or decode_actions):
                break
        else:
            raise AssertionError("it never ends")
        for scheduler in (self.prefill, self.decode):
            scheduler.blocks.check()
            assert scheduler.blocks.num_free == scheduler.blocks.num_blocks

    def generated(self, number: int) -> Generated:
        tokens = self.tokens[number]
        assert number not in self.failures, self.failures[number]
        return [t.token_id for t in tokens], [t.logprobs.logprob for t in tokens if t.logprobs is not None]

    def _on_prefill(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendToProxy(message=message):
                    self._on_proxy(message)
                case SendToPeer(message=ReserveKV() as message):
                    self._on_decode(self.decode.transfers.on_reserve(self._now, message))
                case SendToPeer(message=FinishTransfer() as message):
                    self._on_decode(self.decode.transfers.on_finish_transfer(message))
                case SendToPeer(message=CloseTransfer() as message):
                    self._on_decode(self.decode.transfers.on_close_transfer(message.transfer_id))
                case Ship():
                    source, target = (pool.as_blocks() for pool in self.pools)
                    target[action.dst_block_ids] = source[action.src_block_ids]
                    num_blocks = len(action.src_block_ids)
                    shipped = ShipKV("pair", 0, action.transfer_id, action.first_block, num_blocks)
                    self._on_decode(self.decode.transfers.on_ship(shipped))
                    self._on_prefill(self.prefill.transfers.on_shipped(action.transfer_id, None))

    def _on_decode(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendToProxy(message=message):
                    self._on_proxy(message)
                case SendToPeer(message=KVReserved() as message):
                    self._on_prefill(self.prefill.transfers.on_reserved(message))
                case SendToPeer(message=KVRefused() as message):
                    self._on_prefill(self.prefill.transfers.on_refused(message.transfer_id, message.error))
                case Receive():
                    self._on_decode(self.decode.transfers.on_received(action.transfer_id, None))

    def _on_proxy(self, message: object) -> None:
        match message:
            case FirstToken():
                number = self._by_request[message.attempt_id]
                self.tokens[number].append(message.token)
                self.num_cached_tokens.setdefault(number, message.num_cached_tokens)
            case TokenBatch():
                for new in message.tokens:
                    self.tokens[self._by_request[new.attempt_id]].append(new.token)
            case AttemptFailed():
                self.failures[self._by_request[message.attempt_id]] = message.error.message
            case AttemptPreempted():
                self.num_preempted += 1
                self._dispatch(self._by_request[message.attempt_id])
