"""Reads the largest bodies in a process of its own, which a library may end: `python -m tests.security.largest_values`.

Arguments: the size of a body in bytes, and kinds of bodies, `batch_file` or `adapter`. Prints `begin NAME` before each
body, and `end SECONDS BYTES` after it: the CPU time and the memory that reading it took. With `--once` before them, a
field that has the same name and type in several kinds is read with the first of them only.
"""

from __future__ import annotations

import io
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from msgspec import inspect

from tandem.proxy.batches.batch_lines import IndexedLine, check_lines, read_lines, request_body
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyKind, BodyReader
from tandem.proxy.text.model_text import ModelText
from tandem.runtime.errors import TandemError
from tandem.runtime.files.lora_files import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from tests.security.largest_bodies import adapter_files, all_structs, batch_files, bodies
from tests.support.noise_model import ensure_noise_model

LIMITS = ModelLimits(2048, 2048, "m", 64)


def main(max_bytes: int, kinds: list[str], *, once: bool) -> None:
    read_before: list[tuple[str, Any]] | None = [] if once else None
    for kind in kinds:
        for name, work in works(kind, max_bytes, read_before):
            print(f"begin {kind} {name}", flush=True)
            seconds, num_bytes = measured(work)
            print(f"end {seconds:.3f} {num_bytes}", flush=True)


def works(
    kind: str, max_bytes: int, read_before: list[tuple[str, Any]] | None
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields a name, and what a process of the proxy does with a value.

    read_before: fields that are left out, as names and types; gets those of this kind. None to leave out none.
    """
    if kind == "batch_file":
        for name, content in batch_files(max_bytes):
            yield name, partial(check_batch, content)
    elif kind == "adapter":
        with TemporaryDirectory() as folder:
            for name, config, weights in adapter_files(max_bytes):
                (Path(folder) / CONFIG_FILE).write_bytes(config)
                (Path(folder) / WEIGHTS_FILE).write_bytes(weights)
                yield name, partial(load_adapter, Path(folder))
    else:
        reader = make_reader()
        fields = None if read_before is None else new_fields(all_structs()[kind], read_before)
        for name, body in bodies(all_structs()[kind], max_bytes, fields):
            yield name, partial(read, reader, kind, body)


def new_fields(struct: Any, read_before: list[tuple[str, Any]]) -> list[str]:
    """Returns the fields that are not in `read_before`, and adds them."""
    body = inspect.type_info(struct)
    assert isinstance(body, inspect.StructType)
    new = [field for field in body.fields if (field.encode_name, field.type) not in read_before]
    read_before += [(field.encode_name, field.type) for field in new]
    return [field.encode_name for field in new]


def make_reader() -> BodyReader:
    model = str(ensure_noise_model())
    return BodyReader(ModelText(model), ProxyConfig("proxy-0", "", model, "m"))


def read(reader: BodyReader, kind: str, body: bytes) -> None:
    """Decodes, validates, renders and tokenises, as a reader process does."""
    with suppress(TandemError):  # refused
        if kind in get_args(BodyKind):
            reader.read(body, kind, LIMITS)  # type: ignore[arg-type]
        elif kind == "tokenize":
            reader.tokenize(body, 2048)
        else:
            getattr(reader, kind)(body)


def check_batch(content: bytes) -> None:
    """Checks the lines, and makes a body of each, as the process for this and the proxy do."""

    def on_line(line: IndexedLine) -> None:
        request_body(content[line.offset : line.offset + line.num_bytes])

    checked = check_lines(read_lines(io.BytesIO(content)), "a", on_line)
    assert checked.num_requests or checked.errors


def load_adapter(folder: Path) -> None:
    with suppress(TandemError):
        read_adapter(folder)


def measured(work: Callable[[], None]) -> tuple[float, int]:
    """Returns the CPU time in seconds, and by how many bytes the memory of this process grew at most."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, begun = status_bytes("VmRSS"), _spent_s()
    work()
    return _spent_s() - begun, status_bytes("VmHWM") - before


def _spent_s() -> float:
    """Returns the CPU time of this process and of those that have done some of its work and ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # of parts that are skipped; what goes to stderr is an error
    arguments = [each for each in sys.argv[1:] if each != "--once"]
    main(int(arguments[0]), arguments[1:], once="--once" in sys.argv)
