"""Reads the tensors of media items where they lie, in shared memory, without copying them."""

from __future__ import annotations

import errno
import mmap
import os
import stat

import torch

from tandem.protocol.messages.media import DIGEST_BYTES, MediaItem, MediaTensor, check_segment
from tandem.runtime.errors import InvalidRequest, Overloaded, WorkerLost
from tandem.runtime.file_limits import out_of_descriptors


def open_tensors(item: MediaItem) -> dict[str, torch.Tensor]:
    """By name. They stay readable when the segment's name goes; nobody may write to them.

    Raises InvalidRequest, Overloaded when this process has no descriptors or memory left, or WorkerLost when the item
    is not in its segment any more, or the segment is gone.
    """
    if not item.tensors:
        return {}
    try:
        memory = _map(item)
    except OSError as error:
        if (none_left := out_of_descriptors(error, "images and video in the prefill worker")) is not None:
            raise none_left from error
        reason = errno.errorcode.get(error.errno or 0, str(error))
        if error.errno == errno.ENOMEM:
            raise Overloaded("no memory is left for images and video in the prefill worker; send fewer") from error
        raise InvalidRequest(f"the media segment {item.segment} cannot be opened: {reason}") from error
    return {tensor.name: view_tensor(tensor, memory, tensor.offset) for tensor in item.tensors}


def view_tensor(tensor: MediaTensor, memory: mmap.mmap, offset: int) -> torch.Tensor:
    """The tensor whose bytes begin at `offset`; it keeps the memory."""
    dtype = getattr(torch, tensor.dtype)
    if not tensor.num_bytes:
        return torch.empty(tensor.shape, dtype=dtype)
    count = tensor.num_bytes // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tensor.shape)


def _map(item: MediaItem) -> mmap.mmap:
    """Private, so that a step that wrote by mistake would not change what others read. Costs a descriptor."""
    try:
        fd = os.open(item.segment, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:  # as of a process that has ended
        raise WorkerLost("the media cache that held an image or video is gone; send the request again") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest(f"the media segment {item.segment} is no shared memory")
        check_segment(item, status.st_size)
        if not status.st_size:
            raise InvalidRequest(f"the media segment {item.segment} is empty")
        memory = mmap.mmap(fd, status.st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        if memory[:DIGEST_BYTES] != item.digest:  # descriptors are used again
            memory.close()
            raise WorkerLost("the media cache has let an image or video go that the request still needs")
        return memory
    finally:
        os.close(fd)
