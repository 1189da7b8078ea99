"""Host memory for KV blocks that outlives the workers that use it."""

from __future__ import annotations

import os

import psutil

from tandem.runtime.errors import ConfigError


class HostMemory:
    """One memfd for each rank of each worker, open in this process until `release` or `close`.

    A memfd has no name that could be left behind: its memory is freed when this process and the worker have ended. Its
    pages are allocated when they are first written, or all when a worker pins them for its GPU.
    """

    def __init__(self) -> None:
        self._fds: dict[str, list[int]] = {}

    def files(self, worker: str, num_ranks: int, num_bytes: int) -> list[str]:
        """Returns for each rank the path by which processes of this user open its `num_bytes` of memory.

        A worker that has memory already keeps it. Raises ConfigError if this host has not as much memory.
        """
        if worker not in self._fds:
            self._check(worker, num_ranks * num_bytes)
            fds = self._fds[worker] = []
            try:
                for _ in range(num_ranks):
                    fds.append(os.memfd_create("tandem-kv-host", os.MFD_CLOEXEC))
                    os.ftruncate(fds[-1], num_bytes)
            except OSError as error:
                self.release(worker)
                raise ConfigError(f"kv_host_gib: cannot make host memory for {worker}: {error.strerror}") from error
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds[worker]]

    def _check(self, worker: str, num_bytes: int) -> None:
        """A write to a page that the host cannot allocate would make the kernel kill a process."""
        taken = sum(os.fstat(fd).st_size for fds in self._fds.values() for fd in fds)
        total = psutil.virtual_memory().total
        if taken + num_bytes > total:
            gib = 1 << 30
            raise ConfigError(
                f"kv_host_gib: {worker} would need {num_bytes / gib:.1f} GiB beside the {taken / gib:.1f} GiB of other "
                f"workers, but this host has {total / gib:.1f} GiB; give a smaller --kv-host-gib or start fewer workers"
            )

    def release(self, worker: str) -> None:
        """Closes the memory of a worker that has been removed. Workers without memory have no effect."""
        for fd in self._fds.pop(worker, ()):
            os.close(fd)

    def close(self) -> None:
        for worker in list(self._fds):
            self.release(worker)
