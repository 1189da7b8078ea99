"""Attacks through files: uploads, batches, and adapters that an operator's call names."""

from __future__ import annotations

import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx

from tests.security.attacker import TIMEOUT_S, Attack, Attacker


def uploaded(attacker: Attacker, content: bytes) -> str | None:
    """Returns the id of a new file, or None if it is refused."""
    upload, form = {"file": ("lines.jsonl", content)}, {"purpose": "batch"}
    headers = {"authorization": f"Bearer {attacker.key}"}
    url = f"{attacker.cluster.url}/v1/files"
    stored = httpx.post(url, files=upload, data=form, headers=headers, timeout=TIMEOUT_S)
    return stored.json()["id"] if stored.status_code == 200 else None


def batch_of(file_id: str) -> dict[str, Any]:
    return {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}


def line_breaks(attacker: Attacker) -> None:
    """Batches whose input is 60 MiB of line breaks."""
    if (file_id := uploaded(attacker, b"\n" * (60 << 20))) is not None:
        attacker.send_all("/v1/batches", [batch_of(file_id)] * 8)
        time.sleep(3)


def late_lines(attacker: Attacker) -> None:
    """Batches of lines that are never in time, so that each is tried again after a wait."""
    line = {"method": "POST", "url": "/v1/completions", "body": attacker.complete(prompt=[5] * 1900, timeout=0.001)}
    lines = "\n".join(json.dumps({"custom_id": str(number), **line}) for number in range(60))
    if (file_id := uploaded(attacker, lines.encode())) is not None:
        made = [attacker.send("/v1/batches", batch_of(file_id)) for _ in range(3)]
        time.sleep(8)
        for answer in made:
            if answer is not None and answer.status_code == 200:
                attacker.send(f"/v1/batches/{answer.json()['id']}/cancel", b"{}")


def slow_uploads(attacker: Attacker) -> None:
    """Uploads that hardly move, and then break off."""
    request = (
        "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        f"Authorization: Bearer {attacker.key}\r\nContent-Length: {100 << 20}\r\n\r\n"
        '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    )
    with ExitStack() as connections:
        opened = []
        for _ in range(20):
            connection = connections.enter_context(socket.create_connection(("127.0.0.1", attacker.cluster.port)))
            connection.sendall(request.encode())
            opened.append(connection)
        for _ in range(10):
            for connection in opened:
                with suppress(OSError):  # refused meanwhile
                    connection.sendall(b"x" * 100)
            time.sleep(0.3)


def open_files(attacker: Attacker) -> None:
    """Downloads that nobody reads, and bodies that stop halfway: each has a file open beside its connection."""
    file_id = uploaded(attacker, b"x" * (4 << 20))
    head = f"HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {attacker.key}\r\n"
    download = f"GET /v1/files/{file_id}/content {head}\r\n".encode()
    body = f"POST /v1/chat/completions {head}Content-Length: 900000\r\n\r\n".encode() + b" " * 40_000
    with ExitStack() as connections:
        for number in range(600):
            connection = connections.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", attacker.cluster.port))
            connection.sendall(body if number % 2 else download)
        time.sleep(3)


def blocking_adapters(attacker: Attacker) -> None:
    """Adapters whose files are no regular files, loaded by 40 calls at once."""
    bodies = []
    for number, kind in enumerate(("fifo", "endless")):
        folder = attacker.folder / kind
        folder.mkdir()
        config = folder / "adapter_config.json"
        if kind == "fifo":
            os.mkfifo(config)
        else:
            config.symlink_to("/dev/zero")
        (folder / "adapter_model.safetensors").write_bytes(b"")
        bodies += [
            {"lora_name": f"a{number}-{i}", "lora_path": str(folder)} for i in range(40 if kind == "fifo" else 2)
        ]

    def load(body: dict[str, str]) -> None:
        with suppress(httpx.HTTPError):
            httpx.post(f"{attacker.cluster.admin_url}/v1/load_lora_adapter", json=body, timeout=4)

    with ThreadPoolExecutor(40) as threads:
        list(threads.map(load, bodies))


FILE_ATTACKS = [
    Attack(line_breaks),
    Attack(late_lines, max_batch_s=5.0),
    Attack(slow_uploads),
    Attack(open_files),
    Attack(blocking_adapters),
]
