"""Routes for operators: metrics, the dashboard, Prometheus service discovery, timelines and roles of workers.

They are served on the admin address, or beside the client routes where there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.protocol.messages.membership import Role, WorkerReport
from tandem.proxy.answers.errors import RoleRefused, UnknownRequest, UnknownWorker
from tandem.proxy.config import ProxyConfig
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.starlette_app import ApiRoute, answer, fixed_answer, json_answer
from tandem.proxy.observe.scrape_targets import scrape_targets
from tandem.runtime.errors import InvalidRequest
from tandem.telemetry.proxy_metrics import CONTENT_TYPE
from tandem.telemetry.request_log import NUM_KEPT
from tandem.telemetry.vllm_names import load_gauges, vllm_text

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'",
    "cache-control": "no-cache",
}


class ClusterState(msgspec.Struct, frozen=True):
    """What the dashboard shows beside the metrics. reason: why the cluster is not ready."""

    model: str
    ready: bool
    reason: str
    workers: list[WorkerReport]


class RoleBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `PUT /workers/{worker_id}/role`."""

    role: Role


class WorkerRole(msgspec.Struct, frozen=True):
    worker_id: str
    role: Role


SetRole = Callable[[str, Role], str]
"""Orders a worker to take a role; returns why that is not possible, or ""."""


def admin_routes(config: ProxyConfig, state: AppState, set_role: SetRole) -> list[ApiRoute]:
    page = Path(__file__).with_name("dashboard.html").read_text()
    table = state.worker_table

    async def metrics(request: Request) -> Response:
        text = await asyncio.to_thread(state.metrics.render)  # takes milliseconds
        if config.metrics_compat == "vllm":
            gauges = load_gauges(worker.load for worker in table.report(asyncio.get_running_loop().time()))
            text += await asyncio.to_thread(
                lambda: vllm_text(state.metrics.families(), gauges, config.served_model_name)
            )
        return answer(request, text, CONTENT_TYPE)

    async def service_discovery(request: Request) -> Response:
        return json_answer(request, scrape_targets(config, request.headers.get("host", ""), table.workers()))

    async def timeline(request: Request) -> Response:
        request_id = request.path_params["request_id"]
        found = await state.timelines.find(request_id)
        if not found:
            raise UnknownRequest(f"No proxy knows a request {request_id!r}; each keeps its last {NUM_KEPT}.")
        return answer(request, found)

    async def cluster(request: Request) -> Response:
        reason = table.why_not_ready()
        if reason is not None and (trouble := table.pair_trouble()) is not None:
            reason += f": {trouble}"
        workers = table.report(asyncio.get_running_loop().time())
        return json_answer(request, ClusterState(config.served_model_name, reason is None, reason or "", workers))

    async def put_role(request: Request) -> Response:
        # A page of another site can send such a body from an operator's browser only after a preflight request, which
        # is answered with 405.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise InvalidRequest("Send the role as JSON with Content-Type: application/json.", "content-type")
        async with state.bodies.receive(request.receive, request.headers) as body:
            try:
                role = msgspec.json.decode(body if isinstance(body, bytes) else b"", type=RoleBody).role
            except msgspec.DecodeError as error:
                raise InvalidRequest(f'Send {{"role": "prefill"}}, "decode" or "any": {error}', "role") from error
        worker_id = request.path_params["worker_id"]
        if all(worker.worker_id != worker_id for worker in table.workers()):
            raise UnknownWorker(table.unknown_worker(worker_id))
        if refusal := set_role(worker_id, role):
            raise RoleRefused(refusal)
        return json_answer(request, WorkerRole(worker_id, role))

    return [
        ApiRoute("PUT", "/workers/{worker_id}/role", put_role),
        ApiRoute("GET", "/metrics", metrics),
        ApiRoute("GET", "/sd", service_discovery),
        ApiRoute("GET", "/debug/requests/{request_id}", timeline),
        ApiRoute("GET", "/dashboard", fixed_answer(page, "text/html", PAGE_HEADERS), is_open=True),
        ApiRoute("GET", "/dashboard/cluster", cluster),
    ]
