"""Images and video in a whole cluster: answers equal those of transformers, and no lease remains."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.deploy.processes.runtime_dir import runtime_dir
from tandem.media_cache.media_client import MediaCacheClient
from tandem.protocol.messages.media_cache import MediaCacheStatus
from tests.support.cluster import Cluster
from tests.support.media_proxy import ask_cache, data_url, image_part
from tests.support.served_vision_models import Part, generated_by_transformers, parts_of
from tests.support.vision_model import clip, encoded, picture, save_model

NUM_NEW = 8
TIMEOUT_S = 240.0
"""The first request waits for the media process to load torch and the processor."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Cluster]:
    options = ("--dtype", "float32", "--max-num-batched-tokens", "64", "--block-size", "16", "--kv-cache-gib", "0.05")
    with Cluster("--model", str(model), "--served-model-name", "m", *options) as running:
        yield running


def chat(served: Cluster, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": list(parts)}],
        "max_tokens": NUM_NEW,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    return httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=TIMEOUT_S)


def cache_status(served: Cluster) -> MediaCacheStatus:
    return ask_cache(f"ipc://{runtime_dir(served.port)}/media-cache.sock", MediaCacheClient.status)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_answers_equal_those_of_transformers(served: Cluster, model: Path) -> None:
    one, two, video = picture(120, 90, seed=1), picture(90, 150, seed=2), clip(6)
    prompts: list[list[Part]] = [
        ["what is ", one, "that?"],
        [one, video, "and that", two],
        ["nothing to see"],
    ]
    expected = generated_by_transformers(model, prompts, NUM_NEW)
    for is_cached in (False, True):
        for prompt, tokens in zip(prompts, expected, strict=True):
            answer = chat(served, *parts_of(prompt))
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == tokens
            assert (answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == is_cached
    # The images, the video, and the embedding of each.
    Cluster.wait_for(lambda: cache_status(served).num_items == 6, TIMEOUT_S)
    Cluster.wait_for(lambda: cache_status(served).num_leases == 0, TIMEOUT_S)
    Cluster.wait_for(served.all_blocks_free, TIMEOUT_S)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_example_asks_about_an_image(
    served: Cluster, run_example: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_URL", served.url)
    file = tmp_path / "picture.png"
    file.write_bytes(encoded(picture(seed=11)))
    assert re.match(r"\d+ prompt tokens, most of them the picture\n", run_example("image.py", str(file)))


def test_invalid_media_are_refused_and_leave_no_lease(served: Cluster) -> None:
    good = image_part(data_url(encoded(picture(seed=9))))
    for part, reason in (
        (image_part(data_url(b"no image")), "not an image of a supported type"),
        (image_part("http://127.0.0.1/a.png"), "not a public one"),
    ):
        answer = chat(served, good, part, stream=True)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "invalid_media" and error["param"] == "messages[0].content[1]"
        assert "image 1" in error["message"] and reason in error["message"]
    written = chat(served, text("an <|image_pad|> in the text"), good)
    assert written.status_code == 400 and "write no placeholders" in written.text
    Cluster.wait_for(lambda: cache_status(served).num_leases == 0, TIMEOUT_S)
    assert chat(served, good, text("still served")).status_code == 200


@pytest.mark.extended
def test_the_media_cache_is_cleared_by_command_and_filled_again(served: Cluster) -> None:
    part = image_part(data_url(encoded(picture(seed=61))))
    first = chat(served, part, text("?"))
    Cluster.wait_for(lambda: cache_status(served).num_leases == 0, TIMEOUT_S)
    num_items = cache_status(served).num_items
    assert first.status_code == 200 and num_items >= 1
    done = served.run("cache", "clear", "media")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"dropped {num_items} items, ")
    assert cache_status(served).num_items == 0
    assert chat(served, part, text("?")).json()["choices"] == first.json()["choices"]
    Cluster.wait_for(lambda: cache_status(served).num_items >= 1, TIMEOUT_S)


@pytest.mark.extended
def test_a_stream_that_migrates_after_its_pixels_were_released_goes_on(served: Cluster) -> None:
    """Its workers and all that is cached are gone, so the pixels are made again from what the client sent."""
    cache = f"ipc://{runtime_dir(served.port)}/media-cache.sock"
    parts = [image_part(data_url(encoded(picture(150, 110, seed=91)))), text("and on")]
    expected = chat(served, *parts, max_tokens=600).json()["choices"][0]["token_ids"]
    ask_cache(cache, MediaCacheClient.clear)
    fields = {"max_tokens": 600, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
    body = {"messages": [{"role": "user", "content": parts}], **fields}
    received: list[int] = []
    num_migrations = 0
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=TIMEOUT_S) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                received += choice.get("token_ids") or []
            if len(received) > 5 and not num_migrations:
                num_migrations += 1
                assert cache_status(served).num_leases == 1
                ask_cache(cache, MediaCacheClient.clear)
                assert cache_status(served).num_items == 1, "the pixels are held no more, only what the client sent"
                for pid in served.pids():
                    if b"tandem.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(pid, signal.SIGKILL)
    assert num_migrations and received == expected
    served.wait_for(served.is_healthy)
    served.wait_for(lambda: cache_status(served).num_leases == 0)


def test_no_request_fails_when_the_media_cache_is_killed(served: Cluster) -> None:
    """Kills it while images are read, wait for prefill, or arrive."""
    parts = [image_part(data_url(encoded(picture(seed=30 + number)))) for number in range(8)]

    def answer(number: int) -> list[int]:
        got = chat(served, parts[number % len(parts)], text("?"), cache_salt=f"{number}")
        assert got.status_code == 200, got.text
        token_ids: list[int] = got.json()["choices"][0]["token_ids"]
        return token_ids

    before = [answer(number) for number in range(len(parts))]
    assert ask_cache(f"ipc://{runtime_dir(served.port)}/media-cache.sock", MediaCacheClient.clear)[0] >= len(parts)
    [pid] = [pid for pid in served.pids() if b"media_cache" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(answer, number) for number in range(64)]
        Cluster.wait_for(lambda: sum(each.done() for each in asked) >= 8, TIMEOUT_S)
        os.kill(pid, signal.SIGKILL)
        for number, each in enumerate(asked):
            assert each.result(TIMEOUT_S) == before[number % len(parts)]
