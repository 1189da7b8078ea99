"""Host arrays of a step that all go to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Tensors = Sequence[torch.Tensor]


class Columns:
    """Collects arrays. `add` returns the place of the array's tensor among the uploaded ones."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []

    def add(self, values: Any, dtype: type[np.generic]) -> int:
        self.arrays.append(np.asarray(values, dtype))
        return len(self.arrays) - 1

    def add_padded(self, rows: Sequence[Sequence[int]]) -> int:
        """Adds int64 [num_rows, longest row], padded with -1."""
        padded = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int64)
        for values, row in zip(padded, rows, strict=True):
            values[: len(row)] = row
        return self.add(padded, np.int64)
