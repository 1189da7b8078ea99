"""`/tokenize` and `/detokenize` are limited: calls in flight, their share of the processes, and the size of answers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest

from tandem.proxy.admission.budgets import AnswerBudget, ClientSlots, DescriptorBudget
from tandem.proxy.batches.runner import BatchRunner
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.http.api_keys import ApiKeys
from tandem.proxy.http.app import make_app
from tandem.proxy.http.bodies import RequestBodies
from tandem.proxy.http.routes.batches import MAX_UPLOADS_PER_CLIENT
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading import body_reader
from tandem.proxy.reading.body_reader import BodyReader
from tandem.runtime.errors import InvalidRequest
from tests.support.proxy_cluster import FakeText, turn
from tests.support.reader_pools import fork_pool, run_with


@asynccontextmanager
async def client_of_an_app(folder: Path, **parts: Any) -> AsyncIterator[httpx.AsyncClient]:
    """parts: of the app's state, besides those of a proxy with two keys and no workers."""
    (folder / "keys").write_text("one\ntwo\n")
    state: Any = SimpleNamespace(
        **{
            "answer_budget": AnswerBudget(), "descriptors": DescriptorBudget(),
            "api_keys": ApiKeys(None, folder / "keys"), "bodies": RequestBodies(100_000, 10), "calls": ClientSlots(),
            "media": None, "readers": StuckReaders(), "responses": None, "batches": None, "request_timeout_s": 60,
            "worker_table": WorkerTable(2.5), **parts,
        }
    )  # fmt: skip
    app = make_app(ProxyConfig("proxy-0", "", "m", "m"), state, lambda worker_id, role: "not in this test")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
        yield client


class StuckReaders:
    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.num_begun = 0

    async def transform(self, *arguments: object, client: str) -> bytes:
        self.num_begun += 1
        await self.may_end.wait()
        return b"{}"


def test_a_client_over_its_limit_gets_429_and_others_are_served(tmp_path: Path) -> None:
    async def run() -> None:
        readers = StuckReaders()
        async with client_of_an_app(tmp_path, calls=ClientSlots(max_per_client=2), readers=readers) as client:

            async def call(key: str, path: str) -> httpx.Response:
                return await client.post(path, json={"prompt": "a"}, headers={"authorization": f"Bearer {key}"})

            waiting = [asyncio.ensure_future(call(*each)) for each in (("one", "/tokenize"), ("one", "/detokenize"))]
            while readers.num_begun < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            refused = await call("one", "/tokenize")
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            waiting.append(asyncio.ensure_future(call("two", "/tokenize")))
            while readers.num_begun < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            readers.may_end.set()
            assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 3

    asyncio.run(asyncio.wait_for(run(), 30))


def read_pipe(_reader: Any, path: bytes) -> bytes:
    """In a reader process: blocks until the test writes to the pipe."""
    return Path(os.fsdecode(path)).read_bytes()


def echo(_reader: Any, body: bytes) -> bytes:
    return body


def test_a_call_whose_client_disconnects_is_ended_and_the_next_one_begins(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    pool = fork_pool(2)

    async def run() -> None:
        first = asyncio.create_task(pool.transform(read_pipe, os.fsencode(tmp_path / "pipe")))
        write_fd = await asyncio.to_thread(os.open, tmp_path / "pipe", os.O_WRONLY)  # a process has opened it
        second = asyncio.create_task(pool.transform(echo, b"second"))
        assert await pool.run(echo, b"other") == b"other", "such calls leave processes to other requests"
        await turn()
        assert not second.done()
        first.cancel()  # its client disconnects
        assert await second == b"second"
        os.close(write_fd)

    run_with(pool, run)


@pytest.fixture
def reader() -> BodyReader:
    return BodyReader(cast(Any, FakeText()), ProxyConfig("proxy-0", "", "m", "m"))


def test_a_text_that_is_too_long_is_refused_before_it_is_tokenised(reader: BodyReader) -> None:
    text = "\N{SNOWMAN}" * (body_reader.MAX_TOKENIZED_BYTES // 3)
    for body in ({"prompt": text + "aaa"}, {"messages": [{"role": "user", "content": text + "aaa"}]}):
        with pytest.raises(InvalidRequest, match="has 4194306 bytes, but at most 4194304"):
            reader.tokenize(msgspec.json.encode(body), None)
    assert msgspec.json.decode(reader.tokenize(b'{"prompt": "abc"}', None))["count"] == 3


def test_too_many_tokens_and_a_text_that_is_too_long_are_refused(
    reader: BodyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match="length <= 1048576"):
        reader.detokenize(msgspec.json.encode({"tokens": [1] * (1 + 2**20)}))
    monkeypatch.setattr(body_reader, "MAX_DETOKENIZED_CHARACTERS", 3)
    with pytest.raises(InvalidRequest, match="has 4 characters; the limit of /detokenize is 3"):
        reader.detokenize(b'{"tokens": [66, 66, 66, 66]}')
    assert reader.detokenize(b'{"tokens": [66, 66, 66]}') == b'{"prompt":"bbb"}'


def test_a_client_over_its_limit_of_uploads_gets_429_and_others_are_served(tmp_path: Path) -> None:
    async def run() -> None:
        begun, may_end = asyncio.Semaphore(0), asyncio.Event()
        form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        form += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx'

        async def slow() -> AsyncIterator[bytes]:
            yield form
            begun.release()
            await may_end.wait()
            yield b"\r\n--b--\r\n"

        async with client_of_an_app(tmp_path, batches=BatchRunner(tmp_path / "data", None)) as client:

            async def upload(key: str, content: Any) -> httpx.Response:
                headers = {"authorization": f"Bearer {key}", "content-type": "multipart/form-data; boundary=b"}
                return await client.post("/v1/files", content=content, headers=headers)

            waiting = [asyncio.ensure_future(upload("one", slow())) for _ in range(MAX_UPLOADS_PER_CLIENT)]
            for _ in waiting:
                await begun.acquire()
            whole = form + b"\r\n--b--\r\n"
            assert (await upload("one", whole)).status_code == 429
            assert (await upload("two", whole)).status_code == 200
            may_end.set()
            assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
            assert (await upload("one", whole)).status_code == 200

    asyncio.run(run())
