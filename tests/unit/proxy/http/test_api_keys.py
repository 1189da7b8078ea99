"""API keys: each is accepted and is a client of its own unless named; all others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from tandem.proxy.admission.budgets import AnswerBudget
from tandem.proxy.http.api_keys import MAX_FILE_BYTES, ApiKeys, KeyFile, parse_keys
from tandem.proxy.http.starlette_app import ApiRoute, starlette_app
from tandem.runtime.errors import ConfigError


def client_of(keys: ApiKeys, key: str) -> str:
    found = keys.find(f"Bearer {key}")
    assert found is not None
    return found.client


def test_each_key_without_a_name_is_a_client(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("zwei\ndrei-ä\n")
    keys = ApiKeys("one", file)
    clients = [client_of(keys, key) for key in ("one", "zwei", "drei-ä")]
    assert len(set(clients)) == 3
    assert not any("one" in client or "zwei" in client for client in clients), "the name must not reveal the key"
    for wrong in ("", "one", "Bearer", "Bearer ", "Bearer On", "Bearer one ", "Basic one", "Bearer \udcff"):
        assert keys.find(wrong) is None


def test_a_key_is_found_in_both_headers_whatever_else_they_hold() -> None:
    keys = ApiKeys("one", None)
    for authorization, x_api_key in (
        ("bearer one", ""),
        ("BEARER  one", ""),
        ("", "one"),
        ("Basic dXNlcjpwYXNz", "one"),
        ("Bearer of-a-gateway", "one"),
        ("Bearer one", "of-another-server"),
    ):
        assert keys.find(authorization, x_api_key) is not None, (authorization, x_api_key)
    for authorization, x_api_key in (("Bearer two", "three"), ("Basic one", ""), ("one", ""), ("", "Bearer one")):
        assert keys.find(authorization, x_api_key) is None


def test_a_missing_key_is_asked_for_by_its_scheme() -> None:
    async def never(request: Request) -> Response:
        raise AssertionError("it was let in")

    routes = [ApiRoute("GET", path, never) for path in ("/v1/models", "/v1/messages")]
    app = starlette_app(routes, ApiKeys("one", None), AnswerBudget())
    with TestClient(app) as client:
        for path, code in (("/v1/models", "invalid_api_key"), ("/v1/messages", "authentication_error")):
            answer = client.get(path, headers={"Authorization": "Bearer wrong"})
            assert answer.status_code == 401 and code in answer.text
            assert answer.headers["www-authenticate"] == 'Bearer realm="tandem"'


def test_keys_of_one_name_are_one_client_with_one_cache(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nold  team a\n\n  new\tteam a \nother team b\nlone\nlone\n")
    keys = ApiKeys(None, file)
    old, new, other, lone = (keys.find(f"Bearer {key}") for key in ("old", "new", "other", "lone"))
    assert old is not None and new is not None and other is not None and lone is not None
    assert (old.client, old.cache_scope) == (new.client, new.cache_scope)
    assert len({key.client for key in (old, other, lone)}) == len({key.cache_scope for key in (old, other, lone)}) == 3
    assert ApiKeys("lone", None).find("Bearer lone").cache_scope == lone.cache_scope


def test_files_that_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for text in ("", "# none yet\n"):
        with pytest.raises(ConfigError, match="holds no keys"):
            parse_keys(text)
    with pytest.raises(ConfigError, match="line 3") as caught:
        parse_keys("secret a\nx\nsecret b\n")
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        KeyFile(tmp_path / "missing").read()
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        KeyFile(file).read()
    file.write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        KeyFile(file).read()


def test_a_change_is_read_once_the_file_has_settled(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a\n")
    file = KeyFile(path)
    assert file.read() == "a\n" and file.changed() is None
    path.write_text("a\nlonger\n")
    assert file.changed() is None, "it may still be written"
    path.write_text("a\nlonger still\n")
    assert file.changed() is None
    assert file.changed() == "a\nlonger still\n" and file.changed() is None
    replacement = tmp_path / "replacement"
    replacement.write_text("a\nlonger still\n")
    replacement.replace(path)
    assert file.changed() is None and file.changed() == "a\nlonger still\n", "another file under the same name"
