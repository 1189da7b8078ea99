"""A proxy that may open few file descriptors never runs out of them, whatever clients leave open."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.support.fake_workers import Proxy, make_tokenizer
from tests.support.ports import free_port
from tests.support.waiting import wait_until

KEYS = "key-of-the-attacker attacker\nkey-of-the-tenant tenant\n"
NUM_CONNECTIONS = 160


def request(method: str, path: str, key: str, rest: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{rest}\r\n".encode()


def upload(client: httpx.Client, content: bytes) -> str:
    answer = client.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"})
    assert answer.status_code == 200, answer.text
    return f"/v1/files/{answer.json()['id']}/content"


@pytest.mark.parametrize(
    ("max_descriptors", "kinds"),
    [(256, ("download", "body", "upload", "idle")), (400, ("download",)), (700, ("body", "download"))],
)
def test_clients_that_leave_files_open_take_no_descriptor_from_others(
    max_descriptors: int, kinds: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Downloads that nobody reads, and bodies and uploads that stop halfway."""
    make_tokenizer(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    data = str(tmp_path / "data")
    proxy = Proxy(
        tmp_path, max_descriptors=max_descriptors, admin_port=free_port(), api_keys_file=str(keys), data_folder=data
    )
    tenant = httpx.Client(base_url=proxy.url, headers={"authorization": "Bearer key-of-the-tenant"}, timeout=30)
    with proxy, tenant, contextlib.ExitStack() as connections:
        proxy.wait_for(503)
        file = upload(tenant, b"x" * 100_000)
        with httpx.Client(base_url=proxy.url, headers={"authorization": "Bearer key-of-the-attacker"}) as attacker:
            large = upload(attacker, b"x" * (2 << 20))
        key, part = "key-of-the-attacker", '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        form = "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 9000000\r\n"
        sent = {
            "download": request("GET", large, key),
            "body": request("POST", "/tokenize", key, "Content-Length: 900000\r\n") + b" " * 40_000,
            "upload": request("POST", "/v1/files", key, form) + part.encode() + b"x" * 1_500_000,
            "idle": b"",
        }
        opened = []
        for number in range(NUM_CONNECTIONS):
            connection = connections.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.bind((f"127.0.0.{2 + number % 4}", 0))
            with contextlib.suppress(OSError):  # refused, and closed
                connection.connect(("127.0.0.1", proxy.port))
                connection.settimeout(1)
                connection.sendall(sent[kinds[number % len(kinds)]])
                opened.append(connection)

        def served() -> list[int]:
            return [
                tenant.get("/live").status_code,
                tenant.get(file).status_code,
                tenant.post("/tokenize", json={"prompt": "a" * 50_000}).status_code,
                httpx.get(f"{proxy.admin_url}/live").status_code,
            ]

        for _ in range(10):
            assert served() == [200, 200, 200, 200]
            time.sleep(0.1)
        upload(tenant, b"y")
        statuses: Counter[str] = Counter()
        for connection in opened:
            connection.settimeout(0.01)
            with contextlib.suppress(OSError):
                statuses[connection.recv(12).decode()] += 1
        assert set(statuses) <= {"HTTP/1.1 200", "HTTP/1.1 429", "HTTP/1.1 503", "HTTP/1.1 408", ""}, statuses
        for connection in opened:
            connection.close()
        wait_until(lambda: num_open_files(proxy.process.pid) < 20, 60)
    assert not re.search("Too many open files|no file descriptors|EMFILE", capfd.readouterr().err)


def num_open_files(pid: int) -> int:
    """Returns how many bodies, uploads and downloads the proxy has open."""
    names = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(str(link.readlink()))
    return sum("memfd:body" in name or "(deleted)" in name or name.endswith(".data") for name in names)
