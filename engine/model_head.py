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
_COARSE, _FINE = 2.0**10, 2.0**40
"""Hidden states are added up in multiples of 1 / _COARSE and, for what is left, of 1 / _FINE. Float64 holds such sums
of 16 million tokens exactly, if their states are below 2**19."""


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
        """Returns the last of the rows, or what `exact_sums` returns for a mean, as packed float64 values."""
        rows = self._hidden[0, first_row : first_row + num_rows]
        values = rows[-1].double() if pooling == "last" else exact_sums(rows)
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


def exact_sums(rows: torch.Tensor) -> torch.Tensor:
    """Returns float64 [2, size], whose two rows add up to the sum of `rows` [num_rows, size].

    Neither of them is rounded, so a prompt's mean does not depend on how it was cut into chunks, nor on the order in
    which a device adds.
    """
    total = torch.zeros(2, rows.shape[1], dtype=torch.float64, device=rows.device)
    for some in torch.split(rows, _ROWS_PER_SLICE):  # so that the float64 values need little memory
        values = some.double()
        coarse = (values * _COARSE).round() / _COARSE
        fine = ((values - coarse) * _FINE).round() / _FINE
        total += torch.stack((coarse.sum(0), fine.sum(0)))
    return total
