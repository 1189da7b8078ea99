"""Steps that are queued on the device, and tokens that the next step takes from them before they have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from tandem.engine.batch import BatchItem, ItemOutput, Sample
from tandem.engine.cuda.streams import Array
from tandem.engine.sampling.sampler import SampledRows
from tandem.protocol.messages.sampling import SampledToken

Sampling = tuple[SampledRows | None, Callable[[Sequence[SampledToken]], list[ItemOutput]]]
"""The sampled tokens, None if there are none, and what makes the items' outputs of all of them."""
SampleAfter = Callable[[Sequence[ItemOutput]], Sampling]
"""Queues a step's sampling, given the outputs of the step before it."""


class LaunchedStep:
    """One step that is queued on the device: its model, and its sampling unless that depends on earlier tokens.

    Grammars, penalties, bad words and forced thinking depend on the tokens of the step before. Such a step's model is
    queued first, and its sampling once those tokens are known (`sample_after`), while the model computes.
    """

    def __init__(self, sampling: Sampling | SampleAfter, wait: Callable[[], None]) -> None:
        """wait: blocks until the device is done with the model, and with the sampling if it is queued already."""
        self._sampling = sampling
        self._wait = wait

    @property
    def sampled(self) -> SampledRows | None:
        """None if the step samples nothing."""
        assert isinstance(self._sampling, tuple), "the step's sampling is not queued yet"
        return self._sampling[0]

    @torch.inference_mode()
    def sample_after(self, before: Sequence[ItemOutput]) -> None:
        """Queues the sampling if that is still to be done. before: the outputs of the step before."""
        if not isinstance(self._sampling, tuple):
            self._sampling = self._sampling(before)

    @torch.inference_mode()
    def result(self) -> list[ItemOutput]:
        """Returns one output per item, when the device is done.

        A step that samples nothing reads nothing back, and its blocks may be released and written by a peer at once.
        """
        sampled = self.sampled
        tokens = sampled.result() if sampled is not None else []
        self._wait()
        assert isinstance(self._sampling, tuple)
        return self._sampling[1](tokens)

    @property
    def was_corrected(self) -> bool:
        """Whether `result` has changed tokens; a step that follows this one must then be launched again."""
        return self.sampled is not None and self.sampled.was_corrected


def are_samples_known(items: Sequence[BatchItem]) -> bool:
    """Whether no sample depends on a token of the step before."""
    return all(item.follows is None or not sample.params.needs_history for item in items for sample in item.samples)


def samples_after(items: Sequence[BatchItem], before: Sequence[ItemOutput]) -> list[Sample]:
    """Returns the items' samples, with the tokens of the step before in their histories. before: its outputs.

    A sequence whose grammar has failed in the step before has ended, and asks for no further mask. Nor does one whose
    mask was late: its token is not known, and the scheduler drops what follows it.
    """
    sampled = [(token.token_id, output.error or output.is_late) for output in before for token in output.tokens]
    samples: list[Sample] = []
    for item in items:
        for sample in item.samples:
            if item.follows is not None and sample.params.needs_history:
                token_id, is_void = sampled[item.follows]
                history, grammar = [*sample.output_token_ids, token_id], None if is_void else sample.grammar
                sample = msgspec.structs.replace(sample, output_token_ids=history, grammar=grammar)
            samples.append(sample)
    return samples


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
