"""A small HTTP server for metrics, in threads, which clients that send nothing or read nothing cannot exhaust."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from contextlib import suppress
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
"""Connections at a time, with a thread each. A further one ends the oldest, so that a scrape is always served."""
IO_TIMEOUT_S = 10.0
"""How long a client may take to send or to read something."""


class MetricsEndpoint(ThreadingHTTPServer):
    """Serves the registry's metrics from its own thread until `close`."""

    daemon_threads = True
    request_queue_size = 128  # with the default of 5, the kernel drops connections that arrive at once, for seconds

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Raises OSError when the address cannot be bound. port: 0 takes any free one."""
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # in the order of arrival
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        handler = type("Handler", (MetricsHandler,), {"registry": registry, "timeout": IO_TIMEOUT_S})
        super().__init__((host, port), handler)
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(1.0)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > MAX_CONNECTIONS else None
            if oldest is not None:
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # else the client has left
            log.error("a request for metrics failed", exc_info=error)
