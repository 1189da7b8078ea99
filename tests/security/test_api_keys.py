"""Keys are added and revoked while the proxy runs, and no key learns what another key's prompts are."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.protocol.prefix_hash import scoped_salt
from tandem.proxy.admission.api_key import InvalidApiKey
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.http import api_keys
from tandem.proxy.http.api_keys import ApiKeys, KeyFile
from tandem.proxy.text.prompt import RenderedPrompts
from tandem.telemetry.request_log import RequestRecord
from tests.support.fake_workers import FakeWorkers, Proxy, proxy_with_workers
from tests.support.proxy_cluster import Cluster, play, turn
from tests.support.sse import events_of
from tests.support.waiting import until, wait_until


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "CHECK_INTERVAL_S", 0.01)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("first\nsecond team\n")
    return path


def watched(keys: ApiKeys, scenario: Callable[[], Any]) -> None:
    """Runs the scenario while the file is watched, which happens on a thread."""

    async def run() -> None:
        watching = asyncio.create_task(keys.watch())
        try:
            await asyncio.wait_for(scenario(), 30)
        finally:
            watching.cancel()

    asyncio.run(run())


@pytest.mark.usefixtures("quick")
def test_keys_are_added_and_revoked_while_the_proxy_runs(file: Path) -> None:
    keys = ApiKeys("fixed", file)
    ended: list[Exception] = []

    async def scenario() -> None:
        first, second = keys.find("Bearer first"), keys.find("Bearer second")
        assert first is not None and second is not None
        first.begin(ended.append)
        second.begin(ended.append)
        file.write_text("second team\nthird team\n")
        await until(lambda: keys.find("Bearer third") is not None)
        assert keys.find("Bearer first") is None and keys.find("Bearer fixed") is not None
        assert keys.find("Bearer second") is second, "a key that stays keeps its running requests"
        [error] = ended
        assert isinstance(error, InvalidApiKey) and "revoked" in error.message
        with pytest.raises(InvalidApiKey):  # its body was being read when it was revoked
            first.begin(ended.append)

    watched(keys, scenario)


@pytest.mark.usefixtures("quick")
def test_a_key_is_revoked_while_other_files_block_every_shared_thread(file: Path) -> None:
    keys = ApiKeys(None, file)
    release = threading.Event()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        blocked = [loop.run_in_executor(None, release.wait) for _ in range(64)]
        try:
            file.write_text("second team\n")
            await until(lambda: keys.find("Bearer first") is None)
        finally:
            release.set()
            await asyncio.gather(*blocked)

    watched(keys, scenario)


@pytest.mark.usefixtures("quick")
def test_a_bad_file_opens_nothing_and_revokes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ApiKeys(None, file)
    good = file.read_text()
    looks: list[None] = []
    changed = KeyFile.changed
    monkeypatch.setattr(KeyFile, "changed", lambda self: looks.append(None) or changed(self))

    def errors() -> list[str]:
        return [record.message for record in caplog.records if record.levelno == logging.ERROR]

    async def scenario() -> None:
        for spoil in (lambda: file.write_text("# nothing\n"), lambda: file.write_bytes(b"\xff"), file.unlink):
            caplog.clear()
            spoil()
            await until(lambda: bool(errors()))
            looks.clear()
            await until(lambda: len(looks) == 10)
            assert len(errors()) == 1 and "stay valid" in errors()[0]
            assert keys.find("Bearer first") is not None
            assert keys.find("Bearer ") is None and keys.find("") is None
        file.write_text(good.replace("first", "fourth"))
        await until(lambda: keys.find("Bearer fourth") is not None)
        assert keys.find("Bearer first") is None
        assert not any(key in record.message for record in caplog.records for key in ("first", "second", "fourth"))

    with caplog.at_level(logging.DEBUG):
        watched(keys, scenario)


def request_of(cluster: Cluster, scope: str, **fields: Any) -> GenerationRequest:
    body = json.dumps({"prompt": "a" * 70, "max_tokens": 5, **fields}).encode()
    return cluster.reader.read(body, "completion", ModelLimits(100, 500, "m", 64), scope)


def test_each_client_has_its_own_cached_prefixes() -> None:
    """Hashes of equal prompts differ between clients, whatever salts they send, and agree within one."""

    async def scenario(cluster: Cluster) -> None:
        def hashes(scope: str, **fields: Any) -> bytes:
            request = request_of(cluster, scope, **fields)
            assert isinstance(request.prompt, RenderedPrompts)
            [prompt] = request.prompt.prompts
            assert len(prompt.prefix_hashes) == 8, "one full block"
            return prompt.prefix_hashes

        scopes = [ApiKeys(key, None).find(f"Bearer {key}").cache_scope for key in ("one", "two")]
        one, two = scopes
        assert hashes(one) == hashes(one) and hashes(one, cache_salt="x") == hashes(one, cache_salt="x")
        guesses = [one, two, scoped_salt(one, ""), scoped_salt(one, "x")]  # what the second client might send
        others = {hashes(two, cache_salt=salt) for salt in ("x", *guesses)} | {hashes(two), hashes("")}
        assert len(others) == 7 and not others & {hashes(one), hashes(one, cache_salt="x")}
        assert request_of(cluster, "", cache_salt="mine").cache_salt == "mine", "without keys nothing changes"
        for scope in scopes:
            salt = request_of(cluster, scope, cache_salt="mine").cache_salt
            assert not any(secret in salt for secret in ("one", "two", "mine", scope))

    play(scenario)


def test_a_revoked_keys_request_ends_on_the_workers_too() -> None:
    async def scenario(cluster: Cluster) -> None:
        key = ApiKeys("one", None).find("Bearer one")
        assert key is not None
        generation = Generation(
            cluster.services, request_of(cluster, key.cache_scope), RequestRecord("r", "completion"), api_key=key
        )
        deltas = generation.deltas()
        reading = asyncio.ensure_future(anext(deltas))
        await turn()
        key.revoke()
        with pytest.raises(InvalidApiKey):
            await reading
        assert cluster.aborted() == ["decode-0", "prefill-0"]

    play(scenario)


def test_revoking_a_key_ends_its_stream_with_one_error(tmp_path: Path, file: Path) -> None:
    with proxy_with_workers(tmp_path, api_keys_file=str(file)) as (proxy, workers):
        end_stream_of_revoked_key(proxy, workers, file)


def end_stream_of_revoked_key(proxy: Proxy, workers: FakeWorkers, file: Path) -> None:
    lines: list[str] = []
    fields = {"prompt": "stall", "max_tokens": 50, "stream": True}

    def stream() -> None:
        headers = {"authorization": "Bearer first"}
        url = f"{proxy.url}/v1/completions"
        with httpx.stream("POST", url, json=fields, headers=headers, timeout=60) as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(f"{proxy.url}/v1/models", headers=headers).status_code

    reading = threading.Thread(target=stream)
    reading.start()
    wait_until(lambda: len(workers.seen) > 0, 20)
    assert status("first") == 200
    file.write_text("second team\nthird\n")
    wait_until(lambda: status("third") == 200, 20)
    assert (status("first"), status("second")) == (401, 200)
    reading.join(20)
    assert not reading.is_alive()
    *_, error = events_of(lines)
    assert error["error"]["code"] == "invalid_api_key" and "revoked" in error["error"]["message"]
    assert sum("error" in line for line in lines) == 1
    wait_until(lambda: bool(workers.aborted["decode"]))
