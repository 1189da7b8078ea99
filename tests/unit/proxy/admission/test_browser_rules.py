"""A page of another site cannot use a server without keys, and programs that are no browsers notice nothing."""

from __future__ import annotations

import pytest

from tandem.proxy.admission.browser_rules import BrowserRules, OriginNotAllowed, parse_origins
from tandem.runtime.errors import ConfigError

LOCAL = BrowserRules(["https://chat.example.com"], "127.0.0.1")
PUBLIC = BrowserRules(["https://chat.example.com"], "0.0.0.0")
OPEN = BrowserRules(["*"], "127.0.0.1")
EVIL = {"host": "127.0.0.1:8000", "origin": "https://evil.example"}
REBOUND = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": ""},
        *(
            {"host": host}
            for host in (
                "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "gpu-box:8000", "a.localhost",
                "host.docker.internal:8000", "gpu.local", "CHAT.example.com",
            )
        ),
        {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"},
        {"host": "localhost:8000", "origin": "http://localhost:8000", "sec-fetch-site": "same-origin"},
        {"host": "localhost:8000", "sec-fetch-site": "none"},
        {"host": "localhost:8000", "origin": "https://chat.example.com", "sec-fetch-site": "cross-site"},
        {"host": "localhost:8000", "origin": "HTTPS://Chat.Example.COM"},
        {"host": "127.0.0.1:8000", "origin": "https://behind.example.com", "sec-fetch-site": "same-origin"},
    ],
)  # fmt: skip
def test_own_pages_allowed_pages_and_programs_are_served(headers: dict[str, str]) -> None:
    for rules in (LOCAL, PUBLIC, OPEN):
        for method in ("GET", "POST", "DELETE"):
            rules.check(method, headers)


@pytest.mark.parametrize(
    "headers",
    [
        EVIL,
        EVIL | {"sec-fetch-site": "cross-site"},
        {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:9000", "sec-fetch-site": "same-site"},
        {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:9000"},
        {"host": "127.0.0.1:8000", "origin": "null"},
        {"host": "127.0.0.1:8000", "origin": "http://chat.example.com"},
    ],
)
def test_pages_of_other_sites_compute_and_change_nothing(headers: dict[str, str]) -> None:
    for rules in (LOCAL, PUBLIC):
        rules.check("GET", headers)  # the browser does not show the answer
        rules.check("OPTIONS", headers)
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            with pytest.raises(OriginNotAllowed, match="--cors-origin"):
                rules.check(method, headers)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_name_of_the_internet_does_not_reach_loopback(method: str) -> None:
    with pytest.raises(OriginNotAllowed, match="Use localhost"):
        LOCAL.check(method, REBOUND)
    with pytest.raises(OriginNotAllowed):
        LOCAL.check(method, {"host": "evil.example."})
    PUBLIC.check(method, REBOUND)


def test_a_long_header_is_not_repeated() -> None:
    for headers in ({"host": "a." * 30_000}, {"host": "127.0.0.1", "origin": "https://" + "a" * 60_000}):
        with pytest.raises(OriginNotAllowed) as caught:
            LOCAL.check("POST", headers)
        assert len(caught.value.message) < 800


def test_origins_are_read_from_lists() -> None:
    assert parse_origins(["https://A.com, http://b:80", "*"]) == ["https://a.com", "http://b:80", "*"]
    assert parse_origins([""]) == []
    for wrong in ("a.com", "https://a.com/", "https://a.com/path", "https://*.a.com", "https://"):
        with pytest.raises(ConfigError, match="write it as"):
            parse_origins([wrong])
