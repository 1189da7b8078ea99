"""The memory of a worker's KV cache: an array of blocks, [num_layers, 2, num_kv_heads, block_size, head_dim] each.

The layout is block-major, so a block is contiguous and cheap to transfer. On CPU the pool lies in a memfd, which a peer
may map (`kv_transfer.connectors.mapped_memory`); its pages are allocated when first written.
"""

from __future__ import annotations

import os
from math import prod

import torch

from tandem.engine.engine_config import EngineConfig
from tandem.engine.loaded_model import LoadedModel
from tandem.protocol.messages.transfer import KVLayout
from tandem.runtime.errors import ConfigError


def block_bytes(loaded: LoadedModel) -> int:
    """Returns the size of one block of one rank."""
    layout = loaded.layout
    elements = prod((layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim))
    return elements * loaded.kv_dtype.itemsize


class KVPool:
    """The KV cache of one rank.

    tensor: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], of `config.kv_cache_bytes`.

    model_dtype: of the keys and values that attention gets, before they are stored.

    Raises ConfigError if the device has less memory left.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.layout: KVLayout = loaded.layout
        self.model_dtype: torch.dtype = loaded.dtype
        layout = self.layout
        block_shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        self.block_bytes: int = block_bytes(loaded)
        self.num_blocks: int = config.kv_cache_bytes // self.block_bytes
        self.num_bytes: int = self.num_blocks * self.block_bytes
        self.fd: int | None = None
        shape = (self.num_blocks, *block_shape)
        if loaded.device.type == "cpu":
            self.fd = os.memfd_create("tandem-kv-pool", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, self.num_bytes)
            path = f"/proc/{os.getpid()}/fd/{self.fd}"
            raw = torch.from_file(path, shared=True, size=self.num_bytes, dtype=torch.uint8)
            self.tensor = raw.view(loaded.kv_dtype).view(shape)
        else:
            try:
                self.tensor = torch.zeros(shape, dtype=loaded.kv_dtype, device=loaded.device)
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"the GPU has not {self.num_bytes / 2**30:.2f} GiB left for the KV cache: lower --kv-cache-gib, or "
                    "end other programs on the GPU"
                ) from error
        # Per layer, keys and values: rows [.., block_size * head_dim], one head of one block each, from the layer's
        # first row on. A block therefore has the same row number in every layer.
        rows = self.tensor.view(-1, layout.block_size * layout.head_dim)
        num_heads = layout.num_kv_heads
        self.layer_blocks = [
            (rows[2 * layer * num_heads :], rows[(2 * layer + 1) * num_heads :]) for layer in range(layout.num_layers)
        ]
        # Per layer, keys and values: [num_blocks, block_size, num_kv_heads, head_dim]
        by_layer = self.tensor.permute(1, 2, 0, 4, 3, 5)
        self.layer_tokens = [(keys, values) for keys, values in by_layer]

    def as_blocks(self) -> torch.Tensor:
        """Returns a view of the pool as bytes, uint8 [num_blocks, block_bytes]."""
        return self.tensor.view(self.num_blocks, -1).view(torch.uint8)

    def close(self) -> None:
        """Closes the memfd. The memory is freed when this process and its peers have unmapped it."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
