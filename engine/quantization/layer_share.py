"""The share of a quantised linear layer that one rank of tensor parallelism computes."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

import torch

Split = Literal["", "outputs", "inputs"]


@dataclass(frozen=True)
class LayerShare:
    """A rank's share of a layer that is split evenly by its outputs or by its inputs; "" is the whole layer.

    in_features, out_features: of the whole layer.
    """

    in_features: int
    out_features: int
    split: Split = ""
    rank: int = 0
    num_ranks: int = 1

    @property
    def inputs(self) -> range:
        """This rank's inputs."""
        return self._of_rank(self.in_features) if self.split == "inputs" else range(self.in_features)

    @property
    def outputs(self) -> range:
        """This rank's outputs."""
        return self._of_rank(self.out_features) if self.split == "outputs" else range(self.out_features)

    def _of_rank(self, size: int) -> range:
        per_rank = size // self.num_ranks
        return range(self.rank * per_rank, (self.rank + 1) * per_rank)

    def uneven(self) -> str:
        """Returns why the ranks cannot share the layer evenly, or an empty string."""
        size = self.in_features if self.split == "inputs" else self.out_features
        is_uneven = self.split and size % self.num_ranks
        return f"its {size} {self.split} are not a multiple of {self.num_ranks}" if is_uneven else ""

    def groups(self, group_size: int) -> list[int]:
        """Returns the whole layer's groups of this rank's inputs: one for each run of equal numbers of inputs.

        A run is a group, or a part of one where ranks share groups. group_size: 0 if all inputs are one group.
        """
        if not group_size:
            return [0]
        return [first // group_size for first in self.inputs[:: gcd(group_size, len(self.inputs))]]

    def take_groups(self, values: torch.Tensor, group_size: int) -> torch.Tensor:
        """Returns the values of the runs of `groups`. values: [num_outputs, num_groups] of the whole layer's groups."""
        return values[:, self.groups(group_size)] if self.split == "inputs" else values
