"""Drives `VllmEngine` without a scheduler, and collects what it reports. Runs in vLLM's interpreter."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig

from tandem.handover.outgoing import NO_BLOCK
from tandem.kv_transfer.connector import DataNetwork
from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.packed import pack_token_ids, unpack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions, TokenLogprobs
from tandem.protocol.prefix_hash import BlockHasher
from tandem.vllm_worker.engine.vllm_engine import VllmEngine
from tandem.vllm_worker.extensions.kv_ranks import AskRanks, RankKV, open_ranks
from tandem.vllm_worker.scheduler.engine_orders import AddRequest, AllocatedBlocks, EngineFigures, StepReport
from tandem.vllm_worker.vllm_host import engine_arguments, kv_layout
from tandem.vllm_worker.vllm_worker_config import VllmEngineConfig

LIMIT_S = 60.0
BLOCK_SIZE = 32


class EngineDriver:
    """An engine with a small cache, which computes prompts in chunks of 64 tokens and at most four requests at once."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.outputs: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self.prompt_logprobs: dict[str, list[bytes]] = {}
        self.chunks: list[int] = []
        """Tokens of prompts in each step."""
        self.endings: dict[str, str] = {}
        self.begun: set[str] = set()
        self.allocated: dict[str, AllocatedBlocks] = {}
        self.computed: dict[str, list[list[int]]] = {}
        self.added: list[bytes] = []
        self.evicted: list[bytes] = []
        self.figures = EngineFigures()
        self.num_reports = 0
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        small: dict[str, Any] = {
            "dtype": "float32", "kv_cache_bytes": 8 << 20, "max_model_len": 512, "max_num_batched_tokens": 64,
            "max_num_seqs": 4,
        }  # fmt: skip
        self.config = VllmEngineConfig(model=model, **small | settings)
        self.engine = VllmEngine(engine_arguments(self.config, 0), self._open_kv, self._on_report, self._on_failed)
        self.engine.start().result()

    def add(
        self,
        prompt: list[int],
        *,
        generated: list[int] | None = None,
        sampling: SamplingParams | None = None,
        stop: StopConditions | None = None,
        cache_salt: str = "",
        num_prompt_logprobs: int | None = None,
        receives: bool = False,
        ships: bool = False,
    ) -> str:
        """Adds a request. Without a stop, it ends after 40 tokens."""
        generated, stop = generated or [], stop or StopConditions(max_tokens=40)
        sampling = sampling or SamplingParams(temperature=0.0)
        engine_id = self.new_id()
        message = StartPrefill(
            proxy_id="p",
            attempt_ids=[engine_id],
            transfer_id=engine_id,
            token_ids=pack_token_ids(prompt + generated),
            sampling=sampling,
            seeds=[sampling.seed],
            stop=stop,
            deadline_s=600.0,
            num_generated=len(generated),
            cache_salt=cache_salt,
            num_prompt_logprobs=num_prompt_logprobs,
            decode_worker_id=None,
            decode_epoch=None,
        )
        self.add_message(message, receives, ships)
        return engine_id

    def add_message(self, message: StartPrefill, receives: bool = False, ships: bool = False) -> str:
        """Adds a request of one sequence. Returns its attempt's id, by which the engine knows it."""
        [engine_id], token_ids = message.attempt_ids, unpack_token_ids(message.token_ids)
        num_generated, max_tokens = message.num_generated, message.stop.max_tokens
        order = AddRequest(engine_id, message, 0, token_ids, num_generated, max_tokens, receives=receives, ships=ships)
        self.outputs[engine_id], self.logprobs[engine_id] = [], []
        self.engine.add(order, self.hashes(token_ids, message.cache_salt))
        return engine_id

    def new_id(self) -> str:
        engine_id = str(next(self._numbers))
        self.outputs[engine_id], self.logprobs[engine_id] = [], []
        return engine_id

    def run(self, prompt: list[int], **details: object) -> list[int]:
        """Returns all tokens of a request."""
        return self.result(self.add(prompt, **details))  # type: ignore[arg-type]

    def result(self, engine_id: str) -> list[int]:
        self.wait(lambda: engine_id in self.endings)
        return self.outputs[engine_id]

    def wait(self, holds: Callable[[], bool]) -> None:
        """Waits until the condition holds. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(holds, LIMIT_S):
                raise TimeoutError

    def wait_for_steps(self) -> None:
        """Waits for ten reports."""
        last = self.num_reports + 10
        self.wait(lambda: self.num_reports >= last)

    def all_free(self) -> bool:
        """Returns whether all blocks become free."""
        with self._changed:
            return self._changed.wait_for(lambda: self.figures.num_free_blocks == self.figures.num_blocks, 10.0)

    def hashes(self, token_ids: list[int], cache_salt: str = "") -> list[bytes]:
        return BlockHasher(self.block_size, "model", cache_salt).prompt_hashes(pack_token_ids(token_ids))

    def copy_blocks(self, source: str, target: str) -> None:
        """Copies what a request needs that receives, from one that has shipped."""
        for (first, block_ids), computed in zip(self.allocated[target].groups, self.computed[source], strict=True):
            assert NO_BLOCK not in computed[first:] and len(computed) == first + len(block_ids)
            self.rows[block_ids] = self.rows[computed[first:]]

    def _open_kv(self, vllm_config: VllmConfig, block_size: int, ask: AskRanks) -> RankKV:
        self.block_size = block_size
        [self.rank_facts] = ask("kv_facts")
        kv = open_ranks(ask, partial(kv_layout, self.config, vllm_config, block_size), "127.0.0.1", None)
        [pool] = ask("kv_pool", None, (kv.pools.layout, DataNetwork("127.0.0.1")))
        self.rows: torch.Tensor = pool.blocks
        return kv

    def _on_report(self, report: StepReport) -> None:
        with self._changed:
            self.begun.update(report.begun)
            self.allocated.update({each.engine_id: each for each in report.allocated})
            self.computed.update({each.engine_id: each.groups for each in report.computed})
            self.added += report.added
            self.evicted += report.evicted
            self.figures = report.figures
            self.num_reports += 1
            self.chunks.append(report.num_prompt_tokens)
            for output in report.outputs:
                self.outputs[output.engine_id] += [token.token_id for token in output.tokens]
                self.logprobs[output.engine_id] += [token.logprobs for token in output.tokens]
                if output.prompt_logprobs is not None:
                    self.prompt_logprobs[output.engine_id] = output.prompt_logprobs
                if output.error is not None:
                    self.endings[output.engine_id] = f"{output.error.code}: {output.error}"
                elif output.finish_reason:
                    self.endings[output.engine_id] = output.finish_reason
            self._changed.notify_all()

    def _on_failed(self, error: BaseException, _: list[str]) -> None:
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)
