"""Maps the tensors of media items from shared memory without copying them."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tandem.protocol.messages.media import DIGEST_BYTES, MediaItem, MediaTensor, check_segment
from tandem.runtime.errors import InvalidRequest, Overloaded, WorkerLost, client_reason
from tandem.runtime.files.file_limits import out_of_descriptors

if TYPE_CHECKING:
    import torch


def open_tensors(item: MediaItem) -> dict[str, torch.Tensor]:
    """Returns an item's tensors by name, read-only by convention. They keep the segment mapped.

    Raises InvalidRequest; Overloaded if this process is out of descriptors or memory; WorkerLost if the segment is gone
    or holds another item.
    """
    if not item.tensors:
        return {}
    try:
        memory = _map(item)
    except OSError as error:
        if (none_left := out_of_descriptors(error, "images and video in the prefill worker")) is not None:
            raise none_left from error
        reason = errno.errorcode.get(error.errno or 0, client_reason(error))
        if error.errno == errno.ENOMEM:
            raise Overloaded("the prefill worker is out of memory for images and video; send fewer") from error
        raise InvalidRequest(f"the memory of a media item cannot be opened: {reason}") from error
    return {tensor.name: view_tensor(tensor, memory, tensor.offset) for tensor in item.tensors}


def view_tensor(tensor: MediaTensor, memory: mmap.mmap, offset: int) -> torch.Tensor:
    """Returns a view of the tensor at `offset`. It keeps `memory` mapped."""
    import torch

    dtype = getattr(torch, tensor.dtype)
    if not tensor.num_bytes:
        return torch.empty(tensor.shape, dtype=dtype)
    count = tensor.num_bytes // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tensor.shape)


def check_grid(item: MediaItem, tensors: Mapping[str, torch.Tensor], merge_size: int) -> None:
    """Checks an item of a model with grids (Qwen-VL). merge_size: edge of the square of patches that become one token.

    Raises InvalidRequest if the item's grid is missing, or does not fit its placeholders.
    """
    import torch

    name = f"{item.kind}_grid_thw"
    grid = tensors.get(name)
    if grid is None or grid.shape != (1, 3) or grid.dtype != torch.int64 or int(grid.min()) < 1:
        raise InvalidRequest(f"an item of this model must have one {name}, [1, 3] of positive int64")
    num_tokens = int(grid.prod()) // merge_size**2
    if num_tokens != item.num_tokens:
        raise misfit(item, num_tokens)


def misfit(item: MediaItem, num_tokens: int) -> InvalidRequest:
    """num_tokens: that the model makes of the item."""
    return InvalidRequest(
        f"this {item.kind} has {item.num_tokens} placeholder tokens in the prompt, "
        f"but the model encodes it to {num_tokens}"
    )


def numbered(number: int, error: InvalidRequest) -> InvalidRequest:
    """Adds the item's number, so that the client knows which of several items is wrong."""
    return InvalidRequest(f"media item {number}: {error}")


def _map(item: MediaItem) -> mmap.mmap:
    """Maps the item's segment privately, so that accidental writes do not reach other readers.

    Python duplicates the descriptor into the mapping, so each item holds one.
    """
    try:
        fd = os.open(item.segment, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise WorkerLost("the media cache process has exited; send the request again") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest("the memory of a media item is not shared memory")
        check_segment(item, status.st_size)
        if not status.st_size:
            raise InvalidRequest("the memory of a media item is empty")
        memory = mmap.mmap(fd, status.st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        if memory[:DIGEST_BYTES] != item.digest:  # the descriptor was reused
            memory.close()
            raise WorkerLost("the media cache has evicted an image or video of the request; send it again")
        return memory
    finally:
        os.close(fd)
