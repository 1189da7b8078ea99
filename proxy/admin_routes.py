"""The routes for who runs the cluster: the metrics.

One list, so that they can be served where clients do not reach.
"""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from proxy.config import ProxyConfig
from proxy.generation import FrontDoor
from proxy.request_id import id_header
from telemetry.metrics import CONTENT_TYPE

AdminRequest = Request[Any, Any, Any]


def admin_routes(config: ProxyConfig, door: FrontDoor) -> list[HTTPRouteHandler]:
    @get("/metrics")
    async def metrics(request: AdminRequest) -> Response[bytes]:
        return Response(await door.scrapes.render(), media_type=CONTENT_TYPE, headers=id_header(request))

    return [metrics]
