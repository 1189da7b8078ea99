"""One proxy process: constructs its parts, serves HTTP on a shared port and stops in bounded time."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from tandem.media_cache.media_client import MediaCacheClient
from tandem.protocol.sockets import new_context
from tandem.proxy.admission.admission import MAX_INPUTS, Admission, QueueDelayController
from tandem.proxy.admission.budgets import AnswerBudget, ClientSlots, DescriptorBudget
from tandem.proxy.batches.runner import BatchRunner
from tandem.proxy.cluster.router import Router
from tandem.proxy.cluster.worker_table import WORKER_SILENCE_S, WorkerTable
from tandem.proxy.control import Control
from tandem.proxy.dispatch.dispatcher import Dispatcher, WorkerConnections, WorkerReadiness
from tandem.proxy.http.api_keys import ApiKeys
from tandem.proxy.http.app import make_admin_app, make_app, make_batch_app
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.bodies import RequestBodies
from tandem.proxy.http.client_connection import connection_factory, track_requests
from tandem.proxy.http.connection_limits import ConnectionLimits
from tandem.proxy.observe.timelines import Timelines
from tandem.proxy.observe.tracing import make_tracer
from tandem.proxy.parsers.parser_names import log_formats
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.proxy_settings import HttpSettings
from tandem.proxy.reading.media_pool import MediaPool
from tandem.proxy.reading.reader_pool import ReaderPool
from tandem.proxy.records.record_store import record_store
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.token_text import TokenText
from tandem.runtime.errors import ConfigError, RequestAborted
from tandem.runtime.files.file_limits import num_open_descriptors, take_all_descriptors
from tandem.runtime.garbage_collection import freeze_loaded_objects
from tandem.runtime.listen_socket import bind
from tandem.runtime.tasks import keep_running, start_job
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.telemetry.request_log import RequestLog, ignore

log = logging.getLogger(__name__)

_MAX_ADMIN_CONNECTIONS = 128
_GAUGES_INTERVAL_S = 1.0
_RESTART_TASK_S = 5.0
"""Time after which a task of the proxy that has failed is started again."""
_ERROR_EVENT_S = 0.5
"""After the grace period running streams end with an error event. This is the time to send it."""


async def serve(config: ProxyConfig, text: ModelText, readers: ReaderPool) -> None:
    """Serves until SIGTERM or SIGINT, then for at most `drain_timeout_s` or `shutdown_grace_s` more.

    Raises ConfigError when an address cannot be bound or a certificate cannot be read.
    """
    proxy = ProxyServer(config, text, readers)
    try:
        await proxy.serve()
    finally:
        await proxy.close()


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end the process by the signal, not with exit code 0."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpListener:
    """Serves one application on one socket, with limits on its connections."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, limits: ConnectionLimits, config: HttpSettings, *, has_tls: bool
    ) -> None:
        """Raises ConfigError when the certificate cannot be read."""
        self._listener = listener
        self._limits = limits
        # uvicorn gets the socket without TLS, because connections count from before their handshake.
        tls = _read_certificate(config) if has_tls and config.ssl_certfile else None
        uvicorn_config = uvicorn.Config(
            track_requests(app),
            http=connection_factory(limits, config.client_timeout_s, tls),  # type: ignore[arg-type]  # any callable works
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=config.keep_alive_s,  # type: ignore[arg-type]  # any number works
        )
        self._server = HttpServer(uvicorn_config)

    async def serve(self) -> None:
        """Runs until `stop`, and until the requests in flight have ended or their grace period is over."""
        await self._server.serve(sockets=[self._listener])

    def stop(self, grace_s: float) -> None:
        """Accepts no more connections. Requests that are in flight after the grace period are cancelled."""
        self._limits.is_stopping = True
        self._server.config.timeout_graceful_shutdown = grace_s + _ERROR_EVENT_S  # type: ignore[assignment]
        self._server.should_exit = True


class ProxyServer:
    """Owns all parts of a proxy. Construct on the running loop; `close` once."""

    def __init__(self, config: ProxyConfig, text: ModelText, readers: ReaderPool) -> None:
        """Raises ConfigError when an address cannot be bound, or a certificate or the API keys cannot be read."""
        self._config = config
        listener = _listen_socket(config.http.listen_fd, *config.http.address)
        # Unique for each start: workers drop the requests of a proxy's predecessor.
        self._proxy_id = f"{config.proxy_id}-{secrets.token_hex(4)}"
        metrics = ProxyMetrics()
        self._descriptors = _descriptor_budget(config.http.max_connections)
        self._context = new_context("proxy", config.network)
        self._context.refusals.on_refused = lambda reason: metrics.refusals.labels(reason).inc()
        self._tracer = make_tracer(config.otlp_endpoint, config.proxy_id) if config.otlp_endpoint else None
        requests = RequestLog(self._tracer.on_end if self._tracer is not None else ignore)
        ttft_slo_s, routing = config.admission.ttft_slo_s, config.routing

        worker_table = WorkerTable(WORKER_SILENCE_S, decode_may_prefill=routing.decode_prefill_threshold > 0)
        self._connections = WorkerConnections(self._context, self._proxy_id)
        dispatcher = Dispatcher(
            self._proxy_id,
            Router(worker_table, routing.decode_prefill_threshold, routing.num_proxies),
            self._connections,
            metrics,
            routing.worker_wait_s,
            config.media_cache_tcp_endpoint,
        )
        admission = Admission(
            config.admission,
            time.monotonic,
            QueueDelayController(time.monotonic, ttft_slo_s) if ttft_slo_s is not None else None,
            MAX_INPUTS,
        )
        media: MediaPool | None = None
        if config.media_cache_endpoint:
            cache = MediaCacheClient(self._context, config.media_cache_endpoint)
            media = MediaPool(config, cache, readers, ttft_slo_s, self._descriptors)

        api_keys: ApiKeys | None = None
        http = config.http
        if http.needs_api_key:
            api_keys = ApiKeys(http.api_key or None, Path(http.api_keys_file) if http.api_keys_file else None)
        self._admin_keys: ApiKeys | None = None
        if http.admin_keys_file:
            self._admin_keys = ApiKeys(None, Path(http.admin_keys_file), "admin_keys_file")

        batches: BatchRunner | None = None
        if config.data_folder:
            key_of = api_keys.of_client if api_keys is not None else None
            batches = BatchRunner(Path(config.data_folder), key_of, self._descriptors.max_batches)

        self._state = AppState(
            text=text,
            token_text=TokenText(text.tokenizer),
            readers=readers,
            worker_table=worker_table,
            admission=admission,
            answer_budget=AnswerBudget(),
            calls=ClientSlots(),
            dispatcher=dispatcher,
            metrics=metrics,
            requests=requests,
            request_timeout_s=routing.request_timeout_s,
            ttft_slo_s=ttft_slo_s,
            api_keys=api_keys,
            bodies=RequestBodies(http.max_body_mib << 20, http.client_timeout_s, descriptors=self._descriptors),
            readiness=WorkerReadiness(worker_table, config.admission.max_waiting_requests, routing.worker_wait_s),
            timelines=Timelines(self._context, requests, config.peer_endpoints),
            media=media,
            adapters=config.adapter_table(),
            signing_key=(config.signing_key or secrets.token_hex(32)).encode(),
            responses=config.response_store(),
            batches=batches,
            records=record_store(
                config.records, config.record_folder, lambda outcome: metrics.records.labels(outcome).inc()
            ),
            descriptors=self._descriptors,
        )
        self._control = Control(self._context, config, self._proxy_id, self._state, self._connections)
        self._http = self._make_listeners(listener)
        self._abort_timer: asyncio.TimerHandle | None = None

    def _make_listeners(self, listener: socket.socket) -> list[HttpListener]:
        config, state, set_role = self._config, self._state, self._control.set_role
        max_connections = self._descriptors.max_connections
        on_refused = state.metrics.rejected.labels("connections").inc
        self._limits = limits = ConnectionLimits(max_connections, max(1, max_connections // 2), on_refused)
        http = [HttpListener(make_app(config, state, set_role), listener, limits, config.http, has_tls=True)]
        if (own := config.http).admin_port:
            listener = _listen_socket(own.admin_listen_fd, own.admin_host, own.admin_port)
            # Idle connections must not keep out a probe, which would have the whole pod restarted.
            limits = ConnectionLimits(_MAX_ADMIN_CONNECTIONS, _MAX_ADMIN_CONNECTIONS, closes_oldest=True)
            app = make_admin_app(config, state, set_role, self._admin_keys)
            http.append(HttpListener(app, listener, limits, own, has_tls=False))
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are one line for each bad request
        return http

    async def serve(self) -> None:
        """Runs until a signal stops the proxy."""
        config = self._config
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop, config.drain_timeout_s)
        loop.add_signal_handler(signal.SIGINT, self._stop, config.shutdown_grace_s)
        self._state.readers.start()
        if self._state.media is not None:
            start_job(self._state.media.start(), "starting the media process")
        freeze_loaded_objects()
        log.info("proxy %s serves %s on %s:%d", self._proxy_id, config.served_model_name, *config.http.address)
        if config.records.record:
            log.warning("all requests are recorded in %s, with their prompts and answers", config.records.record)
        log_formats(config.requests.tool_call_parser, config.requests.reasoning_parser, self._state.text)
        tasks = [keep_running(self._update_gauges, "updating gauges", _RESTART_TASK_S)]
        if self._state.api_keys is not None and config.http.api_keys_file:
            tasks.append(keep_running(self._state.api_keys.watch, "reading the API keys again", _RESTART_TASK_S))
        if self._admin_keys is not None:
            tasks.append(keep_running(self._admin_keys.watch, "reading the admin keys again", _RESTART_TASK_S))
        if self._state.batches is not None:
            run_batches = partial(self._state.batches.run, make_batch_app(config, self._state))
            tasks.append(keep_running(run_batches, "running batches", _RESTART_TASK_S))
        try:
            await asyncio.gather(*(http.serve() for http in self._http))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # the requests of batches are aborted on the workers

    def _stop(self, grace_s: float) -> None:
        """Accepts no more connections, and ends running streams after the grace period. A later call replaces it."""
        log.info("stopping within %.1f s; %d sequences are running", grace_s, self._state.dispatcher.num_running)
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        self._abort_timer = asyncio.get_running_loop().call_later(grace_s, self._fail_all)
        for http in self._http:
            http.stop(grace_s)

    def _fail_all(self) -> None:
        error = RequestAborted("the server is shutting down")
        self._state.readiness.fail_all(error)
        self._state.dispatcher.fail_all(error)

    async def close(self) -> None:
        self._connections.close_all()
        self._state.timelines.close()
        self._control.close()
        self._state.readers.close()
        if self._state.media is not None:
            self._state.media.close()
        if self._state.batches is not None:
            self._state.batches.close()
        if self._state.responses is not None:
            self._state.responses.threads.close()
        if self._state.records is not None:
            await self._state.records.close()
        self._context.destroy(linger=300)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def _update_gauges(self) -> None:
        while True:
            await asyncio.sleep(_GAUGES_INTERVAL_S)
            self._state.metrics.waiting.set(self._state.admission.num_waiting)
            self._state.metrics.per_token.flush()
            self._descriptors.measure(await asyncio.to_thread(num_open_descriptors), self._limits.num_open)


def _descriptor_budget(wanted_connections: int) -> DescriptorBudget:
    limit = take_all_descriptors()
    budget = DescriptorBudget(limit, wanted_connections, num_open_descriptors())
    if budget.max_connections < wanted_connections:
        log.warning(
            "at most %d connections: this process may open %d descriptors (ulimit -n)", budget.max_connections, limit
        )
    return budget


def _read_certificate(config: HttpSettings) -> ssl.SSLContext:
    """Raises ConfigError when it cannot be read."""
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None)
    except (OSError, ssl.SSLError) as error:
        files = f"{config.ssl_certfile} with the key {config.ssl_keyfile or '(none)'}"
        raise ConfigError(f"cannot read the certificate {files}: {error}") from error
    return context


def _listen_socket(fd: int | None, host: str, port: int) -> socket.socket:
    """Returns the inherited socket, or binds one. Raises ConfigError.

    On one host the launcher binds a socket for each proxy (SO_REUSEPORT) and keeps a duplicate open. Connections that
    wait in the backlog of a proxy that dies are then served by its successor.
    """
    if fd is None:
        return bind(host, port)
    os.set_inheritable(fd, False)  # children must not keep the port
    return socket.socket(fileno=fd)
