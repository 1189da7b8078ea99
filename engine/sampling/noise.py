"""Noise that depends on nothing but a request's seed, a token's position and its id: an exponential number for each.

A choice is a race: token i arrives after an exponential time divided by its weight, and the first to arrive is chosen,
which is i with probability weight_i / sum(weights) (the Gumbel-max trick, in Maddison, Tarlow and Minka, NeurIPS 2014).
A uniform number that is compared with cumulative sums would do too, but each sum moves when any weight before it does.
In the race a token's chance depends on the others' weights alone: workers that round otherwise choose otherwise about
as often as their distributions differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NUM_BITS = 52
"""Of a uniform number: with one half added it is still exact, and neither 0 nor 1."""


def noise_key(seed: int, position: int) -> int:
    """64 bits for the token at `position` of a sequence: two rounds of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    return _splitmix64(_splitmix64(seed & _MASK) ^ position)


def noise_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> torch.Tensor:
    """Those of each row, [num_rows, 1], as signed numbers."""
    keys = [_signed(noise_key(seed, position)) for seed, position in zip(seeds, positions, strict=True)]
    return torch.tensor(keys, device=device)[:, None]


def arrival_times(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Exponential numbers of mean 1, float64 and above zero, [num_rows, size].

    keys: [num_rows, 1]; ids: [num_rows, size] or [size], of what takes part; the same id gives the same number.
    """
    state = keys ^ ids
    state = state + _signed(_GOLDEN)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        state = (state ^ _shifted(state, shift)) * _signed(multiplier)
    state = state ^ _shifted(state, 31)
    uniform = (_shifted(state, 64 - _NUM_BITS).double() + 0.5) * 2.0**-_NUM_BITS
    return uniform.log_().neg_()


def first_to_arrive(weights: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Where in each row the winner is, [num_rows, 1]. A weight of zero never wins while another is above zero.

    weights: float64 [num_rows, size], of any sum; keys and ids as for `arrival_times`.
    """
    return (weights / arrival_times(keys, ids)).argmax(-1, keepdim=True)


def _splitmix64(state: int) -> int:
    state = (state + _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * _MULTIPLIERS[0]) & _MASK
    state = ((state ^ (state >> 27)) * _MULTIPLIERS[1]) & _MASK
    return state ^ (state >> 31)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _shifted(numbers: torch.Tensor, num_bits: int) -> torch.Tensor:
    """To the right, with zeros: torch's own shift of signed numbers copies the sign."""
    return (numbers >> num_bits) & ((1 << (64 - num_bits)) - 1)
