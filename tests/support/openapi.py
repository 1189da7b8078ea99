"""The OpenAPI document of a proxy's routes, without a proxy."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

from tandem.proxy.http.app import client_routes
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.openapi import document_routes, openapi_document
from tandem.proxy.http.starlette_app import ApiRoute
from tests.support.settings import proxy_config


def documented_routes(model: str, has_api_key: bool) -> list[ApiRoute]:
    """Returns all routes of the client's address, which must not be called."""
    routes = client_routes(proxy_config(served_model_name=model), MagicMock(spec=AppState, readers=None, media=None))
    return routes + document_routes(routes, model, has_api_key)


def openapi_of(model: str, has_api_key: bool) -> dict[str, Any]:
    return openapi_document(documented_routes(model, has_api_key), model, has_api_key)
