"""Prompts, answers and API keys appear in no log, metric or status, at any log level."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx

from tests.support.cluster import Cluster, tandem

KEY = "zq-key-4cf1"
WRONG_KEY = "zq-wrong-key-8d20"
PROMPT = "zq-prompt-77aa"
URL = "zq-url-90ee"
SALT = "zq-salt-11bc"
SECRETS = (KEY, WRONG_KEY, PROMPT, URL, SALT)


def test_logs_metrics_and_status_contain_no_client_data(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    flags = ("--api-keys-file", str(keys), "--log-level", "debug", "--kv-cache-gib", "0.05", "--device", "cpu")
    headers = {"Authorization": f"Bearer {KEY}"}
    with Cluster(*flags) as cluster, httpx.Client(base_url=cluster.url, headers=headers, timeout=120) as client:
        message = {"role": "user", "content": PROMPT}
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://127.0.0.1:9/{URL}"}}]}
        chat = {"model": "tandem-demo", "messages": [message], "max_tokens": 4, "cache_salt": SALT, "user": PROMPT}
        answer = client.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 200, answer.text
        streamed = client.post("/v1/chat/completions", json={**chat, "stream": True, "stop": PROMPT, "n": 2})
        assert streamed.status_code == 200 and streamed.text.endswith("[DONE]\n\n")
        assert client.post("/tokenize", json={"model": "tandem-demo", "prompt": PROMPT}).status_code == 200
        for status, body in (
            (400, {**chat, "messages": [image]}),
            (400, {**chat, "temperature": PROMPT}),
            (400, {**chat, "structured_outputs": {"regex": f"({PROMPT}"}}),
            (200, {**chat, "tools": [{"type": PROMPT}]}),
            (404, {**chat, "model": PROMPT}),
        ):
            refused = client.post("/v1/chat/completions", json=body)
            assert refused.status_code == status, refused.text
        broken = json.dumps(chat).encode()[:-5]
        assert client.post("/v1/chat/completions", content=broken).status_code == 400
        assert client.get(f"/{PROMPT}").status_code == 404
        wrong = httpx.get(f"{cluster.url}/v1/models", headers={"Authorization": f"Bearer {WRONG_KEY}"})
        assert wrong.status_code == 401
        kept = {
            "logs": cluster.logs(),
            "metrics": httpx.get(f"{cluster.admin_url}/metrics").text,
            "status": subprocess.check_output(tandem("status", "--json", "--port", str(cluster.port)), text=True),
            "command lines": "".join(_command_line(pid) for pid in cluster.pids()),
        }
    assert " D " in kept["logs"] or " I " in kept["logs"], "there are no log lines to search"
    assert {(where, secret) for where, text in kept.items() for secret in SECRETS if secret in text} == set()


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/environ").read_text()
