"""The `tandem` command: operator errors print one line and exit with 2, and options reach the cluster."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.cluster import MODEL, Cluster, refused_start, run_tandem, tandem
from tests.support.ports import free_port


def refused(*arguments: str) -> str:
    """Returns the one line of the error message."""
    last = refused_start(*arguments).splitlines()[-1]
    assert last.startswith("tandem: ")
    return last


def test_wrong_model_path(tmp_path: Path) -> None:
    assert "no model folder" in refused("--model", str(tmp_path / "nowhere"))


def test_wrong_chat_template(tmp_path: Path, noise_model: Path) -> None:
    assert "--chat-template: there is no file" in refused("--chat-template", str(tmp_path / "nowhere.jinja"))
    (tmp_path / "chat.jinja").write_text("{{ messages")
    error = refused("--model", str(noise_model), "--chat-template", str(tmp_path / "chat.jinja"))
    assert "chat.jinja is not valid Jinja, at line 1" in error


def test_unsupported_architecture(tmp_path: Path, noise_model: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    shutil.copy(noise_model / "tokenizer.json", tmp_path)
    assert "cannot be served" in refused("--model", str(tmp_path))


def test_broken_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libnothing.so: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    problem = "cannot import what workers need: ImportError: libnothing.so: cannot open shared object file"
    assert refused() == f"tandem: {problem}"


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = refused("--port", str(port))
    assert str(port) in error and "--port" in error


def test_unknown_config_key(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("prefil = 2\n")
    assert "prefil" in refused("--config", str(file))


def test_wrong_config_value(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('prefill = "two"\n')
    assert "prefill" in refused("--config", str(file))


def test_missing_config_file(tmp_path: Path) -> None:
    assert "cannot read" in refused("--config", str(tmp_path / "none.toml"))


def test_questions_without_a_cluster() -> None:
    for command in ("status", "doctor"):
        done = run_tandem(command, "--port", str(free_port()))
        assert done.returncode == 2 and "no cluster runs" in done.stderr
    done = run_tandem("doctor", "--seconds", "0")
    assert done.returncode == 2 and "give 1 to 3600" in done.stderr


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_options_reach_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('api_key = "sesame"\nproxies = 2\nmax_model_len = 512\n')
    with Cluster("--config", str(file), "--max-model-len", "256") as cluster:
        body = {"model": MODEL, "prompt": [5] * 300, "max_tokens": 4}
        url = f"{cluster.url}/v1/completions"
        assert httpx.post(url, json=body, timeout=30).status_code == 401
        headers = {"Authorization": "Bearer sesame"}
        answer = httpx.post(url, json=body, headers=headers, timeout=30)
        assert answer.status_code == 400 and "256" in answer.text  # the command line wins over the file
        for _ in range(8):  # each connection may land on either proxy
            answer = httpx.post(url, json={**body, "prompt": "open"}, headers=headers, timeout=30)
            assert answer.status_code == 200, answer.text
        command = tandem("status", "--json", "--port", str(cluster.port))
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as unread:
            assert unread.stdout is not None and unread.stderr is not None
            unread.stdout.close()  # as `head` does
            assert (unread.stderr.read(), unread.wait(90)) == ("", 1)
        done = cluster.run("status")
        assert done.returncode == 0 and "decode-0" in done.stdout and "2 proxies" in done.stdout
        done = cluster.run("doctor", "--seconds", "1")
        assert done.returncode == 0 and "Nothing was served in the last 1 s; send" in " ".join(done.stdout.split())
