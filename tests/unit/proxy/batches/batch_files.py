"""Batches on disk and an application that answers their lines."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.proxy.batches import batch_lines
from tandem.proxy.batches.batch import (
    FINAL,
    BatchObject,
    BatchRequest,
    Endpoint,
)
from tandem.proxy.batches.batch_store import BatchStore, Owner
from tandem.proxy.batches.runner import BatchRunner

URL: Endpoint = "/v1/completions"
OWNER = Owner("", "127.0.0.1")


def line(custom_id: str, **fields: Any) -> bytes:
    body = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": custom_id}, **fields}
    return json.dumps(body).encode()


def check_lines(lines: list[bytes]) -> tuple[int, list[Any]]:
    checked = batch_lines.check_lines(((0, each) for each in lines), URL, lambda line: None)
    return checked.num_requests, checked.errors


def upload(store: BatchStore, *lines: bytes) -> str:
    data = b"\n".join(lines)
    return store.files.add(io.BytesIO(data), len(data), "in.jsonl", "batch").id


def create(store: BatchStore, *lines: bytes, client: str = "", **fields: Any) -> BatchObject:
    request = BatchRequest(input_file_id=upload(store, *lines), endpoint=URL, completion_window="24h", **fields)
    return store.create(request, Owner(client, "127.0.0.1"))


def results(store: BatchStore, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(each) for each in store.files.path(file_id).read_bytes().splitlines()]


class App:
    """An application that answers with the prompt; `answers` may say otherwise, by prompt."""

    def __init__(self, answers: Callable[[str, int], int] = lambda prompt, attempt: 200) -> None:
        self._answers = answers
        self.asked: Counter[str] = Counter()
        self.seen: list[dict[str, Any]] = []
        self.num_running = self.most_running = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.release_at = 0
        self.is_lasting: Callable[[str, int], bool] = lambda prompt, attempt: False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        self.asked[body["prompt"]] += 1
        self.seen.append({**body, "scope": scope})
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if self.num_running == self.release_at:
                self.may_answer.set()
            await self.may_answer.wait()
        finally:
            self.num_running -= 1
        status = self._answers(body["prompt"], self.asked[body["prompt"]])
        headers = [(b"x-request-id", b"r"), (b"retry-after", b"0")]
        if self.is_lasting(body["prompt"], self.asked[body["prompt"]]):
            headers.append((b"x-should-retry", b"false"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"echo":', "more_body": True})
        await send({"type": "http.response.body", "body": json.dumps(body["prompt"]).encode() + b"}"})


async def ended(store: BatchStore, batch_id: str) -> BatchObject:
    async with asyncio.timeout(20):
        while (batch := store.get(batch_id)).status not in FINAL:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return batch


def run_until_ended(folder: Path, app: App, batch_id: str, key_of: Any = None) -> BatchObject:
    async def run() -> BatchObject:
        batches = BatchRunner(folder, key_of)
        task = asyncio.create_task(batches.run(app))
        try:
            return await ended(batches.store(""), batch_id)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return asyncio.run(run())
