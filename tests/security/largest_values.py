"""Reads the largest bodies in a process of its own, which a library may end: `python -m tests.security.largest_values`.

Arguments: the size of a body in bytes, and kinds of bodies. Prints `begin NAME` before each body, and
`end SECONDS BYTES` after it: the CPU time and the memory that reading it took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from bench.noise_model import ensure_noise_model
from tandem.proxy.cluster.worker_table import ModelLimits
from tandem.proxy.config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyKind, BodyReader
from tandem.proxy.text.model_text import ModelText
from tandem.runtime.errors import TandemError
from tests.security.largest_bodies import all_structs, bodies

LIMITS = ModelLimits(2048, 2048, "m", 64)


def main(max_bytes: int, kinds: list[str]) -> None:
    model = str(ensure_noise_model())
    reader = BodyReader(ModelText(model), ProxyConfig("proxy-0", "", model, "m"))
    structs = all_structs()
    for kind in kinds:
        for name, body in bodies(structs[kind], max_bytes):
            print(f"begin {kind} {name}", flush=True)
            seconds, num_bytes = measured(lambda kind=kind, body=body: read(reader, kind, body))  # type: ignore[misc]
            print(f"end {seconds:.3f} {num_bytes}", flush=True)


def read(reader: BodyReader, kind: str, body: bytes) -> None:
    """Decodes, validates, renders and tokenises, as a reader process does."""
    try:
        if kind in get_args(BodyKind):
            reader.read(body, kind, LIMITS)  # type: ignore[arg-type]
        elif kind == "tokenize":
            reader.tokenize(body, 2048)
        else:
            getattr(reader, kind)(body)
    except TandemError:
        pass  # refused


def measured(work: Callable[[], None]) -> tuple[float, int]:
    """Returns the CPU time in seconds, and by how many bytes the memory of this process grew at most."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, begun = status_bytes("VmRSS"), time.process_time()
    work()
    return time.process_time() - begun, status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
