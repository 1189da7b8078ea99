"""The memory of a worker's KV cache: blocks of [num_layers, 2, num_kv_heads, block_size, head_dim], one after another.

Block-major, so that one block is one contiguous run and cheap to ship. On CPU it lies in a memfd, which a peer may map
(`kv_transfer.connectors.mapped_memory`) and which is gone with its last user. Pages are taken when first written.
"""

from __future__ import annotations

import os
from math import prod

import torch

from tandem.engine.config import EngineConfig
from tandem.engine.loading.model_loader import LoadedModel
from tandem.protocol.messages.transfer import ConnectorParams, KVLayout
from tandem.runtime.errors import ConfigError


class KVPool:
    """tensor: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].

    Raises ConfigError when `config.kv_cache_bytes` holds less than one sequence of the model's full length.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.layout: KVLayout = loaded.layout
        layout = self.layout
        block_shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        self.block_bytes: int = prod(block_shape) * loaded.dtype.itemsize
        self.num_blocks: int = config.kv_cache_bytes // self.block_bytes
        needed = -(-loaded.max_model_len // layout.block_size)
        if self.num_blocks < needed:
            raise ConfigError(
                f"a KV cache of {config.kv_cache_bytes / 2**30:.2f} GiB "
                f"holds {self.num_blocks * layout.block_size} tokens, "
                f"one sequence may have {loaded.max_model_len}: raise --kv-cache-gib to at least "
                f"{needed * self.block_bytes / 2**30:.2f} or lower --max-model-len"
            )
        self.num_bytes: int = self.num_blocks * self.block_bytes
        self.fd: int | None = None
        shape = (self.num_blocks, *block_shape)
        if loaded.device.type == "cpu":
            self.fd = os.memfd_create("tandem-kv-pool", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, self.num_bytes)
            path = f"/proc/{os.getpid()}/fd/{self.fd}"
            raw = torch.from_file(path, shared=True, size=self.num_bytes, dtype=torch.uint8)
            self.tensor = raw.view(loaded.dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=loaded.dtype, device=loaded.device)
        # By layer, keys and values: [.., block_size * head_dim], one head of one block in each row, from that layer's
        # first on, so that a block's row number is the same in all of them.
        self.layer_blocks = self._layer_rows(layout.block_size * layout.head_dim)
        # By layer, keys and values: [num_blocks, block_size, num_kv_heads, head_dim]
        by_layer = self.tensor.permute(1, 2, 0, 4, 3, 5)
        self.layer_tokens = [(keys, values) for keys, values in by_layer]

    def _layer_rows(self, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows = self.tensor.view(-1, size)
        first = [
            self.tensor[0, layer, i].storage_offset() // size for layer in range(len(self.tensor[0])) for i in (0, 1)
        ]
        return [(rows[keys:], rows[values:]) for keys, values in zip(first[::2], first[1::2], strict=True)]

    def as_blocks(self) -> torch.Tensor:
        """The pool as bytes, uint8 [num_blocks, block_bytes]."""
        return self.tensor.view(self.num_blocks, -1).view(torch.uint8)

    def location(self) -> ConnectorParams:
        """Where a peer on this host finds the pool's file."""
        return ConnectorParams(pid=os.getpid(), fd=self.fd or 0, num_bytes=self.num_bytes, num_blocks=self.num_blocks)

    def close(self) -> None:
        """Give up the file; the memory lives on while this process or a peer has it mapped."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
