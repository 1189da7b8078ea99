"""`tandem up --ray` with vLLM's workers on a real Ray node: they serve, and an actor that is killed is replaced."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.test_ray import workers
from tests.integration.test_ray_site import environment, one_node
from tests.support.cluster import MODEL, Cluster, is_alive, tandem
from tests.support.noise_model import ensure_noise_model
from tests.support.ports import free_port
from tests.support.sse import events_of
from tests.support.vllm_clusters import START_TIMEOUT_S, cluster_arguments
from tests.support.vllm_python import vllm_python

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]

STEP_LIMIT = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "250"}
"""A variable of vLLM that only the launcher has."""
NAMES = {"prefill-0", "decode-0"}
BODY = {
    "model": MODEL, "prompt": list(range(5, 405)), "max_tokens": 400, "temperature": 1, "seed": 4, "ignore_eos": True,
    "return_token_ids": True, "stream": True,
}  # fmt: skip


def stream(url: str, to_kill: int = 0) -> list[int]:
    """Returns the tokens of a stream. to_kill: process that is killed when the stream has ten tokens."""
    token_ids: list[int] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=START_TIMEOUT_S) as answer:
        assert answer.status_code == 200, answer.read()
        for event in events_of(answer.iter_lines()):
            assert "error" not in event, event
            token_ids += event["choices"][0]["token_ids"]
            if to_kill and len(token_ids) >= 10:
                assert len(token_ids) < 300, "the stream is nearly done"
                os.kill(to_kill, signal.SIGKILL)
                to_kill = 0
    return token_ids


def test_workers_with_vllm_serve_and_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    python = vllm_python()
    pytest.importorskip("ray")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    model = ("--model", str(ensure_noise_model()), "--served-model-name", MODEL, "--kv-cache-gib", "0.1")
    where = ("--port", str(port), "--device", "cpu", "--insecure-network", "--worker-wait-s", "300")
    with one_node(monkeypatch) as address:
        command = tandem(
            "up", "--ray", address, *model, *where, "--decode-prefill-threshold", "0", *cluster_arguments(python)
        )
        env = {**os.environ, **STEP_LIMIT}
        launcher = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output = ""
        try:
            Cluster.wait_for(lambda: launcher.poll() is not None or set(workers(port)) == NAMES, START_TIMEOUT_S)
            before = {name: pid for name, (_, pid) in workers(port).items()}
            assert before.keys() == NAMES
            for pid in before.values():
                assert Path(psutil.Process(pid).cmdline()[0]) == Path(python)
                assert environment(pid).items() >= {**STEP_LIMIT, "VLLM_TARGET_DEVICE": "cpu"}.items()
            expected = stream(url)
            assert len(expected) == BODY["max_tokens"]
            killed = before["decode-0"]
            assert stream(url, to_kill=psutil.Process(killed).ppid()) == expected

            def is_replaced() -> bool:
                found = workers(port)
                return set(found) == NAMES and found["decode-0"][1] != killed

            Cluster.wait_for(is_replaced, START_TIMEOUT_S)
            assert not is_alive(killed)
            assert stream(url) == expected
            pids = [pid for _, pid in workers(port).values()]
        finally:
            launcher.send_signal(signal.SIGTERM)
            try:
                output, _ = launcher.communicate(timeout=60)
            finally:
                launcher.kill()
                print(output)
        assert launcher.returncode == 0, output
        assert "GPU" not in output, "the node has one, which --device cpu leaves alone"
        Cluster.wait_for(lambda: not any(map(is_alive, pids)), 30)
