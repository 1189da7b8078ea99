"""One proxy process: puts the parts together, runs uvicorn on a shared port, and stops in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from protocol.errors import ConfigError, RequestAborted
from protocol.membership import WorkerInfo
from protocol.proxy_endpoints import write_whole
from protocol.sockets import new_context
from proxy.admission import Admission
from proxy.app import make_app
from proxy.config import ProxyConfig
from proxy.control import Control
from proxy.dispatcher import Dispatcher
from proxy.generation import FrontDoor
from proxy.http_connection import make_protocol
from proxy.model_text import ModelText
from proxy.reader_pool import ReaderPool
from proxy.registry import Registry
from proxy.request_body import RequestBodies
from proxy.router import Router
from proxy.scrapes import Scrapes
from proxy.token_text import TokenText
from proxy.turns import Turns
from proxy.worker_pool import WorkerPool
from telemetry.metrics import ProxyMetrics

log = logging.getLogger(__name__)

_BACKLOG = 2048
_STREAMS_PER_ITERATION = 4
"""Streams that get a piece of text in one iteration of the loop; each costs 0.1 to 0.2 ms."""
_FAREWELL_S = 0.5
"""After the grace running streams are ended with an error event; this long they have to hand it over."""


class _Uvicorn(uvicorn.Server):
    """Without its signal handling, which would end the process by the signal itself and not with exit code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(config: ProxyConfig, text: ModelText, readers: ReaderPool) -> None:
    """Runs until SIGTERM or SIGINT. Raises ConfigError when an address cannot be bound."""
    listener = _listen(config.host, config.port)
    # Unique for each start, so that workers tell a restarted proxy, whose requests are gone, from its predecessor.
    proxy_id = f"{config.proxy_id}-{secrets.token_hex(4)}"
    metrics = ProxyMetrics()
    scrapes = Scrapes(metrics)
    registry = Registry(config.worker_silence_s, decode_may_prefill=config.decode_prefill_threshold > 0)
    router = Router(registry, config.decode_prefill_threshold, config.num_proxies)
    turns = Turns(_STREAMS_PER_ITERATION)
    dispatcher = Dispatcher(proxy_id, router, metrics, turns)
    context = new_context()
    pool = WorkerPool(context, proxy_id, config.sockets_per_worker, dispatcher.on_message)
    dispatcher.pool = pool

    def on_lost(worker: WorkerInfo, reason: str) -> None:
        dispatcher.on_worker_lost(worker, reason)
        pool.close(worker)

    try:
        control = Control(
            context,
            config.control_endpoint,
            proxy_id,
            config.served_model_name,
            registry,
            pool.open,
            on_lost,
            lambda: dispatcher.num_running,
        )
    except Exception as error:  # zmq's own, which has no name here
        listener.close()
        raise ConfigError(f"cannot bind the control endpoint {config.control_endpoint}: {error}") from error
    if config.control_endpoint_file:
        write_whole(Path(config.control_endpoint_file), control.endpoint)
    door = FrontDoor(
        text,
        TokenText(text.tokenizer),
        RequestBodies(config.max_body_bytes, config.client_timeout_s),
        readers,
        registry,
        Admission(
            config.max_waiting_requests, time.monotonic, config.max_waiting_tokens, config.max_requests_per_client
        ),
        dispatcher,
        metrics,
        scrapes,
        turns,
        config.request_timeout_s,
        config.ttft_slo_ms / 1000 or None,
    )
    uvicorn_config = uvicorn.Config(
        make_app(config, door),
        http=make_protocol(config.client_timeout_s),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=config.shutdown_grace_s + _FAREWELL_S,  # type: ignore[arg-type]  # any number does
        ssl_certfile=config.ssl_certfile or None,
        ssl_keyfile=config.ssl_keyfile or None,
    )
    try:
        uvicorn_config.load()  # reads the certificate, for one
    except (OSError, ssl.SSLError) as error:
        listener.close()
        raise ConfigError(
            f"cannot read the certificate {config.ssl_certfile} with the key {config.ssl_keyfile or '(none)'}: {error}"
        ) from error
    server = _Uvicorn(uvicorn_config)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if not server.should_exit:
            log.info("stopping; %d sequences are under way", dispatcher.num_running)
            server.should_exit = True
            error = RequestAborted("the server is shutting down")
            loop.call_later(config.shutdown_grace_s, dispatcher.fail_all, error)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    log.info("proxy %s serves %s on %s:%d", proxy_id, config.served_model_name, config.host, config.port)
    try:
        await scrapes.start()
        await server.serve(sockets=[listener])
    finally:
        pool.close_all()
        control.close()
        readers.close()
        scrapes.close()
        context.destroy(linger=300)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # the proxies of a cluster share the port
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener
