"""The main function of a service process: logging, one uvloop, signals, exit code. SIGTERM drains, SIGINT stops."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, Protocol

import uvloop

from tandem.runtime.drain import Retired
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.file_limits import take_all_descriptors
from tandem.runtime.logs import LogSettings, setup_logging
from tandem.runtime.processes.lifetime import die_with_parent, leave
from tandem.runtime.tasks import start

EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_RETIRED = 3
"""Exit code of a worker that was drained for good and must not be restarted."""


class Service(Protocol):
    """What a process runs. drain: finish requests in flight, then end; returns False if there is nothing to finish."""

    async def run(self) -> None: ...

    def stop(self) -> None: ...

    def drain(self) -> bool: ...


def run_process(name: str, logs: LogSettings, make: Callable[[], Service]) -> NoReturn:
    """Runs `make()`'s service until it ends, has drained after SIGTERM, or is stopped by SIGINT or a second SIGTERM.

    `make` is called on the loop. Exits by os._exit, because a thread that waits for a dead peer would block a normal
    exit.
    """
    run_to_exit(name, logs, lambda: uvloop.run(serve(make)), signal.SIGINT)


def run_to_exit(
    name: str, logs: LogSettings, main: Callable[[], None], orphaned: signal.Signals = signal.SIGTERM
) -> NoReturn:
    """Runs `main()` and exits with 0, EXIT_BAD_CONFIG, EXIT_RETIRED, or 1 for any other error. Exits by os._exit.

    orphaned: the signal that the process receives when its parent exits.
    """
    die_with_parent(orphaned)
    take_all_descriptors()
    setup_logging(name, logs)
    exit_code = 0
    try:
        main()
    except BaseException as error:
        exit_code = exit_code_of(error)
        if exit_code == EXIT_BAD_CONFIG:
            print(f"error: {error}", file=sys.stderr)
        elif exit_code == EXIT_FAILED:
            logging.getLogger(name).exception("the process failed")
    leave(exit_code)


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code of a process that this error has ended."""
    match error:
        case ConfigError():
            return EXIT_BAD_CONFIG
        case Retired():
            return EXIT_RETIRED
    return EXIT_FAILED


async def serve(make: Callable[[], Service]) -> None:
    """Runs `make()`'s service on the running loop until it ends or signals end it. Raises what the service raises."""
    service = make()
    stopped_early = asyncio.Event()

    def stop() -> None:
        stopped_early.set()
        service.stop()

    is_draining = False

    def drain() -> None:
        nonlocal is_draining
        if is_draining or not service.drain():
            stop()
        is_draining = True

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, drain)
    loop.add_signal_handler(signal.SIGINT, stop)
    running = start(service.run())
    early = start(stopped_early.wait())
    await asyncio.wait({running, early}, return_when=asyncio.FIRST_COMPLETED)
    # A service that is still loading ignores `stop`; it gets two seconds like the others.
    done, _ = await asyncio.wait({running}, timeout=2.0)
    if done:
        running.result()
