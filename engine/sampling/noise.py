"""Sampling noise that depends only on the request's seed, the token's position and the token id.

Sampling is an exponential race (the Gumbel-max trick; Maddison, Tarlow and Minka, NeurIPS 2014): each token i draws
E_i ~ Exp(1), and argmax_i w_i / E_i is token i with probability w_i / sum(w). Comparing a uniform number with
cumulative sums would be less stable: rounding one weight moves all later sums. With the race, workers whose kernels
round differently choose differently only about as often as their distributions differ.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NUM_BITS = 52
"""Bits of a uniform number: (k + 1/2) / 2^52 is exact in float64 and neither 0 nor 1."""


def noise_key(seed: int, position: int) -> int:
    """Hashes seed and position to 64 bits with two rounds of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    return _splitmix64(_splitmix64(seed & _MASK) ^ position)


def signed_noise_key(seed: int, position: int) -> int:
    """Returns `noise_key` as the int64 number of the same bits."""
    return _signed(noise_key(seed, position))


def arrival_times(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns E = -ln U, with U uniform from SplitMix64 of (key, id): float64 [num_rows, size], above zero.

    keys: [num_rows, 1]. ids: [num_rows, size] or [size], of the competitors.
    """
    state = keys ^ ids
    state = state + _signed(_GOLDEN)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        state = (state ^ _shifted(state, shift)) * _signed(multiplier)
    state = state ^ _shifted(state, 31)
    uniform = (_shifted(state, 64 - _NUM_BITS).double() + 0.5) * 2.0**-_NUM_BITS
    return uniform.log_().neg_()


def first_to_arrive(weights: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns the index of each row's winner, [num_rows, 1]. Zero weights win only if all weights are zero.

    weights: float64 [num_rows, size], not necessarily normalised. keys, ids: as for `arrival_times`.
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
    """Shifts right logically; torch's shift of signed numbers is arithmetic."""
    return (numbers >> num_bits) & ((1 << (64 - num_bits)) - 1)
