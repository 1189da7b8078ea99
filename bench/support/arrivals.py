"""Arrival times of Poisson processes whose rate is constant or ramps linearly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class RandomSource(Protocol):
    """The `random` module or an instance of random.Random."""

    def random(self) -> float: ...

    def expovariate(self, lambd: float) -> float: ...


@dataclass(frozen=True)
class Ramp:
    """Request rate per second: rises or falls linearly from `first` to `last` within `ramp_s`, then stays."""

    first: float
    last: float
    ramp_s: float

    def rate(self, elapsed_s: float) -> float:
        done = min(1.0, elapsed_s / self.ramp_s) if self.ramp_s else 1.0
        return self.first + (self.last - self.first) * done


def next_gap(ramp: Ramp, elapsed_s: float, num_sources: int, rng: RandomSource) -> float:
    """Returns the seconds to the next arrival of one of `num_sources` equal sources that share the rate.

    Uses thinning (Lewis and Shedler, 1979): draws candidates at the highest rate and accepts each with probability
    rate / highest.
    """
    highest = max(ramp.first, ramp.last)
    gap_s = 0.0
    while True:
        gap_s += rng.expovariate(highest / num_sources)
        if rng.random() * highest <= ramp.rate(elapsed_s + gap_s):
            return gap_s
