"""Proxies that are killed at any moment while they run a batch: each request has one result, and does not run again."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proxy.batches.batch import FINAL
from tandem.proxy.batches.batch_run import MAX_DEATHS
from tandem.proxy.batches.batch_store import BatchFiles, BatchStore, LineJournal
from tandem.proxy.batches.file_store import FileStore
from tandem.proxy.batches.runner import BatchRunner
from tests.unit.proxy.batches.batch_files import App, create, line, results, run_until_ended

NUM_LINES = 14
"""More than run at the same time."""
_CHANGES = (
    (BatchStore, "_hold"),
    (BatchFiles, "append"),
    (BatchFiles, "save"),
    (FileStore, "take"),
    (LineJournal, "begin"),
    (LineJournal, "end"),
)
"""What a runner changes on the disk, and its lock."""


class Watched(App):
    """Notes the requests that run although they have a result."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.run_again: list[str] = []
        self.is_dead = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.is_dead:
            await asyncio.Event().wait()
        message = await receive()
        prompt = json.loads(message["body"])["prompt"]
        for file in self._folder.glob("*/batches/*.output"):
            has_result = prompt in [json.loads(each)["custom_id"] for each in file.read_text().splitlines()]
            self.run_again += [prompt] * has_result
        await super().__call__(scope, partial(asyncio.sleep, 0, message), send)


@contextmanager
def killed_after(num_changes: int, on_killed: Callable[[], object]) -> Iterator[None]:
    """Behind so many changes the disk does not change any more, as if the process were dead."""
    num_left = [num_changes]

    def watched(kept: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **options: Any) -> Any:
            num_left[0] -= 1
            if num_left[0] >= 0:
                return kept(*arguments, **options)
            on_killed()
            return None

        return change

    with ExitStack() as patches:
        for owner, name in _CHANGES:
            patches.enter_context(patch.object(owner, name, watched(getattr(owner, name))))
        yield


@settings(max_examples=15, deadline=None)
@given(kills=st.lists(st.integers(0, 3 * NUM_LINES), max_size=MAX_DEATHS - 1))
def test_each_request_has_one_result_whenever_proxies_are_killed(kills: list[int]) -> None:
    """kills: changes on the disk after which a proxy is killed, one after the other. No request is blamed yet."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        app = Watched(folder)

        async def make() -> str:
            return create(BatchRunner(folder, None).store(""), *(line(str(i)) for i in range(NUM_LINES))).id

        async def run_until_killed(num_changes: int) -> None:
            with killed_after(num_changes, lambda: setattr(app, "is_dead", True)):
                batches = BatchRunner(folder, None)
                task = asyncio.create_task(batches.run(app))
                async with asyncio.timeout(20):
                    while not app.is_dead and batches.store("").get(batch_id).status not in FINAL:  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                app.is_dead = False

        batch_id = asyncio.run(make())
        for num_changes in kills:
            asyncio.run(run_until_killed(num_changes))
        batch = run_until_ended(folder, app, batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", NUM_LINES)
        output = results(BatchStore(next(folder.iterdir())), batch.output_file_id)
        assert sorted(int(each["custom_id"]) for each in output) == list(range(NUM_LINES))
        assert not app.run_again and max(app.asked.values()) <= 1 + len(kills)
