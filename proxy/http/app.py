"""The applications of a proxy: for clients, for operators and for the requests of batches."""

from __future__ import annotations

from starlette.types import ASGIApp

from tandem.proxy.config import ProxyConfig
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.routes.admin import SetRole, admin_routes
from tandem.proxy.http.routes.batches import batch_routes
from tandem.proxy.http.routes.generation import generation_routes
from tandem.proxy.http.routes.responses import response_routes
from tandem.proxy.http.routes.server import server_routes
from tandem.proxy.http.starlette_app import starlette_app


def make_app(config: ProxyConfig, state: AppState, set_role: SetRole) -> ASGIApp:
    """Returns the application for clients. It has the admin routes too where there is no admin address."""
    routes = [
        *generation_routes(config, state),
        *response_routes(state),
        *batch_routes(state),
        *server_routes(config, state),
    ]
    if not config.admin_port:
        routes += admin_routes(config, state, set_role)
    return starlette_app(routes, state.api_keys)


def make_batch_app(config: ProxyConfig, state: AppState) -> ASGIApp:
    """Returns the application for the lines of batches. Their API key is known already."""
    return starlette_app(generation_routes(config, state), None)


def make_admin_app(config: ProxyConfig, state: AppState, set_role: SetRole) -> ASGIApp:
    """Returns the application for the admin address. API keys are for clients and do not apply to it."""
    return starlette_app(admin_routes(config, state, set_role), None)
