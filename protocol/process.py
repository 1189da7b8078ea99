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
from telemetry.logs import LogFormat, setup_logging
from telemetry.worker_metrics import WorkerMetrics


class Service(Protocol):
    """What a process runs."""

    async def run(self) -> None: ...

    def stop(self) -> None: ...


def run_process(name: str, log_level: str, make: Callable[[], Service], log_format: LogFormat = "text") -> NoReturn:
    """Run `make()`'s service until SIGTERM or SIGINT; `make` is called on the loop.

    Leaves by os._exit: a thread that still waits for a dead peer must not hold up the end of the process.
    """
    run_to_exit(name, log_level, lambda: uvloop.run(_serve(make)), log_format)


def run_to_exit(name: str, log_level: str, main: Callable[[], None], log_format: LogFormat = "text") -> NoReturn:
    """Run `main()` and leave by os._exit with 0, with 2 for a ConfigError, with 1 for any other error."""
    die_with_parent()
    setup_logging(name, log_level, log_format)
    exit_code = 0
    try:
        main()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        exit_code = 2
    except BaseException:
        logging.getLogger(name).exception("the process fails")
        exit_code = 1
    _leave(exit_code)


def serve_metrics(metrics: WorkerMetrics, host: str, port: int) -> str:
    """Bind a worker's /metrics; returns host:port. Raises ConfigError when the address cannot be had."""
    try:
        return metrics.serve(host, port)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host}:{port} ({error.strerror or error}); choose another --metrics-host"
        ) from error


def end_process(reason: str, exit_code: int = 1) -> NoReturn:
    """From any thread: say why and leave at once, when what the process stands on is gone."""
    logging.getLogger(__name__).critical(reason)
    _leave(exit_code)


def _leave(exit_code: int) -> NoReturn:
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
