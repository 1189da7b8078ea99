"""The routes for who runs the cluster: metrics and the page that shows them, what Prometheus is to
scrape, and what became of one request.

One list, so that they can be served where clients do not reach.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from tandem.protocol.messages.membership import WorkerReport
from tandem.proxy.answers.errors import UnknownRequest
from tandem.proxy.answers.request_id import id_header
from tandem.proxy.config import ProxyConfig
from tandem.proxy.http.app_state import AppState
from tandem.proxy.observe.scrape_targets import scrape_targets
from tandem.telemetry.metrics import CONTENT_TYPE
from tandem.telemetry.request_log import NUM_KEPT

AdminRequest = Request[Any, Any, Any]
_JSON = "application/json"
OPEN = {"open": True}
"""Without a key: for load balancers, and for people who read."""
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'",
    "cache-control": "no-cache",
}


class ClusterState(msgspec.Struct, frozen=True):
    """What the page at /dashboard asks for beside the metrics. reason: why it is not ready."""

    model: str
    ready: bool
    reason: str
    workers: list[WorkerReport]


def admin_routes(config: ProxyConfig, door: AppState) -> list[HTTPRouteHandler]:
    page = Path(__file__).with_name("dashboard.html").read_bytes()

    @get("/metrics")
    async def metrics(request: AdminRequest) -> Response[bytes]:
        is_fresh = "no-cache" in request.headers.get("cache-control", "")
        return Response(await door.scrapes.render(is_fresh), media_type=CONTENT_TYPE, headers=id_header(request))

    @get("/sd")
    async def sd(request: AdminRequest) -> Response[bytes]:
        targets = scrape_targets(config, request.headers.get("host", ""), door.registry.workers())
        return Response(msgspec.json.encode(targets), media_type=_JSON, headers=id_header(request))

    @get("/debug/requests/{request_id:str}")
    async def timeline(request: AdminRequest) -> Response[bytes]:
        request_id = request.path_params["request_id"]
        found = await door.timelines.find(request_id)
        if not found:
            raise UnknownRequest(f"No proxy remembers a request {request_id!r}; each keeps its last {NUM_KEPT}.")
        return Response(found, media_type=_JSON, headers=id_header(request))

    @get("/dashboard", opt=OPEN)
    async def dashboard(request: AdminRequest) -> Response[bytes]:
        return Response(page, media_type="text/html; charset=utf-8", headers=id_header(request) | _PAGE_HEADERS)

    @get("/dashboard/cluster")
    async def cluster(request: AdminRequest) -> Response[bytes]:
        reason = door.registry.why_not_ready()
        workers = door.registry.report(asyncio.get_running_loop().time())
        told = ClusterState(config.served_model_name, reason is None, reason or "", workers)
        return Response(msgspec.json.encode(told), media_type=_JSON, headers=id_header(request))

    return [metrics, sd, timeline, dashboard, cluster]
