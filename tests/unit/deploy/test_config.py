"""The operator's configuration: file, command line, and what is said about mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.deploy.cli import _parser
from tandem.deploy.config import ClusterConfig, field_descriptions, load_config
from tandem.runtime.errors import ConfigError


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('prefill = 2\ndecode = 3\ndevice = "cpu"\n')
    config = load_config(file, {"decode": 4})
    assert (config.prefill, config.decode, config.device, config.proxies) == (2, 4, "cpu", 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("decod = 2", "decod"),
        ("decode = 0", "decode"),
        ('port = "x"', "port"),
        ('kv_connector = "pigeon"', "kv_connector"),
        ("= broken", "TOML"),
        ('cluster_host = "10.0.0.1"', r"tandem keys FOLDER.*--insecure-network"),
        ('cluster_host = "0.0.0.0"\ninsecure_network = true', "cluster_host"),
        ('cluster_host = "10.0.0.1"\nnetwork_keys = "/nonexistent"', "tandem keys /nonexistent"),
        ('join = "tcp://10.0.0.1:7777"', "--cluster-host"),
        ('join = "10.0.0.1:7777"\ncluster_host = "10.0.0.2"\ninsecure_network = true', "tcp://HOST:PORT"),
        ("port = 9000\nadmin_port = 9000", "admin_port"),
        ("prefill = 0\ndecode_prefill_threshold = 0", "prefill.*--decode-prefill-threshold"),
        ("prefill = 0\nautoscale = true", "autoscale.*--prefill"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        load_config(file, {})


def test_every_field_is_a_flag_with_a_description() -> None:
    descriptions = field_descriptions()
    assert set(descriptions) == set(ClusterConfig.__struct_fields__)
    assert all(descriptions.values())
    arguments = _parser().parse_args(
        ["up", "--model", "m", "--prefill", "2", "--kv-cache-gib", "0.5", "--trust-remote-code"]
    )
    assert (arguments.model, arguments.prefill, arguments.kv_cache_gib, arguments.trust_remote_code) == (
        "m",
        2,
        0.5,
        True,
    )
    assert "decode" not in arguments, "what was not given must not override the file"
