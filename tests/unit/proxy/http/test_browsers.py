"""What a browser meets: CORS for allowed pages, nothing for others, and keys for what changes the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from starlette.testclient import TestClient

from tandem.proxy.http.api_keys import ApiKeys
from tandem.proxy.http.app import make_admin_app, make_app
from tandem.proxy.http.app_state import AppState
from tests.support.settings import proxy_config

PAGE = "https://chat.example.com"
SIMPLE = {"Content-Type": "text/plain", "Origin": "https://evil.example", "Host": "127.0.0.1:8000"}
LOAD = "/v1/load_lora_adapter"


def client(**config: Any) -> TestClient:
    """Returns a client of the public address."""
    state = MagicMock(spec=AppState)
    state.api_keys = ApiKeys("key", None) if config.pop("has_keys", False) else None
    state.media = None
    settings = proxy_config(admin_port=1, **config)
    return TestClient(make_app(settings, state, MagicMock()), "http://127.0.0.1:8000")


def admin(host: str, keys: ApiKeys | None = None) -> TestClient:
    config = proxy_config(admin_port=1, admin_host=host)
    return TestClient(make_admin_app(config, MagicMock(spec=AppState), MagicMock(), keys), "http://127.0.0.1:8001")


def preflight(asked: TestClient, origin: str) -> Any:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    return asked.options("/v1/chat/completions", headers=headers)


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("origins", [[PAGE], ["*"]])
def test_an_allowed_page_may_call_and_read(origins: list[str], has_keys: bool) -> None:
    asked = client(cors_origin=origins, has_keys=has_keys)
    answer = preflight(asked, PAGE)
    assert answer.status_code == 200, "a preflight request has no key"
    assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    for path in ("/live", "/nothing"):
        answer = asked.get(path, headers={"Origin": PAGE})
        assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers


def test_other_pages_may_not() -> None:
    asked = client(cors_origin=[PAGE])
    for origin in ("https://evil.example", "http://chat.example.com", "null"):
        assert preflight(asked, origin).status_code == 400
        assert "access-control-allow-origin" not in asked.get("/live", headers={"Origin": origin}).headers


def test_without_the_option_there_is_no_cors() -> None:
    answer = preflight(client(), PAGE)
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
def test_a_simple_request_of_another_site_computes_nothing(path: str) -> None:
    answer = client().post(path, content=b"{}", headers=SIMPLE)
    assert answer.status_code == 403 and "--cors-origin" in answer.text
    assert "x-request-id" in answer.headers


def test_with_keys_any_page_that_has_one_is_served() -> None:
    asked = client(has_keys=True)
    assert asked.get("/live", headers=SIMPLE | {"Host": "any.example"}).status_code == 200
    assert asked.post("/tokenize", headers=SIMPLE).status_code == 401


def test_the_admin_address_on_loopback_knows_its_names() -> None:
    asked = admin("127.0.0.1")
    assert asked.get("/dashboard").status_code == 200
    assert asked.get("/dashboard", headers={"Host": "evil.example:8001"}).status_code == 403
    assert asked.post(LOAD, headers=SIMPLE).status_code == 403
    assert asked.post(LOAD).status_code == 400  # no JSON


def test_an_open_admin_address_changes_nothing_without_keys() -> None:
    asked = admin("0.0.0.0")
    assert asked.get("/dashboard", headers={"Host": "gpu.example:8001"}).status_code == 200
    for method, path in (("POST", LOAD), ("POST", "/v1/unload_lora_adapter"), ("PUT", "/workers/w/role")):
        answer = asked.request(method, path, json={})
        assert answer.status_code == 403 and "--admin-keys-file" in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_admin_keys_are_asked_for_by_what_changes_something(host: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("secret operator\n")
    asked = admin(host, ApiKeys(None, file, "admin_keys_file"))
    assert asked.get("/dashboard").status_code == 200
    assert asked.post(LOAD, json={}).status_code == 401
    assert asked.post(LOAD, headers={"Authorization": "Bearer secret"}).status_code == 400
