"""Computes logits of selected rows from a step's hidden states, a slice at a time, for prompt logprobs; and embeddings.

A model's head may do more than one matrix product (soft caps, scaling). Its own `forward` is therefore used, with the
decoder replaced by a module that returns the stored hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_outputs import MoeModelOutputWithPast

from tandem.engine.sampling.logprobs import token_logprobs
from tandem.protocol.messages.sampling import Pooling, TokenLogprobs

_ROWS_PER_SLICE = 256
"""Rows of logits in memory at a time: about 160 MB for a vocabulary of 150,000."""


class _Replay(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.empty(0)

    def forward(self, *args: Any, **kwargs: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


class ModelHead:
    """Runs the decoder once, in the constructor. inputs: the whole model's."""

    def __init__(self, model: Any, inputs: dict[str, Any]) -> None:
        self._model = model
        self._hidden: torch.Tensor = model.base_model(**inputs).last_hidden_state  # [1, num_tokens, hidden_size]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns [len(rows), vocab_size]."""
        with self._replaying(self._hidden.index_select(1, rows)):
            logits: torch.Tensor = self._model(input_ids=None, use_cache=False).logits[0]
        return logits

    def logprobs(self, first_row: int, targets: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
        """Returns the logprobs of `targets`, token ids [num_targets], under the rows from `first_row` on."""
        logprobs: list[TokenLogprobs] = []
        for start in range(0, len(targets), _ROWS_PER_SLICE):
            batch = targets[start : start + _ROWS_PER_SLICE]
            rows = torch.arange(first_row + start, first_row + start + len(batch), device=targets.device)
            logprobs += token_logprobs(self.logits(rows), batch, [num_top] * len(batch))
        return logprobs

    def pooled(self, first_row: int, num_rows: int, pooling: Pooling) -> bytes:
        """Returns the last of the rows, or the sum of all for a mean, as packed float32 values [hidden_size]."""
        rows = self._hidden[0, first_row : first_row + num_rows]
        values = rows[-1].float() if pooling == "last" else rows.float().sum(0)
        return values.cpu().numpy().tobytes()

    @contextmanager
    def _replaying(self, hidden: torch.Tensor) -> Iterator[None]:
        prefix = self._model.base_model_prefix
        decoder, replay = getattr(self._model, prefix), _Replay()
        replay.hidden = hidden
        setattr(self._model, prefix, replay)
        try:
            yield
        finally:
            setattr(self._model, prefix, decoder)
