"""One proxy process: puts the parts together, runs uvicorn on a shared port, and stops in bounded time."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import ssl
import time
from pathlib import Path
from typing import Any

import uvicorn

from tandem.protocol.media_client import MediaCacheClient
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.proxy_endpoints import write_whole
from tandem.protocol.sockets import new_context
from tandem.proxy.admission.admission import Admission
from tandem.proxy.admission.queue_delay import QueueDelayController
from tandem.proxy.cluster.control import Control
from tandem.proxy.cluster.readiness import WorkerReadiness
from tandem.proxy.cluster.registry import Registry
from tandem.proxy.cluster.router import Router
from tandem.proxy.config import ProxyConfig
from tandem.proxy.dispatch.dispatcher import Dispatcher
from tandem.proxy.dispatch.worker_pool import WorkerPool
from tandem.proxy.http.app import make_admin_app, make_app
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.bodies import RequestBodies
from tandem.proxy.http.connection import make_protocol
from tandem.proxy.http.connections import Connections, affordable_connections
from tandem.proxy.http.listening import BACKLOG, ListenSockets
from tandem.proxy.http.server import HttpServer
from tandem.proxy.observe.figures import serving_figures
from tandem.proxy.observe.scrapes import Scrapes
from tandem.proxy.observe.timelines import Timelines
from tandem.proxy.observe.tracing import make_tracer
from tandem.proxy.reading.media_jobs import MediaSetup
from tandem.proxy.reading.media_pool import MediaPool
from tandem.proxy.reading.reader_pool import ReaderPool
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.token_text import TokenText
from tandem.runtime.collector import freeze_loaded_objects
from tandem.runtime.errors import ConfigError, RequestAborted
from tandem.telemetry.metrics import ProxyMetrics
from tandem.telemetry.request_log import RequestLog, ignore

log = logging.getLogger(__name__)

_MAX_ADMIN_CONNECTIONS = 128
"""Of those who run the cluster, which clients must not shut out."""
_TELL_INTERVAL_S = 1.0
"""How often gauges are set that are not worth it at each change."""
_FAREWELL_S = 0.5
"""After the grace running streams are ended with an error event; this long they have to hand it over."""


async def serve(config: ProxyConfig, text: ModelText, readers: ReaderPool) -> None:
    """Runs until SIGTERM (running streams have time to end) or SIGINT (hardly any).

    Raises ConfigError when an address cannot be bound.
    """
    doors = ListenSockets.of(config.listen_fds, config.host, config.port)
    admin_doors = (
        ListenSockets.of(config.admin_listen_fds, config.admin_host, config.admin_port) if config.admin_port else None
    )
    # Unique for each start, so that workers tell a restarted proxy, whose requests are gone, from its predecessor.
    proxy_id = f"{config.proxy_id}-{secrets.token_hex(4)}"
    metrics = ProxyMetrics()
    scrapes = Scrapes(metrics)
    registry = Registry(config.worker_silence_s, decode_may_prefill=config.decode_prefill_threshold > 0)
    router = Router(registry, config.decode_prefill_threshold, config.num_proxies)
    context = new_context("proxy", config.network)
    pool = WorkerPool(context, proxy_id)
    dispatcher = Dispatcher(proxy_id, router, pool, metrics, config.worker_wait_s, config.media_cache_tcp_endpoint)
    arrivals = WorkerReadiness(registry, config.max_waiting_requests, config.worker_wait_s)
    context.refusals.on_refused = lambda reason: metrics.refusals.labels(reason).inc()

    ttft_slo_s = config.ttft_slo_ms / 1000 or None
    admission = Admission(
        config.max_waiting_requests,
        time.monotonic,
        config.max_waiting_tokens,
        config.max_requests_per_client,
        QueueDelayController(time.monotonic, ttft_slo_s) if ttft_slo_s is not None else None,
        config.low_priority_share,
    )
    tracer = make_tracer(config.otlp_endpoint, config.proxy_id) if config.otlp_endpoint else None
    requests = RequestLog(tracer.on_end if tracer is not None else ignore)
    timelines = Timelines(context, requests, config.peer_endpoints)

    def on_joined(worker: WorkerInfo) -> None:
        metrics.on_joined(worker.worker_id, worker.role)
        pool.open(
            worker,
            dispatcher.on_message,
            lambda worker: dispatcher.on_worker_lost(worker, "a connection to it broke"),
        )

    def on_lost(worker: WorkerInfo, reason: str) -> None:
        metrics.on_lost(worker.role)
        dispatcher.on_worker_lost(worker, reason)
        pool.close(worker)

    def on_changed() -> None:
        arrivals.on_cluster_changed()
        dispatcher.on_cluster_changed()

    try:
        control = Control(
            context,
            config.control_endpoint,
            config.control_tcp_endpoint,
            proxy_id,
            config.served_model_name,
            registry,
            on_joined,
            on_lost,
            on_changed,
            lambda: dispatcher.num_running,
            metrics.on_worker_refusals,
            timelines.own,
            lambda: serving_figures(metrics, admission),
        )
    except ConfigError:
        doors.close()
        raise
    except Exception as error:  # zmq's own, which has no name here
        doors.close()
        where = " and ".join(filter(None, (config.control_endpoint, config.control_tcp_endpoint)))
        mend = "; choose another --cluster-port" if config.control_tcp_endpoint else ""
        raise ConfigError(f"cannot bind the control endpoint {where}: {error}{mend}") from error
    if config.control_endpoint_file:
        write_whole(Path(config.control_endpoint_file), control.endpoint)
    media_cache = media = None
    if config.media_cache_endpoint:
        media_cache = MediaCacheClient(context, config.media_cache_endpoint)
        media = MediaPool(
            _media_setup(config), media_cache, config.max_waiting_media, config.ttft_slo_ms / 1000 or None
        )
    door = AppState(
        text,
        TokenText(text.tokenizer),
        readers,
        registry,
        admission,
        dispatcher,
        metrics,
        requests,
        config.request_timeout_s,
        ttft_slo_s,
        RequestBodies(config.max_body_bytes, config.client_timeout_s),
        scrapes,
        timelines,
        arrivals,
        media,
    )
    connections = Connections(
        affordable_connections(config.max_connections),
        config.max_connections_per_client,
        metrics.rejected.labels("connections").inc,
    )
    uvicorn_config = _uvicorn_config(
        make_app(config, door), config, connections, config.ssl_certfile, config.ssl_keyfile
    )
    try:
        uvicorn_config.load()  # reads the certificate, for one
    except (OSError, ssl.SSLError) as error:
        doors.close()
        raise ConfigError(
            f"cannot read the certificate {config.ssl_certfile} with the key {config.ssl_keyfile or '(none)'}: {error}"
        ) from error
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are a line for each bad request
    server = HttpServer(uvicorn_config, doors)
    serving = [server.serve()]
    admin: HttpServer | None = None
    if admin_doors is not None:
        own = Connections(_MAX_ADMIN_CONNECTIONS, _MAX_ADMIN_CONNECTIONS)
        admin = HttpServer(_uvicorn_config(make_admin_app(config, door), config, own), admin_doors)
        serving.append(admin.serve())
    loop = asyncio.get_running_loop()

    farewell: asyncio.TimerHandle | None = None

    def stop(grace_s: float) -> None:
        """No new connections; running streams have so long. Again: the time that is said last."""
        nonlocal farewell
        log.info("stopping within %.1f s; %d sequences are under way", grace_s, dispatcher.num_running)
        if farewell is not None:
            farewell.cancel()
        error = RequestAborted("the server is shutting down")
        farewell = loop.call_later(grace_s, dispatcher.fail_all, error)
        server.should_exit = True
        if admin is not None:
            admin.should_exit = True

    loop.add_signal_handler(signal.SIGTERM, stop, config.drain_timeout_s)
    loop.add_signal_handler(signal.SIGINT, stop, config.shutdown_grace_s)
    log.info("proxy %s serves %s on %s:%d", proxy_id, config.served_model_name, config.host, config.port)

    telling = asyncio.create_task(_tell(metrics, admission))
    try:
        await scrapes.start()
        if media is not None:
            await media.start()
        freeze_loaded_objects()
        await asyncio.gather(*serving)
    finally:
        telling.cancel()
        pool.close_all()
        timelines.close()
        control.close()
        readers.close()
        if media is not None:
            media.close()
        if media_cache is not None:
            media_cache.close()
        scrapes.close()
        context.destroy(linger=300)
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


async def _tell(metrics: ProxyMetrics, admission: Admission) -> None:
    while True:
        await asyncio.sleep(_TELL_INTERVAL_S)
        metrics.waiting.set(admission.num_waiting)
        metrics.per_token.tell()


def _uvicorn_config(
    app: Any, config: ProxyConfig, connections: Connections, certfile: str = "", keyfile: str = ""
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=make_protocol(config.client_timeout_s, connections),  # type: ignore[arg-type]  # it is called, no more
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=config.keep_alive_s,  # type: ignore[arg-type]  # any number does
        timeout_graceful_shutdown=max(config.shutdown_grace_s, config.drain_timeout_s) + _FAREWELL_S,  # type: ignore[arg-type]
        ssl_certfile=certfile or None,
        ssl_keyfile=keyfile or None,
    )


def _media_setup(config: ProxyConfig) -> MediaSetup:
    return MediaSetup(
        name=f"{config.proxy_id}-media",
        log_level=config.log_level,
        model=config.model,
        served_model_name=config.served_model_name,
        trust_chat_template=config.trust_request_chat_template,
        tool_call_parser=config.tool_call_parser,
        trust_remote_code=config.trust_remote_code,
        cache_endpoint=config.media_cache_endpoint,
        limits=config.media,
        num_threads=config.media_threads,
    )
