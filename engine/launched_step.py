"""Steps that are queued on the device, and tokens that the next step takes from them before they have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from tandem.engine.batch import BatchItem, ItemOutput
from tandem.engine.cuda.streams import Array
from tandem.engine.sampling.sampler import SampledRows
from tandem.protocol.messages.generation import SampledToken


@dataclass(frozen=True)
class LaunchedStep:
    """One step. sampled: None if it samples nothing. outputs: makes the items' outputs of all sampled tokens.

    wait: blocks until the device is done with the step.
    """

    sampled: SampledRows | None
    outputs: Callable[[Sequence[SampledToken]], list[ItemOutput]]
    wait: Callable[[], None]

    @torch.inference_mode()
    def result(self) -> list[ItemOutput]:
        """Returns one output per item, when the device is done.

        A step that samples nothing reads nothing back, and its blocks may be released and written by a peer at once.
        """
        tokens = self.sampled.result() if self.sampled is not None else []
        self.wait()
        return self.outputs(tokens)

    @property
    def was_corrected(self) -> bool:
        """Whether `result` has changed tokens; a step that follows this one must then be launched again."""
        return self.sampled is not None and self.sampled.was_corrected


class FedTokens:
    """Tokens of a step that the step before has sampled. Only the device knows them; of several ranks, that of rank 0.

    before: None on the other ranks, which receive the tokens. arrays: to upload; none if there are no such tokens.
    """

    def __init__(self, items: Sequence[BatchItem], before: LaunchedStep | None, num_ranks: int = 1) -> None:
        rows, samples, row = [], [], 0
        for item in items:
            if item.follows is not None:
                rows.append(row)
                samples.append(item.follows)
            row += len(item.token_ids)
        self._before = before
        self._num_ranks = num_ranks
        self.arrays: list[Array] = [np.array(rows, np.int64), np.array(samples, np.int64)] if rows else []

    def put_into(self, token_ids: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Writes the tokens to their places. token_ids: begins with the step's tokens. tensors: `arrays`, uploaded.

        With several ranks it is a collective: rank 0 broadcasts the tokens, in the order of the work on its stream.
        """
        if not tensors:
            return
        rows, samples = tensors
        if self._num_ranks > 1 and dist.get_rank() > 0:
            tokens = torch.empty_like(samples)
        else:
            assert self._before is not None and self._before.sampled is not None, "no step has sampled these tokens"
            tokens = self._before.sampled.token_ids.index_select(0, samples)
        if self._num_ranks > 1:
            dist.broadcast(tokens, 0)
        token_ids.index_copy_(0, rows, tokens.to(token_ids.dtype))
