"""A double of CUDA graphs: records the operators that a function runs, and replays the recording without Python.

As on a GPU, a replay reads and writes the memory that the operators had at capture, sees no value that Python read, and
leaves nothing of one replay to the next: memory that the recording allocates is poisoned before each replay. What
cannot be captured raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter

_NOT_CAPTURED = {
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self.allocated: list[torch.Tensor] = []
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in _NOT_CAPTURED:
            raise RuntimeError(f"{func._schema.name} is not permitted when a stream is capturing")
        result = func(*args, **kwargs)
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._seen.add(tensor.untyped_storage().data_ptr())
        outputs = tree_flatten(result)[0]
        for tensor in outputs:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._seen:
                self._seen.add(tensor.untyped_storage().data_ptr())
                self.allocated.append(tensor)
        self.calls.append((func, args, kwargs, outputs))  # keeps all tensors, so that no address is used again
        return result


class RecordedGraphs:
    """`capture` takes the place of what `streams.cuda_capture` returns."""

    def __init__(self) -> None:
        self.num_replays = 0

    def capture(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        with _Recorder() as recorder:
            output = function()

        def replay() -> torch.Tensor:
            self.num_replays += 1
            for tensor in recorder.allocated:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 99)
            for func, args, kwargs, outputs in recorder.calls:
                for old, new in zip(outputs, tree_flatten(func(*args, **kwargs))[0], strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
            return output

        return replay
