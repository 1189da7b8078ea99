"""Runs one step: a batch of prompt chunks and single tokens through the model, and one sampled token per item."""

from __future__ import annotations

import torch

from engine.batch import Batch, BatchItem, ItemOutput, Sample
from engine.cpu_attention import PlainAttention
from engine.fused_layers import fuse_layers
from engine.kv_pool import KVPool
from engine.memory import keep_freed_memory
from engine.model_loader import LoadedModel
from engine.packed_linear import pack_linears
from engine.sampler import sample
from protocol.generation import SamplingParams


class ModelRunner:
    """Owns the model on the engine thread. `run` is the only way in while the worker serves."""

    def __init__(self, loaded: LoadedModel, pool: KVPool) -> None:
        self._model = loaded.model
        self._pool = pool
        self._device = loaded.device
        if loaded.device.type == "cpu":
            keep_freed_memory()
            with torch.inference_mode():
                fuse_layers(self._model)
                pack_linears(self._model)

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[ItemOutput]:
        """One output per item."""
        if batch.block_copies:
            sources, destinations = zip(*batch.block_copies, strict=True)
            self._pool.tensor[list(destinations)] = self._pool.tensor[list(sources)]
        items = batch.items
        token_ids = [token_id for item in items for token_id in item.token_ids]
        positions = [p for item in items for p in range(item.start, item.start + len(item.token_ids))]
        rows, samples, sampled_positions = self._rows_to_sample(items)
        output = self._model(
            input_ids=torch.tensor([token_ids], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            use_cache=False,
            # Logits only where a token is sampled; at least one row, models do not expect none.
            logits_to_keep=torch.tensor(rows or [len(token_ids) - 1], device=self._device),
            tandem=PlainAttention(self._pool, items),
        )
        tokens = iter(sample(output.logits[0], samples, sampled_positions) if samples else [])
        return [ItemOutput([next(tokens) for _ in item.samples]) for item in items]

    @staticmethod
    def _rows_to_sample(items: list[BatchItem]) -> tuple[list[int], list[Sample], list[int]]:
        """For each sample: the row whose logits it is chosen from, itself, and the position of the token to be."""
        rows: list[int] = []
        samples: list[Sample] = []
        positions: list[int] = []
        num_rows = 0
        for item in items:
            num_rows += len(item.token_ids)
            samples += item.samples
            rows += [num_rows - 1] * len(item.samples)
            positions += [item.start + len(item.token_ids)] * len(item.samples)
        return rows, samples, positions

    def warm_up(self) -> None:
        """Run each kind of step once, on block 0, which nobody holds yet: first calls are slow."""
        num_tokens = min(self._pool.layout.block_size, 16)
        self.run(Batch([BatchItem([0] * num_tokens, 0, [0])]))
        for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9, top_k=10)):
            self.run(Batch([BatchItem([0], num_tokens - 1, [0], [Sample(params)])]))
