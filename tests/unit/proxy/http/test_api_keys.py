"""API keys: each is accepted and is a separate client; all others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.deploy.config import read_api_keys
from tandem.proxy.http.starlette_app import ApiKeys
from tandem.runtime.errors import ConfigError


def test_each_key_is_a_client() -> None:
    keys = ApiKeys(["one", "zwei", "drei-ä"])
    clients = [keys.client_of(f"Bearer {key}") for key in ("one", "zwei", "drei-ä")]
    assert len(set(clients)) == 3 and None not in clients
    assert not any("one" in str(client) for client in clients), "the name must not reveal the key"
    for wrong in ("", "one", "Bearer", "Bearer ", "Bearer On", "Bearer one ", "bearer one", "Bearer \udcff"):
        assert keys.client_of(wrong) is None


def test_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\n  beta \nalpha\n")
    assert read_api_keys(file) == ["alpha", "beta"]
    file.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="holds no keys"):
        read_api_keys(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_api_keys(tmp_path / "missing")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_api_keys(file)
