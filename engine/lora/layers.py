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

    def add_to(self, output: torch.Tensor, slices: Sequence[LoraSlice], inputs: torch.Tensor) -> None:
        """Adds the adapters' products to a layer's output, in place. inputs, output: [..., num_rows, features]."""
        inputs, output = inputs.reshape(-1, inputs.shape[-1]), output.view(-1, output.shape[-1])
        if len(inputs) != self._num_rows:
            raise RuntimeError(f"a layer got {len(inputs)} of the step's {self._num_rows} rows; it cannot be adapted")
        for part in self.parts:
            for piece in slices:
                matrices = part.weights.layers.get(piece.name)
                if matrices is None:
                    continue
                first, second = matrices
                second = second[piece.first_row : piece.first_row + piece.num_outputs]
                delta = nn.functional.linear(nn.functional.linear(inputs[part.rows], first), second)
                columns = output[:, piece.first_output : piece.first_output + piece.num_outputs]
                if isinstance(part.rows, slice):
                    columns[part.rows] += delta
                else:
                    columns.index_add_(0, part.rows, delta)


def _rows(spans: list[tuple[int, int]], device: torch.device) -> slice | torch.Tensor:
    if len(spans) == 1:
        return slice(*spans[0])
    return torch.cat([torch.arange(start, end) for start, end in spans]).to(device)


class AdaptedLinear(nn.Module):
    """A linear layer with the adapters of the step. inner: any layer with `in_features` and `out_features`."""

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
        if not self._step.parts:
            plain: torch.Tensor = self.inner(inputs)
            return plain
        output: torch.Tensor = self.inner.before_activation(inputs) if self._has_swish else self.inner(inputs)
        self._step.add_to(output, self._slices, inputs)
        return nn.functional.silu(output) if self._has_swish else output

    def combined(self, inputs: torch.Tensor, other: torch.Tensor, operation: Literal["add", "mul"]) -> torch.Tensor:
        """See `engine.layers.linear`."""
        if not self._step.parts:
            plain: torch.Tensor = self.inner.combined(inputs, other, operation)
            return plain
        output: torch.Tensor = self.inner(inputs)
        self._step.add_to(output, self._slices, inputs)
        return output.add_(other) if operation == "add" else output.mul_(other)


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
