"""Host memory for KV blocks: it outlives killed workers, and is freed when a worker is removed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tandem.deploy.processes.host_memory import HostMemory
from tandem.runtime.errors import ConfigError

WRITER = """
import mmap, os, signal, sys
fd = os.open(sys.argv[1], os.O_RDWR)
mmap.mmap(fd, 1 << 20)[4096:4101] = b"block"
os.kill(os.getpid(), signal.SIGKILL)
"""
READER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
sys.stdout.write(mmap.mmap(fd, 1 << 20)[4096:4101].decode())
"""


def held() -> list[str]:
    """Targets of this process's descriptors of host memory."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            targets.append(str(link.readlink()))
    return [target for target in targets if "memfd:tandem-kv-host" in target]


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    memory = HostMemory()
    yield memory
    memory.close()
    assert held() == []


def run(program: str, file: str) -> subprocess.CompletedProcess[str]:
    """Runs a process that inherits no descriptor."""
    return subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True, timeout=60)


def test_what_a_killed_worker_wrote_is_read_by_its_successor(memory: HostMemory) -> None:
    first, second = memory.files("prefill-0", 2, 1 << 20)
    assert run(WRITER, second).returncode == -signal.SIGKILL
    assert memory.files("prefill-0", 2, 1 << 20) == [first, second]
    assert run(READER, second).stdout == "block"
    assert run(READER, first).stdout == "\0" * 5


def test_memory_is_allocated_when_it_is_written(memory: HostMemory) -> None:
    [file] = memory.files("prefill-0", 1, 1 << 30)
    status = Path(file).stat()
    assert (status.st_size, status.st_blocks) == (1 << 30, 0)


def test_a_removed_worker_leaves_no_memory_and_its_name_gets_new_memory(memory: HostMemory) -> None:
    [file] = memory.files("worker-0", 1, 1 << 20)
    memory.files("worker-1", 2, 1 << 20)
    assert len(held()) == 3
    Path(file).write_bytes(b"block")
    memory.release("worker-0")
    memory.release("worker-0")
    assert len(held()) == 2
    [file] = memory.files("worker-0", 1, 1 << 20)
    assert not any(Path(file).read_bytes())


def test_more_than_the_host_has_is_refused_and_leaves_nothing(memory: HostMemory) -> None:
    total = psutil.virtual_memory().total
    memory.files("worker-0", 2, total // 4)
    with pytest.raises(ConfigError, match=r"kv_host_gib: worker-1 would need .* smaller --kv-host-gib or .* fewer"):
        memory.files("worker-1", 4, total // 4)
    assert len(held()) == 2
    memory.release("worker-0")
    memory.files("worker-1", 4, total // 4)
