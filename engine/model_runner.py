"""Runs one step: a batch of prompt chunks and single tokens through the model, and one sampled token per item."""

from __future__ import annotations

import torch

from engine.attention import AttentionMetadata
from engine.batch import BatchItem
from engine.kv_pool import KVPool
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
        if loaded.device.type == "cpu" and loaded.dtype == torch.bfloat16:
            pack_linears(self._model)

    @torch.inference_mode()
    def run(self, items: list[BatchItem]) -> list[int | None]:
        """The sampled token of each item, None for those that sample none."""
        token_ids = [token_id for item in items for token_id in item.token_ids]
        positions = [p for item in items for p in range(item.start, item.start + len(item.token_ids))]
        last_rows: list[int] = []
        params: list[SamplingParams] = []
        sampled_positions: list[int] = []
        row = 0
        for item in items:
            row += len(item.token_ids)
            if item.sampling is not None:
                last_rows.append(row - 1)
                params.append(item.sampling)
                sampled_positions.append(item.start + len(item.token_ids))
        output = self._model(
            input_ids=torch.tensor([token_ids], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            use_cache=False,
            # Logits only where a token is sampled; at least one row, models do not expect none.
            logits_to_keep=torch.tensor(last_rows or [row - 1], device=self._device),
            tandem=AttentionMetadata(self._pool, items),
        )
        sampled = iter(sample(output.logits[0], params, sampled_positions) if params else [])
        return [next(sampled) if item.sampling is not None else None for item in items]

    def warm_up(self) -> None:
        """Run both kinds of step once, on block 0, which nobody holds yet: first calls are slow."""
        greedy = SamplingParams(temperature=0.0)
        num_tokens = min(self._pool.layout.block_size, 16)
        self.run([BatchItem([0] * num_tokens, 0, [0], None)])
        self.run([BatchItem([0], num_tokens - 1, [0], greedy)])
        self.run([BatchItem([0], num_tokens - 1, [0], SamplingParams(temperature=1.0, top_p=0.9, top_k=10))])
