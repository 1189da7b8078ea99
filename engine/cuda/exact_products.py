"""Matrix products in which a row has the same bits whatever the other rows, and however many (--exact).

A GPU's library chooses a kernel by the number of rows, and two kernels may add in different orders. So exact products
have only the numbers of rows that graphs of steps have: rows of zeros are added to fewer, and more are cut into slices.
At the start every such number is compared with the largest (`product_problem`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tandem.engine.layers.linear import CombiningLinear
from tandem.engine.row_products import differing_count


class ExactLinear(CombiningLinear):
    """Equivalent of `nn.Linear`. row_counts: of its products, ascending; see `engine.cuda.step_graphs.GraphLimits`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, row_counts: Sequence[int]) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.row_counts = row_counts

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return exact_product(inputs, self.weight, self.bias, self.row_counts)


def exact_product(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, row_counts: Sequence[int]
) -> torch.Tensor:
    """Returns `inputs @ weight.T + bias`. inputs: [..., num_inputs]."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    products = []
    for slice_ in torch.split(rows, row_counts[-1]):
        num_rows = len(slice_)
        size = next(count for count in row_counts if count >= num_rows)
        padded = slice_ if size == num_rows else nn.functional.pad(slice_, (0, 0, 0, size - num_rows))
        products.append(nn.functional.linear(padded, weight, bias)[:num_rows])
    product = products[0] if len(products) == 1 else torch.cat(products)
    return product.view(*inputs.shape[:-1], len(weight))


def use_exact_products() -> None:
    """Tells torch not to split products along the sum, and not to round sums on the way, in this process.

    Only cuBLASLt can be told not to split. `deploy.processes.gpu_environment` takes the memory for it from both
    libraries.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)


def product_problem(linears: Iterable[Any], row_counts: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    """Returns which product's rows have other bits among more rows, or an empty string if there is none.

    linears: exact layers, of which one of each kind and shape is tried with every number of rows: its own, or
    `row_counts` if it has none. dtype: of the inputs.
    """
    tried: dict[tuple[str, int, int, bool], Any] = {}
    for linear in linears:
        bias = getattr(linear, "bias", None) is not None
        tried.setdefault((type(linear).__name__, linear.out_features, linear.in_features, bias), linear)
    name = str(dtype).removeprefix("torch.")
    for (_, num_outputs, num_inputs, _), linear in tried.items():
        counts = getattr(linear, "row_counts", row_counts)
        if count := differing_count(linear, num_inputs, counts, dtype, device):
            return (
                f"the product with a weight of {num_outputs} x {num_inputs} in {name} gives other bits for {count} "
                f"rows than for {counts[-1]}"
            )
    return ""
