"""Middlewares for requests that browsers send for web pages."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.proxy.admission.browser_rules import BrowserRules, OriginNotAllowed
from tandem.proxy.answers.errors import tandem_error_response
from tandem.proxy.answers.record_header import HEADER as RECORD_HEADER
from tandem.proxy.answers.request_id import ANTHROPIC_HEADER, HEADER

_METHODS = ("GET", "POST", "DELETE")
_SHOWN_HEADERS = (HEADER, ANTHROPIC_HEADER, RECORD_HEADER, "retry-after", "www-authenticate")
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


def with_rules(app: ASGIApp, rules: BrowserRules) -> ASGIApp:
    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            rules.check(scope["method"], Headers(scope=scope))
        except OriginNotAllowed as error:
            await tandem_error_response(Request(scope), error)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return checked
