"""The route of records without a cluster: whose they are, with and without API keys, and what is not found."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from tandem.proxy.admission.budgets import AnswerBudget, DescriptorBudget
from tandem.proxy.http.api_keys import ApiKeys
from tandem.proxy.http.routes import records
from tandem.proxy.http.routes.records import record_header, record_routes
from tandem.proxy.http.starlette_app import starlette_app
from tandem.proxy.records.record import decode_record
from tandem.proxy.records.record_store import RecordNotFound, RecordStore
from tests.unit.proxy.records.test_record_store import made

Call = Callable[..., Awaitable[httpx.Response]]


def run(
    test: Callable[[RecordStore, Call], Awaitable[None]],
    folder: Path,
    keys: ApiKeys | None = None,
    has_store: bool = True,
) -> None:
    async def main() -> None:
        store = RecordStore(folder)
        state: Any = SimpleNamespace(records=store if has_store else None, descriptors=DescriptorBudget())
        app = starlette_app(record_routes(state), keys, AnswerBudget())

        async def call(request_id: str, address: str = "192.0.2.1", key: str = "") -> httpx.Response:
            async def from_address(scope: Scope, receive: Receive, send: Send) -> None:  # as uvicorn calls it
                await app({**scope, "state": {}, "client": (address, 1)}, receive, send)

            headers = {"authorization": f"Bearer {key}"} if key else {}
            transport = httpx.ASGITransport(from_address)
            async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
                return await client.get(record_header(request_id)["x-tandem-record"], headers=headers)

        await test(store, call)
        await store.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_without_keys_a_record_is_its_address_s(tmp_path: Path) -> None:
    async def test(store: RecordStore, call: Call) -> None:
        store.put(made("network 192.0.2.1"), "stop")
        found = await call("r-1")
        assert found.status_code == 200 and found.headers["content-type"] == "application/jsonl"
        assert decode_record(found.content).head.request_id == "r-1" and found.headers["x-request-id"]
        other = await call("r-1", "192.0.2.2")
        assert other.status_code == 404 and other.json()["error"]["code"] == "record_not_found"

    run(test, tmp_path)


def test_with_keys_a_record_is_its_key_s(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key-a alice\nkey-a2 alice\nkey-b bob\n")
    keys = ApiKeys(None, file)
    [scope] = {key.cache_scope for name in ("key-a", "key-a2") if (key := keys.find(f"Bearer {name}", "")) is not None}

    async def test(store: RecordStore, call: Call) -> None:
        store.put(made(f"key {scope}"), "stop")
        statuses = [(await call("r-1", key=key)).status_code for key in ("key-a", "key-a2", "key-b", "key-c", "")]
        assert statuses == [200, 200, 404, 401, 401]

    run(test, tmp_path / "records", keys)


@pytest.mark.parametrize("request_id", ["a/b", "../x", "%2e%2e", "?", "#", "\\", "a" * 128])
def test_any_id_is_found_by_the_path_of_its_answer(request_id: str, tmp_path: Path) -> None:
    async def test(store: RecordStore, call: Call) -> None:
        store.put(made("network 192.0.2.1", request_id), "stop")
        assert (await call(request_id)).status_code == 200
        assert (await call(f"{request_id}x")).status_code == 404

    run(test, tmp_path)


def test_long_and_odd_names_lead_nowhere(tmp_path: Path) -> None:
    async def test(store: RecordStore, call: Call) -> None:
        for request_id in ("../" * 50 + "etc/passwd", "\0", "ü", "x" * 5000):
            assert (await call(request_id)).status_code == 404

    run(test, tmp_path)


def test_a_server_without_a_folder_has_no_records(tmp_path: Path) -> None:
    async def test(store: RecordStore, call: Call) -> None:
        assert (await call("r-1")).status_code == 404

    run(test, tmp_path, has_store=False)


def test_calls_that_wait_for_records_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_READS_PER_CLIENT", 2)
    may_end = asyncio.Event()

    async def test(store: RecordStore, call: Call) -> None:
        async def open_file(*_: object) -> BinaryIO:
            await may_end.wait()
            raise RecordNotFound("it was not there")

        monkeypatch.setattr(store, "open", open_file)
        waiting = [asyncio.ensure_future(call("r-1")) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert (await call("r-1")).status_code == 429
        may_end.set()
        assert [each.status_code for each in await asyncio.gather(*waiting)] == [404, 404]

    run(test, tmp_path)
