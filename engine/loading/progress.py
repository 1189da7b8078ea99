"""Reports how much of a model is loaded, through a small file that the launcher reads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers.utils.logging import set_tqdm_hook

from tandem.runtime.files.whole_file import write_whole

_PERIOD_S = 0.1


class _ReportingBar:
    """Wraps a tqdm bar and writes the fraction that has been consumed to a file."""

    def __init__(self, bar: Any, file: Path, total: int) -> None:
        self._bar = bar
        self._file = file
        self._total = total
        self._next_write = 0.0

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self._bar):
            if time.monotonic() >= self._next_write:
                write_whole(self._file, f"{number / self._total:.3f}")
                self._next_write = time.monotonic() + _PERIOD_S
            yield item
        write_whole(self._file, "1")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)


@contextlib.contextmanager
def report_progress(file: str) -> Iterator[None]:
    """Writes the progress of transformers' weight loading to `file`, from 0 to 1. Does nothing if `file` is empty."""
    if not file:
        yield
        return

    def make(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bar = factory(*args, **kwargs)
        total = getattr(bar, "total", None)
        return _ReportingBar(bar, Path(file), total) if kwargs.get("desc") == "Loading weights" and total else bar

    previous = set_tqdm_hook(make)
    try:
        yield
    finally:
        set_tqdm_hook(previous)
