"""The process from which a pytest worker forks launchers: `python -m tests.support.preload`.

A launcher that is forked from it has imported what workers need, so it makes its own preloaded process by a fork.
"""

from __future__ import annotations

import importlib
import os
import sys

from tandem.deploy.processes import preloaded
from tandem.deploy.processes.preloaded import PreloadedWorker
from tandem.runtime.garbage_collection import freeze_loaded_objects
from tandem.runtime.processes.command_line import show_command_line
from tandem.runtime.processes.fork_server import main_channel, serve_forks
from tandem.runtime.processes.forked_process import CHANNEL_FD, ONE_THREAD, ForkServer
from tandem.worker import preload

_ADDED = (*ONE_THREAD, *sys.argv[2:])
"""Variables that a launcher does not have. The first argument is space for the command line."""


def main() -> None:
    for module in ("tandem.deploy.cli", "tandem.deploy.launch.run_cluster", "rich.progress", "rich.console"):
        importlib.import_module(module)
    preload.load(on_cpu=True)
    freeze_loaded_objects()
    serve_forks(main_channel(CHANNEL_FD), {"launcher": launch})


def launch(arguments: list[str]) -> None:
    """In a forked process: runs `tandem`."""
    from tandem.deploy.cli import main as run_tandem

    for name in _ADDED:  # only for the imports
        os.environ.pop(name, None)
    show_command_line("tandem.worker.preload")
    server = ForkServer.fork_here({preloaded._ENTRY: preload.entry_of("tandem.worker")})
    spawn = PreloadedWorker.spawn

    def take(self: PreloadedWorker) -> None:
        PreloadedWorker.spawn = spawn  # type: ignore[method-assign]  # another one is started as in production
        if self._module == preloaded.PRELOAD_MODULE:
            self._server = server
        else:
            self.spawn()

    PreloadedWorker.spawn = take  # type: ignore[method-assign]
    show_command_line("tandem.deploy.cli", *arguments)
    sys.exit(run_tandem())


if __name__ == "__main__":
    main()
