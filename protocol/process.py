"""The frame of every worker process: logging, one uvloop, SIGTERM to stop, exit code 2 for a wrong configuration."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, Protocol

import uvloop

from protocol.errors import ConfigError
from protocol.lifetime import die_with_parent
from telemetry.logs import setup_logging


class Service(Protocol):
    """What a process runs."""

    async def run(self) -> None: ...

    def stop(self) -> None: ...


def run_process(name: str, log_level: str, make: Callable[[], Service]) -> NoReturn:
    """Run `make()`'s service until SIGTERM or SIGINT; `make` is called on the loop.

    Leaves by os._exit: a thread that still waits for a dead peer must not hold up the end of the process.
    """
    die_with_parent()
    setup_logging(name, log_level)
    exit_code = 0
    try:
        uvloop.run(_serve(make))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        exit_code = 2
    except BaseException:
        logging.getLogger(name).exception("the process fails")
        exit_code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


async def _serve(make: Callable[[], Service]) -> None:
    service = make()
    stopped_early = asyncio.Event()

    def stop() -> None:
        stopped_early.set()
        service.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    running = asyncio.ensure_future(service.run())
    early = asyncio.ensure_future(stopped_early.wait())
    await asyncio.wait({running, early}, return_when=asyncio.FIRST_COMPLETED)
    # Told to stop: a service that is still loading has nothing to wind up, the others get two seconds for it.
    done, _ = await asyncio.wait({running}, timeout=2.0)
    if done:
        running.result()
