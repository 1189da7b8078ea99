"""`POST /v1/unload_lora_adapter` on the admin address, beside a proxy that holds the lock of the adapters' file."""

from __future__ import annotations

import asyncio
import fcntl
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from starlette.types import Receive, Scope, Send

from tandem.protocol.messages.dispatch import AdapterRef
from tandem.proxy.admission.budgets import AnswerBudget
from tandem.proxy.cluster.adapter_table import AdapterTable, NamedAdapter
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.http.app import make_admin_app
from tandem.proxy.http.bodies import RequestBodies
from tandem.proxy.proxy_config import ProxyConfig


def test_the_loop_runs_while_another_proxy_holds_the_lock(tmp_path: Path) -> None:
    adapters = AdapterTable(tmp_path / "adapters.json", [NamedAdapter("a", AdapterRef("0", "/a"))], "m")
    lock = (tmp_path / "adapters.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    is_over = threading.Event()
    timer = threading.Timer(5.0, lambda: (is_over.set(), lock.close()))  # a loop that waits for the lock goes on
    timer.start()

    async def main() -> httpx.Response:
        state: Any = SimpleNamespace(
            answer_budget=AnswerBudget(),
            adapters=adapters,
            bodies=RequestBodies(100_000, 10.0),
            worker_table=WorkerTable(2.5),
        )
        app = make_admin_app(ProxyConfig("proxy-0", "", "m", "m"), state, lambda worker_id, role: "")

        async def with_state(scope: Scope, receive: Receive, send: Send) -> None:  # as uvicorn calls it
            await app({**scope, "state": {}}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://proxy") as client:
            answer = asyncio.create_task(client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}))
            await asyncio.sleep(0.1)
            assert not is_over.is_set() and not answer.done() and adapters.get("a") is not None
            lock.close()
            return await answer

    try:
        assert asyncio.run(main()).status_code == 200
    finally:
        timer.cancel()
    assert adapters.get("a") is None
