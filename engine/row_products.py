"""Products whose rows have the same bits alone and among any others, on CPUs and on GPUs.

On CPUs, oneDNN computes every row of a product in the same order, except that it computes a lone row in another one. So
a lone row is computed twice. MKL, which multiplies float32 matrices in torch, changes the order with the number of rows
and with the number of threads (docs/adr/0042-exact-arithmetic.md).

On GPUs, the library chooses a kernel by the number of rows, and two kernels may add in different orders. So exact
products (--exact) have only the numbers of rows that graphs of steps have: rows of zeros are added to fewer, and more
are cut into slices. At the start every such number is compared with the largest (`product_problem`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tandem.engine.layers.linear import CombiningLinear

_VECTOR = 64
"""A multiple of the elements in a vector of any instruction set, and of the vectors that torch's loops take at once."""


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns `inputs @ weight.T + bias`. weight: [out_features, in_features].

    Where oneDNN has no such product, torch's own is used.
    """
    if weight.device.type != "cpu" or not _has_products(weight.dtype):
        return F.linear(inputs, weight, bias)
    return onednn_linear(inputs, weight, bias)


def onednn_linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "none"
) -> torch.Tensor:
    """As `linear`, always by oneDNN. weight: packed or not. activation: applied before the result is rounded."""
    if inputs.numel() != inputs.shape[-1]:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, activation, [], "")
        return output
    output = torch.ops.mkldnn._linear_pointwise(torch.cat((inputs, inputs)), weight, bias, activation, [], "")
    return output[:1]


@functools.cache
def has_bfloat16_products() -> bool:
    """Whether torch has oneDNN, and the CPU has the AVX-512 that oneDNN needs to multiply bfloat16 matrices."""
    has_onednn = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return bool(has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def has_float32_products() -> bool:
    return bool(torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"))


def _has_products(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return has_bfloat16_products()
    return dtype == torch.float32 and has_float32_products()


def computes_rows_alike(dtype: torch.dtype, is_exact: bool) -> bool:
    """Whether products on CPU use kernels whose rows have the same bits in any batch."""
    return dtype == torch.bfloat16 or (is_exact and dtype == torch.float32)


@torch.inference_mode()
def differing_count(
    product: Callable[[torch.Tensor], torch.Tensor],
    num_inputs: int,
    counts: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Tries a product with random rows. Returns a number of rows among which a row has other bits than among the
    largest number; 0 if there is none. counts: numbers of rows, ascending."""
    largest = counts[-1]
    rows = torch.randn(largest, num_inputs, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    whole = product(rows)
    for count in counts[:-1]:
        for some in (slice(0, count), slice(largest - count, largest)):
            if not torch.equal(product(rows[some].clone()), whole[some]):
                return count
    return 0


class RowProducts(TorchFunctionMode):
    """Replaces products and functions in the code of models, while it is entered on the calling thread.

    It costs about a microsecond for each call of torch, so modules that are known to need nothing of it run without.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))


def _grouped_linear(inputs: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor, **_: Any) -> torch.Tensor:
    """Replaces `grouped_mm`. weight: [num_groups, in_features, out_features]. offs: the end of each group's rows."""
    output = inputs.new_empty(len(inputs), weight.shape[2])
    start = 0
    for number, end in enumerate(offs.tolist()):
        if end > start:
            output[start:end] = linear(inputs[start:end], weight[number].t())
        start = end
    return output


def _matmul(inputs: torch.Tensor, other: torch.Tensor, **options: Any) -> torch.Tensor:
    if inputs.ndim >= 2 and other.ndim == 2 and inputs.dtype == other.dtype and not options:
        return linear(inputs, other.t())
    return torch.matmul(inputs, other, **options)


def _in_whole_vectors(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a function of single elements that is applied to whole vectors.

    torch computes what remains after the last vector, of each thread, by another formula.
    """

    def apply(values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if values.device.type != "cpu" or not values.is_floating_point():
            return function(values, *args, **kwargs)
        kwargs.pop("inplace", None)
        size = values.numel()
        padded = F.pad(values.reshape(-1), (0, -size % (_VECTOR * torch.get_num_threads())))
        return function(padded, *args, **kwargs)[:size].view(values.shape)

    return apply


_REPLACED: dict[Any, Callable[..., torch.Tensor]] = {
    F.linear: linear,
    torch._grouped_mm: _grouped_linear,  # what `F.grouped_mm` calls
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
} | {
    function: _in_whole_vectors(function)
    for function in (
        F.silu, F.gelu, F.softplus, F.logsigmoid, torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid, torch.tanh,
        torch.Tensor.tanh, F.tanh, torch.exp, torch.Tensor.exp, torch.erf, torch.Tensor.erf,
    )
}  # fmt: skip


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
