"""`PUT /workers/{worker_id}/role` on the admin address."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from tandem.protocol.messages.membership import PROTOCOL_VERSION, RegisterWorker, Role, WorkerInfo
from tandem.proxy.admission.budgets import AnswerBudget
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.http.app import make_admin_app
from tandem.proxy.http.bodies import RequestBodies
from tandem.proxy.proxy_config import ProxyConfig

JSON = {"content-type": "application/json"}


def put(worker_id: str, content: bytes, headers: dict[str, str] = JSON) -> tuple[httpx.Response, WorkerTable]:
    table = WorkerTable(2.5)
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role in roles:
        info = WorkerInfo(f"{role}-0", f"{role}/1", role, f"ipc://{role}", 1)
        table.on_register(0.0, RegisterWorker(PROTOCOL_VERSION, info, 100, 500, "m", 64))

    async def main() -> httpx.Response:
        state: Any = SimpleNamespace(
            worker_table=table, bodies=RequestBodies(100_000, 10.0), answer_budget=AnswerBudget()
        )
        app = make_admin_app(ProxyConfig("proxy-0", "", "m", "m"), state, partial(table.change_role, 0.0))

        async def with_state(scope: Scope, receive: Receive, send: Send) -> None:  # as uvicorn calls it
            await app({**scope, "state": {}}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://proxy") as client:
            return await client.put(f"/workers/{worker_id}/role", content=content, headers=headers)

    return asyncio.run(main()), table


def test_a_role_is_set() -> None:
    answer, table = put("decode-0", b'{"role": "any"}', {"content-type": "Application/JSON; charset=utf-8"})
    assert (answer.status_code, answer.json()) == (200, {"worker_id": "decode-0", "role": "any"})
    assert {worker.worker_id: worker.role for worker in table.workers()} == {"prefill-0": "prefill", "decode-0": "any"}


@pytest.mark.parametrize(
    ("worker_id", "content", "headers", "status", "says"),
    [
        ("decode-0", b'{"role": "both"}', JSON, 400, "both"),
        ("decode-0", b'{"role": "any", "now": true}', JSON, 400, "now"),
        ("decode-0", b"", JSON, 400, "truncated"),
        ("decode-0", b" " * 20_000, JSON, 400, "truncated"),
        ("decode-7", b'{"role": "any"}', JSON, 404, "registered workers: decode-0, prefill-0"),
        ("decode-0", b'{"role": "prefill"}', JSON, 409, "decode-0 is the last worker that may decode"),
        ("decode-0", b'{"role": "any"}', {}, 400, "Content-Type: application/json"),
    ],
)
def test_other_requests_change_nothing(
    worker_id: str, content: bytes, headers: dict[str, str], status: int, says: str
) -> None:
    answer, table = put(worker_id, content, headers)
    assert answer.status_code == status and says in answer.json()["error"]["message"]
    assert {worker.worker_id: worker.role for worker in table.workers()} == {
        "prefill-0": "prefill",
        "decode-0": "decode",
    }


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_that_browsers_send_to_other_sites_unasked_is_refused(content_type: str) -> None:
    answer, _ = put("decode-0", b'{"role": "any"}', {"content-type": content_type, "origin": "http://evil.example"})
    assert answer.status_code == 403 and not [name for name in answer.headers if name.startswith("access-control")]
