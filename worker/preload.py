"""The process from which workers are forked: `python -m tandem.worker.preload`, see `runtime.processes.fork_server`.

It has imported what workers import, and holds no model, thread, socket or CUDA context. The variables that libraries
read when they are imported are those of this process; a worker's own are read later (`deploy.processes.preloaded`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from tandem.runtime.errors import first_line
from tandem.runtime.garbage_collection import importing
from tandem.runtime.processes.command_line import show_command_line
from tandem.runtime.processes.fork_server import Entry, main_channel, serve_forks
from tandem.runtime.processes.forked_process import CHANNEL_FD
from tandem.runtime.processes.process import EXIT_BAD_CONFIG

ENTRY = "worker"
MODULES = (
    "tandem.worker.__main__",
    "tandem.worker.worker",
    "tandem.worker.engine_loading",
    "tandem.worker.follower",
    "tandem.engine.loading.model_loader",
    "transformers.models.llama.modeling_llama",  # and with it what all modelling files import
    "transformers.generation.utils",
)
CPU_MODULES = ("tandem.engine.cpu.attention", "tandem.engine.cpu.layer_operators")
"""Imported too if workers run on the CPU."""


def main() -> NoReturn:
    on_cpu = "cpu" in sys.argv[1:]
    serve("tandem.worker", lambda: load(on_cpu))


def serve(package: str, load: Callable[[], None]) -> NoReturn:
    """Calls `load`, then forks processes that do what `python -m package` does. It is `python -m package.preload`."""
    show_command_line(f"{package}.preload")
    try:
        load()
    except Exception as error:
        print(f"error: cannot import what workers need: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIG)
    serve_forks(main_channel(CHANNEL_FD), {ENTRY: entry_of(package)})


def entry_of(package: str) -> Entry:
    """Returns what a forked process runs. Its argument is the worker's configuration file."""

    def run(arguments: list[str]) -> None:
        show_command_line(package, *arguments)
        importlib.import_module(f"{package}.__main__").main()

    return run


def load(on_cpu: bool) -> None:
    """Imports the modules, also those that numba imports when it compiles its first function. Leaves no thread."""
    with importing():
        for module in (*MODULES, *(CPU_MODULES if on_cpu else ())):
            importlib.import_module(module)
        with suppress(ImportError):  # another transformers: each worker makes them
            from transformers.conversion_mapping import get_checkpoint_conversion_mapping

            get_checkpoint_conversion_mapping("llama")  # makes those of all models, from 900 regular expressions
        if on_cpu:
            from tandem.engine.cpu.compiler import load_compiler

            load_compiler()


if __name__ == "__main__":
    main()
