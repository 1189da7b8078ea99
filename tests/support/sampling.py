"""Sampling of one step by itself, and the noise of several rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.engine.batch import Sample
from tandem.engine.cuda.streams import upload
from tandem.engine.sampling.grammar_mask import StepMask
from tandem.engine.sampling.noise import signed_noise_key
from tandem.engine.sampling.sampler import SamplingStep
from tandem.protocol.messages.sampling import SampledToken


def sample(
    logits: torch.Tensor, samples: Sequence[Sample], positions: Sequence[int], mask: StepMask | None = None
) -> list[SampledToken]:
    """Samples one token per row of `logits` [num_rows, vocab_size]. positions: of the sampled tokens."""
    step = SamplingStep(samples, positions, logits.shape[-1])
    return step.run(logits, upload(step.arrays, logits.device), mask).result()


def noise_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns the key of each row's noise, int64 [num_rows, 1]."""
    keys = [signed_noise_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    return torch.tensor(keys, device=device)[:, None]
