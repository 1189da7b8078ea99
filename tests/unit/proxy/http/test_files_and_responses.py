"""Routes of files, batches and stored responses without a cluster: uploads, pages of lists, full disks."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from starlette.datastructures import UploadFile
from starlette.types import Receive, Scope, Send

from tandem.proxy.admission.budgets import AnswerBudget, DescriptorBudget
from tandem.proxy.api.responses_api.response_store import ItemReader, ResponseStore, StoredResponse
from tandem.proxy.api.responses_api.responses_request import ResponseRequest, options_of
from tandem.proxy.batches import file_store
from tandem.proxy.batches.file_store import FileStore
from tandem.proxy.batches.runner import BatchRunner
from tandem.proxy.http import listing
from tandem.proxy.http.bodies import RequestBodies
from tandem.proxy.http.routes import batches
from tandem.proxy.http.routes.batches import batch_routes
from tandem.proxy.http.routes.stored_responses import response_routes
from tandem.proxy.http.starlette_app import starlette_app

Test = Callable[[httpx.AsyncClient], Awaitable[None]]
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}'


def run(folder: Path, test: Test, descriptors: DescriptorBudget | None = None) -> None:
    async def main() -> None:
        state: Any = SimpleNamespace(
            batches=BatchRunner(folder, None),
            bodies=RequestBodies(100_000, 10.0),
            responses=ResponseStore(folder / "responses"),
            descriptors=descriptors or DescriptorBudget(),
        )
        app = starlette_app([*batch_routes(state), *response_routes(state)], None, AnswerBudget())

        async def with_state(scope: Scope, receive: Receive, send: Send) -> None:  # as uvicorn calls it
            await app({**scope, "state": {}}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://proxy") as client:
            await test(client)

    asyncio.run(main())


def test_downloads_take_descriptors_and_give_them_back(tmp_path: Path) -> None:
    budget = DescriptorBudget(256, 100, 20)

    async def test(client: httpx.AsyncClient) -> None:
        path = f"/v1/files/{(await upload(client)).json()['id']}/content"
        room = budget.room
        # Two while it is read, and one more while it is looked for.
        with budget.hold("127.0.0.1", int(room * 0.75) - 3):
            assert [(await client.get(path)).status_code for _ in range(3)] == [200] * 3
            with budget.hold("127.0.0.1", 3):
                refused = await client.get(path)
                assert refused.status_code == 429 and refused.headers["retry-after"]
                assert refused.json()["error"]["code"] == "client_share_exceeded"
                assert (await upload(client)).status_code == (await client.get("/v1/files")).status_code == 429
        with budget.hold("b", room // 2), budget.hold("c", room - room // 2):
            assert (await client.get(path)).status_code == 503
        assert budget.num_held == 0

    run(tmp_path, test, budget)


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
        assert await ids(client, "/v1/files", after="", order="", limit="", purpose="", before="") == (
            newest_first,
            False,
        )
        assert await ids(client, "/v1/batches", after="") == ([], False)
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
        assert await ids(client, path, after="") == (newest_first, False)
        assert (await client.get("/v1/responses/resp_1")).json() == {"id": "resp_1"}
        refused = await client.get("/v1/responses/resp_1", params={"stream": "true"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream"
        assert (await client.get("/v1/responses/resp_2/input_items")).status_code == 404

    run(tmp_path, test)


def test_ignored_fields_are_not_stored(tmp_path: Path) -> None:
    """Five million ignored empty lists were stored, and decoded for a second whenever one item was asked for."""
    lists = b"[" + b"[]," * 999_999 + b"[]]"
    part = b'{"type": "output_text", "text": "a", "annotations": ' + lists + b', "unknown": ' + lists + b"}"
    call = b'{"type": "function_call", "call_id": "1", "name": "f", "role": "user", "content": "' + b"x" * 10**6 + b'"}'
    body = (
        b'{"input": [{"role": "assistant", "status": "'
        + b"y" * 10**6
        + b'", "id": "'
        + b"z" * 10**6
        + b'", "content": ['
    )
    began, before = time.process_time(), resident_bytes()
    request = msgspec.json.decode(body + part + b"]}, " + call + b"]}", type=ResponseRequest)
    kept = options_of(request).input
    assert len(kept.items) + len(kept.index) < 1000
    store = ResponseStore(tmp_path / "responses")
    store.save("", "resp_1", StoredResponse(b'{"output": []}', kept))

    async def test(client: httpx.AsyncClient) -> None:
        listed = (await client.get("/v1/responses/resp_1/input_items", params={"order": "asc"})).json()["data"]
        assert listed[0]["content"] == [{"type": "output_text", "text": "a", "annotations": []}]
        assert listed[0].keys() == {"type", "role", "content", "id", "status"}
        assert listed[1].keys() == {"type", "id", "status", "call_id", "name", "arguments"}

    run(tmp_path, test)
    assert [item.type for item in store.history("", "resp_1")] == ["message", "function_call"]
    assert time.process_time() - began < 2 and resident_bytes() - before < 50 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_responses_that_are_not_kept_are_not_encoded_for_it() -> None:
    request = msgspec.json.decode(b'{"input": "hello", "store": false}', type=ResponseRequest)
    assert not options_of(request).input.items


def test_a_page_reads_its_own_items_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(1000)]
    request = msgspec.json.decode(json.dumps({"input": items}), type=ResponseRequest)
    ResponseStore(tmp_path / "responses").save("", "r", StoredResponse(b"{}", options_of(request).input))
    read: list[int] = []
    item = ItemReader.item

    def counted(self: ItemReader, number: int) -> bytes:
        read.append(number)
        return item(self, number)

    monkeypatch.setattr(ItemReader, "item", counted)

    async def test(client: httpx.AsyncClient) -> None:
        assert len((await ids(client, "/v1/responses/r/input_items", limit=2))[0]) == 2
        assert read == [999, 998, 997], "the page's, and one to know whether more follow"

    run(tmp_path, test)


def test_a_page_ends_before_it_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of batches with large metadata had 170 MB."""
    monkeypatch.setattr(listing, "MAX_PAGE_BYTES", 3000)

    async def test(client: httpx.AsyncClient) -> None:
        metadata = {f"key-{number}": "x" * 100 for number in range(16)}
        file = (await upload(client)).json()["id"]
        batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h", "metadata": metadata}
        made = [(await client.post("/v1/batches", json=batch)).json()["id"] for _ in range(5)]
        seen: list[str] = []
        query: dict[str, Any] = {"limit": 10_000, "order": "asc"}
        while True:
            page = await client.get("/v1/batches", params=query)
            assert len(page.content) < 3000 + 200
            seen += [each["id"] for each in page.json()["data"]]
            if not page.json()["has_more"]:
                break
            query["after"] = seen[-1]
        assert seen == made, "clients that follow has_more see every batch once"

    run(tmp_path, test)


def test_a_list_leaves_out_what_cannot_be_read(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        first, second = [(await upload(client)).json()["id"] for _ in range(2)]
        [file] = tmp_path.glob(f"*/files/{second}.json")
        file.write_bytes(b"{")
        assert await ids(client, "/v1/files") == ([first], False)
        assert (await client.get(f"/v1/files/{second}")).status_code == 404
        assert await ids(client, "/v1/files", purpose="batch_output") == ([], False)

    run(tmp_path, test)


def test_calls_of_one_client_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read = threading.Event()

    def slow(self: object, *arguments: object) -> Any:
        assert may_read.wait(10)
        return []

    monkeypatch.setattr(ResponseStore, "load", slow)
    monkeypatch.setattr(FileStore, "ids", slow)

    async def test(client: httpx.AsyncClient) -> None:
        for path in ("/v1/responses/r", "/v1/files"):
            may_read.clear()
            asked = [asyncio.create_task(client.get(path)) for _ in range(20)]
            async with asyncio.timeout(10):
                done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                while len(done) < 4:
                    more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    done |= more
            assert {each.result().status_code for each in done} == {429} and len(waiting) == 16
            assert len(await asyncio.to_thread(bytes, 3)) == 3, "asyncio's own threads are free"
            may_read.set()
            await asyncio.gather(*waiting)

    run(tmp_path, test)


def test_a_slow_upload_loses_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 16 KiB in each 30 s, an upload of 200 MiB held one of eight places for four days."""
    monkeypatch.setattr(batches, "UPLOAD_GRACE_S", 0.2)

    async def slow_form() -> AsyncGenerator[bytes, None]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(1000):
            yield b"x" * 100
            await asyncio.sleep(0.05)

    async def test(client: httpx.AsyncClient) -> None:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        async with asyncio.timeout(10):
            for _ in range(3):  # more than a client may have at a time
                refused = await client.post("/v1/files", content=slow_form(), headers=headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (408, "client_too_slow")
                assert "64 KiB/s" in refused.json()["error"]["message"]
        assert (await upload(client)).status_code == 200

    run(tmp_path, test)


FORM = (
    b'--a b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--a b\r\nContent-Disposition: form-data; name="file"; filename="in"\r\n\r\n{}\r\n--a b--\r\n'
)


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    "preamble", [b"", b"\r\n", b"This is a message\r\n--a bit\r\nin parts.\r\n", b"x" * 5000 + b"\n"]
)
def test_a_form_may_begin_with_a_preamble(preamble: bytes, size: int, tmp_path: Path) -> None:
    async def pieces() -> AsyncGenerator[bytes, None]:
        data = preamble + FORM
        for begin in range(0, len(data), size):
            yield data[begin : begin + size]

    async def test(client: httpx.AsyncClient) -> None:
        headers = {"content-type": 'multipart/form-data; boundary="a b"'}
        stored = await client.post("/v1/files", content=pieces(), headers=headers)
        assert stored.status_code == 200 and stored.json()["bytes"] == 2, stored.text
        nothing = await client.post("/v1/files", content=preamble, headers=headers)
        assert nothing.status_code == 400 and "has no file" in nothing.text

    run(tmp_path, test)
