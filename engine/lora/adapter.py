"""A LoRA adapter of a request, as schedulers see it: loaded or being loaded. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.runtime.errors import ErrorInfo, InternalError, InvalidRequest
from tandem.runtime.files.lora_files import InvalidAdapter

if TYPE_CHECKING:
    import torch


CANNOT_LOAD = "A worker cannot load this LoRA adapter; its log says why."
"""What clients are told. The reason names files and folders."""


@dataclass(frozen=True)
class AdapterWeights:
    """Matrices of one adapter, by the name of the layer: A [rank, inputs], B [outputs, rank] times the scaling."""

    layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class Adapter:
    """An adapter that is loaded or being loaded; shared by all requests that use it."""

    def __init__(self, loading: Future[AdapterWeights]) -> None:
        self._loading = loading

    @property
    def is_ready(self) -> bool:
        """Whether loading has ended, with or without an `error`."""
        return self._loading.done()

    @property
    def error(self) -> ErrorInfo | None:
        """What clients are told if a ready adapter could not be loaded. The reason, which names files, is logged."""
        error = self._loading.exception()
        if error is None:
            return None
        kind = InvalidRequest if isinstance(error, InvalidAdapter) else InternalError
        return ErrorInfo.of(kind(CANNOT_LOAD, "model"))

    @property
    def weights(self) -> AdapterWeights:
        """The weights of a ready adapter without an error."""
        return self._loading.result()
