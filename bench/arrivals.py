"""When requests come: Poisson processes of a rate that is constant or goes in a line. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class RandomSource(Protocol):
    """`random` itself, or an instance of random.Random."""

    def random(self) -> float: ...

    def expovariate(self, lambd: float) -> float: ...


@dataclass(frozen=True)
class Ramp:
    """Requests per second: from first to last within ramp_s, then last."""

    first: float
    last: float
    ramp_s: float

    def rate(self, elapsed_s: float) -> float:
        done = min(1.0, elapsed_s / self.ramp_s) if self.ramp_s else 1.0
        return self.first + (self.last - self.first) * done


def next_gap(ramp: Ramp, elapsed_s: float, num_sources: int, rng: RandomSource) -> float:
    """Seconds to the next arrival of one of num_sources equal sources, which together have the rate.

    By thinning (Lewis and Shedler, 1979): candidates come at the highest rate and are taken with rate/highest.
    """
    highest = max(ramp.first, ramp.last)
    gap_s = 0.0
    while True:
        gap_s += rng.expovariate(highest / num_sources)
        if rng.random() * highest <= ramp.rate(elapsed_s + gap_s):
            return gap_s
