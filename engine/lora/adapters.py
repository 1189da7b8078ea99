"""LoRA adapters on a worker (Hu et al., 2021): loaded on a separate thread when the first request names them.

Requests carry the adapter's folder and digest, so nothing has to be sent to workers in advance, and a restarted worker
loads what its next requests need. A prompt waits until its adapter is loaded.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load

from tandem.engine.lora.adapter import Adapter, AdapterWeights
from tandem.protocol.messages.dispatch import AdapterRef
from tandem.runtime.errors import first_line
from tandem.runtime.files.lora_files import AdapterFiles, InvalidAdapter, Shape, read_unchanged_adapter, tensor_names
from tandem.runtime.threads import show_thread_name

log = logging.getLogger(__name__)

MAX_CACHED_ADAPTERS = 32
"""Adapters in memory besides those that requests use."""


class Adapters:
    """Loads adapters and keeps the most recently used.

    modules: layers that adapters may change. on_loaded: called on another thread after each adapter.
    """

    def __init__(
        self,
        modules: Mapping[str, Shape],
        dtype: torch.dtype,
        device: torch.device,
        on_loaded: Callable[[], object],
    ) -> None:
        self._modules = modules
        self._dtype = dtype
        self._device = device
        self._on_loaded = on_loaded
        self._adapters: OrderedDict[AdapterRef, Adapter] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "adapters", show_thread_name)

    def get(self, ref: AdapterRef | None) -> Adapter | None:
        """Returns the adapter of a request, loading or loaded. Call it on the event loop.

        An adapter that could not be loaded before is tried again.
        """
        if ref is None:
            return None
        adapter = self._adapters.get(ref)
        if adapter is None or (adapter.is_ready and adapter.error is not None):
            loading = self._thread.submit(self._load, ref)
            loading.add_done_callback(lambda _: self._on_loaded())
            adapter = self._adapters[ref] = Adapter(loading)
            if len(self._adapters) > MAX_CACHED_ADAPTERS:
                self._adapters.popitem(last=False)  # requests that use it keep it
        self._adapters.move_to_end(ref)
        return adapter

    def _load(self, ref: AdapterRef) -> AdapterWeights:
        try:
            return load_adapter(ref, self._modules, self._dtype, self._device)
        except Exception as error:
            log.error("cannot load the LoRA adapter in %s: %s", ref.folder, first_line(error))
            raise

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def load_adapter(
    ref: AdapterRef, modules: Mapping[str, Shape], dtype: torch.dtype, device: torch.device
) -> AdapterWeights:
    """Raises InvalidAdapter if it cannot be read, has changed, or does not fit the model."""
    files = read_unchanged_adapter(Path(ref.folder), ref.digest)
    files.check_fits(modules)
    return _weights(files, dtype, device)


def _weights(files: AdapterFiles, dtype: torch.dtype, device: torch.device) -> AdapterWeights:
    try:
        tensors = load(files.weights)
    except Exception as error:  # the library's own errors
        raise InvalidAdapter(f"The adapter's tensors cannot be read: {first_line(error)}") from error
    layers = {}
    for module in files.modules:
        first, second = (tensors[name].float() for name in tensor_names(module))
        layers[module] = first.to(device, dtype), (second * files.scaling).to(device, dtype)
    return AdapterWeights(layers)
