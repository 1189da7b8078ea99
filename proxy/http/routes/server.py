"""Routes about the server: its models, tokeniser, configuration, load and health."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.proxy.api.answer_bodies import HealthResponse, ModelCard, ModelList, VersionResponse
from tandem.proxy.api.validation import ModelNotFound
from tandem.proxy.cluster.adapter_table import NamedAdapter
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.routes.admin import PAGE_HEADERS
from tandem.proxy.http.starlette_app import ApiRoute, fixed_answer, json_answer
from tandem.proxy.proxy_config import ProxyConfig
from tandem.runtime.errors import Overloaded
from tandem.runtime.version import own_version


def server_routes(config: ProxyConfig, state: AppState) -> list[ApiRoute]:
    card = ModelCard(config.served_model_name, int(time.time()), None, root=config.served_model_name)

    def adapter_card(base: ModelCard, adapter: NamedAdapter) -> ModelCard:
        return msgspec.structs.replace(
            base, id=adapter.name, created=adapter.created or base.created, root=adapter.name, parent=base.id
        )

    async def models(request: Request) -> Response:
        base = _with_limit(state, card)
        return json_answer(request, ModelList([base, *(adapter_card(base, each) for each in state.adapters.all())]))

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        base = _with_limit(state, card)
        if name == config.served_model_name:
            return json_answer(request, base)
        if (adapter := state.adapters.get(name)) is None:
            raise ModelNotFound(
                f"The model {name!r} does not exist; this server has {config.served_model_name!r}.", "model"
            )
        return json_answer(request, adapter_card(base, adapter))

    page = Path(__file__).with_name("chat.html").read_text()
    page = page.replace("TAKES_IMAGES", "yes" if state.media is not None else "no")

    return [
        ApiRoute("GET", "/", fixed_answer(page, "text/html", PAGE_HEADERS), "A page to chat with the model.",
            "text/html", is_open=True),
        ApiRoute("GET", "/v1/models", models, "The model that is served, and LoRA adapters.", ModelList),
        ApiRoute("GET", "/v1/models/{model:path}", model, "The same, by its name.", ModelCard, more_errors=(404,)),
        *health_routes(state),
        ApiRoute("GET", "/version", fixed_answer(VersionResponse(own_version())), "Tandem's version.",
            VersionResponse),
    ]  # fmt: skip


def health_routes(state: AppState) -> list[ApiRoute]:
    """Returns what load balancers and probes ask, on both addresses."""
    return [
        ApiRoute("GET", "/health", partial(_health, state), "200 while requests can be served.", HealthResponse,
            more_errors=(503,), is_open=True),
        ApiRoute("GET", "/live", fixed_answer(HealthResponse("ok")), "200 while the process runs.", HealthResponse,
            is_open=True),
    ]  # fmt: skip


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
