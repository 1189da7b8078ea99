"""A cluster under a part of the check. Its logs are printed if it does not start or a case fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.gpu.part import Part
from bench.support.servers import server, tandem
from tandem.deploy.processes.runtime_dir import log_dir
from tests.support.ports import free_port

_START_LIMIT_S = {"cuda": 75.0, "cpu": 300.0}
_TAIL_CHARACTERS = 3000
"""Of each log. The last 6,000 of a part's output are in the report."""


@contextmanager
def served(part: Part, model: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[int]:
    """Yields the port of a cluster. Raises RuntimeError if it does not start."""
    port, num_failures = free_port(), part.num_failures
    is_over = False
    try:
        command = tandem(model, port, *flags, "--device", part.device)
        with server(command, port, env, _START_LIMIT_S[part.device]):
            yield port
        is_over = True
    except SystemExit as error:  # how `server` reports that nothing came up
        raise RuntimeError(str(error)) from error
    finally:
        if not is_over or part.num_failures > num_failures:
            print_logs(log_dir(port))


def print_logs(folder: Path) -> None:
    for file in sorted(folder.glob("*.log")):
        print(f"--- {file.name}\n{file.read_text(errors='replace')[-_TAIL_CHARACTERS:]}", flush=True)
