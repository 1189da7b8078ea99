"""The limit on the memory of the media process."""

from __future__ import annotations

import resource
from pathlib import Path


def limit_memory(num_bytes: int) -> None:
    """Lets this process allocate at most this many bytes more; then allocations fail, as a rule with a MemoryError.

    RLIMIT_DATA counts private writable memory only. RLIMIT_AS would also count torch's libraries, the media cache's
    shared memory and address space that malloc reserves for each thread.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit = int(fields["VmData"].split()[0]) * 1024 + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
