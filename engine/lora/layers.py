"""The linear layers that LoRA adapters may change, and the application of a step's adapters to them.

Nothing is changed in the model until the first step with an adapter. From then on each linear layer is wrapped; steps
without adapters pay for one comparison per layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from tandem.engine.batch import BatchItem
from tandem.engine.lora.adapter import AdapterWeights
from tandem.engine.quantization.linears import QuantizedLinear
from tandem.engine.row_products import RowProducts, linear
from tandem.runtime.files.lora_files import Shape


@dataclass(frozen=True)
class LoraSlice:
    """The part of a layer's outputs that one of the model's original linear layers computes."""

    name: str
    """Name of the original layer."""
    first_output: int
    """Index of its first output among this layer's."""
    num_outputs: int
    first_row: int = 0
    """Index of the first of the original's outputs that is computed here."""


@dataclass(frozen=True)
class AdapterRows:
    """Rows of the step's hidden states that belong to one adapter."""

    weights: AdapterWeights
    rows: slice | torch.Tensor

    def products(self, inputs: torch.Tensor, slices: Sequence[LoraSlice]) -> Iterator[tuple[LoraSlice, torch.Tensor]]:
        """Yields each slice that the adapter changes, and what it adds to its rows. inputs: [num_rows, features]."""
        for piece in slices:
            matrices = self.weights.layers.get(piece.name)
            if matrices is not None:
                first, second = matrices
                second = second[piece.first_row : piece.first_row + piece.num_outputs]
                yield piece, linear(linear(inputs[self.rows], first), second)


class StepAdapters:
    """The adapters of the step that runs; empty between steps. All layers of a model share one object."""

    def __init__(self) -> None:
        self.parts: list[AdapterRows] = []
        self._num_rows = 0

    @contextmanager
    def of(self, items: Sequence[BatchItem], device: torch.device) -> Iterator[None]:
        """Applies the items' adapters while the model runs. All adapters must be loaded."""
        spans: dict[int, list[tuple[int, int]]] = {}
        weights: dict[int, AdapterWeights] = {}
        row = 0
        for item in items:
            end = row + len(item.token_ids)
            if item.adapter is not None:
                key = id(item.adapter.weights)
                weights[key] = item.adapter.weights
                mine = spans.setdefault(key, [])
                if mine and mine[-1][1] == row:
                    mine[-1] = (mine[-1][0], end)
                else:
                    mine.append((row, end))
            row = end
        self.parts = [AdapterRows(weights[key], _rows(found, device)) for key, found in spans.items()]
        self._num_rows = row
        try:
            yield
        finally:
            self.parts = []

    def add_to(
        self,
        output: torch.Tensor,
        slices: Sequence[LoraSlice],
        inputs: torch.Tensor,
        factor: torch.Tensor | None = None,
    ) -> None:
        """Adds the adapters' products, times `factor` of the output's shape, to a layer's output, in place.

        inputs, output: [..., num_rows, features].
        """
        inputs, output = self._flat(inputs), output.view(-1, output.shape[-1])
        for part in self.parts:
            for piece, delta in part.products(inputs, slices):
                columns = slice(piece.first_output, piece.first_output + piece.num_outputs)
                if factor is not None:
                    delta = delta * factor.reshape(output.shape)[part.rows, columns]
                if isinstance(part.rows, slice):
                    output[part.rows, columns] += delta
                else:
                    output[:, columns].index_add_(0, part.rows, delta)

    def replace_activated(
        self, output: torch.Tensor, slices: Sequence[LoraSlice], inputs: torch.Tensor, linear_of: Any
    ) -> None:
        """Computes the rows of adapters again, in place, in a layer's output after SiLU.

        linear_of: returns the layer's output before SiLU.
        """
        inputs, output = self._flat(inputs), output.view(-1, output.shape[-1])
        for part in self.parts:
            changed = list(part.products(inputs, slices))
            if changed:
                before = linear_of(inputs[part.rows])
                for piece, delta in changed:
                    before[:, piece.first_output : piece.first_output + piece.num_outputs] += delta
                with RowProducts():
                    output[part.rows] = nn.functional.silu(before)

    def _flat(self, inputs: torch.Tensor) -> torch.Tensor:
        flat = inputs.reshape(-1, inputs.shape[-1])
        if len(flat) != self._num_rows:
            raise RuntimeError(f"a layer got {len(flat)} of the step's {self._num_rows} rows; it cannot be adapted")
        return flat


def _rows(spans: list[tuple[int, int]], device: torch.device) -> slice | torch.Tensor:
    if len(spans) == 1:
        return slice(*spans[0])
    return torch.cat([torch.arange(start, end) for start, end in spans]).to(device)


class AdaptedLinear(nn.Module):
    """A linear layer with the adapters of the step. inner: any layer with `in_features` and `out_features`.

    Rows without an adapter are computed as in steps without adapters, so they do not depend on the others.
    """

    def __init__(self, inner: Any, slices: Sequence[LoraSlice], step: StepAdapters) -> None:
        super().__init__()
        self.inner = inner
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._slices = slices
        self._step = step
        self._has_swish = getattr(inner, "activation", "none") == "swish"

    @property
    def weight(self) -> Any:
        return self.inner.weight

    @property
    def bias(self) -> Any:
        return self.inner.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(inputs)
        if self._step.parts and self._has_swish:
            self._step.replace_activated(output, self._slices, inputs, self.inner.before_activation)
        elif self._step.parts:
            self._step.add_to(output, self._slices, inputs)
        return output

    def combined(self, inputs: torch.Tensor, other: torch.Tensor, operation: Literal["add", "mul"]) -> torch.Tensor:
        """See `engine.layers.linear`."""
        output: torch.Tensor = self.inner.combined(inputs, other, operation)
        if self._step.parts:
            self._step.add_to(output, self._slices, inputs, other if operation == "mul" else None)
        return output


def adaptable_layers(model: nn.Module) -> dict[str, Shape]:
    """Returns (inputs, outputs) of the layers that adapters may change, by name. Call before layers are fused.

    The head is left out, and so are layers of experts, which see some of the tokens.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, QuantizedLinear))
        and module is not head
        and ".experts." not in name
    }


def wrap_layers(model: nn.Module, names: Mapping[str, Shape], step: StepAdapters) -> None:
    """Wraps all layers in `names`, and the fused layers that contain some of them."""
    for name, module in list(model.named_modules()):
        adapt = getattr(module, "adapt", None)
        if adapt is not None:  # a fused layer
            adapt(name, step)
        elif name in names:
            model.set_submodule(name, AdaptedLinear(module, [LoraSlice(name, 0, names[name][1])], step))
