"""The stages of a start and how long each took, as `tandem up` shows them. Pure."""

from __future__ import annotations

STAGES = ("preload", "load", "warm up")
"""Imports of what workers need; weights; kernels, registration and pairs."""


class StartStages:
    """A stage never comes back: a worker that is restarted meanwhile lengthens the present one."""

    def __init__(self, now: float) -> None:
        self._began_at = [now]  # of each stage so far, in order

    @property
    def current(self) -> str:
        return STAGES[len(self._began_at) - 1]

    def update(self, now: float, is_preloaded: bool, fraction_loaded: float | None) -> None:
        """fraction_loaded: mean over the workers; None before the first has loaded a part."""
        reached = 0 if not is_preloaded and fraction_loaded is None else 1
        if fraction_loaded is not None and fraction_loaded >= 1:
            reached = 2
        self._began_at += [now] * (reached + 1 - len(self._began_at))

    def summary(self, now: float) -> str:
        """Returns the stages with their seconds."""
        ends = [*self._began_at[1:], now]
        times = [f"{name} {end - start:.1f} s" for name, start, end in zip(STAGES, self._began_at, ends, strict=False)]
        return ", ".join(times)
