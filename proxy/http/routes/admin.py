"""Routes for operators: metrics, the dashboard, Prometheus service discovery, timelines, roles, LoRA adapters.

They are served on the admin address, or beside the client routes where there is none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tandem.protocol.messages.membership import Role, WorkerInfo, WorkerReport
from tandem.proxy.answers.errors import RoleRefused, UnknownRequest, UnknownWorker
from tandem.proxy.api.field_checks import decode_body
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.starlette_app import ApiRoute, answer, client_of, fixed_answer, json_answer
from tandem.proxy.proxy_config import ProxyConfig
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.files.lora_files import read_adapter
from tandem.runtime.threads import Threads
from tandem.telemetry.proxy_metrics import CONTENT_TYPE
from tandem.telemetry.request_log import NUM_KEPT

log = logging.getLogger(__name__)

MAX_SCRAPES, MAX_ADAPTER_CALLS = 32, 16
"""Limits for calls of /metrics, and for calls that load or unload adapters, on one proxy; then they get 503."""
_ADMIN_TIMEOUT_S = 60.0
"""What such a call may take: the disk of an adapter may be that of another host."""

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'",
    "cache-control": "no-cache",
}


class ClusterState(msgspec.Struct, frozen=True):
    """The state of the cluster, which the dashboard shows beside the metrics. reason: why the cluster is not ready."""

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


AdapterName = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadAdapterBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's fields. lora_path: absolute path of the folder, on every host with workers."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=1024)]
    load_inplace: bool = False


class UnloadAdapterBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's fields. lora_int_id: accepted and ignored."""

    lora_name: AdapterName
    lora_int_id: int | None = None


SetRole = Callable[[str, Role], str]
"""Orders a worker to take a role; returns why that is not possible, or ""."""


_LOAD_ADAPTER = msgspec.json.Decoder(LoadAdapterBody)
_UNLOAD_ADAPTER = msgspec.json.Decoder(UnloadAdapterBody)


async def _json_body(state: AppState, request: Request) -> bytes:
    """Returns a small body, or b"" for a large one. Raises InvalidRequest.

    A page of another site can send JSON from an operator's browser only after a preflight request, which is answered
    with 405.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequest("Send JSON with Content-Type: application/json.", "content-type")
    async with state.bodies.receive(request.receive, request.headers, client_of(request)) as body:
        return body if isinstance(body, bytes) else b""


def admin_routes(config: ProxyConfig, state: AppState, set_role: SetRole) -> list[ApiRoute]:
    page = Path(__file__).with_name("dashboard.html").read_text()
    table = state.worker_table
    rendering = Threads("metrics", 1, MAX_SCRAPES, _ADMIN_TIMEOUT_S)
    adapter_files = Threads("adapters", 2, MAX_ADAPTER_CALLS, _ADMIN_TIMEOUT_S)

    async def metrics(request: Request) -> Response:
        text = await rendering.run(state.metrics.render)  # takes milliseconds
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
        if reason is not None and (trouble := table.trouble()) is not None:
            reason += f": {trouble}"
        workers = table.report(asyncio.get_running_loop().time())
        return json_answer(request, ClusterState(config.served_model_name, reason is None, reason or "", workers))

    async def put_role(request: Request) -> Response:
        body = await _json_body(state, request)
        try:
            role = msgspec.json.decode(body, type=RoleBody).role
        except msgspec.DecodeError as error:
            raise InvalidRequest(f'Send {{"role": "prefill"}}, "decode" or "any": {error}', "role") from error
        worker_id = request.path_params["worker_id"]
        if all(worker.worker_id != worker_id for worker in table.workers()):
            raise UnknownWorker(table.unknown_worker(worker_id))
        if refusal := set_role(worker_id, role):
            raise RoleRefused(refusal)
        return json_answer(request, WorkerRole(worker_id, role))

    async def load_adapter(request: Request) -> Response:
        asked = decode_body(_LOAD_ADAPTER, await _json_body(state, request))
        folder = Path(asked.lora_path)
        files = await adapter_files.run(partial(read_adapter, folder))
        await state.readiness.limits()
        modules = table.lora_modules()
        files.check_rank(table.max_lora_rank())
        load = partial(state.adapters.load, asked.lora_name, files, folder, modules, replace=asked.load_inplace)
        await adapter_files.run(load)
        log.info("loaded the LoRA adapter %s from %s", asked.lora_name, folder)
        return answer(request, f"Success: LoRA adapter '{asked.lora_name}' added successfully.", "text/plain")

    async def unload_adapter(request: Request) -> Response:
        asked = decode_body(_UNLOAD_ADAPTER, await _json_body(state, request))
        await adapter_files.run(partial(state.adapters.unload, asked.lora_name))
        log.info("unloaded the LoRA adapter %s", asked.lora_name)
        return answer(request, f"Success: LoRA adapter '{asked.lora_name}' removed successfully.", "text/plain")

    return [
        ApiRoute("POST", "/v1/load_lora_adapter", load_adapter),
        ApiRoute("POST", "/v1/unload_lora_adapter", unload_adapter),
        ApiRoute("PUT", "/workers/{worker_id}/role", put_role),
        ApiRoute("GET", "/metrics", metrics),
        ApiRoute("GET", "/sd", service_discovery),
        ApiRoute("GET", "/debug/requests/{request_id}", timeline),
        ApiRoute("GET", "/dashboard", fixed_answer(page, "text/html", PAGE_HEADERS), is_open=True),
        ApiRoute("GET", "/dashboard/cluster", cluster),
    ]


_EVERY_ADDRESS = ("0.0.0.0", "::", "")


class TargetGroup(msgspec.Struct, frozen=True):
    """Labels with two leading underscores configure the scrape; the others are added to every series."""

    targets: list[str]
    labels: dict[str, str]


def scrape_targets(config: ProxyConfig, asked_host: str, workers: Iterable[WorkerInfo]) -> list[TargetGroup]:
    """Returns the proxies' shared port and each worker's own endpoint, for Prometheus (`http_sd_configs`).

    Proxies that share a port render each other's metrics, so they are one target.
    asked_host: the request's Host header (host:port), used where the proxy is bound to every address.

    workers: with their current roles, so that the label `role` follows a change of role.
    """
    http = config.http
    host, port = (http.admin_host, http.admin_port) if http.admin_port else (http.host, http.port)
    own = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if host in _EVERY_ADDRESS and asked_host:
        own = asked_host
    scheme = {"__scheme__": "https"} if http.ssl_certfile and not http.admin_port else {}
    groups = [TargetGroup([own], {"role": "proxy", **scheme})]
    for worker in sorted(workers, key=lambda worker: (worker.role, worker.worker_id)):
        if worker.metrics_address:
            groups.append(TargetGroup([worker.metrics_address], {"role": worker.role, "worker": worker.worker_id}))
    return groups
