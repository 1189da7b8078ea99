"""Downloads of files that are deleted at any moment: they are sent as a whole, or not found."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.proxy.admission.budgets import AnswerBudget, DescriptorBudget
from tandem.proxy.answers.http_answers import Download
from tandem.proxy.batches.file_store import FileStore
from tandem.proxy.batches.runner import BatchRunner
from tandem.proxy.http.bodies import RequestBodies
from tandem.proxy.http.routes.batches import batch_routes
from tandem.proxy.http.starlette_app import ApiRoute, starlette_app
from tests.unit.proxy.batches.batch_files import line, upload

CONTENT = b"0123456789" * 20_000


def get(routes: list[ApiRoute], path: str, **headers: str) -> httpx.Response:
    app = starlette_app(routes, None, AnswerBudget())

    async def with_state(scope: Scope, receive: Receive, send: Send) -> None:  # as uvicorn calls it
        await app({**scope, "state": {}}, receive, send)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(with_state)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy", headers=headers) as client:
            return await client.get(path)

    return asyncio.run(main())


@pytest.mark.parametrize(("wanted", "expected"), [("", CONTENT), ("bytes=5-8", b"5678"), ("bytes=-3", b"789")])
def test_a_file_that_is_deleted_while_it_is_sent_is_sent_as_a_whole(
    wanted: str, expected: bytes, tmp_path: Path
) -> None:
    budget, file = DescriptorBudget(), tmp_path / "file"
    file.write_bytes(CONTENT)
    opened: list[BinaryIO] = []

    async def open_file() -> BinaryIO:
        opened.append(file.open("rb"))
        file.unlink()
        return opened[0]

    async def download(request: Request) -> Response:
        return Download(open_file, budget, "alice", {"x-own": "1"})

    answer = get([ApiRoute("GET", "/file", download)], "/file", **({"range": wanted} if wanted else {}))
    assert (answer.status_code, answer.content) == (206 if wanted else 200, expected)
    assert answer.headers["x-own"] == "1" and opened[0].closed and budget.num_held == 0


def test_a_file_whose_content_is_gone_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client deletes it between the look-up and the sending, which was answered with 500."""
    runner = BatchRunner(tmp_path, None)
    budget = DescriptorBudget()
    state: Any = SimpleNamespace(
        batches=runner, bodies=RequestBodies(100_000, 10.0), responses=None, descriptors=budget
    )
    file_id = upload(runner.store(""), line("a"))
    path = FileStore.path

    def found_and_deleted(self: FileStore, file_id: str) -> Path:
        found = path(self, file_id)
        self.delete(file_id)
        return found

    monkeypatch.setattr(FileStore, "path", found_and_deleted)
    answer = get(batch_routes(state), f"/v1/files/{file_id}/content")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "file_not_found")
    assert "was deleted" in answer.json()["error"]["message"] and budget.num_held == 0
    runner.close()
