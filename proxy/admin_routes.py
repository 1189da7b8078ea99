"""The routes for who runs the cluster: metrics, what Prometheus is to scrape, and what became of one request.

One list, so that they can be served where clients do not reach.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from proxy.config import ProxyConfig
from proxy.generation import FrontDoor
from proxy.request_id import id_header
from proxy.scrape_targets import scrape_targets
from telemetry.metrics import CONTENT_TYPE

AdminRequest = Request[Any, Any, Any]
_JSON = "application/json"


def admin_routes(config: ProxyConfig, door: FrontDoor) -> list[HTTPRouteHandler]:
    @get("/metrics")
    async def metrics(request: AdminRequest) -> Response[bytes]:
        return Response(await door.scrapes.render(), media_type=CONTENT_TYPE, headers=id_header(request))

    @get("/sd")
    async def sd(request: AdminRequest) -> Response[bytes]:
        targets = scrape_targets(config, request.headers.get("host", ""), door.registry.workers())
        return Response(msgspec.json.encode(targets), media_type=_JSON, headers=id_header(request))

    return [metrics, sd]
