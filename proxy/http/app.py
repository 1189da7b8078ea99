"""The applications of a proxy: for clients, for operators and for the requests of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tandem.proxy.admission.browser_rules import BrowserRules, is_loopback
from tandem.proxy.answers.errors import AdminAddressIsOpen
from tandem.proxy.answers.http_answers import ANTHROPIC_ID_HEADER, ID_HEADER
from tandem.proxy.http.api_keys import ApiKeys
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.openapi import document_routes
from tandem.proxy.http.routes.admin import SetRole, admin_routes
from tandem.proxy.http.routes.batches import batch_routes
from tandem.proxy.http.routes.generation_routes import generation_routes
from tandem.proxy.http.routes.records import RECORD_HEADER, record_routes
from tandem.proxy.http.routes.server import health_routes, server_routes
from tandem.proxy.http.routes.stored_responses import response_routes
from tandem.proxy.http.starlette_app import ApiRoute, starlette_app, with_rules
from tandem.proxy.proxy_config import ProxyConfig


def make_app(config: ProxyConfig, state: AppState, set_role: SetRole) -> ASGIApp:
    """Returns the application for clients. It has the admin routes too where there is no admin address."""
    routes = client_routes(config, state)
    routes += document_routes(routes, config.served_model_name, state.api_keys is not None)
    if not config.http.admin_port:
        routes += admin_routes(config, state, set_role)
    app = starlette_app(routes, state.api_keys, state.answer_budget)
    if state.api_keys is None:
        app = with_rules(app, BrowserRules(config.http.cors_origins, config.http.host))
    return with_cors(app, config.http.cors_origins)


def client_routes(config: ProxyConfig, state: AppState) -> list[ApiRoute]:
    """Returns the routes for clients, without those of their description."""
    server = server_routes(config, state)
    return [
        *generation_routes(config, state),
        *response_routes(state),
        *batch_routes(state),
        *record_routes(state),
        *server,
    ]


def make_batch_app(config: ProxyConfig, state: AppState) -> ASGIApp:
    """Returns the application for the lines of batches. Their API key is known already."""
    return starlette_app(generation_routes(config, state), None, state.answer_budget)


def make_admin_app(config: ProxyConfig, state: AppState, set_role: SetRole, keys: ApiKeys | None = None) -> ASGIApp:
    """Returns the application for the admin address. Clients' API keys do not apply to it.

    It answers probes too, because clients can take all connections of the public address.
    keys: for requests that change something; None takes such requests on loopback only.
    """
    routes = [replace(route, is_open=route.method == "GET") for route in admin_routes(config, state, set_role)]
    routes += health_routes(state)
    if keys is None and not is_loopback(config.http.admin_host):
        routes = [route if route.is_open else replace(route, handler=_refuse_change) for route in routes]
    return with_rules(starlette_app(routes, keys, state.answer_budget), BrowserRules([], config.http.admin_host))


async def _refuse_change(request: Request) -> Response:
    raise AdminAddressIsOpen(
        "Everybody who can reach this address could change the cluster, so it needs keys: start Tandem with "
        "--admin-keys-file, or with --admin-host 127.0.0.1."
    )


_METHODS = ("GET", "POST", "DELETE")
_SHOWN_HEADERS = (ID_HEADER, ANTHROPIC_ID_HEADER, RECORD_HEADER, "retry-after", "www-authenticate")
"""Headers of answers that pages may read beside those that browsers always show."""


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Lets pages of these origins read answers. Their preflight requests need no API key."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=_METHODS,
        allow_headers=["*"],
        allow_private_network=True,  # a page on the internet may use a server on its reader's own network
        expose_headers=_SHOWN_HEADERS,
    )
