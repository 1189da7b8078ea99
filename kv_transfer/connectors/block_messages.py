"""Divides transfers into messages: blocks in their place in the pool, or gathered in a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import torch

from tandem.kv_transfer.connectors.staging import copy_blocks, gather_on_device, is_run, scatter_on_device

DIRECT_BLOCK_BYTES = {"tcp": 1024 * 1024, "gloo": 256 * 1024, "nccl": 16 * 1024 * 1024}
"""Blocks of at least this size are sent one per message, without staging. Smaller ones are gathered into messages,
because the fixed cost of a message exceeds that of the copy."""
MESSAGE_BYTES = {"tcp": 1024 * 1024, "gloo": 4 * 1024 * 1024, "nccl": 16 * 1024 * 1024}
"""Size of a message of gathered blocks."""


def message_plan(backend: str, block_bytes: int) -> tuple[int, int]:
    """Returns (blocks per message, staging buffers). Both sides must compute the same plan.

    gloo has as many messages in flight as buffers, at least two, so that staging overlaps with sending. The others
    gather, send and scatter one message after another.
    """
    message_bytes = MESSAGE_BYTES[backend]
    is_direct = block_bytes >= DIRECT_BLOCK_BYTES[backend]
    num_blocks = 1 if is_direct else message_bytes // block_bytes
    return num_blocks, max(2, 2 * message_bytes // (num_blocks * block_bytes)) if backend == "gloo" else 1


@dataclass(frozen=True)
class Message:
    """Blocks sent together. data: the blocks in the pool if they are contiguous, else a staging buffer.

    ids_on_device: the block ids of a staged message, if the pool is on a GPU.
    """

    block_ids: list[int]
    data: torch.Tensor
    is_staged: bool
    ids_on_device: torch.Tensor | None = None


class BlockMessages:
    """The messages of one path. blocks: uint8 [num_blocks, ...], whole blocks or some heads of each."""

    def __init__(self, backend: str, blocks: torch.Tensor) -> None:
        self._blocks = blocks
        self._blocks_per_message, self.num_buffers = message_plan(backend, blocks[0].numel())
        self._buffers: torch.Tensor | None = None
        self._is_on_gpu = backend == "nccl"

    def prepare(self) -> None:
        """Allocates the buffers, and runs the kernels that gather and scatter, whose results nobody reads.

        CUDA loads a kernel at its first launch, and may wait for the whole device then, as for an allocation. Later
        there would be messages on it that wait for their peers, also for such as wait for this path.
        """
        size = self._blocks_per_message
        if size == 1 and self._blocks.is_contiguous():
            return  # each message is one block, in its place
        self._buffers = self._blocks.new_empty((self.num_buffers, size, *self._blocks.shape[1:]))
        if not self._is_on_gpu:
            return
        zeros = torch.zeros(size, dtype=torch.int64, device=self._blocks.device)
        for count in (1, size):  # torch has kernels for few blocks and for many
            gather_on_device(self._blocks, zeros[:count], self._buffers[0, :count])
        rows = self._blocks.new_zeros(2, gcd(self._blocks.shape[-1], 8))  # the kernel depends on the element's size
        scatter_on_device(rows[:1], rows[1:], zeros[:1])

    def of(self, block_ids: list[int]) -> Iterator[Message]:
        """Divides the blocks into messages. A buffer is used again after `num_buffers` messages."""
        size, is_contiguous = self._blocks_per_message, self._blocks.is_contiguous()
        all_on_device = self._upload(block_ids)
        for index, first in enumerate(range(0, len(block_ids), size)):
            ids = block_ids[first : first + size]
            if is_contiguous and is_run(ids):
                yield Message(ids, self._blocks[ids[0] : ids[0] + len(ids)], is_staged=False)
            else:
                assert self._buffers is not None
                buffer = self._buffers[index % self.num_buffers, : len(ids)]
                on_device = None if all_on_device is None else all_on_device[first : first + size]
                yield Message(ids, buffer, True, on_device)

    def _upload(self, block_ids: list[int]) -> torch.Tensor | None:
        """Returns the ids on the GPU, if blocks may have to be gathered there.

        The host waits for this copy, so it is made before anything is queued that waits for the peer.
        """
        if not self._is_on_gpu or (is_run(block_ids) and self._blocks.is_contiguous()):
            return None
        return torch.tensor(block_ids, device=self._blocks.device)

    def gather(self, message: Message) -> None:
        """Copies the blocks of a staged message into its buffer."""
        if message.ids_on_device is not None:
            gather_on_device(self._blocks, message.ids_on_device, message.data)
        elif message.is_staged:
            copy_blocks(self._blocks, message.block_ids, message.data, range(len(message.block_ids)))

    def scatter(self, message: Message) -> None:
        """Copies the buffer of a staged message into its blocks."""
        if message.ids_on_device is not None:
            scatter_on_device(message.data, self._blocks, message.ids_on_device)
        elif message.is_staged:
            copy_blocks(message.data, range(len(message.block_ids)), self._blocks, message.block_ids)
