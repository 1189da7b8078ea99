"""Routes about the server: its models, tokeniser, configuration, load and health."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.proxy.api.responses import (
    HealthResponse,
    ModelCard,
    ModelList,
    ServerInfo,
    ServerLoad,
    VersionResponse,
)
from tandem.proxy.api.validation import ModelNotFound
from tandem.proxy.cluster.adapter_table import NamedAdapter
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.openapi import docs_page, openapi_document
from tandem.proxy.http.routes.admin import PAGE_HEADERS
from tandem.proxy.http.starlette_app import ApiRoute, fixed_answer, json_answer
from tandem.proxy.proxy_config import ProxyConfig
from tandem.runtime.errors import Overloaded
from tandem.runtime.threads import Threads
from tandem.runtime.version import own_version

MAX_INFO_CALLS = 16
"""Calls of /tokenizer_info that may run or wait on one proxy; further ones get 503."""
_INFO_TIMEOUT_S = 30.0
_SHOWN_CONFIG = (
    "model", "served_model_name", "num_proxies", "tokenizer_threads", "trust_request_chat_template", "tool_call_parser",
    "generation_config", "max_logprobs", "decode_prefill_threshold", "max_body_bytes", "max_waiting_requests",
    "max_waiting_tokens", "low_priority_share", "soonest_priority", "max_requests_per_client", "request_timeout_s",
    "worker_wait_s", "ttft_slo_ms",
)  # fmt: skip
"""Fields of ProxyConfig that clients may see: no keys, addresses or files other than the model's."""


def server_routes(config: ProxyConfig, state: AppState) -> list[ApiRoute]:
    card = ModelCard(config.served_model_name, int(time.time()), None, root=config.served_model_name)
    document = openapi_document(config.served_model_name, state.api_keys is not None)
    show_health = partial(_health, state)
    reading = Threads("tokenizer info", 1, MAX_INFO_CALLS, _INFO_TIMEOUT_S)

    def adapter_card(base: ModelCard, adapter: NamedAdapter) -> ModelCard:
        return msgspec.structs.replace(
            base, id=adapter.name, created=adapter.created or base.created, root=adapter.name, parent=base.id
        )

    async def models(request: Request) -> Response:
        base = _with_limit(state, card)
        return json_answer(request, ModelList([base, *(adapter_card(base, each) for each in state.adapters.all())]))

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        base = _with_limit(state, card)
        if name == config.served_model_name:
            return json_answer(request, base)
        if (adapter := state.adapters.get(name)) is None:
            raise ModelNotFound(
                f"The model {name!r} does not exist; this server has {config.served_model_name!r}.", "model"
            )
        return json_answer(request, adapter_card(base, adapter))

    async def tokenizer_info(request: Request) -> Response:
        return json_answer(request, await reading.run(state.text.tokenizer_info))

    async def server_info(request: Request) -> Response:
        shown = {name: getattr(config, name) for name in _SHOWN_CONFIG}
        defaults = state.text.sampling_defaults.known()
        return json_answer(request, ServerInfo(own_version(), max_model_len(state), defaults, shown))

    async def load(request: Request) -> Response:
        return json_answer(request, ServerLoad(state.dispatcher.num_running))

    page = Path(__file__).with_name("chat.html").read_text()
    page = page.replace("TAKES_IMAGES", "yes" if state.media is not None else "no")

    return [
        ApiRoute("GET", "/", fixed_answer(page, "text/html", PAGE_HEADERS), is_open=True),
        ApiRoute("GET", "/v1/models", models),
        ApiRoute("GET", "/v1/models/{name:path}", model),
        ApiRoute("GET", "/tokenizer_info", tokenizer_info),
        ApiRoute("GET", "/server_info", server_info),
        ApiRoute("GET", "/load", load),
        ApiRoute("GET", "/health", show_health, is_open=True),
        ApiRoute("GET", "/ping", show_health, is_open=True),
        ApiRoute("POST", "/ping", show_health, is_open=True),
        ApiRoute("GET", "/live", fixed_answer(HealthResponse("ok")), is_open=True),
        ApiRoute("GET", "/version", fixed_answer(VersionResponse(own_version()))),
        ApiRoute("GET", "/openapi.json", fixed_answer(document), is_open=True),
        ApiRoute("GET", "/docs", fixed_answer(docs_page(document), "text/html"), is_open=True),
    ]


def max_model_len(state: AppState) -> int | None:
    """Returns the limit that all workers accept; None while there is no worker."""
    try:
        return state.worker_table.limits().max_model_len
    except Overloaded:
        return None


def _with_limit(state: AppState, card: ModelCard) -> ModelCard:
    return msgspec.structs.replace(card, max_model_len=max_model_len(state))


async def _health(state: AppState, request: Request) -> Response:
    reason = state.worker_table.why_not_ready()
    if reason is None:
        return json_answer(request, HealthResponse("ok"))
    return json_answer(request, HealthResponse("unavailable", reason), status=503)
