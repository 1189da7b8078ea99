"""Routes of files, batches and stored responses without a cluster: uploads, pages of lists, full disks."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from starlette.datastructures import UploadFile
from starlette.types import Receive, Scope, Send

from tandem.proxy.admission.answer_budget import AnswerBudget
from tandem.proxy.api.response_store import ResponseStore, StoredResponse
from tandem.proxy.api.responses_request import ResponseRequest, options_of
from tandem.proxy.batches import file_store
from tandem.proxy.batches.runner import BatchRunner
from tandem.proxy.http.bodies import RequestBodies
from tandem.proxy.http.routes.batches import batch_routes
from tandem.proxy.http.routes.responses import response_routes
from tandem.proxy.http.starlette_app import starlette_app

Test = Callable[[httpx.AsyncClient], Awaitable[None]]
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}'


def run(folder: Path, test: Test) -> None:
    async def main() -> None:
        state: Any = SimpleNamespace(
            batches=BatchRunner(folder, None),
            bodies=RequestBodies(100_000, 10.0),
            responses=ResponseStore(folder / "responses"),
        )
        app = starlette_app([*batch_routes(state), *response_routes(state)], None, AnswerBudget())

        async def with_state(scope: Scope, receive: Receive, send: Send) -> None:  # as uvicorn calls it
            await app({**scope, "state": {}}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://proxy") as client:
            await test(client)

    asyncio.run(main())


async def upload(client: httpx.AsyncClient, content: bytes = LINE) -> httpx.Response:
    return await client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})


async def ids(client: httpx.AsyncClient, path: str, **query: Any) -> tuple[list[str], bool]:
    listed = (await client.get(path, params=query)).json()
    found = [each["id"] for each in listed["data"]]
    assert (listed["first_id"], listed["last_id"]) == ((found[0], found[-1]) if found else (None, None))
    return found, listed["has_more"]


def test_lists_come_in_pages_in_either_order(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert await ids(client, "/v1/files") == ([], False)
        for _ in range(3):
            assert (await upload(client)).status_code == 200
        newest_first, has_more = await ids(client, "/v1/files")
        assert len(newest_first) == 3 and not has_more
        assert await ids(client, "/v1/files", order="asc", limit=2) == (newest_first[:0:-1], True)
        assert await ids(client, "/v1/files", after=newest_first[1]) == (newest_first[2:], False)
        assert await ids(client, "/v1/files", after=newest_first[1], order="asc") == (newest_first[:1], False)
        for query in ({"order": "up"}, {"limit": 0}, {"limit": "x"}, {"limit": 10**9}, {"after": "file-x"}):
            refused = await client.get("/v1/files", params=query)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == next(iter(query))

    run(tmp_path, test)


def test_a_disk_that_is_full_while_a_file_arrives_is_507(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(self: UploadFile, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(UploadFile, "write", full)

    async def test(client: httpx.AsyncClient) -> None:
        refused = await upload(client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_full")

    run(tmp_path, test)


def test_the_number_of_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "MAX_FILES", 2)

    async def test(client: httpx.AsyncClient) -> None:
        first = (await upload(client)).json()["id"]
        batch = {"input_file_id": first, "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await client.post("/v1/batches", json=batch)).status_code == 200
        await upload(client)
        for refused in (await upload(client), await client.post("/v1/batches", json=batch)):
            assert refused.status_code == 400 and "limit is 2" in refused.json()["error"]["message"]
        await client.delete(f"/v1/files/{first}")
        assert (await upload(client)).status_code == 200

    run(tmp_path, test)


def test_items_of_a_response_come_newest_first(tmp_path: Path) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(3)]
    request = msgspec.json.decode(json.dumps({"input": items}), type=ResponseRequest)
    stored = StoredResponse(b'{"id": "resp_1"}', options_of(request).input)
    ResponseStore(tmp_path / "responses").save("", "resp_1", stored)

    async def test(client: httpx.AsyncClient) -> None:
        path = "/v1/responses/resp_1/input_items"
        listed = (await client.get(path)).json()
        assert [item["content"][0]["text"] for item in listed["data"]] == ["2", "1", "0"]
        newest_first, _ = await ids(client, path)
        assert await ids(client, path, order="asc", limit=1) == (newest_first[2:], True)
        assert await ids(client, path, after=newest_first[0], limit=1) == (newest_first[1:2], True)
        assert (await client.get("/v1/responses/resp_1")).json() == {"id": "resp_1"}
        refused = await client.get("/v1/responses/resp_1", params={"stream": "true"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream"
        assert (await client.get("/v1/responses/resp_2/input_items")).status_code == 404

    run(tmp_path, test)
