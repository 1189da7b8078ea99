"""Computes one sequence at a time in this process, in steps that hold nothing else: its prompt, then single tokens.

It is what `tandem replay` compares an answer with. Items of steps are made by the same code as in a worker; there are
no other sequences, no prefix cache and no transfers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from tandem.decode_worker.sequence import DecodePrompt
from tandem.engine.batch import Batch, BatchItem, ItemOutput
from tandem.engine.cuda.step_graphs import GraphLimits
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_cache_size import fit_kv_cache
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.lora.adapters import Adapters
from tandem.engine.model_runner import ModelRunner
from tandem.engine.sampling.grammar import Grammar
from tandem.engine.sampling.grammars import Grammars
from tandem.prefill_worker.prompt import PrefillPrompt
from tandem.protocol.messages.checks import check_request
from tandem.protocol.messages.dispatch import AdapterRef, StartPrefill
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.runtime.errors import InternalError, InvalidRequest

LOAD_TIMEOUT_S = 300.0
"""Wait for an adapter, or for a grammar and the tokeniser that it needs."""
MAX_LATE_MASKS = 20
"""Tries of a step whose grammar's mask was late."""


class LoneEngine:
    """A model of one rank. Raises what loading it raises: ConfigError or InternalError. Of one thread."""

    def __init__(self, config: EngineConfig) -> None:
        torch.set_num_threads(config.num_threads)
        self.loaded, self._config = fit_kv_cache(load_model(config), config)
        self._pool = KVPool(self.loaded, self._config)
        self._runner = ModelRunner(self.loaded, self._pool, GraphLimits.of(self._config))
        self._prepared = threading.Event()
        self._grammars: Grammars | None = None
        self._adapters = Adapters(self.loaded.lora_modules, self.loaded.dtype, self.loaded.device, self._prepared.set)

    def tokens(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        stop: StopConditions,
        num_tokens: int,
        adapter: AdapterRef | None = None,
    ) -> Iterator[SampledToken]:
        """Yields the first `num_tokens` tokens of a sequence, whether or not one of them would end it.

        sampling: with the sequence's seed. adapter: with the folder from which to load it. Raises TandemError for a
        request that the model cannot serve.
        """
        stop = StopConditions(max(num_tokens, stop.min_tokens, 1), stop.stop_token_ids, stop.min_tokens)
        request = StartPrefill(
            proxy_id="replay", attempt_ids=["replay"], transfer_id="replay", token_ids=pack_token_ids(prompt),
            sampling=sampling, seeds=[sampling.seed], stop=stop, deadline_s=LOAD_TIMEOUT_S, adapter=adapter,
            decode_worker_id=None, decode_epoch=None,
        )  # fmt: skip
        check_request(request, self.loaded.vocab_size, self.loaded.max_model_len)
        block_size = self._pool.layout.block_size
        num_blocks = -(-(len(prompt) + num_tokens) // block_size)
        if num_blocks > self._pool.num_blocks:
            raise InvalidRequest(
                f"the sequence needs {num_blocks} KV blocks, and there is memory for {self._pool.num_blocks}"
            )
        grammar = self._compiled(sampling.grammar)
        loaded_adapter = self._adapters.get(adapter)
        if loaded_adapter is not None:
            self._wait_until(lambda: loaded_adapter.is_ready, LOAD_TIMEOUT_S, "loading the LoRA adapter")
        block_table = list(range(num_blocks))

        prefill = PrefillPrompt.of(request, None, False, 0, 0.0, grammar, None, loaded_adapter)
        prefill.block_table = block_table
        while not prefill.is_computed:
            num_chunk = min(prefill.num_remaining_tokens, self._config.max_num_batched_tokens)
            output = self._step(partial(prefill.next_item, num_chunk))
            prefill.num_computed_tokens += num_chunk
        [token] = output.tokens
        yield token

        shared = DecodePrompt.of(
            request, 0, 0.0, block_size, self._pool.layout.model_id, grammar, adapter=loaded_adapter
        )
        [sequence] = shared.sequences.values()
        sequence.begin(block_table, token.token_id, block_size, 0)
        for _ in range(num_tokens - 1):
            [token] = self._step(partial(sequence.next_item, None)).tokens
            sequence.on_token(token.token_id, block_size)
            yield token

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()
        self._adapters.close()
        self._pool.close()

    def _compiled(self, text: str | None) -> Grammar | None:
        """Returns a grammar that is compiled, or has failed to."""
        if text is None:
            return None
        if self._grammars is None:
            self._grammars = Grammars(self._config.model, self.loaded.vocab_size, self._prepared.set)
        grammar = self._grammars.get(text)
        assert grammar is not None
        self._wait_until(lambda: grammar.is_compiled, LOAD_TIMEOUT_S, "compiling the grammar")
        return grammar

    def _wait_until(self, is_ready: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self._prepared.clear()
            if is_ready():
                return
            if not self._prepared.wait(deadline - time.monotonic()):
                raise InternalError(f"{what} took more than {timeout_s:g} s")

    def _step(self, make_item: Callable[[], BatchItem]) -> ItemOutput:
        """Runs a step with one item, again if its mask was late. Raises the error of its grammar or adapter."""
        for _ in range(MAX_LATE_MASKS):
            [output] = self._runner.run(Batch([make_item()]))
            if output.error is not None:
                raise output.error.to_error()
            if not output.is_late:
                return output
        raise InternalError("the masks of the grammar take too long on this machine")
