"""Runs one step: a batch of prompt chunks and single tokens through the model, and one sampled token per item."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from engine.batch import Batch, BatchItem, ItemOutput, Sample
from engine.cpu_attention import PlainAttention
from engine.kv_pool import KVPool
from engine.model_head import ModelHead
from engine.model_loader import LoadedModel
from engine.packed_linear import pack_linears
from engine.sampler import sample
from protocol.generation import SamplingParams, TokenLogprobs


class ModelRunner:
    """Owns the model on the engine thread. `run` is the only way in while the worker serves."""

    def __init__(self, loaded: LoadedModel, pool: KVPool) -> None:
        self._model = loaded.model
        self._pool = pool
        self._device = loaded.device
        # The hooks of a tensor parallel plan hold the linear layers themselves, so those stay.
        is_whole = loaded.layout.tensor_parallel_size == 1
        if loaded.device.type == "cpu" and loaded.dtype == torch.bfloat16 and is_whole:
            pack_linears(self._model)

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[ItemOutput]:
        """One output per item."""
        if batch.block_copies:
            sources, destinations = zip(*batch.block_copies, strict=True)
            self._pool.tensor[list(destinations)] = self._pool.tensor[list(sources)]
        items = batch.items
        if any(item.num_prompt_logprobs is not None for item in items):
            rows, prompt_logprobs = self._run_with_prompt_logprobs(items)
        else:
            rows, prompt_logprobs = self._sampled_logits(items), {}
        samples = [s for item in items for s in item.samples]
        positions = [item.start + len(item.token_ids) for item in items for _ in item.samples]
        tokens = iter(sample(rows, samples, positions) if samples else [])
        return [
            ItemOutput([next(tokens) for _ in item.samples], prompt_logprobs.get(number, []))
            for number, item in enumerate(items)
        ]

    def _inputs(self, items: list[BatchItem]) -> dict[str, Any]:
        token_ids = [token_id for item in items for token_id in item.token_ids]
        positions = [p for item in items for p in range(item.start, item.start + len(item.token_ids))]
        return {
            "input_ids": torch.tensor([token_ids], device=self._device),
            "position_ids": torch.tensor([positions], device=self._device),
            "use_cache": False,
            "tandem": PlainAttention(self._pool, items),
        }

    def _sampled_logits(self, items: list[BatchItem]) -> torch.Tensor:
        """[num_samples, vocab_size]: computed only where a token is sampled, and once for samples of one item."""
        last_rows = list(itertools.accumulate(len(item.token_ids) for item in items))
        sampled = [(last - 1, len(item.samples)) for last, item in zip(last_rows, items, strict=True) if item.samples]
        # At least one row: models do not expect none.
        keep = torch.tensor([row for row, _ in sampled] or [0], device=self._device)
        logits: torch.Tensor = self._model(**self._inputs(items), logits_to_keep=keep).logits[0]
        if len(sampled) == sum(num for _, num in sampled):
            return logits
        return logits.repeat_interleave(torch.tensor([num for _, num in sampled], device=self._device), 0)

    def _run_with_prompt_logprobs(self, items: list[BatchItem]) -> tuple[torch.Tensor, dict[int, list[TokenLogprobs]]]:
        """As `_sampled_logits`, and by item number the logprobs of its targets."""
        head = ModelHead(self._model, self._inputs(items))
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        sampled_rows: list[int] = []
        first_row = 0
        for number, item in enumerate(items):
            if item.num_prompt_logprobs is not None:
                targets = torch.tensor(item.target_token_ids, dtype=torch.long, device=self._device)
                prompt_logprobs[number] = head.logprobs(first_row, targets, item.num_prompt_logprobs)
            first_row += len(item.token_ids)
            sampled_rows += [first_row - 1] * len(item.samples)
        return head.logits(torch.tensor(sampled_rows or [0], device=self._device)), prompt_logprobs

    def warm_up(self) -> None:
        """Run each kind of step once, on block 0, which nobody holds yet: first calls are slow."""
        num_tokens = min(self._pool.layout.block_size, 16)
        self.run(Batch([BatchItem([0] * num_tokens, 0, [0])]))
        for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9, top_k=10)):
            self.run(Batch([BatchItem([0], num_tokens - 1, [0], [Sample(params)])]))
